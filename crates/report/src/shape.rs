//! Chooses the picture for a result's cases by the settings that vary.
//!
//! No scenario is known by name.

use std::collections::{BTreeMap, BTreeSet};

use demeter_outcome::{Case, RunResult, SystemResult};

use crate::measure::Measure;
use crate::text::clean;

/// Maximum number of groups of cases.
const GROUPS_MAX: usize = 16;
/// Maximum number of settings of a case that are considered.
const KEYS_MAX: usize = 16;
/// Maximum number of settings of a case that are named.
const SETTINGS_MAX: usize = 4;
/// Maximum number of values of a line chart's axis.
const LINE_VALUES_MAX: usize = 500;
/// Maximum number of values of an axis of words.
const BAR_VALUES_MAX: usize = 24;
/// Maximum number of values of a heat map's axis.
const HEAT_VALUES_MAX: usize = 32;
/// Largest number on a numeric axis; a larger one counts as a word.
const NUMBER_MAX: f64 = 1e15;
/// The setting that names a case of a folder of scenarios.
const CASE_KEY: &str = "scenario";
/// The setting that describes a group of cases in a sentence.
const ABOUT_KEY: &str = "about";
/// The setting with the number of VMs.
const VMS_KEY: &str = "sim.vms";

/// The cases of one table of a scenario's `vary`.
pub(crate) struct Group<'a> {
    /// Settings common to all cases: key and value.
    pub fixed: Vec<(&'a str, &'a str)>,
    /// The settings that vary.
    pub axes: Vec<Setting<'a>>,
    /// The cases; at least one.
    pub cases: Vec<&'a Case>,
}

/// A key with several values.
pub(crate) struct Setting<'a> {
    /// A dotted key.
    pub key: &'a str,
    /// Distinct values: numbers ascending, words in order of appearance.
    pub values: Vec<&'a str>,
    /// The values as numbers, if all are.
    pub numbers: Option<Vec<f64>>,
}

/// The kind of picture for a group.
pub(crate) enum Shape<'g, 'a> {
    /// A line for each system over numbers.
    Lines(&'g Setting<'a>),
    /// A group of bars for each word.
    Bars(&'g Setting<'a>),
    /// A heat map for each system.
    Heat {
        x: &'g Setting<'a>,
        y: &'g Setting<'a>,
    },
    /// No picture, only a table.
    Table,
}

impl<'a> Group<'a> {
    /// The groups of a result, in order.
    pub(crate) fn all(result: &'a RunResult) -> Vec<Self> {
        let mut groups: BTreeMap<usize, Vec<&Case>> = BTreeMap::new();
        for case in &result.cases {
            groups.entry(case.group).or_default().push(case);
        }
        let groups = groups.into_values().take(GROUPS_MAX);
        groups.map(Self::new).collect()
    }

    fn new(cases: Vec<&'a Case>) -> Self {
        let mut keys: Vec<&str> = vec![];
        let mut seen = BTreeSet::new();
        for (key, _) in cases.iter().flat_map(|case| &case.settings) {
            if keys.len() < KEYS_MAX && seen.insert(key) {
                keys.push(key);
            }
        }
        let settings = keys.into_iter().map(|key| Setting::new(key, &cases));
        let (mut axes, fixed): (Vec<_>, Vec<_>) = settings.partition(|s| s.values.len() > 1);
        // A number identifies cases, so names are not needed.
        let has_number = axes.iter().any(|s| s.numbers.is_some());
        axes.retain(|s| s.key != CASE_KEY || !has_number);
        let fixed = fixed.iter().map(|s| (s.key, s.values[0])).collect();
        Self { fixed, axes, cases }
    }

    /// The kind of picture for this group.
    pub(crate) fn shape(&self) -> Shape<'_, 'a> {
        let numeric = |setting: &Setting| setting.numbers.is_some();
        let fits = |setting: &Setting, max| setting.values.len() <= max;
        match self.axes.as_slice() {
            [axis] if numeric(axis) && fits(axis, LINE_VALUES_MAX) => Shape::Lines(axis),
            [axis] if !numeric(axis) && fits(axis, BAR_VALUES_MAX) => Shape::Bars(axis),
            [y, x]
                if [y, x]
                    .iter()
                    .all(|s| numeric(s) && fits(s, HEAT_VALUES_MAX)) =>
            {
                Shape::Heat { x, y }
            }
            _ => Shape::Table,
        }
    }

    /// The main figure of its pictures.
    pub(crate) fn measure(&self) -> Measure {
        Measure::of(self.cases.iter().flat_map(|case| &case.systems))
    }

    /// The case at each value of an axis, the first if there are several.
    pub(crate) fn along(&self, axis: &Setting<'a>) -> Vec<Option<&'a Case>> {
        let mut at: BTreeMap<&str, &Case> = BTreeMap::new();
        for case in &self.cases {
            at.entry(value(case, axis.key)).or_insert(case);
        }
        let values = axis.values.iter();
        values.map(|value| at.get(value).copied()).collect()
    }

    /// The case at each point of two axes: rows along `y`.
    pub(crate) fn over(&self, x: &Setting<'a>, y: &Setting<'a>) -> Vec<Vec<Option<&'a Case>>> {
        let mut at: BTreeMap<(&str, &str), &Case> = BTreeMap::new();
        for case in &self.cases {
            let place = (value(case, x.key), value(case, y.key));
            at.entry(place).or_insert(case);
        }
        let row = |y: &&'a str| {
            x.values
                .iter()
                .map(|x| at.get(&(*x, *y)).copied())
                .collect()
        };
        y.values.iter().map(row).collect()
    }

    /// Settings common to all cases, for people, or the description that they have; may be empty.
    pub(crate) fn common(&self) -> String {
        if let Some((_, about)) = self.fixed.iter().find(|(key, _)| *key == ABOUT_KEY) {
            return clean::sentence(about);
        }
        let settings = self.fixed.iter();
        let settings = settings.map(|(key, value)| {
            let (key, value) = (clean::sentence(key), clean::name(value));
            format!("{key}={value}")
        });
        settings.collect::<Vec<_>>().join(", ")
    }

    /// The difference of a case from others, for people; empty if there are no others.
    pub(crate) fn label(&self, case: &Case) -> String {
        match self.axes.as_slice() {
            // A word is clear without its key.
            [axis] if axis.numbers.is_none() => clean::name(value(case, axis.key)),
            axes => {
                let settings = axes.iter().map(|axis| {
                    let value = clean::name(value(case, axis.key));
                    format!("{} {value}", axis.title())
                });
                settings.collect::<Vec<_>>().join(", ")
            }
        }
    }
}

impl<'a> Setting<'a> {
    fn new(key: &'a str, cases: &[&'a Case]) -> Self {
        let mut seen = BTreeSet::new();
        let all = cases.iter().map(|case| value(case, key));
        let mut values: Vec<&str> = all.filter(|value| seen.insert(*value)).collect();
        let numbers: Option<Vec<f64>> = values.iter().map(|value| number(value)).collect();
        let numbers = numbers.map(|numbers| {
            let mut pairs: Vec<_> = numbers.into_iter().zip(values.iter().copied()).collect();
            pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (numbers, sorted) = pairs.into_iter().unzip();
            values = sorted;
            numbers
        });
        Self {
            key,
            values,
            numbers,
        }
    }

    /// Its key for people.
    pub(crate) fn title(&self) -> String {
        title(self.key)
    }

    /// Whether it counts VMs, so that management's use of the host matters.
    pub(crate) fn counts_vms(&self) -> bool {
        self.key == VMS_KEY
    }
}

/// A dotted key for people, without the scenario's table.
pub(crate) fn title(key: &str) -> String {
    let inner = key.split_once('.').map_or(key, |(_, inner)| inner);
    clean::name(&inner.replace(['.', '_'], " "))
}

/// A case's settings for people; empty if it has none.
pub(crate) fn settings(settings: &[(String, String)]) -> String {
    let settings = settings.iter().take(SETTINGS_MAX);
    let settings = settings.map(|(key, value)| format!("{} {}", title(key), clean::name(value)));
    settings.collect::<Vec<_>>().join(", ")
}

/// The title of a folder's case: its scenario, or else all its settings.
pub(crate) fn case_title(case: &Case) -> String {
    let settings = case.settings.iter();
    let name = settings.clone().find(|(key, _)| key == CASE_KEY);
    match name {
        Some((_, name)) => clean::name(name),
        None => {
            let values: Vec<&str> = settings.map(|(_, value)| value.as_str()).collect();
            clean::name(&values.join(" "))
        }
    }
}

/// A case's value of a key; `-` if it has none.
pub(crate) fn value<'a>(case: &'a Case, key: &str) -> &'a str {
    let mut settings = case.settings.iter();
    settings
        .find(|(set, _)| set == key)
        .map_or("-", |(_, value)| value)
}

/// The result of a system in a case.
pub(crate) fn system<'a>(case: &'a Case, name: &str) -> Option<&'a SystemResult> {
    case.systems.iter().find(|system| system.name == name)
}

fn number(text: &str) -> Option<f64> {
    let number: f64 = text.parse().ok()?;
    (number.abs() <= NUMBER_MAX).then_some(number)
}

/// Systems that ran under equal conditions.
pub(crate) struct Side<'a> {
    /// The difference from other conditions; empty if there are none.
    pub heading: String,
    pub systems: &'a [SystemResult],
}

impl<'a> Side<'a> {
    /// All sides of a result: its systems, and each of its cases.
    pub(crate) fn all(result: &'a RunResult) -> Vec<Self> {
        let mut sides = vec![];
        if !result.systems.is_empty() {
            sides.push(Self {
                heading: String::new(),
                systems: &result.systems,
            });
        }
        let groups = Group::all(result);
        for group in &groups {
            // With several groups, a case's common settings distinguish it from cases of other groups.
            let common = Some(group.common()).filter(|_| groups.len() > 1);
            sides.extend(group.cases.iter().map(|case| {
                let parts = [common.clone(), Some(group.label(case))];
                let parts = parts.into_iter().flatten().filter(|part| !part.is_empty());
                Self {
                    heading: parts.collect::<Vec<_>>().join(", "),
                    systems: &case.systems,
                }
            }));
        }
        sides
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(cases: &[&[(&str, &str)]]) -> RunResult {
        let case = |settings: &&[(&str, &str)]| Case {
            group: 0,
            settings: settings
                .iter()
                .map(|(key, value)| (key.to_string(), value.to_string()))
                .collect(),
            systems: vec![],
        };
        let text = r#"{"schema":1,"scenario":"x","on":"sim","seed":1,"duration_s":1,"systems":[]}"#;
        RunResult {
            cases: cases.iter().map(case).collect(),
            ..RunResult::from_json(text).unwrap()
        }
    }

    fn shape(cases: &[&[(&str, &str)]]) -> String {
        let result = result(cases);
        let group = &Group::all(&result)[0];
        match group.shape() {
            Shape::Lines(axis) => format!("lines {}", axis.values.join(" ")),
            Shape::Bars(axis) => format!("bars {}", axis.values.join(" ")),
            Shape::Heat { x, y } => format!("heat {} {}", x.title(), y.title()),
            Shape::Table => "table".into(),
        }
    }

    #[test]
    fn the_settings_decide_on_the_picture() {
        let vms = |n| ("sim.vms", n);
        let kind = |word| ("workload.kind", word);
        let never = ("machine.thp", "never");
        assert_eq!(
            shape(&[&[vms("10")], &[vms("9")], &[vms("1")]]),
            "lines 1 9 10"
        );
        assert_eq!(
            shape(&[&[never, vms("1")], &[never, vms("2")]]),
            "lines 1 2"
        );
        assert_eq!(shape(&[&[kind("silo")], &[kind("9")]]), "bars silo 9");
        assert_eq!(
            shape(&[&[kind("silo"), vms("1")], &[kind("btree"), vms("2")]]),
            "table"
        );
        let grid: &[&[(&str, &str)]] = &[
            &[("a.x_ms", "1"), ("a.y", "0.5")],
            &[("a.x_ms", "2"), ("a.y", "0.25")],
        ];
        assert_eq!(shape(grid), "heat y x ms");
        assert_eq!(title("machine.slow.latency_ns"), "slow latency ns");
        assert_eq!(shape(&[&[never]]), "table");
        let folder = |name, mib| [("scenario", name), ("workload.size_mib", mib)];
        assert_eq!(
            shape(&[&folder("gups-4g", "4000"), &folder("gups-1g", "1000")]),
            "lines 1000 4000"
        );
        // Words that no numeric axis can show.
        for word in ["inf", "nan", "1e16"] {
            assert!(shape(&[&[vms("1")], &[vms(word)]]).starts_with("bars"));
        }
        // A case without the setting.
        assert_eq!(shape(&[&[vms("1")], &[]]), "bars 1 -");
    }

    #[test]
    fn a_group_is_named_by_its_description_or_by_its_settings() {
        let about = ("about", "DRAM and CXL");
        let [one, two] = [("x", "a"), ("x", "b")];
        let ns = ("machine.slow.latency_ns", "170");
        let common = |cases: &[&[(&str, &str)]]| Group::all(&result(cases))[0].common();
        assert_eq!(
            common(&[&[about, ns, one], &[about, ns, two]]),
            "DRAM and CXL"
        );
        assert_eq!(
            common(&[&[ns, one], &[ns, two]]),
            "machine.slow.latency_ns=170"
        );
    }

    #[test]
    fn cases_are_found_by_their_values() {
        let result = result(&[
            &[("x", "2"), ("y", "1")],
            &[("x", "1"), ("y", "1")],
            &[("x", "1"), ("y", "3")],
            &[("x", "1"), ("y", "3")],
        ]);
        let group = &Group::all(&result)[0];
        let [x, y] = group.axes.as_slice() else {
            panic!("two axes");
        };
        let found = group.over(x, y);
        let labels = |row: &[Option<&Case>]| -> Vec<String> {
            let label = |case: &Option<&Case>| case.map_or("none".into(), |c| group.label(c));
            row.iter().map(label).collect()
        };
        assert_eq!(labels(&found[0]), ["x 1, y 1", "x 2, y 1"]);
        assert_eq!(labels(&found[1]), ["x 1, y 3", "none"]);
        assert!(std::ptr::eq(
            found[1][0].unwrap(),
            &raw const result.cases[2]
        ));
    }
}
