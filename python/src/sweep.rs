//! Sweeps for Python, which executes the runs.

use std::num::NonZeroU32;

use demeter_outcome::SystemResult;
use demeter_report::{RunRow, columns, csv};
use demeter_scenario::System;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{Error, told};
use crate::result::objects;
use crate::scenario::Scenario;

/// A grid of a scenario with systems and seeds.
#[pyclass(frozen, module = "demeter._core")]
pub struct Sweep(demeter_sim::Sweep);

#[pymethods]
impl Sweep {
    #[new]
    fn new(
        scenario: &Scenario,
        grid: &Bound<'_, PyDict>,
        systems: Vec<String>,
        seeds: NonZeroU32,
    ) -> PyResult<Self> {
        let systems = systems.iter().map(|name| name.parse::<System>());
        let systems = systems.collect::<Result<_, _>>().map_err(told)?;
        let sweep = demeter_sim::Sweep::new(&scenario.grid(grid)?, systems, seeds);
        Ok(Self(sweep.map_err(told)?))
    }

    /// All runs in order: name, scenario as TOML, system and seed.
    fn runs(&self) -> PyResult<Vec<(String, String, String, u64)>> {
        let jobs = self.0.jobs().into_iter();
        let runs = jobs.map(|job| {
            let scenario = toml::to_string(&job.point.scenario).map_err(told)?;
            Ok((job.to_string(), scenario, job.system.to_string(), job.seed))
        });
        runs.collect()
    }

    /// Combines the runs' results, in order, to a result file, the table as CSV, and its columns.
    fn together<'py>(
        &self,
        py: Python<'py>,
        results: Vec<String>,
    ) -> PyResult<(String, String, Bound<'py, PyAny>)> {
        let results = results.iter().map(|text| serde_json::from_str(text));
        let results: Vec<SystemResult> = results.collect::<Result<_, _>>().map_err(told)?;
        let jobs = self.0.jobs();
        if results.len() != jobs.len() {
            return Err(Error::new_err("there must be a result for each run"));
        }
        let result = serde_json::to_string(&self.0.result(&results)).map_err(told)?;
        let rows = jobs.iter().zip(results).map(|(job, result)| RunRow {
            settings: job.settings(),
            result,
        });
        let rows: Vec<RunRow> = rows.collect();
        Ok((result, csv(&rows), objects(py, &columns(&rows))?))
    }
}
