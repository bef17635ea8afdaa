//! The systems under test: what is switched on for each, and switched off again.

use std::fs;
use std::path::{Path, PathBuf};

use demeter_policy::{PAGE_SIZE, Pid};
use demeter_scenario::{System, Thp};

use super::agent::Agent;
use super::damon::Damon;
use super::fault::Fault;
use crate::link::Totals;

/// `kernel.numa_balancing`: 0 = off, 2 = promote between memory tiers.
const NUMA_BALANCING: &str = "proc/sys/kernel/numa_balancing";
/// Whether reclaim demotes pages to a slower tier instead of dropping them.
const DEMOTION: &str = "sys/kernel/mm/numa/demotion_enabled";
/// The memory tiers that the kernel made of the nodes.
const TIERS: &str = "sys/devices/virtual/memory_tiering";
/// Mode of transparent huge pages.
const THP: &str = "sys/kernel/mm/transparent_hugepage/enabled";

/// A system that is switched on.
#[derive(Debug)]
pub enum Running {
    /// Nothing runs.
    Nothing,
    /// The kernel's own tiering.
    Linux(PathBuf),
    /// DAMON's schemes.
    Damon(Damon),
    /// The agent.
    Agent(Agent),
}

impl Running {
    /// Switches `system` on for process `pid`, below `root` (`/` in a VM).
    pub fn start(root: &Path, system: System, pid: Pid) -> Result<Self, Fault> {
        set_kernel_tiering(root, system == System::Linux)?;
        Ok(match system {
            System::None | System::Oracle => Self::Nothing,
            System::Linux => {
                check_tiers(root)?;
                Self::Linux(root.into())
            }
            System::Damon => Self::Damon(Damon::start(root)?),
            System::Demeter | System::DemeterDamon => Self::Agent(Agent::start(pid)?),
        })
    }

    /// The agent's process, when there is one.
    pub fn agent_pid(&self) -> Option<Pid> {
        match self {
            Self::Agent(agent) => Some(agent.pid()),
            _ => None,
        }
    }

    /// Fails when the agent has ended.
    pub fn check(&mut self) -> Result<(), Fault> {
        match self {
            Self::Agent(agent) => agent.check(),
            _ => Ok(()),
        }
    }

    /// Adds the bytes that the system has moved, as far as somebody counts them.
    pub fn add_moved(&mut self, totals: &mut Totals) {
        let moved = match self {
            Self::Nothing => Some((0, 0)),
            Self::Linux(_) => Some(moved_by_kernel(totals)),
            // Its own counter, sz_applied, also counts pages that were meant to be promoted and
            // landed in the slow node again.
            Self::Damon(_) => None,
            Self::Agent(agent) => agent.moved_bytes(),
        };
        totals.promoted_bytes = moved.map(|(promoted, _)| promoted);
        totals.demoted_bytes = moved.map(|(_, demoted)| demoted);
    }

    /// Switches it off.
    pub fn stop(self) -> Result<(), Fault> {
        match self {
            Self::Nothing => Ok(()),
            Self::Linux(root) => set_kernel_tiering(&root, false),
            Self::Damon(damon) => damon.stop(),
            Self::Agent(agent) => agent.stop(),
        }
    }
}

/// Sets the mode of transparent huge pages, and switches off the balancing between nodes that the
/// kernel boots with: it would spend hint faults, and split huge pages, on memory that is still
/// being filled.
pub fn prepare(root: &Path, thp: Thp) -> Result<(), Fault> {
    let mode = match thp {
        Thp::Always => "always",
        Thp::Never => "never",
    };
    write(root, THP, mode)?;
    set_kernel_tiering(root, false)
}

/// Clears the accessed bits of a process's pages. Filling memory has set them all, and DAMON and
/// reclaim would take the whole of it for hot until they have looked at every page once.
pub fn forget_accesses(root: &Path, pid: Pid) -> Result<(), Fault> {
    write(root, &format!("proc/{pid}/clear_refs"), "1")
}

fn set_kernel_tiering(root: &Path, on: bool) -> Result<(), Fault> {
    write(root, NUMA_BALANCING, if on { "2" } else { "0" })?;
    write(root, DEMOTION, if on { "1" } else { "0" })
}

fn write(root: &Path, path: &str, value: &str) -> Result<(), Fault> {
    let path = root.join(path);
    fs::write(&path, value).map_err(Fault::io("write", &path))
}

/// Bytes that the kernel's own tiering has promoted and demoted, from its counters of pages.
fn moved_by_kernel(totals: &Totals) -> (u64, u64) {
    let bytes = |start: &str| {
        let counters = totals
            .vmstat
            .iter()
            .filter(|(name, _)| name.starts_with(start));
        counters.map(|(_, pages)| pages * PAGE_SIZE).sum()
    };
    (bytes("pgpromote_success"), bytes("pgdemote_"))
}

/// The kernel only moves pages between nodes that it put in different tiers.
fn check_tiers(root: &Path) -> Result<(), Fault> {
    let dir = root.join(TIERS);
    let mut tiers = 0;
    for entry in fs::read_dir(&dir).map_err(Fault::io("list", &dir))? {
        let entry = entry.map_err(Fault::io("list", &dir))?;
        let nodes = fs::read_to_string(entry.path().join("nodelist")).unwrap_or_default();
        tiers += usize::from(!nodes.trim().is_empty());
    }
    if tiers >= 2 {
        return Ok(());
    }
    Err(Fault::Unsupported {
        what: format!(
            "the kernel put all nodes into one memory tier ({})",
            dir.display()
        ),
        mend: "Linux tiering needs a kernel that reads HMAT into tiers: 6.7 or newer",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(tiers: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in [NUMA_BALANCING, DEMOTION, THP] {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "?").unwrap();
        }
        for (i, nodes) in tiers.iter().enumerate() {
            let tier = root.path().join(TIERS).join(format!("memory_tier{i}"));
            fs::create_dir_all(&tier).unwrap();
            fs::write(tier.join("nodelist"), nodes).unwrap();
        }
        root
    }

    fn kernel_tiering(root: &Path) -> (String, String) {
        let read = |file| fs::read_to_string(root.join(file)).unwrap();
        (read(NUMA_BALANCING), read(DEMOTION))
    }

    #[test]
    fn linux_tiering_is_on_only_while_it_runs() {
        let root = machine(&["0\n", "1\n"]);
        let running = Running::start(root.path(), System::Linux, Pid(1)).unwrap();
        assert_eq!(kernel_tiering(root.path()), ("2".into(), "1".into()));
        running.stop().unwrap();
        assert_eq!(kernel_tiering(root.path()), ("0".into(), "0".into()));
    }

    #[test]
    fn none_switches_the_kernels_tiering_off() {
        let root = machine(&[]);
        let mut running = Running::start(root.path(), System::None, Pid(1)).unwrap();
        assert_eq!(kernel_tiering(root.path()), ("0".into(), "0".into()));
        let mut totals = Totals::default();
        running.add_moved(&mut totals);
        assert_eq!(
            (totals.promoted_bytes, totals.demoted_bytes),
            (Some(0), Some(0))
        );
    }

    #[test]
    fn memory_is_filled_without_balancing_and_then_forgotten() {
        let root = machine(&[]);
        prepare(root.path(), Thp::Never).unwrap();
        assert_eq!(kernel_tiering(root.path()), ("0".into(), "0".into()));
        assert_eq!(fs::read_to_string(root.path().join(THP)).unwrap(), "never");
        let process = root.path().join("proc/7");
        fs::create_dir_all(&process).unwrap();
        forget_accesses(root.path(), Pid(7)).unwrap();
        assert_eq!(fs::read_to_string(process.join("clear_refs")).unwrap(), "1");
    }

    #[test]
    fn one_tier_is_told_of() {
        let root = machine(&["0-1\n", "\n"]);
        let said = Running::start(root.path(), System::Linux, Pid(1))
            .unwrap_err()
            .to_string();
        assert!(
            said.contains("one memory tier") && said.contains("6.7"),
            "{said}"
        );
    }

    #[test]
    fn the_kernels_pages_become_bytes() {
        let mut totals = Totals::default();
        for (name, pages) in [
            ("pgpromote_success", 3),
            ("pgpromote_candidate", 50),
            ("pgdemote_kswapd", 2),
            ("pgdemote_direct", 5),
        ] {
            totals.vmstat.insert(name.into(), pages);
        }
        assert_eq!(moved_by_kernel(&totals), (3 * 4096, 7 * 4096));
    }
}
