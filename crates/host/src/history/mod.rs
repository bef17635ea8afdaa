//! Tiering of a VM that runs no agent, by what the host alone can see.
//!
//! ```text
//! vCPUs' run time ──▸ when to look        DAMON on the hypervisor's process ──▸ which blocks were accessed
//!                              └──────▸ histories, planner (demeter_policy) ◂──────┘
//!                                                  │
//!                       what the VM may have ──▸ move_pages on the hypervisor's process
//! ```
//!
//! The guest sees one kind of memory; the tiers are the host's nodes. The agent's engine decides
//! here, too, with access-bit histories instead of samples ([`demeter_policy::history`]).
//!
//! For the engine, the hypervisor is a process like any other. So a [`GuestVirtAddr`] here is an
//! address of that process (hVA). [`VmMemory::find`] alone converts it from a [`HostVirtAddr`].
//!
//! The controller sets the VM's fast memory; it sees this module as a [`Provisioner`].

#[cfg(test)]
mod live;
mod look;
mod sleep;
#[cfg(test)]
mod tests;
mod worker;

use std::io;
use std::path::Path;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use demeter_linux::damon::DamonError;
use demeter_linux::maps::{MapsError, Vma, VmaKind, read_maps};
use demeter_linux::nodes::{NodesError, Pair, Topology};
use demeter_linux::pages::{LivePages, Pages, PagesError};
use demeter_policy::engine::Misuse;
use demeter_policy::{ByteCount, GuestVirtAddr, NodeId, PerTier, Pid, Tier, TierBytes, VirtRange};
use demeter_proto::shown;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, timeout_at};

use crate::config::VmConfig;
use crate::hypervisor::{Connection, HostVirtAddr, Hypervisor, HypervisorError};
use crate::memory::pinned_by;
use crate::outside::{Outside, Stuck};
use crate::provisioner::{Progress, ProvisionError, Provisioner};
pub(crate) use look::SharedDamon;
use look::{AccessBits, DamonBits};
pub(crate) use worker::HistoryState;
use worker::{HistoryCommand, Worker};

/// Poll interval while a VM shrinks.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Time reserved before the deadline for the last check.
const LAST_LOOK: Duration = Duration::from_millis(200);

/// Reason why a VM cannot be managed by histories.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The hypervisor did not answer or refused.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    /// The host does not have two tiers.
    #[error("manage = \"history\": {0}")]
    Nodes(#[from] NodesError),
    /// DAMON cannot be used.
    #[error(
        "manage = \"history\" reads access bits through DAMON: {0}; or run demeter guest in the VM and \
         set manage = \"agent\""
    )]
    Damon(#[from] DamonError),
    /// The hypervisor's mappings cannot be read.
    #[error("manage = \"history\": {0}")]
    Maps(#[from] MapsError),
    /// The hypervisor's pages cannot be moved.
    #[error("manage = \"history\": cannot move the hypervisor's pages: {0}")]
    Pages(#[from] PagesError),
    /// The VM's memory cannot be moved.
    #[error(
        "manage = \"history\": {what}, which the kernel cannot move; {hint}, or set manage = \"agent\""
    )]
    Immovable {
        /// The memory and the cause.
        what: String,
        /// How to fix it.
        hint: &'static str,
    },
    /// The slow tier is smaller than the VM's memory.
    #[error(
        "manage = \"history\": the VM has {memory}, but slow.size_mib is {slow}; set it to all the \
         VM's memory, because all of it may end up in the slow tier"
    )]
    Slow {
        /// All memory of the VM.
        memory: ByteCount,
        /// Configured slow memory.
        slow: ByteCount,
    },
    /// The system refused a resource.
    #[error("manage = \"history\": cannot start a thread: {0}")]
    Thread(#[from] io::Error),
    /// Inspecting the VM takes too long.
    #[error(transparent)]
    Stuck(#[from] Stuck),
    /// A bug in this program.
    #[error("manage = \"history\": invalid input to the engine: {0}; please report this bug")]
    Misuse(#[from] Misuse),
}

/// A VM's memory and CPUs, as the host's kernel sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VmMemory {
    /// The hypervisor's process.
    pub process: Pid,
    /// Its mappings of guest memory: sorted, disjoint.
    pub ranges: Vec<VirtRange>,
    /// The threads that run virtual CPUs.
    pub vcpus: Vec<Pid>,
}

impl VmMemory {
    /// Asks the hypervisor for its memory, and refuses memory that cannot be moved.
    pub async fn find(
        root: &Path,
        outside: &Outside,
        connection: &Connection<impl Hypervisor>,
    ) -> Result<Self, HistoryError> {
        let hypervisor = &connection.hypervisor;
        let process = connection.process.pid;
        let device = hypervisor.pinning_device().await?;
        let mut ranges = vec![];
        for backend in hypervisor.backends().await? {
            let Some(id) = backend.id else { continue };
            for mapping in hypervisor.memory_map(&id).await? {
                let HostVirtAddr(start) = mapping.host;
                let end = start.saturating_add(mapping.guest.len().0);
                ranges.extend(VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(end)));
            }
        }
        let ranges = joined(ranges);
        let (root, of_vm) = (root.to_owned(), ranges.clone());
        let checked = outside.ask("looking for the VM's memory", move |wait| {
            // Ignore a failed check: without the right to read descriptors, moving pages fails with
            // its own error.
            if let Some(device) = device.or(pinned_by(&root, process, wait).ok().flatten()) {
                return Err(HistoryError::Immovable {
                    what: format!("{} pins the VM's memory", shown(&device)),
                    hint: "remove the device from the VM",
                });
            }
            let vmas = read_maps(&root, process)?;
            of_vm
                .iter()
                .try_for_each(|range| check_movable(range, &vmas))
        });
        checked.await??;
        if ranges.is_empty() {
            let what = format!("{} reports no memory of its VM", hypervisor.name());
            return Err(HypervisorError::Failed(what).into());
        }
        Ok(Self {
            process,
            ranges,
            vcpus: hypervisor.vcpus().await?,
        })
    }

    /// Total size.
    pub fn size(&self) -> ByteCount {
        ByteCount(self.ranges.iter().map(|range| range.len().0).sum())
    }
}

/// The two nodes of a pool between which memory moves: its first fast one, and the largest slow one.
fn pair(topology: &Topology, nodes: &PerTier<Vec<NodeId>>) -> Result<Pair, NodesError> {
    let size = |node: &&NodeId| {
        let found = topology.nodes.iter().find(|of| of.id == **node);
        found.map(|of| of.total)
    };
    // Of equal ones the first, as in `TierOrder::pair`.
    let slow = nodes.slow.iter().rev().max_by_key(size);
    match (nodes.fast.first(), slow) {
        (Some(&fast), Some(&slow)) => Ok(Pair { fast, slow }),
        // A pool that names no nodes has those of the machine, unless there are none.
        _ => Ok(topology.order()?.pair),
    }
}

/// Sorts ranges and merges those that touch or overlap.
fn joined(mut ranges: Vec<VirtRange>) -> Vec<VirtRange> {
    ranges.sort_unstable();
    let mut joined: Vec<VirtRange> = vec![];
    for range in ranges {
        let before = joined.last_mut().filter(|last| range.start() <= last.end());
        match before.and_then(|last| {
            let end = last.end().max(range.end());
            Some((VirtRange::new(last.start(), end)?, last))
        }) {
            Some((both, last)) => *last = both,
            None => joined.push(range),
        }
    }
    joined
}

fn check_movable(range: &VirtRange, vmas: &[Vma]) -> Result<(), HistoryError> {
    let mut behind = vmas
        .iter()
        .filter(|vma| vma.range.intersection(range).is_some())
        .peekable();
    if behind.peek().is_none() {
        return Err(HistoryError::Immovable {
            what: format!("memory at {:#x} is not mapped", range.start().0),
            hint: "start the VM without guest_memfd",
        });
    }
    match behind.find(|vma| !matches!(vma.kind, VmaKind::Anonymous | VmaKind::Shmem)) {
        None => Ok(()),
        Some(_) => Err(HistoryError::Immovable {
            what: "the VM's memory lies in hugetlbfs, guest_memfd or a file".into(),
            hint: "back it with memory-backend-ram, or -memfd without hugetlb",
        }),
    }
}

/// Tiering of one VM by a thread of its own. Dropping it ends the thread and removes all that it
/// set up.
#[derive(Debug)]
pub(crate) struct HistoryTiering {
    orders: mpsc::Sender<HistoryCommand>,
    memory: ByteCount,
    /// Fast memory that the VM may have.
    grant: ByteCount,
    thread: Option<JoinHandle<()>>,
}

impl HistoryTiering {
    /// Acquires DAMON for a VM and starts the thread. `nodes` are those of the VM's pool. Also returns
    /// its reports.
    pub fn start(
        root: &Path,
        config: &VmConfig,
        memory: VmMemory,
        nodes: &PerTier<Vec<NodeId>>,
        damon: look::Mine,
    ) -> Result<(Self, watch::Receiver<HistoryState>), HistoryError> {
        let tiers = pair(&Topology::read(root)?, nodes)?;
        let bits = DamonBits::new(root, damon, &memory)?;
        Self::with(
            root,
            config,
            memory,
            tiers,
            Box::new(LivePages::default()),
            Box::new(bits),
        )
    }

    fn with(
        root: &Path,
        config: &VmConfig,
        memory: VmMemory,
        tiers: Pair,
        pages: Box<dyn Pages>,
        bits: Box<dyn AccessBits>,
    ) -> Result<(Self, watch::Receiver<HistoryState>), HistoryError> {
        let (size, slow) = (memory.size(), config.sizes().slow);
        if slow < size {
            return Err(HistoryError::Slow { memory: size, slow });
        }
        let (orders, received) = mpsc::channel();
        let (reports_in, reports) = watch::channel(HistoryState::default());
        let worker = Worker::new(root, config, memory, tiers, pages, bits, reports_in)?;
        let grant = worker.grant();
        let thread = std::thread::Builder::new()
            .name("history".into())
            .spawn(move || worker.run(&received))?;
        let tiering = Self {
            orders,
            memory: size,
            grant,
            thread: Some(thread),
        };
        Ok((tiering, reports))
    }

    /// Sends a command and returns the memory that the VM then has in each tier.
    async fn ask(
        &self,
        order: impl FnOnce(oneshot::Sender<TierBytes>) -> HistoryCommand,
        deadline: Instant,
    ) -> Result<TierBytes, ProvisionError> {
        let who = || "the thread that manages the VM by histories".to_owned();
        let (answer, answered) = oneshot::channel();
        let sent = self.orders.send(order(answer));
        sent.map_err(|_| ProvisionError::Unreachable(who()))?;
        match timeout_at(deadline, answered).await {
            Ok(Ok(usage)) => Ok(usage),
            Ok(Err(_)) => Err(ProvisionError::Unreachable(who())),
            Err(_) => Err(ProvisionError::Timeout(who())),
        }
    }
}

impl Drop for HistoryTiering {
    fn drop(&mut self) {
        // The thread may have ended by itself.
        let _ = self.orders.send(HistoryCommand::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Provisioner for HistoryTiering {
    fn name(&self) -> &'static str {
        "history"
    }

    /// Fast: the grant, or the present use if that is more. Slow: all the VM's memory, because all
    /// of it may end up there.
    async fn actual(&mut self, deadline: Instant) -> Result<TierBytes, ProvisionError> {
        let usage = self.ask(HistoryCommand::Count, deadline).await?;
        Ok(TierBytes {
            fast: usage.fast.max(self.grant),
            slow: self.memory,
        })
    }

    async fn set(
        &mut self,
        tier: Tier,
        target: ByteCount,
        deadline: Instant,
    ) -> Result<Progress, ProvisionError> {
        if tier == Tier::Slow {
            return Ok(Progress {
                owned: self.memory,
                returned_to_host: ByteCount(0),
                reason: (target < self.memory)
                    .then(|| "all of the VM's memory may end up in the slow tier".into()),
            });
        }
        let before = self.ask(HistoryCommand::Count, deadline).await?;
        self.grant = target;
        let order = |answer| HistoryCommand::Grant {
            fast: target,
            answer,
        };
        let mut usage = self.ask(order, deadline).await?;
        while usage.fast > target && Instant::now() + LAST_LOOK < deadline {
            sleep(LOOK_EVERY).await;
            usage = self.ask(HistoryCommand::Count, deadline).await?;
        }
        let reason = (usage.fast > target)
            .then(|| format!("{} of fast memory are not moved out yet", usage.fast));
        Ok(Progress {
            owned: usage.fast.max(target),
            returned_to_host: ByteCount(before.fast.0.saturating_sub(usage.fast.0)),
            reason,
        })
    }
}
