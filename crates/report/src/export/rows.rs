//! Many runs as rows of one table: settings and figures by name.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Number, Value};

use demeter_outcome::SystemResult;

/// One run: its settings and its result.
#[derive(Debug, Clone, PartialEq)]
pub struct RunRow {
    /// Names and values of its settings; every row has the same names.
    pub settings: Vec<(String, String)>,
    /// The result.
    pub result: SystemResult,
}

/// Rows with the same columns.
///
/// The settings come first, then `system`, then every figure of the result file by its name; those within `cpu_s` and
/// `counters` as `cpu_s.kswapd`. The series is omitted.
pub(crate) struct Columns<'a> {
    rows: &'a [RunRow],
    figures: Vec<BTreeMap<String, Number>>,
}

impl<'a> Columns<'a> {
    pub(crate) fn new(rows: &'a [RunRow]) -> Self {
        let figures = rows.iter().map(|row| figures(&row.result)).collect();
        Self { rows, figures }
    }

    /// Columns of text, with a value for each row.
    pub(crate) fn texts(&self) -> Vec<(&'a str, Vec<&'a str>)> {
        let settings = self.rows.first().map_or(&[][..], |row| &row.settings);
        let mut columns: Vec<(&str, Vec<&str>)> = (settings.iter().enumerate())
            .map(|(i, (name, _))| {
                let values = self.rows.iter().map(|row| row.settings[i].1.as_str());
                (name.as_str(), values.collect())
            })
            .collect();
        let systems = self.rows.iter().map(|row| row.result.name.as_str());
        columns.push(("system", systems.collect()));
        columns
    }

    /// Columns of numbers; `None` if not measured.
    pub(crate) fn numbers(&self) -> Vec<(&str, Vec<Option<&Number>>)> {
        let names: BTreeSet<&String> = self.figures.iter().flat_map(BTreeMap::keys).collect();
        let column = |name: &'_ String| self.figures.iter().map(|f| f.get(name)).collect();
        names.iter().map(|n| (n.as_str(), column(n))).collect()
    }
}

/// The columns of [`csv`](crate::csv) in its order, with a value for each row.
///
/// Settings and system are texts, figures are numbers, and missing figures are null.
pub fn columns(rows: &[RunRow]) -> Vec<(String, Vec<Value>)> {
    let columns = Columns::new(rows);
    let texts = columns.texts().into_iter().map(|(name, values)| {
        let values = values.into_iter().map(Value::from);
        (name.to_owned(), values.collect())
    });
    let numbers = columns.numbers().into_iter().map(|(name, values)| {
        let values = values.into_iter().map(|n| n.cloned().into());
        (name.to_owned(), values.collect())
    });
    texts.chain(numbers).collect()
}

/// All numbers of a result by name. The name of a speed contains its unit.
fn figures(result: &SystemResult) -> BTreeMap<String, Number> {
    let mut figures = BTreeMap::new();
    // A result of numbers and texts can always be serialized.
    if let Ok(Value::Object(mut fields)) = serde_json::to_value(result) {
        if let (Some(speed), Some(Value::Object(parts))) = (&result.speed, fields.remove("speed")) {
            let unit = match speed.unit.name() {
                "Mops" => "mops",
                "ns" => "latency_ns",
                other => other,
            };
            let parts = parts.into_iter();
            fields.extend(parts.map(|(part, value)| (format!("{part}_{unit}"), value)));
        }
        for (name, value) in fields {
            flatten(name, value, &mut figures);
        }
    }
    figures
}

fn flatten(name: String, value: Value, figures: &mut BTreeMap<String, Number>) {
    match value {
        Value::Number(number) => {
            figures.insert(name, number);
        }
        Value::Object(fields) => {
            for (inner, value) in fields {
                flatten(format!("{name}.{inner}"), value, figures);
            }
        }
        Value::Null | Value::Bool(_) | Value::String(_) | Value::Array(_) => {}
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use demeter_outcome::{Speed, Unit};

    use super::*;

    /// Two runs that measured different figures.
    pub(crate) fn two_runs() -> [RunRow; 2] {
        let row = |value: &str, cause: &str, mops| RunRow {
            settings: vec![("workload.kind".into(), value.into())],
            result: SystemResult {
                name: "demeter".into(),
                speed: Some(Speed::new(Unit::MOPS, mops, None)),
                cpu_s: [(cause.into(), 0.25)].into(),
                counters: [("samples".into(), u64::MAX)].into(),
                ..SystemResult::default()
            },
        };
        [row("a,b", "walk", Some(1.5)), row("c\"d", "flush", None)]
    }

    #[test]
    fn every_column_has_a_value_for_every_row() {
        let rows = two_runs();
        let columns = Columns::new(&rows);
        let texts = columns.texts();
        assert_eq!(texts[0], ("workload.kind", vec!["a,b", "c\"d"]));
        assert_eq!(texts[1], ("system", vec!["demeter", "demeter"]));
        let numbers = columns.numbers();
        assert!(
            numbers
                .iter()
                .all(|(name, n)| n.len() == 2 && *name != "series")
        );
        let of = |name: &str| {
            let (_, values) = numbers.iter().find(|(n, _)| *n == name).unwrap();
            values
                .iter()
                .map(|v| v.and_then(Number::as_f64))
                .collect::<Vec<_>>()
        };
        assert_eq!(of("mean_mops"), [Some(1.5), None]);
        assert_eq!(of("cpu_s.walk"), [Some(0.25), None]);
        assert_eq!(of("cpu_s.flush"), [None, Some(0.25)]);
        let plain = super::columns(&rows);
        let plain = |name: &str| plain.iter().find(|(n, _)| n == name).map(|(_, v)| &v[..]);
        assert_eq!(plain("mean_mops"), Some(&[1.5.into(), Value::Null][..]));
        assert_eq!(
            plain("system"),
            Some(&["demeter".into(), "demeter".into()][..])
        );
    }
}
