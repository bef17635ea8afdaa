//! `docs/src/systems.md`: the designs, and what they come to beside their authors' figures.

use std::fs;
use std::path::Path;

use anyhow::Context;

use crate::{build, shell};

/// Where results are kept.
const RESULTS: &str = "target/systems";
const PAGE: &str = "docs/src/systems.md";

/// Runs each `scenarios/paper-NAME.toml` on the simulator, and writes the page.
pub fn systems() -> anyhow::Result<()> {
    build::build()?;
    fs::create_dir_all(shell::root().join(RESULTS)).context("cannot make target/systems")?;
    let demeter = shell::root().join("target/release/demeter");
    let mut names: Vec<String> = fs::read_dir(shell::root().join("scenarios"))
        .context("cannot read scenarios")?
        .filter_map(|entry| {
            Some(
                Path::new(&entry.ok()?.file_name())
                    .file_stem()?
                    .to_str()?
                    .into(),
            )
        })
        .filter(|name: &String| name.starts_with("paper-"))
        .collect();
    names.sort();
    let mut page = String::from("systems --markdown");
    for name in names {
        let result = format!("{RESULTS}/{name}.json");
        let run = format!("run scenarios/{name}.toml --on sim --json {result}");
        shell::run(shell::program(&demeter, &run))?;
        page = page + " " + &result;
    }
    let output = shell::program(&demeter, &page)
        .output()
        .context("cannot run demeter")?;
    anyhow::ensure!(output.status.success(), "demeter {page}: {}", output.status);
    fs::write(shell::root().join(PAGE), output.stdout).context("cannot write docs/src/systems.md")
}
