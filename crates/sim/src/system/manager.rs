//! The seam between a VM and the system that manages its memory.
//!
//! A VM asks its manager only between slices of accesses and at faults, never in the access loop, so
//! that dynamic dispatch costs nothing there.

use std::fmt;

use demeter_policy::{ByteCount, GuestPhysAddr, GuestVirtAddr, RankedRange};
use demeter_scenario::Settings;

use super::AgentSettings;
use crate::error::SimError;
use crate::guest::{Guest, Watermarks};
use crate::hypervisor::{Backing, Hypervisor};
use crate::machine::actor::Actor;
use crate::machine::memory::TierId;
use crate::machine::sampler::{Record, Sampling};
use crate::machine::tier::TierModel;
use crate::reclaim::Lists;

/// A time that never comes.
pub(crate) const NEVER_PS: u64 = u64::MAX;

/// What a manager is given to manage.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Managed<'a> {
    /// Memory of the program.
    pub(crate) footprint: ByteCount,
    /// Threads that use it.
    pub(crate) threads: u64,
    /// What a load that no cache had takes at least.
    pub(crate) load_ps: u64,
    /// The fast tier and the slow one.
    pub(crate) tiers: [TierModel; 2],
    /// What an agent is set to.
    pub(crate) agent: AgentSettings,
    /// Whether Memtis has no limit on fast memory.
    pub(crate) memtis_unlimited: bool,
    /// What a rival is set to; nothing for what it is by default.
    pub(crate) settings: Option<&'a Settings>,
}

impl Managed<'_> {
    /// A knob of the settings, if it is set.
    pub(crate) fn knob<T>(&self, of: impl Fn(&Settings) -> Option<T>) -> Option<T> {
        of(self.settings?)
    }
}

/// Who sees two tiers of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tiering {
    /// The guest, as two nodes.
    Guest,
    /// The hypervisor. The guest sees one node.
    Hypervisor,
    /// The memory controller, line by line. The guest sees one node.
    Hardware,
}

/// What a system needs of the kernels beneath it.
#[derive(Debug, Clone)]
pub(crate) struct Needs {
    /// Who sees the tiers.
    pub(crate) tiering: Tiering,
    /// Where the hypervisor manages the tiers: the one that a page lies in at first, while it lasts.
    pub(crate) first_touch: TierId,
    /// What is kept free of fast memory, by whoever sees the tiers.
    pub(crate) watermarks: Watermarks,
    /// What the guest's reclaim goes by.
    pub(crate) lists: Lists,
    /// Pages that go to the fast node and to the slow one in turn, where fresh memory is interleaved.
    pub(crate) interleave: Option<[u32; 2]>,
    /// Whether fast memory is kept for what the program says is hot.
    pub(crate) keeps_hot_set: bool,
    /// Whether a fault that finds no huge page in the fast node takes one of the slow node, where huge pages are the
    /// rule. Linux takes small pages there, unless it is set to `defrag = always`.
    pub(crate) huge_in_slow: bool,
}

impl Default for Needs {
    /// Linux as it is, with two nodes.
    fn default() -> Self {
        Self {
            tiering: Tiering::Guest,
            first_touch: TierId::Fast,
            watermarks: Watermarks::LINUX,
            lists: Lists::default(),
            interleave: None,
            keeps_hot_set: false,
            huge_in_slow: false,
        }
    }
}

/// What a manager acts on, and on whose time.
pub(crate) struct Context<'a> {
    pub(crate) guest: &'a mut Guest,
    pub(crate) hypervisor: &'a mut Hypervisor,
    pub(crate) backing: &'a mut Backing,
    pub(crate) actor: Actor<'a>,
}

/// What manages a VM's memory. Each event that it does not care about it leaves to the default, which
/// does nothing.
pub(crate) trait Manager: fmt::Debug {
    /// What it needs of the kernels beneath it.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// The ranges that it takes memory apart into, if any, the hottest first.
    fn ranking(&self) -> &[RankedRange] {
        &[]
    }

    /// What the sampling units are to record, if anything. A simulated load stands for `2^k`.
    fn sampling(&self, _k: u32) -> Option<Sampling> {
        None
    }

    /// Whether a thread of its own empties the sampling units' buffers, see
    /// [`Self::worker_turn`]. Else they are emptied at context switches.
    fn has_worker(&self) -> bool {
        false
    }

    /// The timed phase begins; memory was filled before, or is still to be filled (`filling`).
    /// Returns when the first turn is due.
    fn start(&mut self, _guest: &Guest, _now_ps: u64, _filling: bool) -> u64 {
        NEVER_PS
    }

    /// Its turn: an epoch, a scan, a batch of moves. Returns when the next one is due.
    fn turn(&mut self, _ctx: &mut Context<'_>) -> u64 {
        NEVER_PS
    }

    /// What ended its last turn early, if something did: an error in the simulator.
    fn fault(&mut self) -> Option<SimError> {
        None
    }

    /// Takes what a sampling unit recorded.
    fn take_samples(&mut self, _records: &[Record]) {}

    /// The turn of the thread that empties the buffers, which began at `began_ps`, after
    /// [`Self::take_samples`]. Returns whether [`Self::sampling`] has changed.
    fn worker_turn(&mut self, _began_ps: u64, _ctx: &mut Context<'_>) -> bool {
        false
    }

    /// Memory that it sees in use again and again, wherever it lies; nothing while it has not seen any.
    fn working_set(&self) -> Option<ByteCount> {
        None
    }

    /// Memory that the system has for itself on a real machine: what it knows of pages, beyond what a kernel keeps of
    /// each anyway, and copies of them. Entries are as large as here, unless its source says more.
    fn memory_overhead(&self, _guest: &Guest) -> ByteCount {
        ByteCount(0)
    }

    /// Base pages by the ones in their histories of accesses, if it keeps such: first those with one.
    fn pages_by_ones(&self) -> Vec<u64> {
        vec![]
    }

    /// Samples that it has counted.
    fn samples_seen(&self) -> u64 {
        0
    }

    /// A page was accessed that it made fault in the guest's tables.
    fn hint_fault(&mut self, _gva: GuestVirtAddr, _ctx: &mut Context<'_>) {}

    /// A page was accessed that it took out of the second-level tables.
    fn host_hint_fault(&mut self, _gpa: GuestPhysAddr, _ctx: &mut Context<'_>) {}

    /// The guest's kernel has taken memory for a page.
    fn guest_took_memory(&mut self, _ctx: &mut Context<'_>) {}

    /// The hypervisor has taken memory to back a page.
    fn host_took_memory(&mut self, _ctx: &mut Context<'_>) {}

    /// Since when the thread that frees fast memory has had something to do, if there is one and it
    /// may have a turn at `now_ps`.
    fn reclaim_since_ps(&self, _now_ps: u64) -> Option<u64> {
        None
    }

    /// That thread's turn.
    fn reclaim(&mut self, _now_ps: u64, _ctx: &mut Context<'_>) {}
}
