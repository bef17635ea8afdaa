//! Workloads that only the simulator runs: models of applications, and traces.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{Scenario, Workload, scenario::one};

/// Smallest application, MiB: below it a model has too few things to be one.
const SIZE_MIN_MIB: u64 = 16;

/// Parameters of an application; its data structures grow to fill the size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct App {
    /// Memory of all its data structures, MiB.
    pub size_mib: u64,
    /// Idle memory that is touched first, so that it takes the fast tier, MiB: such as input
    /// files in the page cache.
    #[serde(default)]
    pub cold_mib: u64,
    /// Threads.
    #[serde(default = "one")]
    pub threads: u32,
}

/// Parameters of silo.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Silo {
    /// Memory of records and index, MiB.
    pub size_mib: u64,
    /// Idle memory that is touched first, MiB.
    #[serde(default)]
    pub cold_mib: u64,
    /// Threads.
    #[serde(default = "one")]
    pub threads: u32,
    /// Which transactions.
    pub mix: SiloMix,
    /// With `ycsb`: seconds after which other keys become popular.
    #[serde(default)]
    pub drift_s: Option<u64>,
}

/// Silo's transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SiloMix {
    /// Reads and updates of single records by popularity.
    Ycsb,
    /// Orders that are inserted, and read while they are recent.
    Tpcc,
}

/// A recorded program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// The trace file, as `demeter trace` writes it; relative to the current folder.
    pub file: PathBuf,
}

impl Workload {
    /// Its kind, as a scenario file spells it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Gups(_) => "gups",
            Self::Memlat(_) => "memlat",
            Self::Sequential(_) => "sequential",
            Self::Btree(_) => "btree",
            Self::Silo(_) => "silo",
            Self::Xsbench(_) => "xsbench",
            Self::Bwaves(_) => "bwaves",
            Self::Graph500(_) => "graph500",
            Self::Pagerank(_) => "pagerank",
            Self::Liblinear(_) => "liblinear",
            Self::Trace(_) => "trace",
        }
    }

    /// Whether there is a real program that does it.
    pub fn is_real(&self) -> bool {
        matches!(self, Self::Gups(_) | Self::Memlat(_))
    }

    /// Memory that it works on, MiB; of a trace only its file knows.
    pub fn size_mib(&self) -> u64 {
        match self {
            Self::Gups(gups) => gups.size_mib,
            Self::Memlat(memlat) => memlat.size_mib,
            Self::Silo(silo) => silo.size_mib,
            Self::Trace(_) => 0,
            app => app.app().map_or(0, |app| app.size_mib),
        }
    }

    /// Idle memory that is touched before, MiB.
    pub fn cold_mib(&self) -> u64 {
        match self {
            Self::Memlat(memlat) => memlat.cold_mib,
            Self::Silo(silo) => silo.cold_mib,
            Self::Gups(_) | Self::Trace(_) => 0,
            app => app.app().map_or(0, |app| app.cold_mib),
        }
    }

    fn app(&self) -> Option<&App> {
        match self {
            Self::Sequential(app)
            | Self::Btree(app)
            | Self::Xsbench(app)
            | Self::Bwaves(app)
            | Self::Graph500(app)
            | Self::Pagerank(app)
            | Self::Liblinear(app) => Some(app),
            Self::Gups(_) | Self::Memlat(_) | Self::Silo(_) | Self::Trace(_) => None,
        }
    }
}

/// What is wrong with the parameters of a workload that only the simulator runs.
pub(crate) fn fault(scenario: &Scenario, threads_max: u32) -> Option<String> {
    let size_mib = scenario.workload.size_mib();
    let threads = match &scenario.workload {
        Workload::Trace(trace) => {
            return trace.file.as_os_str().is_empty().then(|| {
                "workload.file: name a trace, as `demeter trace record` writes it".into()
            });
        }
        Workload::Silo(silo) => match (silo.drift_s, silo.mix) {
            (Some(0), _) => return Some("workload.drift_s = 0: must be at least 1".into()),
            (Some(_), SiloMix::Tpcc) => {
                return Some(
                    "workload.drift_s: only mix = \"ycsb\" has it; orders move by themselves"
                        .into(),
                );
            }
            _ => silo.threads,
        },
        app => app.app()?.threads,
    };
    if size_mib < SIZE_MIN_MIB {
        return Some(format!(
            "workload.size_mib = {size_mib}: must be at least {SIZE_MIN_MIB}"
        ));
    }
    (!(1..=threads_max).contains(&threads))
        .then(|| format!("workload.threads = {threads}: must be 1 to {threads_max}"))
}

#[cfg(test)]
pub(crate) mod tests {
    use crate::Scenario;

    fn checked(workload: &str) -> Result<Scenario, String> {
        checked_with(workload, "")
    }

    /// A scenario with this workload and further tables, as far as it can be read.
    pub(crate) fn checked_with(workload: &str, tables: &str) -> Result<Scenario, String> {
        let text = format!(
            "name = \"x\"\nduration_s = 9\nsystems = [\"none\"]\n\
             machine = {{ vcpus = 1, fast = {{ usable_mib = 100, latency_ns = 80, \
             bandwidth_gbps = 50 }}, slow = {{ usable_mib = 100, latency_ns = 250, \
             bandwidth_gbps = 20 }} }}\nworkload = {{ {workload} }}\n{tables}"
        );
        let scenario: Scenario = toml::from_str(&text).map_err(|e| e.message().to_owned())?;
        scenario.check().map_err(|e| e.to_string())?;
        Ok(scenario)
    }

    #[test]
    fn every_kind_is_spelt_as_it_calls_itself() {
        for kind in [
            "sequential",
            "btree",
            "xsbench",
            "bwaves",
            "graph500",
            "pagerank",
            "liblinear",
        ] {
            let scenario = checked(&format!("kind = \"{kind}\", size_mib = 80, cold_mib = 20"));
            let scenario = scenario.unwrap();
            assert_eq!(scenario.workload.kind(), kind);
            assert_eq!(scenario.footprint_mib(), 100);
            assert!(!scenario.workload.is_real());
        }
        let silo = checked("kind = \"silo\", size_mib = 80, mix = \"ycsb\", drift_s = 3").unwrap();
        assert_eq!(silo.workload.kind(), "silo");
        let trace = checked("kind = \"trace\", file = \"x.trace\"").unwrap();
        assert_eq!((trace.workload.kind(), trace.footprint_mib()), ("trace", 0));
    }

    #[test]
    fn each_fault_names_its_key() {
        for (workload, key) in [
            ("kind = \"btree\", size_mib = 15", "workload.size_mib"),
            (
                "kind = \"btree\", size_mib = 80, threads = 0",
                "workload.threads",
            ),
            (
                "kind = \"btree\", size_mib = 80, cold_mib = 200",
                "machine.slow.usable_mib",
            ),
            ("kind = \"btree\", size_mib = 80, hot_mib = 1", "hot_mib"),
            ("kind = \"bush\", size_mib = 80", "bush"),
            ("kind = \"silo\", size_mib = 80", "mix"),
            (
                "kind = \"silo\", size_mib = 80, mix = \"ycsb\", drift_s = 0",
                "drift_s",
            ),
            (
                "kind = \"silo\", size_mib = 80, mix = \"tpcc\", drift_s = 1",
                "drift_s",
            ),
            (
                "kind = \"silo\", size_mib = 1, mix = \"tpcc\"",
                "workload.size_mib",
            ),
            ("kind = \"trace\", file = \"\"", "workload.file"),
        ] {
            let said = checked(workload).expect_err(workload);
            assert!(said.contains(key), "{said:?} does not name {key}");
        }
    }
}
