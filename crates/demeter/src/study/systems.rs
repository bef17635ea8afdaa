//! `demeter systems`: lists the catalogue of systems; parses their names.

use std::fmt::Write;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use demeter_outcome::{Published, RunResult};
use demeter_scenario::{Row, System, UnknownSystem};

use crate::output;

/// Options of `demeter systems`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
    /// Print a page of Markdown: the designs, and these result files beside their authors' figures
    #[arg(long, value_name = "RESULT", num_args = 1.., conflicts_with = "json")]
    markdown: Vec<PathBuf>,
}

/// Prints the catalogue.
pub fn systems(args: &Args) -> anyhow::Result<()> {
    if !args.markdown.is_empty() {
        let results = args.markdown.iter().map(|file| RunResult::load(file));
        return output::print(markdown(&results.collect::<Result<Vec<_>, _>>()?));
    }
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

/// The designs, and each result's published and measured figures.
fn markdown(results: &[RunResult]) -> String {
    let published = || results.iter().flat_map(|result| &result.published);
    let mut page = String::from(
        "# Systems in the simulator\n\n\
         Made by `cargo xtask systems`; nothing here is written by hand. The last column counts the\n\
         figures below that are within their limit and, if they are ratios, on the same side of 1. A system\n\
         without a count has none here: its experiment was not run to its end, or nobody has published a\n\
         figure of it; `scenarios/` says more.\n\n\
         | system | source | where | tracks | classifies | moves | agrees |\n|---|---|---|---|---|---|---|\n",
    );
    for &system in System::ALL {
        let Some(design) = system.design() else {
            continue;
        };
        let Row { name, source, .. } = system.row();
        let of_it = || published().filter(|p| p.system == *name);
        let agrees = match of_it().count() {
            0 => String::new(),
            all => format!("{} of {all}", of_it().filter(|p| p.agrees()).count()),
        };
        let quoted = format!("`{name}`");
        let cells = [
            quoted.as_str(),
            source,
            design.place,
            design.tracks,
            design.classifies,
            design.moves,
            agrees.as_str(),
        ];
        let _ = writeln!(page, "| {} |", cells.join(" | "));
    }
    for result in results.iter().filter(|r| !r.published.is_empty()) {
        let _ = write!(
            page,
            "\n## {0}\n\nThe head of `scenarios/{0}.toml` describes the scenario, and why figures differ.\n\n\
             | figure | case | published | ours | limit | agrees |\n|---|---|---|---|---|---|\n",
            result.scenario
        );
        for figure in &result.published {
            let _ = writeln!(page, "| {} |", cells(figure).join(" | "));
        }
    }
    page
}

/// A published figure as a row.
fn cells(p: &Published) -> [String; 6] {
    let over = p.over.as_ref().map(|over| format!(" / {over}"));
    let case = p.case.iter().map(|(key, value)| format!("{key}={value}"));
    [
        format!("{} {}{}", p.figure, p.system, over.unwrap_or_default()),
        case.collect::<Vec<_>>().join(" "),
        format!("{:.3}", p.value),
        p.ours
            .map_or_else(|| "-".into(), |ours| format!("{ours:.3}")),
        format!("{:.0} %", p.within * 100.0),
        match p.agrees() {
            true => "yes",
            false if p.is_reversed() => "**no, reversed**",
            false => "**no**",
        }
        .into(),
    ]
}

/// A parser of systems' names, which `--help` lists.
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
    fn a_page_counts_what_agrees() {
        let figure = |system: &str, ours| Published {
            figure: "mean_mops".into(),
            system: system.into(),
            over: Some("none".into()),
            case: vec![("sim.vms".into(), "9".into())],
            value: 2.0,
            ours: Some(ours),
            within: 0.1,
            source: String::new(),
        };
        let result = RunResult {
            scenario: "paper-x".into(),
            published: vec![
                figure("memtis", 2.1),
                figure("memtis", 3.0),
                figure("linux", 1.0),
            ],
            ..RunResult::default()
        };
        let page = markdown(&[result]);
        let row = |system: &str| {
            let start = format!("| `{system}` |");
            page.lines().find(|l| l.starts_with(&start)).unwrap()
        };
        assert!(row("memtis").ends_with("| 1 of 2 |"), "{page}");
        assert!(row("linux").ends_with("| 0 of 1 |"), "{page}");
        assert!(row("g-tpp").ends_with("|  |"), "{page}");
        let ours = "| mean_mops memtis / none | sim.vms=9 | 2.000 | 3.000 | 10 % | **no** |";
        assert!(page.contains(ours), "{page}");
    }

    #[test]
    fn the_book_has_the_catalogue() {
        let page = include_str!("../../../../docs/src/scenarios.md");
        for system in System::ALL {
            let Row {
                name,
                about,
                source,
                ..
            } = system.row();
            let places = system.row().places();
            let line = format!("| `{name}` | {places} | {about} | {source} |");
            assert!(page.contains(&line), "docs/src/scenarios.md lacks:\n{line}");
        }
    }
}
