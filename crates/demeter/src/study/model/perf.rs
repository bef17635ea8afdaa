//! Parses the output of `perf stat`: plain, with `-x,` or with `-j`.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use demeter_sim::linear::Counters;
use serde_json::Value;

/// Maximum file size, bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The necessary events, as given to perf.
const EVENTS: &str = "cycles, dtlb_load_misses.walk_completed, dtlb_store_misses.walk_completed, \
                      dtlb_load_misses.walk_active, dtlb_store_misses.walk_active";

/// Reads the counters of a run.
///
/// # Errors
/// The file, the missing events, and how to count them.
pub fn load(path: &Path) -> anyhow::Result<Counters> {
    let name = path.display();
    let size = std::fs::metadata(path).with_context(|| format!("cannot read {name}"))?;
    ensure!(
        size.len() <= FILE_BYTES_MAX,
        "{name} has {} bytes, more than perf stat prints; give its output",
        size.len()
    );
    let text = std::fs::read(path).with_context(|| format!("cannot read {name}"))?;
    counters(&String::from_utf8_lossy(&text)).with_context(|| format!("{name}, as of perf stat"))
}

fn counters(text: &str) -> anyhow::Result<Counters> {
    let mut counts: Vec<(String, f64)> = vec![];
    for line in text.lines() {
        let Some((event, value)) = count(line) else {
            continue;
        };
        let Some(value) = value else {
            // Other events may be missing.
            if role(&event).is_some() {
                bail!(
                    "{event} was not counted; run perf stat with fewer events, or on another CPU"
                );
            }
            continue;
        };
        counts.push((event, value));
    }
    let sum = |wanted: Role| {
        let of = counts
            .iter()
            .filter(|(event, _)| role(event) == Some(wanted));
        of.map(|(_, value)| *value).reduce(|a, b| a + b)
    };
    let need = |sum: Option<f64>, what: &str| {
        sum.with_context(|| format!("no {what} in it; run perf stat -e {EVENTS}"))
    };
    Ok(Counters {
        time: need(sum(Role::Cycles), "cycles")?,
        // Started walks count if completed ones were not counted.
        walks: need(sum(Role::Walks).or(sum(Role::WalksBegun)), "page walks")?,
        walk_time: need(sum(Role::WalkCycles), "cycles of page walks")?,
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Cycles,
    Walks,
    WalksBegun,
    WalkCycles,
}

/// The role of an event in the model, by Intel's names since Sandy Bridge.
fn role(event: &str) -> Option<Role> {
    // Removes the PMU of a hybrid processor and the mode: cpu_core/cycles/u, cycles:u.
    let event = event.strip_suffix("/u").unwrap_or(event);
    let event = event
        .split(':')
        .next()
        .unwrap_or(event)
        .trim_end_matches('/');
    let event = event.rsplit('/').next().unwrap_or(event);
    if matches!(event, "cycles" | "cpu-cycles") {
        return Some(Role::Cycles);
    }
    let of_data = event.starts_with("dtlb_load_misses.") || event.starts_with("dtlb_store_misses.");
    match event.rsplit('.').next()? {
        _ if !of_data => None,
        "walk_completed" => Some(Role::Walks),
        "miss_causes_a_walk" => Some(Role::WalksBegun),
        "walk_active" | "walk_duration" | "walk_pending" => Some(Role::WalkCycles),
        _ => None,
    }
}

/// A line's event and count; `None` if perf has no count.
fn count(line: &str) -> Option<(String, Option<f64>)> {
    let line = line.trim();
    if line.starts_with('{') {
        let value: Value = serde_json::from_str(line).ok()?;
        let event = value.get("event")?.as_str()?;
        let count = value.get("counter-value")?.as_str()?;
        return Some((event.into(), count.trim().parse().ok()));
    }
    let mut words = line.split_whitespace();
    let first = words.next()?;
    if let (Some(count), Some(event)) = (number(first), words.next()) {
        return Some((event.into(), Some(count)));
    }
    let mut fields = line.split(',');
    let count = fields.next()?;
    if let Some(event) = fields.nth(1).filter(|_| count.parse::<f64>().is_ok()) {
        return Some((event.trim().into(), count.parse().ok()));
    }
    // `<not counted>` or `<not supported>`, followed by the event.
    let rest = line.strip_prefix("<not ")?;
    let event = rest.split(|c: char| c == ',' || c.is_whitespace());
    let event = event.skip(1).find(|word| !word.is_empty())?;
    Some((event.into(), None))
}

/// Parses a count with commas between groups of three digits.
fn number(text: &str) -> Option<f64> {
    let plain = text.replace(',', "");
    let is_grouped = text.split(',').skip(1).all(|group| group.len() == 3);
    (is_grouped && text.starts_with(|c: char| c.is_ascii_digit())).then(|| plain.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: Counters = Counters {
        time: 1_234_567.0,
        walks: 1100.0,
        walk_time: 34_000.0,
    };

    #[test]
    fn all_three_formats_are_read() {
        let people = " Performance counter stats for './gups':\n\n\
                      \x20     1,234,567      cycles:u      # 2.1 GHz   (80.01%)\n\
                      \x20         1,000      dtlb_load_misses.walk_completed\n\
                      \x20           100      dtlb_store_misses.walk_completed:u\n\
                      \x20        30,000      dtlb_load_misses.walk_active\n\
                      \x20         4,000      dtlb_store_misses.walk_active\n\
                      \x20   <not counted>   branches\n\n\
                      \x20      1.234567 seconds time elapsed\n";
        let commas = "1234567,,cycles,100,100.00,2.1,GHz\n1000,,dtlb_load_misses.walk_completed,1,100.00,,\n\
                      100,,dtlb_store_misses.walk_completed,1,100.00,,\n\
                      5,,dtlb_store_misses.miss_causes_a_walk,1,100.00,,\n\
                      30000,,dtlb_load_misses.walk_duration,1,100.00,,\n\
                      4000,,dtlb_store_misses.walk_duration,1,100.00,,\n";
        let json = "{\"counter-value\" : \"1234567.000000\", \"event\" : \"cpu_core/cycles/\"}\n\
                    {\"counter-value\" : \"1100\", \"event\" : \"dtlb_load_misses.walk_completed\"}\n\
                    {\"counter-value\" : \"34000\", \"event\" : \"dtlb_load_misses.walk_pending\"}\n";
        for text in [people, commas, json] {
            assert_eq!(counters(text).unwrap(), EXPECTED);
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let said = |text: &str| counters(text).unwrap_err().to_string();
        assert!(said("12 cycles").contains("no page walks"));
        assert!(said("").contains("no cycles"));
        let text = "<not supported>,,dtlb_load_misses.walk_active,0,100.00,,";
        assert!(said(text).contains("walk_active was not counted"));
        let text = "  <not counted>   dtlb_load_misses.walk_active:u";
        assert!(said(text).contains("was not counted"));
    }
}
