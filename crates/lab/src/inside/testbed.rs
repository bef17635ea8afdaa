//! The machine under test: a lab VM from inside, or this machine.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use demeter_guest::nodes::{Pair, Tiers};
use demeter_policy::NodeId;
use demeter_scenario::Machine;

use super::plugged::Plug;
use super::zones::nodes_free_mib;
use crate::fault::Fault;
use crate::link::{AGENT_CONFIG_PATH, AGENT_SOCKET_PATH, VmMessage};

/// Paths, nodes and limits of the machine under test.
#[derive(Debug)]
pub struct Testbed<'a> {
    /// The folder that has `/proc` and `/sys`.
    pub root: PathBuf,
    /// The nodes of each tier.
    pub tiers: Tiers,
    /// How nodes come and go in the timed phase.
    pub plugs: Vec<Plug>,
    /// Folder of our own programs, including the agent.
    pub programs: PathBuf,
    /// The agent's configuration.
    pub agent_config: PathBuf,
    /// Whether the configuration selects the workload's processes, by their cgroups.
    pub agent_has_targets: bool,
    /// The agent's socket, as in the configuration.
    pub agent_socket: PathBuf,
    /// File for the agent's output.
    pub agent_log: PathBuf,
    /// Limits that end the run early.
    pub limits: StopConditions<'a>,
}

/// Limits that end a run early. A VM has none, since its host kills it.
#[derive(Debug, Clone, Copy, Default)]
pub struct StopConditions<'a> {
    /// The user's stop flag.
    pub stop: Option<&'a AtomicBool>,
    /// Time limit of one of our workloads, from its start to its last event.
    pub workload: Option<Duration>,
}

/// Interval between checks of the stop flag.
const TICK: Duration = Duration::from_millis(100);

impl Testbed<'_> {
    /// A lab VM, from inside.
    pub fn vm() -> Self {
        Self {
            root: "/".into(),
            tiers: Pair {
                fast: NodeId(0),
                slow: NodeId(1),
            }
            .into(),
            plugs: vec![],
            programs: "/bin".into(),
            agent_config: AGENT_CONFIG_PATH.into(),
            agent_has_targets: false,
            agent_socket: AGENT_SOCKET_PATH.into(),
            agent_log: "/run/demeter/agent.log".into(),
            limits: StopConditions::default(),
        }
    }

    /// A VM's testbed with the nodes of a machine.
    pub fn vm_of(machine: &Machine) -> Result<Self, Fault> {
        let nodes = machine.nodes();
        let tier = |tier: u32| -> Vec<NodeId> {
            let numbered = (0..).map(NodeId).zip(&nodes);
            let of_tier = numbered.filter(|(_, node)| node.tier == tier && node.usable_mib > 0);
            of_tier.map(|(id, _)| id).collect()
        };
        let count = nodes.iter().map(|node| node.tier).max().unwrap_or(0);
        let tiers = Tiers::new((1..=count).map(tier).collect());
        Ok(Self {
            tiers: tiers.map_err(|error| Fault::Tiers(error.to_string()))?,
            plugs: Plug::all_of(machine),
            ..Self::vm()
        })
    }

    /// The machine's description of itself after boot.
    pub fn booted(&self) -> Result<VmMessage, Fault> {
        Ok(VmMessage::Booted {
            kernel: kernel_release(&self.root)?,
            fast_free_mib: nodes_free_mib(&self.root, self.tiers.fastest().to_vec())?,
            slow_free_mib: nodes_free_mib(&self.root, self.tiers.slower())?,
        })
    }
}

fn kernel_release(root: &Path) -> Result<String, Fault> {
    let path = root.join("proc/sys/kernel/osrelease");
    let text = std::fs::read_to_string(&path).map_err(Fault::io("read", &path))?;
    Ok(text.trim().to_owned())
}

impl StopConditions<'_> {
    /// Maximum length of a wait between checks of the limits; none without limits, so that a VM wakes only for its
    /// workload.
    pub fn tick(&self) -> Option<Duration> {
        (self.stop.is_some() || self.workload.is_some()).then_some(TICK)
    }

    /// Fails if a workload that started at this time must end.
    pub fn check(&self, started: Instant) -> Result<(), Fault> {
        if self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            return Err(Fault::Interrupted);
        }
        match self.workload {
            Some(limit) if started.elapsed() >= limit => Err(Fault::Workload(format!(
                "did not end within {} s (duration_s and lab.timeout_s)",
                limit.as_secs()
            ))),
            _ => Ok(()),
        }
    }
}
