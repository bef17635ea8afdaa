//! Systems as compositions of parts: how accesses are seen, how hot memory is told from cold, how
//! pages are moved. A named system is a line of [`Parts::of`].

mod ageing;
mod agent;
mod halves;
mod heat;
mod hints;
mod memtis;
mod moves;
mod reclaimer;
mod scan;

use demeter_scenario::System;

use crate::machine::sampler::{Record, Sampling};

pub(crate) use ageing::Ageing;
pub(crate) use agent::{Agent, AgentSettings};
pub(crate) use halves::Halves;
pub(crate) use heat::Heat;
pub(crate) use hints::Hints;
pub(crate) use memtis::Memtis;

/// How accesses are seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Track {
    /// Not at all.
    Nothing,
    /// Hardware samples in the guest, drained when its scheduler switches away.
    SamplesAtSwitch,
    /// Hardware samples in the guest, drained by a thread that wakes every 2 ms.
    SamplesByWorker,
    /// A scanner in the guest's kernel makes pages of the slow node fault.
    HintFaults,
    /// The hypervisor takes pages of the slow tier out of second-level tables.
    SecondLevelFaults,
}

/// How hot memory is told from cold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Classify {
    /// Not at all.
    Nothing,
    /// The program says before it starts what is hot.
    Told,
    /// Ranges of the policy crate.
    Ranges,
    /// Ranges that are halved, as in the Demeter paper.
    Halves,
    /// A counter for every block of 2 MiB.
    Blocks,
    /// A histogram of all pages by how often they were sampled (Memtis).
    Histogram,
    /// A page that faults soon after it was marked (Linux's `numa_balancing=2`).
    SoonFault,
    /// A page that faults while it is active, having faulted twice before (TPP).
    RepeatedFault,
}

/// How pages change their place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Relocate {
    /// Never.
    Nothing,
    /// The policy crate's plan, in batches whose translations are flushed together.
    Batches,
    /// Exchanged without a limit to what moves in an epoch, and page by page, each flushed alone: as
    /// the paper's kernel does.
    Exchange,
    /// The policy crate's promotions only, page by page, each flushed alone; reclaim makes room.
    Sequential,
    /// Promotion when a page is found hot, demotion when memory is short.
    Reclaim,
}

/// What a system is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parts {
    pub(crate) track: Track,
    pub(crate) classify: Classify,
    pub(crate) relocate: Relocate,
}

impl Parts {
    /// The parts of a named system; nothing for those that the simulator does not model.
    pub(crate) fn of(system: System) -> Option<Self> {
        use {Classify as C, Relocate as R, Track as T};
        let (track, classify, relocate) = match system {
            System::None => (T::Nothing, C::Nothing, R::Nothing),
            System::Oracle => (T::Nothing, C::Told, R::Nothing),
            System::Linux => (T::HintFaults, C::SoonFault, R::Reclaim),
            System::GTpp => (T::HintFaults, C::RepeatedFault, R::Reclaim),
            System::HTpp => (T::SecondLevelFaults, C::RepeatedFault, R::Reclaim),
            System::Demeter => (T::SamplesAtSwitch, C::Ranges, R::Batches),
            System::DemeterWorker => (T::SamplesByWorker, C::Ranges, R::Batches),
            System::DemeterBlocks => (T::SamplesAtSwitch, C::Blocks, R::Batches),
            System::DemeterPaper => (T::SamplesAtSwitch, C::Halves, R::Exchange),
            System::DemeterSequential => (T::SamplesAtSwitch, C::Ranges, R::Sequential),
            System::Memtis => (T::SamplesByWorker, C::Histogram, R::Reclaim),
            System::Damon | System::DemeterDamon => return None,
        };
        Some(Self {
            track,
            classify,
            relocate,
        })
    }

    /// Whether the hypervisor manages the tiers: the guest then sees one node.
    pub(crate) fn in_hypervisor(self) -> bool {
        self.track == Track::SecondLevelFaults
    }
}

/// The memory that is to be managed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    /// Its size.
    pub(crate) bytes: u64,
    /// Threads that use it.
    pub(crate) threads: u64,
    /// What a load that no cache had takes at least.
    pub(crate) latency_ps: u64,
}

/// Who manages a VM's memory, with what it knows.
#[derive(Debug)]
pub(crate) enum Manager {
    /// Nobody.
    Nobody,
    /// The guest's kernel, by hint faults.
    Hints(Hints),
    /// An agent in the guest, by samples.
    Agent(Box<Agent>),
    /// The guest's kernel, by samples.
    Memtis(Box<Memtis>),
    /// The hypervisor, by exits.
    Ageing(Ageing),
}

impl Manager {
    /// A manager made of these parts.
    /// `memory`: what is to be managed.
    pub(crate) fn new(parts: Parts, settings: &AgentSettings, memory: Memory) -> Self {
        match parts.track {
            Track::Nothing => Self::Nobody,
            Track::HintFaults => Self::Hints(Hints::new(parts.classify, memory)),
            Track::SamplesByWorker if parts.classify == Classify::Histogram => {
                Self::Memtis(Box::new(Memtis::new(memory.latency_ps)))
            }
            Track::SamplesAtSwitch | Track::SamplesByWorker => {
                Self::Agent(Box::new(Agent::new(parts, settings)))
            }
            Track::SecondLevelFaults => Self::Ageing(Ageing::new(memory)),
        }
    }

    /// What to sample, if anything; a simulated load stands for `2^k`.
    pub(crate) fn sampling(&self, k: u32) -> Option<Sampling> {
        match self {
            Self::Agent(agent) => Some(agent.sampling()),
            Self::Memtis(memtis) => Some(memtis.sampling(k)),
            _ => None,
        }
    }

    /// Whether a thread of its own empties the sampling units' buffers.
    pub(crate) fn has_worker(&self) -> bool {
        match self {
            Self::Agent(agent) => agent.has_worker(),
            Self::Memtis(_) => true,
            _ => false,
        }
    }

    /// Since when the thread that frees fast memory has had something to do, if there is one and it
    /// may have a turn at `now_ps`.
    pub(crate) fn wants_to_reclaim(&self, now_ps: u64) -> Option<u64> {
        match self {
            Self::Hints(hints) => hints.reclaimer().wants_turn(now_ps),
            Self::Ageing(ageing) => ageing.reclaimer().wants_turn(now_ps),
            _ => None,
        }
    }

    /// Takes what a sampling unit recorded.
    pub(crate) fn take(&mut self, records: impl Iterator<Item = Record>) {
        match self {
            Self::Agent(agent) => agent.take(records),
            Self::Memtis(memtis) => memtis.take(records),
            _ => {}
        }
    }

    /// Hardware samples that it has seen.
    pub(crate) fn samples_seen(&self) -> u64 {
        match self {
            Self::Agent(agent) => agent.samples_seen,
            Self::Memtis(memtis) => memtis.samples_seen,
            _ => 0,
        }
    }
}
