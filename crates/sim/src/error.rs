//! Why a simulation cannot start or go on.

use demeter_policy::engine::Misuse;

use crate::guest::OutOfMemory;
use crate::hypervisor::HostFull;
use crate::machine::cpu::UnsoundGeometry;

/// Why a simulation cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// A part of the scenario that the simulator has no model of.
    #[error("the simulator has no model of {0}; use --on lab")]
    NoModelOf(&'static str),
    /// A processor that cannot be.
    #[error("the simulated processor: {0}")]
    Unsound(#[from] UnsoundGeometry),
    /// More pages than the simulator counts.
    #[error(
        "{pages} simulated pages are more than the simulator holds ({max}): raise sim.scale_bits"
    )]
    TooLarge {
        /// Pages that the machine would have.
        pages: u64,
        /// The most.
        max: u64,
    },
    /// More memory than a VM's page tables hold.
    #[error(
        "a simulated VM has at most {max_gib} GiB of memory, not {gib}: lower machine.slow.usable_mib"
    )]
    TooMuchMemory {
        /// Memory of a VM.
        gib: u64,
        /// The most.
        max_gib: u64,
    },
    /// A program whose addresses are further apart than page tables reach.
    #[error(
        "the program's memory and what it reserves span {gib} GiB, of which the simulator holds {max_gib}: lower \
         sim.reserve_mib"
    )]
    TooWide {
        /// Addresses from the first to the last.
        gib: u64,
        /// The most.
        max_gib: u64,
    },
    /// Memory that does not suffice.
    #[error("{0}; raise machine.slow.usable_mib")]
    OutOfMemory(String),
    /// More slow memory than hardware that tiers by itself can have.
    #[error(
        "hardware that tiers by itself has a line of fast memory for each of slow memory, but {slow_mib} MiB are \
         slow and {fast_mib} MiB fast: raise machine.fast.usable_mib, or leave flat-mode and memstrata out"
    )]
    Pairs {
        /// Fast memory of a VM.
        fast_mib: u64,
        /// Slow memory of a VM.
        slow_mib: u64,
    },
    /// The workload cannot run.
    #[error("workload: {0}")]
    Workload(String),
    /// A scenario's cases.
    #[error(transparent)]
    Cases(#[from] demeter_scenario::Error),
    /// A sweep over a scenario that has cases.
    #[error(
        "scenario {0} has cases of its own ([[vary]]): run them with demeter run {0} --on sim, or \
         take the tables out to sweep over other values"
    )]
    OwnCases(String),
    /// A sweep over a scenario that provisions memory in several ways.
    #[error(
        "scenario {0} provisions memory in several ways: run them with demeter run {0} --on sim, or leave one \
         policy and one provisioner to sweep over other values"
    )]
    Ways(String),
    /// One of several runs.
    #[error("{job}")]
    Run {
        /// Its settings, system and seed.
        job: String,
        /// What went wrong.
        source: Box<SimError>,
    },
    /// Somebody said stop.
    #[error("interrupted")]
    Interrupted,
    /// More runs than there is time for.
    #[error(
        "{runs} runs would take about {hours:.1} hours more, longer than --hours-max {hours_max}: \
         run fewer, shorten duration_s, or allow more hours"
    )]
    TooLong {
        /// All runs.
        runs: usize,
        /// How long those that are not done would take.
        hours: f64,
        /// What is allowed.
        hours_max: f64,
    },
    /// The agent told the engine something else than it had asked for: an error in the simulator.
    #[error("the simulated agent: {0}; please report the scenario")]
    Agent(#[from] Misuse),
    /// One access faults for ever: an error in the simulator.
    #[error("an access faults for ever; please report the scenario")]
    Stuck,
}

impl From<OutOfMemory> for SimError {
    fn from(full: OutOfMemory) -> Self {
        Self::OutOfMemory(full.to_string())
    }
}

impl From<HostFull> for SimError {
    fn from(full: HostFull) -> Self {
        Self::OutOfMemory(full.to_string())
    }
}
