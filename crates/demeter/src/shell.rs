//! Completion scripts and manual pages, generated from the command line's definition.

use std::path::PathBuf;

use anyhow::Context;

use crate::output;

/// Arguments of `demeter completions`.
#[derive(clap::Args)]
pub struct CompletionsArgs {
    /// The shell to complete for
    shell: clap_complete::Shell,
}

/// Arguments of `demeter man`.
#[derive(clap::Args)]
pub struct ManArgs {
    /// Folder for one page per subcommand; without it the main page goes to stdout
    dir: Option<PathBuf>,
}

/// Prints the completion script of one shell.
pub fn completions(args: &CompletionsArgs, command: &mut clap::Command) -> anyhow::Result<()> {
    // Buffered, because the generator panics when its writer fails.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, "demeter", &mut script);
    output::print(script)
}

/// Prints the manual page, or writes all of them to a folder.
pub fn man(args: &ManArgs, command: clap::Command) -> anyhow::Result<()> {
    let Some(dir) = &args.dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        return output::print(page);
    };
    std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(command, dir))
        .with_context(|| format!("cannot write manual pages to {}", dir.display()))
}
