//! Errors of the simulator.

use demeter_policy::engine::Misuse;
use demeter_scenario::System;

use crate::guest::OutOfMemory;
use crate::hypervisor::HostFull;
use crate::machine::cpu::UnsoundGeometry;

/// An error that prevents or ends a simulation.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// A part of the scenario that the simulator does not model.
    #[error("the simulator has no model of {0}; use --on lab")]
    NoModelOf(&'static str),
    /// A system that knows a fast and a slow node, on a machine of other nodes.
    #[error(
        "{0} knows machines of one socket with a fast and a slow node only: leave it out; none, oracle, demeter and \
         demeter-damon run on this one"
    )]
    TwoNodes(System),
    /// An unsupported geometry of a processor.
    #[error("the simulated processor: {0}")]
    Unsound(#[from] UnsoundGeometry),
    /// More pages than the simulator supports.
    #[error(
        "{pages} simulated pages are more than the simulator holds ({max}): raise sim.scale_bits"
    )]
    TooLarge {
        /// Number of pages of the machine.
        pages: u64,
        /// Maximum number of pages.
        max: u64,
    },
    /// More memory than a VM's page tables can map.
    #[error(
        "a simulated VM has at most {max_gib} GiB of memory, not {gib}: lower machine.slow.usable_mib"
    )]
    TooMuchMemory {
        /// Memory of a VM.
        gib: u64,
        /// Maximum.
        max_gib: u64,
    },
    /// A program whose address space is wider than the page tables.
    #[error(
        "the program's memory and what it reserves span {gib} GiB, of which the simulator holds {max_gib}: lower \
         sim.reserve_mib"
    )]
    TooWide {
        /// Distance from the first to the last address.
        gib: u64,
        /// Maximum.
        max_gib: u64,
    },
    /// Not enough memory.
    #[error("{0}; raise machine.slow.usable_mib")]
    OutOfMemory(String),
    /// More slow memory than hardware tiering supports.
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
    /// The workload failed.
    #[error("workload: {0}")]
    Workload(String),
    /// Invalid cases of a scenario.
    #[error(transparent)]
    Cases(#[from] demeter_scenario::Error),
    /// A sweep over a scenario that has cases.
    #[error(
        "scenario {0} has cases of its own ([[vary]]): run them with demeter run {0} --on sim, or \
         take the tables out to sweep over other values"
    )]
    OwnCases(String),
    /// A sweep over a scenario with several provisioning variants.
    #[error(
        "scenario {0} provisions memory in several ways: run them with demeter run {0} --on sim, or leave one \
         policy and one provisioner to sweep over other values"
    )]
    Ways(String),
    /// An error in one of several runs.
    #[error("{job}")]
    Run {
        /// Its settings, system and seed.
        job: String,
        /// The cause.
        source: Box<SimError>,
    },
    /// The caller set the stop flag.
    #[error("interrupted")]
    Interrupted,
    /// The runs would exceed the time limit.
    #[error(
        "{runs} runs would take about {hours:.1} hours more, longer than --hours-max {hours_max}: \
         run fewer, shorten duration_s, or allow more hours"
    )]
    TooLong {
        /// Number of runs.
        runs: usize,
        /// Estimated time of the remaining runs.
        hours: f64,
        /// The limit.
        hours_max: f64,
    },
    /// The simulated agent misused the engine: a bug of the simulator.
    #[error("the simulated agent: {0}; please report the scenario")]
    Agent(#[from] Misuse),
    /// One access faults endlessly: a bug of the simulator.
    #[error("an access faults endlessly; please report the scenario")]
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
