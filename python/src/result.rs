//! Results and reports for Python.

use demeter_outcome::{ContentError, RunResult};
use demeter_report::{RunRow, columns};
use demeter_scenario::System;
use pyo3::prelude::*;
use serde::Serialize;

use crate::error::told;

/// Converts JSON to Python objects.
pub fn objects<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).map_err(told)?;
    py.import("json")?.call_method1("loads", (text,))
}

/// Parses and checks a result.
fn result(json: &str) -> PyResult<RunResult> {
    RunResult::from_json(json).map_err(|error: ContentError| told(error))
}

/// The terminal's table.
#[pyfunction]
pub fn table(json: &str) -> PyResult<String> {
    Ok(demeter_report::table(&result(json)?))
}

/// The report as a self-contained page.
#[pyfunction]
pub fn page(json: &str) -> PyResult<String> {
    Ok(demeter_report::html(&result(json)?))
}

/// Every figure by its name, as columns with a row for each system of each case.
#[pyfunction]
pub fn figures<'py>(py: Python<'py>, json: &str) -> PyResult<Bound<'py, PyAny>> {
    let result = result(json)?;
    // Cases of several tables have different keys.
    let mut keys: Vec<String> = vec![];
    for (key, _) in result.cases.iter().flat_map(|case| &case.settings) {
        if !keys.contains(key) {
            keys.push(key.clone());
        }
    }
    let mut rows: Vec<RunRow> = vec![];
    for case in result.cases {
        let value = |key: &String| {
            let found = case.settings.iter().find(|(k, _)| k == key);
            let value = found.map_or(String::new(), |(_, value)| value.clone());
            (key.clone(), value)
        };
        let settings: Vec<_> = keys.iter().map(value).collect();
        rows.extend(case.systems.into_iter().map(|result| RunRow {
            settings: settings.clone(),
            result,
        }));
    }
    rows.extend(result.systems.into_iter().map(|result| {
        RunRow {
            settings: keys
                .iter()
                .map(|key| (key.clone(), String::new()))
                .collect(),
            result,
        }
    }));
    objects(py, &columns(&rows))
}

/// All systems, and where each runs.
#[pyfunction]
pub fn systems(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let rows: Vec<_> = System::ALL.iter().map(|system| system.row()).collect();
    objects(py, &rows)
}
