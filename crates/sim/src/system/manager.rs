//! Interface between a VM and its memory manager.
//!
//! A VM calls its manager only between slices of accesses and at faults, never in the access loop. Dynamic dispatch
//! therefore costs nothing there.

use std::fmt;

use demeter_policy::benefit::Benefit;
use demeter_policy::{ByteCount, GuestPhysAddr, GuestVirtAddr, RankedRange, Tier};
use demeter_scenario::Settings;

use super::AgentSettings;
use crate::error::SimError;
use crate::guest::{Guest, Watermarks};
use crate::hypervisor::{Backing, Hypervisor};
use crate::machine::actor::Actor;
use crate::machine::sampler::{Record, Sampling};
use crate::machine::tier::TierModel;
use crate::reclaim::Lists;

/// A time in the infinite future.
pub(crate) const NEVER_PS: u64 = u64::MAX;

/// Parameters of the memory to manage.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Managed<'a> {
    /// Size of the program's memory.
    pub(crate) footprint: ByteCount,
    /// Number of threads that use it.
    pub(crate) threads: u64,
    /// Minimum latency of a load that misses all caches.
    pub(crate) load_ps: u64,
    /// The fast tier and the slow one.
    pub(crate) tiers: [TierModel; 2],
    /// Settings of the agent.
    pub(crate) agent: &'a AgentSettings,
    /// Whether Memtis may use all fast memory.
    pub(crate) memtis_unlimited: bool,
    /// Settings of a rival; none for its defaults.
    pub(crate) settings: Option<&'a Settings>,
}

impl Managed<'_> {
    /// One setting, if it is set.
    pub(crate) fn knob<T>(&self, of: impl Fn(&Settings) -> Option<T>) -> Option<T> {
        of(self.settings?)
    }
}

/// The component that sees two memory tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tiering {
    /// The guest, as two nodes.
    Guest,
    /// The hypervisor. The guest sees one node.
    Hypervisor,
    /// The memory controller, line by line. The guest sees one node.
    Hardware,
}

/// Requirements of a system on the kernels.
#[derive(Debug, Clone)]
pub(crate) struct Needs {
    /// The component that sees the tiers.
    pub(crate) tiering: Tiering,
    /// The preferred tier of a first touch, if the hypervisor tiers.
    pub(crate) first_touch: Tier,
    /// Watermarks of fast memory, for the kernel that sees the tiers.
    pub(crate) watermarks: Watermarks,
    /// Page lists of the guest's reclaim.
    pub(crate) lists: Lists,
    /// Pages that go to the fast node and to the slow one in turn, where fresh memory is interleaved.
    pub(crate) interleave: Option<[u32; 2]>,
    /// Whether fast memory is reserved for the program's declared hot set.
    pub(crate) keeps_hot_set: bool,
    /// Whether a huge-page fault falls back to the slow node. Linux falls back to small pages of the fast node, unless
    /// it is set to `defrag = always`.
    pub(crate) huge_in_slow: bool,
}

impl Default for Needs {
    /// Plain Linux with two nodes.
    fn default() -> Self {
        Self {
            tiering: Tiering::Guest,
            first_touch: Tier::Fast,
            watermarks: Watermarks::LINUX,
            lists: Lists::default(),
            interleave: None,
            keeps_hot_set: false,
            huge_in_slow: false,
        }
    }
}

/// The guest, hypervisor and actor of a manager's turn.
pub(crate) struct Context<'a> {
    pub(crate) guest: &'a mut Guest,
    pub(crate) hypervisor: &'a mut Hypervisor,
    pub(crate) backing: &'a mut Backing,
    pub(crate) actor: Actor<'a>,
}

/// The manager of a VM's memory. Every event handler does nothing by default.
pub(crate) trait Manager: fmt::Debug {
    /// Its requirements on the kernels.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// The ranges that it manages, hottest first, if any.
    fn ranking(&self) -> &[RankedRange] {
        &[]
    }

    /// The settings of sampling units, if it samples. A simulated load stands for `2^k` real ones.
    fn sampling(&self, _k: u32) -> Option<Sampling> {
        None
    }

    /// Whether it has a thread that drains the sampling buffers, see [`Self::worker_turn`]. If not, they are drained at
    /// context switches.
    fn has_worker(&self) -> bool {
        false
    }

    /// Starts the timed phase. Memory is populated, or is still to be (`filling`). Returns the time of the first turn.
    fn start(&mut self, _guest: &Guest, _now_ps: u64, _filling: bool) -> u64 {
        NEVER_PS
    }

    /// One turn: an epoch, a scan, or a batch of moves. Returns the time of the next turn.
    fn turn(&mut self, _ctx: &mut Context<'_>) -> u64 {
        NEVER_PS
    }

    /// The error that ended its last turn early: a bug of the simulator.
    fn fault(&mut self) -> Option<SimError> {
        None
    }

    /// Receives records of a sampling unit.
    fn take_samples(&mut self, _records: &[Record]) {}

    /// Turn of the draining thread, which began at `began_ps`, after [`Self::take_samples`]. Returns whether
    /// [`Self::sampling`] changed.
    fn worker_turn(&mut self, _began_ps: u64, _ctx: &mut Context<'_>) -> bool {
        false
    }

    /// Its estimate of the working set, in either tier; none until it has one.
    fn working_set(&self) -> Option<ByteCount> {
        None
    }

    /// Its estimate of the benefit of fast memory that the VM owns; none until it has one. `running_ms` is the CPU time
    /// of programs per second.
    fn benefit(&self, _guest: &Guest, _running_ms: u32) -> Option<Benefit> {
        None
    }

    /// Memory for its own metadata on a real machine: page metadata beyond the kernel's own, and page copies. Entry
    /// sizes are those of this model, unless the source gives others.
    fn memory_overhead(&self, _guest: &Guest) -> ByteCount {
        ByteCount(0)
    }

    /// Base pages by the number of ones in their access histories, from one on; empty without histories.
    fn pages_by_ones(&self) -> Vec<u64> {
        vec![]
    }

    /// Number of samples counted.
    fn samples_seen(&self) -> u64 {
        0
    }

    /// Handles an access to a page that it marked to fault in the guest's tables.
    fn hint_fault(&mut self, _gva: GuestVirtAddr, _ctx: &mut Context<'_>) {}

    /// Handles an access to a page that it unmapped from the second-level tables.
    fn host_hint_fault(&mut self, _gpa: GuestPhysAddr, _ctx: &mut Context<'_>) {}

    /// The guest's kernel has allocated memory for a page.
    fn guest_took_memory(&mut self, _ctx: &mut Context<'_>) {}

    /// The hypervisor has allocated memory to back a page.
    fn host_took_memory(&mut self, _ctx: &mut Context<'_>) {}

    /// Time since when its reclaim thread has work; none without such a thread, or if it may not run at `now_ps`.
    fn reclaim_since_ps(&self, _now_ps: u64) -> Option<u64> {
        None
    }

    /// Turn of its reclaim thread.
    fn reclaim(&mut self, _now_ps: u64, _ctx: &mut Context<'_>) {}
}
