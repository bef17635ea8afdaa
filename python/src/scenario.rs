//! Scenarios for Python.

use std::path::PathBuf;

use demeter_scenario::{self as scenario, Axis, Grid, Point, System};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyList, PyTuple};
use toml::{Table, Value};

use crate::error::{Error, told};
use crate::result::objects;

/// Maximum nesting of a value: a scenario has tables in lists in tables.
const DEPTH_MAX: u32 = 16;

/// A checked, immutable scenario; `set` returns another one.
#[pyclass(frozen, module = "demeter._core")]
pub struct Scenario {
    /// Its file's content.
    grid: Grid,
    pub point: Point,
}

impl Scenario {
    fn new(table: Table, name: String) -> PyResult<Self> {
        let grid = Grid::new(table, name, vec![]).map_err(told)?;
        let point = grid.point(vec![]).map_err(told)?;
        Ok(Self { grid, point })
    }

    /// The grid over it along these axes.
    pub fn grid(&self, axes: &Bound<'_, PyDict>) -> PyResult<Grid> {
        let axes = axes.iter().map(|(key, values)| {
            let key: String = key.extract()?;
            match value(&values, 0)? {
                Value::Array(values) if !values.is_empty() => Ok(Axis::new(&key, values)),
                _ => Err(Error::new_err(format!(
                    "{key}: give a list of values, such as [1, 2]"
                ))),
            }
        });
        let axes = axes.collect::<PyResult<Vec<_>>>()?;
        let table = self.grid.table(&[]).map_err(told)?;
        Grid::new(table, self.grid.name().into(), axes).map_err(told)
    }
}

#[pymethods]
impl Scenario {
    /// Reads and checks a scenario file.
    #[staticmethod]
    fn load(path: PathBuf) -> PyResult<Self> {
        // First the same way as the command line, whose errors have line numbers.
        scenario::Scenario::load(&path).map_err(told)?;
        let grid = Grid::load(&path, vec![]).map_err(told)?;
        let point = grid.point(vec![]).map_err(told)?;
        Ok(Self { grid, point })
    }

    /// Parses the text of a file that extends no other; `name` is for messages.
    #[staticmethod]
    #[pyo3(signature = (text, name = "text".to_owned()))]
    fn parse(text: &str, name: String) -> PyResult<Self> {
        let table = scenario::table_from_text(&name, text).map_err(told)?;
        Self::new(table, name)
    }

    /// A scenario with some keys changed. Keys are dotted, as in `demeter sweep`.
    fn set(&self, settings: &Bound<'_, PyDict>) -> PyResult<Self> {
        let settings = settings
            .iter()
            .map(|(key, v)| Ok((key.extract()?, value(&v, 0)?)));
        let settings = settings.collect::<PyResult<Vec<(String, Value)>>>()?;
        // For its error, which names the changed keys.
        self.grid.point(settings.clone()).map_err(told)?;
        let table = self.grid.table(&settings).map_err(told)?;
        Self::new(table, self.grid.name().into())
    }

    /// All keys, including defaults, as dictionaries and lists.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects(py, &self.point.scenario)
    }

    /// The text of a scenario file.
    fn to_toml(&self) -> PyResult<String> {
        let table = self.grid.table(&[]).map_err(told)?;
        toml::to_string(&table).map_err(told)
    }

    #[getter]
    fn name(&self) -> &str {
        &self.point.scenario.name
    }

    /// Names of the systems to compare.
    #[getter]
    fn systems(&self) -> Vec<String> {
        let systems = self.point.scenario.systems.iter();
        systems.map(System::to_string).collect()
    }

    fn __repr__(&self) -> String {
        format!("<demeter.Scenario {}>", self.point.scenario.name)
    }

    /// For pickle, so that a scenario can be sent to another process.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String, String))> {
        let this = slf.get();
        let parse = slf.get_type().getattr("parse")?;
        Ok((parse, (this.to_toml()?, this.grid.name().to_owned())))
    }
}

/// Converts a Python object to a value of a scenario file.
fn value(object: &Bound<'_, PyAny>, depth: u32) -> PyResult<Value> {
    let unfit = || {
        let kind = object.get_type().name();
        let kind = kind.map_or("that".to_owned(), |name| name.to_string());
        PyTypeError::new_err(format!(
            "a scenario has numbers, texts, truth values, lists and dictionaries; not {kind}"
        ))
    };
    if depth > DEPTH_MAX {
        return Err(unfit());
    }
    if object.is_instance_of::<PyBool>() {
        return Ok(Value::Boolean(object.extract()?));
    }
    if let Ok(text) = object.extract::<String>() {
        return Ok(Value::String(text));
    }
    if let Ok(number) = object.extract::<i64>() {
        return Ok(Value::Integer(number));
    }
    if let Ok(number) = object.extract::<f64>() {
        return Ok(Value::Float(number));
    }
    if let Ok(table) = object.cast::<PyDict>() {
        let entries = table
            .iter()
            .map(|(key, inner)| Ok((key.extract()?, value(&inner, depth + 1)?)));
        return Ok(Value::Table(entries.collect::<PyResult<Table>>()?));
    }
    if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
        let inner = object.try_iter()?.map(|inner| value(&inner?, depth + 1));
        return Ok(Value::Array(inner.collect::<PyResult<_>>()?));
    }
    Err(unfit())
}
