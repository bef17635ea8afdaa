//! Says which orders of systems depend on the simulator's assumed costs.
//!
//! `scenarios/sensitivity.toml` runs programs as they are, then with each cost changed. A conclusion is the order of a tracker and a
//! rival on one program. It flips if the other one is faster once a cost has changed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::{build, shell};

const SCENARIO: &str = "scenarios/sensitivity.toml";
const RESULT: &str = "target/sensitivity.json";

/// Begins the names of our systems; all others are rivals.
const OURS: &str = "demeter";

/// The setting that names a program. All other settings are costs.
const PROGRAM: &str = "workload";

/// Speeds that differ by less have no order.
const EQUAL: f64 = 0.01;

/// Changes each assumed cost of the simulator, and says which orders of systems change.
#[derive(clap::Args)]
pub struct Args {
    /// Use this result of scenarios/sensitivity.toml instead of running it
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Also write the table to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs the scenario and prints the table.
pub fn sensitivity(args: &Args) -> anyhow::Result<()> {
    let result = match &args.from {
        Some(file) => file.clone(),
        None => {
            build::build()?;
            let demeter = shell::root().join("target/release/demeter");
            let run = format!("run {SCENARIO} --on sim --json {RESULT}");
            shell::run(shell::program(demeter, &run))?;
            shell::root().join(RESULT)
        }
    };
    let changes = changes(&read(&result)?)?;
    if let Some(file) = &args.json {
        let all: Vec<Value> = changes.iter().map(Change::json).collect();
        let text = serde_json::to_string_pretty(&all)? + "\n";
        fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    print!("{}", table(&changes));
    Ok(())
}

fn read(file: &Path) -> anyhow::Result<Value> {
    let text = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is no result file", file.display()))
}

/// Speeds of systems on programs, by program and system.
type Speeds = BTreeMap<(String, String), f64>;

/// A pair of systems on a program: ours over the rival's speed, before and after a change.
#[derive(Debug, Clone, PartialEq)]
struct Order {
    program: String,
    ours: String,
    rival: String,
    before: f64,
    after: f64,
}

impl Order {
    fn flips(&self) -> bool {
        (self.before > 1.0) != (self.after > 1.0)
    }
}

/// A changed cost.
#[derive(Debug)]
struct Change {
    /// Key and value, as in the result.
    cost: String,
    value: String,
    /// The conclusions.
    orders: Vec<Order>,
}

impl Change {
    fn flips(&self) -> impl Iterator<Item = &Order> {
        self.orders.iter().filter(|order| order.flips())
    }

    /// The largest relative change of a ratio.
    fn largest(&self) -> f64 {
        let moved = |order: &Order| (order.after / order.before - 1.0).abs();
        self.orders.iter().map(moved).fold(0.0, f64::max)
    }

    fn json(&self) -> Value {
        let flips = self.flips().map(|order| {
            json!({
                "program": order.program,
                "system": order.ours,
                "rival": order.rival,
                "before": order.before,
                "after": order.after,
            })
        });
        json!({
            "cost": self.cost,
            "value": self.value,
            "orders": self.orders.len(),
            "largest_change": self.largest(),
            "flips": flips.collect::<Vec<_>>(),
        })
    }
}

/// The conclusions under each changed cost, in the result's order.
fn changes(result: &Value) -> anyhow::Result<Vec<Change>> {
    let cases = result["cases"].as_array().context("it has no cases")?;
    let mut all: Vec<((String, String), Speeds)> = vec![];
    let mut base = Speeds::new();
    for case in cases {
        let settings = case["settings"]
            .as_array()
            .context("a case lacks settings")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut cost = None;
        let mut program = String::new();
        for setting in settings {
            match (text(&setting[0]), text(&setting[1])) {
                (key, value) if key == PROGRAM => program = value,
                changed => cost = Some(changed),
            }
        }
        let speeds = match cost {
            None => &mut base,
            Some(cost) => {
                if !all.iter().any(|(known, _)| *known == cost) {
                    all.push((cost.clone(), Speeds::new()));
                }
                let found = all.iter_mut().find(|(known, _)| *known == cost);
                &mut found.context("it was added")?.1
            }
        };
        for system in case["systems"].as_array().into_iter().flatten() {
            let mean = system["speed"]["mean"].as_f64();
            let mean = mean.filter(|mean| *mean > 0.0);
            let mean = mean.with_context(|| format!("{} has no speed", system["name"]))?;
            speeds.insert((program.clone(), text(&system["name"])), mean);
        }
    }
    ensure!(!base.is_empty(), "it has no case without a changed cost");
    let change = |((cost, value), speeds): ((String, String), Speeds)| Change {
        cost,
        value,
        orders: orders(&base, &speeds),
    };
    Ok(all.into_iter().map(change).collect())
}

/// Pairs of our systems and rivals that have an order in `base`.
fn orders(base: &Speeds, changed: &Speeds) -> Vec<Order> {
    let mut orders = vec![];
    let is_ours = |name: &str| name.starts_with(OURS);
    for (program, ours) in base.keys().filter(|(_, name)| is_ours(name)) {
        for (other, rival) in base.keys() {
            if other != program || is_ours(rival) {
                continue;
            }
            let ratio = |speeds: &Speeds| {
                let speed = |name: &String| speeds.get(&(program.clone(), name.clone())).copied();
                Some(speed(ours)? / speed(rival)?)
            };
            if let (Some(before), Some(after)) = (ratio(base), ratio(changed))
                && (before - 1.0).abs() >= EQUAL
            {
                orders.push(Order {
                    program: program.clone(),
                    ours: ours.clone(),
                    rival: rival.clone(),
                    before,
                    after,
                });
            }
        }
    }
    orders
}

/// One line for each change, or for each of its flips.
fn table(changes: &[Change]) -> String {
    let mut text = format!(
        "{:<32} {:>5}  {:>8}  {:>7}  {:<40}  {:>6}  {:>5}\n",
        "cost", "value", "flips", "change", "order that flips", "before", "after"
    );
    for change in changes {
        let flips: Vec<&Order> = change.flips().collect();
        let head = format!(
            "{:<32} {:>5}  {:>8}  {:>5.1} %",
            change.cost,
            change.value,
            format!("{} of {}", flips.len(), change.orders.len()),
            change.largest() * 100.0
        );
        if flips.is_empty() {
            text += &format!("{head}  -\n");
        }
        for (at, order) in flips.iter().enumerate() {
            let head = if at == 0 { head.as_str() } else { "" };
            let pair = format!("{}: {} / {}", order.program, order.ours, order.rival);
            text += &format!(
                "{head:<58}  {pair:<40}  {:>6.2}  {:>5.2}\n",
                order.before, order.after
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(settings: Value, speeds: [f64; 3]) -> Value {
        let names = ["memtis", "demeter", "demeter-damon"];
        let systems = names.iter().zip(speeds);
        let systems =
            systems.map(|(name, mean)| json!({ "name": name, "speed": { "mean": mean } }));
        json!({ "settings": settings, "systems": systems.collect::<Vec<_>>() })
    }

    fn result(changed: [f64; 3]) -> Value {
        json!({ "cases": [
            case(json!([["workload", "zipf"]]), [1.0, 1.1, 1.005]),
            case(json!([["sim.cost_percent.copy", "200"], ["workload", "zipf"]]), changed),
        ]})
    }

    #[test]
    fn an_order_flips_if_the_other_is_faster() {
        let kept = changes(&result([1.0, 1.01, 0.9])).unwrap();
        // The second pair had no order before.
        assert_eq!((kept[0].orders.len(), kept[0].flips().count()), (1, 0));
        let flipped = changes(&result([1.0, 0.99, 1.0])).unwrap();
        let flips: Vec<&Order> = flipped[0].flips().collect();
        assert_eq!(
            (flips[0].ours.as_str(), flips[0].rival.as_str()),
            ("demeter", "memtis")
        );
        let table = table(&flipped);
        assert!(
            table.contains("1 of 1") && table.contains("zipf: demeter / memtis"),
            "{table}"
        );
        assert!((flipped[0].largest() - 0.1).abs() < 1e-9);
        assert_eq!(flipped[0].json()["flips"][0]["after"], json!(0.99));
    }

    #[test]
    fn a_result_without_speeds_or_base_is_refused() {
        assert!(changes(&json!({})).is_err());
        assert!(changes(&result([0.0, 1.0, 1.0])).is_err());
        let without = json!({ "cases": [result([1.0; 3])["cases"][1]] });
        assert!(changes(&without).is_err());
    }
}
