//! A grid of scenarios: one file with several values for some of its keys.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use demeter_toml_file::parse_table;
use toml::{Table, Value};

use crate::file::KIND;
use crate::{Error, Scenario};

/// Maximum number of scenarios in a grid.
const POINTS_MAX: usize = 100_000;

/// A key with its values.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// A dotted key, such as `workload.hot_mib`.
    key: String,
    /// At least one.
    values: Vec<Value>,
}

impl Axis {
    /// An axis of a dotted key with at least one value.
    pub fn new(key: &str, values: Vec<Value>) -> Self {
        Self {
            key: key.into(),
            values,
        }
    }
}

/// The text is no axis.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not KEY=VALUE,VALUE,... such as workload.hot_mib=50,100,200")]
pub struct NoAxis(String);

impl FromStr for Axis {
    type Err = NoAxis;

    fn from_str(text: &str) -> Result<Self, NoAxis> {
        let no_axis = || NoAxis(text.into());
        let (key, values) = text.split_once('=').ok_or_else(no_axis)?;
        let mut parts = key.split('.').chain(values.split(','));
        if parts.any(|part| part.trim().is_empty()) {
            return Err(no_axis());
        }
        Ok(Self {
            key: key.trim().into(),
            values: values.split(',').map(|text| value(text.trim())).collect(),
        })
    }
}

/// A number or boolean if the text is one, otherwise the text.
fn value(text: &str) -> Value {
    format!("value = {text}")
        .parse::<Table>()
        .ok()
        .and_then(|mut table| table.remove("value"))
        .unwrap_or_else(|| Value::String(text.into()))
}

/// A scenario file with axes.
#[derive(Debug, Clone)]
pub struct Grid {
    base: Table,
    name: String,
    axes: Vec<Axis>,
}

/// One scenario of a grid.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// Key and value for each axis, in order.
    pub settings: Vec<(String, Value)>,
    /// The scenario with these settings, checked.
    pub scenario: Scenario,
}

impl Point {
    /// Its settings, as written.
    pub fn texts(&self) -> Vec<(String, String)> {
        let settings = self.settings.iter();
        settings
            .map(|(key, value)| (key.clone(), plain(value)))
            .collect()
    }
}

impl fmt::Display for Point {
    /// The settings, as written.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&text(&self.settings))
    }
}

fn text(settings: &[(String, Value)]) -> String {
    let settings = settings.iter();
    let settings: Vec<_> = settings
        .map(|(key, value)| format!("{key}={}", plain(value)))
        .collect();
    settings.join(" ")
}

/// A value without a string's quotes; a table by its `kind`, if any.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Table(table) if table.contains_key("kind") => plain(&table["kind"]),
        other => other.to_string(),
    }
}

impl Grid {
    /// The grid over the scenario file at `path`.
    ///
    /// # Errors
    /// The file cannot be read or parsed, a key occurs twice, or there are too many points.
    pub fn load(path: &Path, axes: Vec<Axis>) -> Result<Self, Error> {
        let base = crate::file::table(path)?;
        Self::new(base, path.display().to_string(), axes)
    }

    /// The grid over a scenario's table, without the files that it extends.
    ///
    /// # Errors
    /// A key occurs twice, or there are too many points.
    pub fn new(base: Table, name: String, axes: Vec<Axis>) -> Result<Self, Error> {
        let grid = Self { base, name, axes };
        for (index, axis) in grid.axes.iter().enumerate() {
            if grid.axes[..index].iter().any(|other| other.key == axis.key) {
                return Err(grid.fault(format!(
                    "{} is set twice; give all values at once",
                    axis.key
                )));
            }
        }
        let sizes = grid.axes.iter().map(|axis| axis.values.len());
        let points = sizes.fold(1usize, usize::saturating_mul);
        if points > POINTS_MAX {
            return Err(grid.fault(format!(
                "the grid has {points} points, more than {POINTS_MAX}; sweep fewer values"
            )));
        }
        Ok(grid)
    }

    /// All points; the last axis varies fastest.
    ///
    /// # Errors
    /// The settings of a point make no valid scenario.
    pub fn points(&self) -> Result<Vec<Point>, Error> {
        let mut combinations: Vec<Vec<(String, Value)>> = vec![Vec::new()];
        for axis in &self.axes {
            let extended = combinations.iter().flat_map(|settings| {
                axis.values.iter().map(|value| {
                    let mut settings = settings.clone();
                    settings.push((axis.key.clone(), value.clone()));
                    settings
                })
            });
            combinations = extended.collect();
        }
        combinations
            .into_iter()
            .map(|settings| self.point(settings))
            .collect()
    }

    /// The scenario's name in messages: its file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file's table with these keys set.
    ///
    /// # Errors
    /// A key leads through a value that is no table.
    pub fn table(&self, settings: &[(String, Value)]) -> Result<Table, Error> {
        let mut table = self.base.clone();
        for (key, value) in settings {
            set(&mut table, key, value.clone()).map_err(|what| self.fault(what))?;
        }
        Ok(table)
    }

    /// The scenario with these keys set, checked.
    ///
    /// # Errors
    /// The settings make no valid scenario.
    pub fn point(&self, settings: Vec<(String, Value)>) -> Result<Point, Error> {
        let table = self.table(&settings)?;
        let fault =
            |what: &dyn fmt::Display| self.fault(format!("with {}: {what}", text(&settings)));
        let scenario: Scenario = parse_table(&KIND, table).map_err(|what| fault(&what))?;
        scenario.check_keys().map_err(|what| fault(&what))?;
        Ok(Point { settings, scenario })
    }

    fn fault(&self, what: String) -> Error {
        Error::Invalid {
            name: self.name.clone(),
            what,
        }
    }
}

/// Sets a dotted key, and creates missing tables on the way.
fn set(table: &mut Table, key: &str, value: Value) -> Result<(), String> {
    let (parents, last) = key.rsplit_once('.').unwrap_or(("", key));
    let mut at = table;
    for part in parents.split('.').filter(|part| !part.is_empty()) {
        let next = at.entry(part).or_insert_with(|| Value::Table(Table::new()));
        at = next
            .as_table_mut()
            .ok_or_else(|| format!("{key}: {part} is a value, not a table"))?;
    }
    at.insert(last.into(), value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workload;

    fn axis(text: &str) -> Axis {
        text.parse().unwrap()
    }

    fn grid(axes: &[&str]) -> Result<Grid, Error> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/gups.toml");
        Grid::load(&path, axes.iter().map(|text| axis(text)).collect())
    }

    #[test]
    fn an_axis_takes_numbers_truths_and_words() {
        let Axis { key, values } = axis("a.b=1, 0.5,true,always");
        assert_eq!(key, "a.b");
        let texts: Vec<_> = values.iter().map(Value::type_str).collect();
        assert_eq!(texts, ["integer", "float", "boolean", "string"]);
        for bad in ["a", "=1", "a=", "a=1,,2", "a..b=1", ".a=1"] {
            assert!(bad.parse::<Axis>().is_err(), "{bad}");
        }
    }

    #[test]
    fn every_combination_is_a_point() {
        let grid = grid(&[
            "workload.hot_mib=50,100",
            "machine.thp=always,never",
            "agent.epoch_ms=100",
        ]);
        let points = grid.unwrap().points().unwrap();
        let texts: Vec<_> = points.iter().map(Point::to_string).collect();
        assert_eq!(
            texts,
            [
                "workload.hot_mib=50 machine.thp=always agent.epoch_ms=100",
                "workload.hot_mib=50 machine.thp=never agent.epoch_ms=100",
                "workload.hot_mib=100 machine.thp=always agent.epoch_ms=100",
                "workload.hot_mib=100 machine.thp=never agent.epoch_ms=100",
            ]
        );
        for (point, hot_mib) in points.iter().zip([50, 50, 100, 100]) {
            let Workload::Gups(gups) = &point.scenario.workload else {
                panic!("another workload");
            };
            assert_eq!(gups.hot_mib, hot_mib);
        }
    }

    #[test]
    fn without_axes_there_is_the_file_itself() {
        let points = grid(&[]).unwrap().points().unwrap();
        assert_eq!(points.len(), 1);
        assert_eq!(points[0].to_string(), "");
    }

    #[test]
    fn what_makes_no_scenario_is_named() {
        for (axis, says) in [
            ("workload.hot=1", "hot"),
            ("agent.epoch=1", "agent.epoch is no key of this table"),
            ("agent.epoch_ms=1", "agent.epoch_ms = 1 is out of bounds"),
            ("workload.hot_mib=50,9000", "hot_mib=9000"),
            ("workload.hot_mib=many", "hot_mib=many"),
            ("name.x=1", "name"),
        ] {
            let error = grid(&[axis]).unwrap().points().unwrap_err().to_string();
            assert!(
                error.contains(says) && error.contains("gups.toml"),
                "{error}"
            );
        }
        let error = grid(&["seed=1", "seed=2"]).unwrap_err().to_string();
        assert!(error.contains("twice"), "{error}");
        let many = format!("seed={}", vec!["1"; 400].join(","));
        let error = grid(&[&many, &many.replace("seed", "duration_s")])
            .unwrap_err()
            .to_string();
        assert!(error.contains("160000 points"), "{error}");
    }
}
