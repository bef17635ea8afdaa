//! Writes many runs as comma-separated values (RFC 4180), for plotting.

use serde_json::Number;

use crate::export::rows::{Columns, RunRow};

/// The rows as text.
///
/// The settings come first, then `system`, then every figure of the result file by its name; those within `cpu_s` and
/// `counters` as `cpu_s.kswapd`. Missing figures are empty, and the series is omitted.
pub fn csv(rows: &[RunRow]) -> String {
    let columns = Columns::new(rows);
    let (texts, numbers) = (columns.texts(), columns.numbers());
    let mut lines = String::new();
    let names = texts.iter().map(|c| c.0).chain(numbers.iter().map(|c| c.0));
    line(&mut lines, names.map(cell));
    for row in 0..rows.len() {
        let texts = texts.iter().map(|(_, values)| cell(values[row]));
        let numbers = numbers
            .iter()
            .map(|(_, values)| values[row].map_or(String::new(), Number::to_string));
        line(&mut lines, texts.chain(numbers));
    }
    lines
}

fn line(lines: &mut String, cells: impl Iterator<Item = String>) {
    let cells: Vec<String> = cells.collect();
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
    use crate::export::rows::tests::two_runs;

    #[test]
    fn a_row_has_a_cell_for_every_column() {
        let text = csv(&two_runs());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        let heading: Vec<&str> = lines[0].split(',').collect();
        assert_eq!(heading[..2], ["workload.kind", "system"]);
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
