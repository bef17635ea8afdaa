//! Many runs as one table of comma-separated values (RFC 4180), for programs that draw.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::schema::SystemResult;

/// One run: what tells it from the others, and what it measured.
#[derive(Debug, Clone, PartialEq)]
pub struct CsvRow {
    /// Name and value of what was set for it; each row has the same names.
    pub settings: Vec<(String, String)>,
    /// What was measured.
    pub result: SystemResult,
}

/// The rows as text. The settings come first, then `system`, then every figure of the result file
/// by its name there; within `cpu_s` and `counters` as `cpu_s.kswapd`. What was not measured is
/// empty; the series over time is left out.
pub fn csv(rows: &[CsvRow]) -> String {
    let figures: Vec<BTreeMap<String, String>> =
        rows.iter().map(|row| figures(&row.result)).collect();
    let names: BTreeSet<&String> = figures.iter().flat_map(BTreeMap::keys).collect();

    let settings = rows.first().map_or(&[][..], |row| &row.settings);
    let mut lines = String::new();
    let heading = settings.iter().map(|(name, _)| name.as_str());
    line(
        &mut lines,
        heading
            .chain(["system"])
            .chain(names.iter().map(|name| name.as_str())),
    );
    for (row, figures) in rows.iter().zip(&figures) {
        let settings = row.settings.iter().map(|(_, value)| value.as_str());
        let cells = names
            .iter()
            .map(|name| figures.get(*name).map_or("", String::as_str));
        line(
            &mut lines,
            settings.chain([row.result.name.as_str()]).chain(cells),
        );
    }
    lines
}

/// Every number of a result by its name.
fn figures(result: &SystemResult) -> BTreeMap<String, String> {
    let mut figures = BTreeMap::new();
    // A result of numbers and texts has a JSON form.
    if let Ok(Value::Object(fields)) = serde_json::to_value(result) {
        for (name, value) in fields {
            flatten(name, &value, &mut figures);
        }
    }
    figures
}

fn flatten(name: String, value: &Value, figures: &mut BTreeMap<String, String>) {
    match value {
        Value::Number(number) => {
            figures.insert(name, number.to_string());
        }
        Value::Null => {
            figures.insert(name, String::new());
        }
        Value::Object(fields) => {
            for (inner, value) in fields {
                flatten(format!("{name}.{inner}"), value, figures);
            }
        }
        Value::Bool(_) | Value::String(_) | Value::Array(_) => {}
    }
}

fn line<'a>(lines: &mut String, cells: impl Iterator<Item = &'a str>) {
    let cells: Vec<String> = cells.map(cell).collect();
    lines.push_str(&cells.join(","));
    lines.push('\n');
}

fn cell(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_a_cell_for_every_column() {
        let row = |value: &str, cause: &str, mops| CsvRow {
            settings: vec![("workload.kind".into(), value.into())],
            result: SystemResult {
                name: "demeter".into(),
                mean_mops: mops,
                cpu_s: [(cause.into(), 0.25)].into(),
                ..SystemResult::default()
            },
        };
        let text = csv(&[row("a,b", "walk", Some(1.5)), row("c\"d", "flush", None)]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        let heading: Vec<&str> = lines[0].split(',').collect();
        assert_eq!(heading[..2], ["workload.kind", "system"]);
        assert!(!heading.contains(&"series") && !heading.contains(&"name"));
        let column = |name: &str| heading.iter().position(|h| *h == name).unwrap();
        let first: Vec<&str> = lines[1]
            .strip_prefix("\"a,b\"")
            .unwrap()
            .split(',')
            .collect();
        assert_eq!(first.len(), heading.len());
        assert_eq!(first[column("mean_mops")], "1.5");
        assert_eq!(first[column("cpu_s.walk")], "0.25");
        assert_eq!(first[column("cpu_s.flush")], "");
        assert!(lines[2].starts_with("\"c\"\"d\",demeter,"));
    }
}
