//! `demeter model`: predicts the benefit of direct segments from counters of runs without them.

mod perf;

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use demeter_outcome::{Figure, RunResult, SystemResult};
use demeter_sim::linear::{Counters, Overheads, Runs};
use serde_json::{Value, json};

use crate::output;

/// The setting that names a mode of translation.
const MODE: &str = "sim.translation.mode";

/// Predicts what direct segments would save a program in a VM.
///
/// The counters are those of the program natively and in a VM, with the same input and page sizes. The
/// prediction is the linear model of Gandhi et al. (MICRO-47).
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  perf stat -x, -o native.csv -e cycles,dtlb_load_misses.walk_completed,\\
dtlb_store_misses.walk_completed,dtlb_load_misses.walk_active,dtlb_store_misses.walk_active PROGRAM
  demeter model --native native.csv --virtual vm.csv --segment-share 0.99
  demeter model segments.json           results of the simulator, beside its own full model")]
pub struct Args {
    /// Result of a scenario whose cases vary sim.translation.mode: native and virtualized at least
    #[arg(required_unless_present = "native", conflicts_with_all = ["native", "virtual_run"])]
    result: Option<PathBuf>,
    /// Output of `perf stat` for the native run
    #[arg(long, value_name = "FILE", requires = "virtual_run")]
    native: Option<PathBuf>,
    /// Output of `perf stat` for the run in a VM, without the hypervisor's own events
    #[arg(long = "virtual", value_name = "FILE", requires = "native")]
    virtual_run: Option<PathBuf>,
    /// Share of the TLB misses that fall in the segment, 0 to 1
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    segment_share: f64,
    /// Clock of the simulated processor, GHz: a comparison with a segment's bounds takes a cycle
    #[arg(long, value_name = "GHZ", default_value_t = 2.2)]
    ghz: f64,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

/// A program with its predictions and the simulator's own results, by mode.
struct Predicted {
    name: String,
    overheads: Overheads,
    full: Vec<(String, f64)>,
}

/// Predicts and prints.
pub fn model(args: &Args) -> anyhow::Result<()> {
    let predicted = match (&args.native, &args.virtual_run, &args.result) {
        (Some(native), Some(virtual_run), _) => {
            let runs = Runs {
                native: perf::load(native)?,
                virtualized: perf::load(virtual_run)?,
                segment_share: args.segment_share,
                // The unit is one cycle.
                check_time: 1.0,
            };
            vec![Predicted {
                name: native.display().to_string(),
                overheads: runs.predict()?,
                full: vec![],
            }]
        }
        (_, _, Some(path)) => {
            ensure!(
                args.ghz.is_finite() && args.ghz > 0.0,
                "--ghz {}: give the processor's clock, such as 2.2",
                args.ghz
            );
            of_result(&RunResult::load(path)?, args).with_context(|| path.display().to_string())?
        }
        // The options exclude this case.
        _ => vec![],
    };
    output::print(match args.json {
        true => serde_json::to_string_pretty(&json_of(&predicted))? + "\n",
        false => table(&predicted),
    })
}

/// Predictions for each program of a result.
fn of_result(result: &RunResult, args: &Args) -> anyhow::Result<Vec<Predicted>> {
    let overhead = Figure::try_from("walk_overhead".to_owned())?;
    let mut groups: Vec<(String, Vec<(String, &SystemResult)>)> = vec![];
    for case in &result.cases {
        let is_mode = |(key, _): &&(String, String)| key == MODE;
        let Some((_, mode)) = case.settings.iter().find(is_mode) else {
            continue;
        };
        let others = case.settings.iter().filter(|setting| !is_mode(setting));
        let others: Vec<_> = others
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        let name = others.join(" ");
        let Some(system) = case.systems.first() else {
            continue;
        };
        match groups.iter_mut().find(|(other, _)| *other == name) {
            Some((_, modes)) => modes.push((mode.clone(), system)),
            None => groups.push((name, vec![(mode.clone(), system)])),
        }
    }
    let mut predicted = vec![];
    for (name, modes) in groups {
        let of = |wanted: &str| modes.iter().find(|(mode, _)| mode == wanted);
        let (Some((_, native)), Some((_, virtualized))) = (of("native"), of("virtualized")) else {
            continue;
        };
        let runs = Runs {
            native: simulated(native).with_context(|| format!("{name}, native"))?,
            virtualized: simulated(virtualized).with_context(|| format!("{name}, virtualized"))?,
            segment_share: args.segment_share,
            check_time: 1.0 / args.ghz,
        };
        let overheads = runs.predict().with_context(|| name.clone())?;
        let full = modes.iter();
        let full = full.filter_map(|(mode, system)| Some((mode.clone(), overhead.of(system)?)));
        predicted.push(Predicted {
            name,
            overheads,
            full: full.collect(),
        });
    }
    ensure!(
        !predicted.is_empty(),
        "no two cases differ only in {MODE} = native and virtualized; run scenarios/seed-segments.toml, or \
         one like it, with --on sim --json"
    );
    Ok(predicted)
}

/// Counters of a simulated run, nanoseconds.
fn simulated(system: &SystemResult) -> anyhow::Result<Counters> {
    let counter = |name: &str| {
        let count = system.counters.get(name);
        count
            .map(|&n| n as f64)
            .with_context(|| format!("no counter {name}"))
    };
    let mut time = 0.0;
    for cause in ["compute", "walk", "cache", "fast", "slow"] {
        let seconds = system.cpu_s.get(cause);
        time += seconds.with_context(|| format!("no CPU time of {cause}"))? * 1e9;
    }
    Ok(Counters {
        time,
        walks: counter("tlb_misses")?,
        walk_time: counter("walk_ns")?,
    })
}

/// The modes with their names, as scenarios spell them.
fn modes(overheads: &Overheads) -> [(&'static str, f64); 6] {
    [
        ("native", overheads.native),
        ("direct-segment", overheads.direct_segment),
        ("virtualized", overheads.virtualized),
        ("vmm-direct", overheads.vmm_direct),
        ("guest-direct", overheads.guest_direct),
        ("dual-direct", overheads.dual_direct),
    ]
}

fn table(predicted: &[Predicted]) -> String {
    let mut text = String::new();
    for program in predicted {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}", program.name);
        let _ = writeln!(
            text,
            "  {:<15} {:>11}  {:>11}",
            "mode", "predicted %", "simulated %"
        );
        for (mode, overhead) in modes(&program.overheads) {
            let full = program.full.iter().find(|(other, _)| other == mode);
            let full = full.map_or("-".into(), |(_, full)| format!("{:.2}", full * 100.0));
            let _ = writeln!(text, "  {mode:<15} {:>11.2}  {full:>11}", overhead * 100.0);
        }
    }
    text
}

fn json_of(predicted: &[Predicted]) -> Value {
    let program = |program: &Predicted| {
        let of = |pairs: &mut dyn Iterator<Item = (String, f64)>| -> Value {
            pairs
                .map(|(mode, overhead)| (mode, json!(overhead)))
                .collect()
        };
        let named = modes(&program.overheads);
        json!({
            "program": program.name,
            "predicted": of(&mut named.iter().map(|(mode, overhead)| ((*mode).to_owned(), *overhead))),
            "simulated": of(&mut program.full.iter().cloned()),
        })
    };
    predicted.iter().map(program).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use demeter_outcome::Case;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn args(words: &[&str]) -> Args {
        let words = std::iter::once(&"model").chain(words);
        Cli::try_parse_from(words).unwrap().args
    }

    fn case(mode: &str, walk_ns: u64) -> Case {
        let cpu_s = [
            ("compute", 1.0),
            ("cache", 0.0),
            ("fast", 0.0),
            ("slow", 0.0),
        ];
        let mut cpu_s: Vec<_> = cpu_s.map(|(cause, s)| (cause.to_owned(), s)).into();
        cpu_s.push(("walk".into(), walk_ns as f64 / 1e9));
        let counters = [
            ("tlb_misses".to_owned(), 1_000_000),
            ("walk_ns".to_owned(), walk_ns),
        ];
        Case {
            group: 0,
            settings: vec![
                ("workload".into(), "gups".into()),
                (MODE.into(), mode.into()),
            ],
            systems: vec![SystemResult {
                cpu_s: cpu_s.into_iter().collect(),
                counters: counters.into(),
                ..SystemResult::default()
            }],
        }
    }

    #[test]
    fn a_result_of_the_simulator_is_predicted_beside_its_own() {
        let result = RunResult {
            cases: vec![
                case("native", 100_000_000),
                case("virtualized", 300_000_000),
                case("vmm-direct", 110_000_000),
            ],
            ..RunResult::default()
        };
        let args = args(&["x.json", "--ghz", "1"]);
        let predicted = of_result(&result, &args).unwrap();
        assert_eq!(predicted.len(), 1);
        assert_eq!(predicted[0].name, "workload=gups");
        // A million misses of 100 ns and five comparisons of one.
        assert!((predicted[0].overheads.vmm_direct - 0.105).abs() < 1e-9);
        let text = table(&predicted);
        assert!(text.contains("10.50") && text.contains("11.00"), "{text}");
        let value = json_of(&predicted);
        assert!(value[0]["predicted"]["dual-direct"] == json!(0.0));
    }

    #[test]
    fn a_result_without_both_runs_is_refused() {
        let result = RunResult {
            cases: vec![case("native", 1)],
            ..RunResult::default()
        };
        let said = of_result(&result, &args(&["x.json"]))
            .err()
            .unwrap()
            .to_string();
        assert!(said.contains("virtualized"), "{said}");
    }
}
