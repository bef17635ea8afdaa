//! `demeter systems`: the catalogue of systems, and the option that names one of them.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use demeter_scenario::{Row, System, UnknownSystem};

use crate::output;

/// Options of `demeter systems`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// Prints the catalogue.
pub fn systems(args: &Args) -> anyhow::Result<()> {
    let rows: Vec<&Row> = System::ALL.iter().map(|system| system.row()).collect();
    output::print(if args.json {
        serde_json::to_string_pretty(&rows)? + "\n"
    } else {
        table(&rows)
    })
}

fn table(rows: &[&Row]) -> String {
    let line = |name, places: &str, source, about| {
        format!("{name:<18}  {places:<20}  {source:<18}  {about}\n")
    };
    let rows = rows
        .iter()
        .map(|row| line(row.name, &row.places(), row.source, row.about));
    line("system", "runs on", "source", "what it is") + &rows.collect::<String>()
}

/// Reads a system's name; `--help` then lists all of them.
pub fn parser() -> impl TypedValueParser<Value = System> {
    let values = System::ALL.iter().map(|system| {
        let row = system.row();
        PossibleValue::new(row.name).help(row.about)
    });
    PossibleValuesParser::new(values)
        .try_map(|name| name.parse().map_err(|e: UnknownSystem| e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_has_the_catalogue() {
        let readme = include_str!("../../../README.md");
        for system in System::ALL {
            let Row {
                name,
                about,
                source,
                ..
            } = system.row();
            let places = system.row().places();
            let line = format!("| `{name}` | {places} | {about} | {source} |");
            assert!(readme.contains(&line), "README.md lacks:\n{line}");
        }
    }
}
