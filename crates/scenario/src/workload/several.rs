//! several: processes in one guest, each of which is a mix.

use serde::{Deserialize, Serialize};

use super::{Mix, Parameters, THREADS_MAX};
use crate::fault::{refuse_if, within};

/// Maximum number of processes, equal to the agent's.
const PROCESSES_MAX: usize = 64;

/// Parameters of several processes. The heat of each follows from its threads, its hot sets and its computation between
/// two accesses: `processes = [{ threads = 3, parts = [{ size_mib = 800, hot_mib = 100, hot_weight = 0.9 }] }, {
/// compute_ns = 2000, parts = [{ size_mib = 800 }] }]`. Each has its own pid and mappings, but all share the guest's
/// page tables. Simulator only.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Several {
    /// The processes, in the order in which they fill their memory.
    pub processes: Vec<Mix>,
}

impl Several {
    /// Threads of all processes.
    pub fn threads(&self) -> u32 {
        let threads = self.processes.iter().map(|mix| mix.threads);
        threads.fold(0, u32::saturating_add)
    }
}

impl Parameters for Several {
    fn size_mib(&self) -> u64 {
        let sizes = self.processes.iter().map(Parameters::size_mib);
        sizes.fold(0, u64::saturating_add)
    }

    /// Whether at least one process has a hot set, and all report theirs.
    fn tells_hot_set(&self) -> bool {
        self.processes.iter().any(Parameters::tells_hot_set)
            && self.processes.iter().all(|mix| {
                let has_hot_set = mix.parts.iter().any(|part| part.hot_mib > 0);
                mix.tells_hot_set() || !has_hot_set
            })
    }

    fn check(&self, _duration_s: u64) -> Result<(), String> {
        let count = self.processes.len();
        within("workload.processes, their number", count, 1..=PROCESSES_MAX)?;
        for (n, mix) in self.processes.iter().enumerate() {
            let table = format!("workload.processes[{n}]");
            mix.check_below(&table)?;
            refuse_if(mix.cold_mib > 0, || {
                format!("{table}.cold_mib: make idle memory a part with share = 0")
            })?;
        }
        within(
            "workload.processes, their threads",
            self.threads(),
            1..=THREADS_MAX,
        )
    }
}

#[cfg(test)]
mod tests {
    use crate::workload::tests::checked;

    #[test]
    fn impossible_processes_are_refused_in_one_line() {
        let said = |processes: &str| {
            checked(&format!("kind = \"several\", processes = [{processes}]")).map(drop)
        };
        let hot = "{ threads = 3, parts = [{ size_mib = 20, hot_mib = 2, hot_weight = 0.9 }] }";
        let even = "{ compute_ns = 500, parts = [{ size_mib = 20, start_mib = 2, grows_s = 4 }] }";
        said(&format!("{hot}, {even}")).unwrap();
        for (processes, key) in [
            (String::new(), "their number"),
            (hot.replace("3", "65"), "processes[0].threads"),
            (
                format!("{even}, {}", hot.replace("hot_mib = 2", "hot_mib = 20")),
                "processes[1].parts[0].hot_mib",
            ),
            (
                hot.replace("{ threads", "{ cold_mib = 3, threads"),
                "processes[0].cold_mib",
            ),
            (vec![hot.replace("3", "33"); 2].join(","), "their threads"),
            (even.replace("start_mib = 2, ", ""), "start_mib and grows_s"),
            (
                even.replace("start_mib = 2", "start_mib = 21"),
                "start_mib = 21",
            ),
            (even.replace("grows_s = 4", "grows_s = 0"), "grows_s = 0"),
            (
                even.replace("size_mib = 20", "size_mib = 20, hot_mib = 2"),
                "grows_s",
            ),
            (even.replace("500", "5_000_000"), "compute_ns"),
            (even.replace("20", "300"), "300 MiB"),
        ] {
            let said = said(&processes).unwrap_err();
            assert!(said.contains(key) && !said.contains('\n'), "{key}: {said}");
        }
    }
}
