//! Runs other programs in the repository's root.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

/// The repository's root.
pub fn root() -> PathBuf {
    // xtask/ is a subfolder of the root.
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A program with space-separated arguments that runs in the root.
pub fn program(name: impl AsRef<Path>, args: &str) -> Command {
    let mut command = Command::new(name.as_ref());
    command.args(args.split_whitespace()).current_dir(root());
    command
}

/// The cargo that runs us.
pub fn cargo(args: &str) -> Command {
    program(
        std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()),
        args,
    )
}

/// Prints a command and runs it. An error if it fails.
pub fn run(mut command: Command) -> anyhow::Result<()> {
    let shown = show(&command);
    eprintln!("$ {shown}");
    let status = command
        .status()
        .with_context(|| format!("cannot run {shown}"))?;
    if !status.success() {
        bail!("{shown}: {status}");
    }
    Ok(())
}

/// Runs a program without output. Returns whether it succeeds.
pub fn succeeds(mut command: Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// Checks that programs exist; the error names their Debian packages. Each is given with its package.
pub fn need(programs: &[(&str, &str)]) -> anyhow::Result<()> {
    let missing: Vec<&str> = programs
        .iter()
        .filter(|(name, _)| !succeeds(program("which", name)))
        .map(|(_, package)| *package)
        .collect();
    if !missing.is_empty() {
        bail!(
            "missing: {0}; get them with: apt-get install {0}",
            missing.join(" ")
        );
    }
    Ok(())
}

fn show(command: &Command) -> String {
    let name = Path::new(command.get_program());
    let name = name.file_name().unwrap_or(name.as_os_str());
    let words = std::iter::once(name).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}
