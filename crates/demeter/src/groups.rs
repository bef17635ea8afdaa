//! The commands in two groups: operate a machine, and study designs.

use std::ffi::OsString;
use std::fmt::Write;

use anyhow::anyhow;
use clap::Command;

/// The package that has the second group.
const STUDY_PACKAGE: &str = "demeter-lab";

/// Commands for production, in the order of `--help`.
const OPERATE: [&str; 6] = ["guest", "host", "top", "probe", "dirty-log", "replay"];

/// Commands for the lab and the simulator.
const STUDY: [&str; 8] = [
    "run", "report", "compare", "sweep", "tune", "systems", "model", "trace",
];

/// Commands about the command.
const OTHER: [&str; 2] = ["completions", "man"];

/// Shows the subcommands in groups in `--help`.
pub fn in_groups(command: Command) -> Command {
    let header = *command.get_styles().get_header();
    let name_width = command
        .get_subcommands()
        .map(|command| command.get_name().len())
        .max()
        .unwrap_or(0);
    let mut groups = String::new();
    for (title, names) in [
        ("Operate", &OPERATE[..]),
        ("Study", &STUDY),
        ("Other", &OTHER),
    ] {
        // Writing to a String cannot fail.
        let _ = writeln!(groups, "{header}{title}:{header:#}");
        let mut present = names
            .iter()
            .filter_map(|name| command.find_subcommand(name))
            .peekable();
        if present.peek().is_none() {
            let names = names.join(", ");
            let _ = writeln!(groups, "  In the package {STUDY_PACKAGE}: {names}");
        }
        for command in present {
            let name = command.get_name();
            let about = command.get_about().map(ToString::to_string);
            let about = about.unwrap_or_default();
            let _ = writeln!(groups, "  {name:name_width$}  {about}");
        }
        groups.push('\n');
    }
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{groups}\
         {header}Options:{header:#}\n{{options}}{{after-help}}"
    ))
}

/// Refuses a command that this build lacks, and says where it is. `words` follow the program's name.
pub fn check_is_here(
    command: &Command,
    mut words: impl Iterator<Item = OsString>,
) -> anyhow::Result<()> {
    let is_name = |word: &OsString| word != "help" && !word.as_encoded_bytes().starts_with(b"-");
    let first = words.find(is_name);
    let name = STUDY
        .into_iter()
        .find(|&name| first.as_deref() == Some(name.as_ref()));
    match name {
        Some(name) if command.find_subcommand(name).is_none() => Err(anyhow!(
            "demeter {name} is not in this package; install {STUDY_PACKAGE}"
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::*;

    /// A command with these subcommands.
    fn with(names: &[&'static str]) -> Command {
        let of = |&name: &&'static str| Command::new(name).about(format!("about {name}"));
        Command::new("demeter").subcommands(names.iter().map(of))
    }

    fn check(command: &Command, words: &str) -> Result<(), String> {
        let words = words.split(' ').map(OsString::from);
        check_is_here(command, words).map_err(|error| error.to_string())
    }

    #[test]
    fn each_command_is_in_one_group() {
        let grouped = OPERATE.into_iter().chain(STUDY).chain(OTHER);
        let is_here = |name: &&str| cfg!(feature = "study") || !STUDY.contains(name);
        let grouped: Vec<&str> = grouped.filter(is_here).collect();
        let command = crate::Cli::command();
        let shown = command.get_subcommands().filter(|c| !c.is_hide_set());
        let shown: BTreeSet<&str> = shown.map(|c| c.get_name()).collect();
        assert_eq!(grouped.len(), shown.len());
        assert_eq!(BTreeSet::from_iter(grouped), shown);
    }

    #[test]
    fn help_shows_the_groups_and_where_the_second_is() {
        let help = |names: &[&'static str]| in_groups(with(names)).render_help().to_string();
        let text = help(&["guest", "run", "man"]);
        assert!(
            text.contains(
                "Operate:\n  guest  about guest\n\nStudy:\n  run    about run\n\nOther:\n"
            ),
            "{text}"
        );
        let text = help(&["guest", "man"]);
        assert!(
            text.contains("Study:\n  In the package demeter-lab: run, report, compare"),
            "{text}"
        );
    }

    #[test]
    fn a_command_of_the_other_package_is_refused() {
        let refused = Err("demeter run is not in this package; install demeter-lab".to_owned());
        let small = with(&["guest"]);
        for words in ["run", "-v run --on sim", "help run"] {
            assert_eq!(check(&small, words), refused, "{words}");
        }
        for words in ["", "guest run", "guest --pid 1", "walk"] {
            assert_eq!(check(&small, words), Ok(()), "{words}");
        }
        assert_eq!(check(&with(&["guest", "run"]), "run"), Ok(()));
    }
}
