//! Sweeps: a grid of scenarios, run under several systems with several seeds.

use std::num::NonZeroU32;

use demeter_outcome::{Case, RunResult, SystemResult, together};
use demeter_scenario::{Grid, Point, System};

use crate::error::SimError;
use crate::parallel_runs::PlannedRun;
use crate::provision::variants;

/// A sweep: all points of a grid, each with the same systems and number of seeds.
#[derive(Debug, Clone)]
pub struct Sweep {
    points: Vec<Point>,
    /// If empty, each point's own systems are used.
    systems: Vec<System>,
    seeds: NonZeroU32,
}

impl Sweep {
    /// A sweep over `grid` under `systems`. If `systems` is empty, the scenario's own are used. Seeds count up from the
    /// scenario's.
    ///
    /// # Errors
    /// When the settings of a point are invalid, or the scenario has cases of its own.
    pub fn new(grid: &Grid, systems: Vec<System>, seeds: NonZeroU32) -> Result<Self, SimError> {
        let points = grid.points()?;
        if points.iter().any(|point| !point.scenario.vary.is_empty()) {
            return Err(SimError::OwnCases(grid.name().into()));
        }
        if points
            .iter()
            .any(|point| variants(&point.scenario).len() > 1)
        {
            return Err(SimError::Ways(grid.name().into()));
        }
        Ok(Self {
            points,
            systems,
            seeds,
        })
    }

    /// All runs, in table order.
    pub fn jobs(&self) -> Vec<PlannedRun<'_>> {
        let mut jobs = Vec::new();
        for point in &self.points {
            let systems = match &self.systems[..] {
                [] => &point.scenario.systems,
                chosen => chosen,
            };
            for &system in systems {
                for seed in (point.scenario.seed..).take(self.seeds.get() as usize) {
                    jobs.push(PlannedRun {
                        point,
                        system,
                        under: None,
                        seed,
                    });
                }
            }
        }
        jobs
    }

    /// Combines the results of all [`Sweep::jobs`], given in order: one case for each point, with the median run of
    /// each system. A grid without axes has no cases.
    pub fn result(&self, results: &[SystemResult]) -> RunResult {
        let jobs = self.jobs();
        let runs: Vec<_> = jobs.iter().zip(results).collect();
        let points = runs.chunk_by(|a, b| std::ptr::eq(a.0.point, b.0.point));
        let case = |runs: &[(&PlannedRun<'_>, &SystemResult)]| Case {
            group: 0,
            settings: runs[0].0.point.texts(),
            systems: together(runs.iter().map(|(_, result)| (*result).clone()), self.seeds),
        };
        let Some(base) = self.points.first() else {
            return RunResult::default();
        };
        let mut result = RunResult {
            cases: points.map(case).collect(),
            ..base.scenario.empty_result("sim")
        };
        if base.settings.is_empty() {
            let cases = result.cases.drain(..);
            result.systems = cases.flat_map(|case| case.systems).collect();
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use demeter_outcome::{Speed, Unit};

    use super::*;

    fn sweep(axes: &[&str], systems: &[System], seeds: u32) -> Sweep {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/gups.toml");
        let axes = axes.iter().map(|axis| axis.parse().unwrap()).collect();
        let grid = Grid::load(&path, axes).unwrap();
        Sweep::new(&grid, systems.to_vec(), NonZeroU32::new(seeds).unwrap()).unwrap()
    }

    #[test]
    fn a_case_has_the_middle_of_its_runs_less_what_none_takes() {
        let sweep = sweep(
            &["workload.hot_mib=10,20"],
            &[System::None, System::Demeter],
            3,
        );
        // In each case, `none` takes 1, 2, 3 seconds and `demeter` 4, 5, 6.
        let run = |(index, job): (usize, &PlannedRun<'_>)| SystemResult {
            name: job.system.to_string(),
            speed: Some(Speed::new(Unit::MOPS, (index % 6) as f64 + 1.0, None)),
            mgmt_cpu_s: Some((index % 6) as f64 + 1.0),
            ..SystemResult::default()
        };
        let results: Vec<_> = sweep.jobs().iter().enumerate().map(run).collect();
        let found = sweep.result(&results);
        found.check().unwrap();
        assert!(found.systems.is_empty());
        assert_eq!(found.cases.len(), 2);
        for (case, hot_mib) in found.cases.iter().zip(["10", "20"]) {
            assert_eq!(
                case.settings,
                [("workload.hot_mib".to_owned(), hot_mib.to_owned())]
            );
            let figures: Vec<_> = case
                .systems
                .iter()
                .map(|s| (s.name.as_str(), s.mean(), s.mgmt_cpu_s))
                .collect();
            let expected = [
                ("none", Some(2.0), Some(0.0)),
                ("demeter", Some(5.0), Some(3.0)),
            ];
            assert_eq!(figures, expected);
            let repeats = case.systems[1].repeats.unwrap();
            assert_eq!((repeats.runs, repeats.min, repeats.max), (3, 4.0, 6.0));
        }
    }

    #[test]
    fn without_axes_there_are_no_cases() {
        let found = sweep(&[], &[System::None], 1).result(&[SystemResult::default()]);
        assert_eq!((found.systems.len(), found.cases.len()), (1, 0));
    }

    #[test]
    fn every_point_runs_every_system_with_every_seed() {
        let sweep = sweep(
            &["workload.hot_mib=10,20"],
            &[System::None, System::Demeter],
            2,
        );
        let texts: Vec<_> = sweep.jobs().iter().map(ToString::to_string).collect();
        let expected = ["10", "20"].into_iter().flat_map(|hot| {
            ["none", "none seed 2", "demeter", "demeter seed 2"]
                .map(|run| format!("workload.hot_mib={hot} {run}"))
        });
        assert_eq!(texts, expected.collect::<Vec<_>>());
    }
}
