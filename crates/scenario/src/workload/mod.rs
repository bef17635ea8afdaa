//! The program under test. Each kind has a module: its parameters with their defaults, and what
//! is wrong with them.

mod app;
mod course;
mod gups;
mod memlat;
mod mix;
mod program;
mod several;
mod silo;
#[cfg(test)]
pub(crate) mod tests;
mod trace;
mod zipf;

use serde::{Deserialize, Serialize};

pub use app::App;
pub use course::{Course, Stretch};
pub use gups::{Gups, Phase};
pub use memlat::Memlat;
pub use mix::{Mix, Part, Pattern};
pub use program::{Cgroup, Figure, Number, Program, Programs, Ready};
pub use several::Several;
pub use silo::{Silo, SiloMix};
pub use trace::Trace;
pub use zipf::Zipf;

/// Most threads: as many as a VM has virtual CPUs at most.
pub(crate) const THREADS_MAX: u32 = 64;

/// Longest computation between two accesses, nanoseconds: a millisecond.
const COMPUTE_MAX_NS: u64 = 1_000_000;

/// What a scenario asks of the parameters of every kind.
pub(crate) trait Parameters {
    /// Memory that it works on, MiB; 0 where only a file knows.
    fn size_mib(&self) -> u64;

    /// Idle memory that is touched before, MiB.
    fn cold_mib(&self) -> u64 {
        0
    }

    /// Whether the lab has a program that does it.
    fn is_real(&self) -> bool {
        false
    }

    /// Whether it says what of its memory is hot.
    fn tells_hot_set(&self) -> bool {
        true
    }

    /// Second of the timed phase at which the hot set jumps.
    fn shift_at_s(&self) -> Option<u64> {
        None
    }

    /// Misses that a core has under way at once.
    fn in_flight(&self) -> u32 {
        1
    }

    /// The key that only the simulator can run, if it has one.
    fn simulated_only(&self) -> Option<&'static str> {
        None
    }

    /// Programs that do it side by side.
    fn copies(&self) -> u32 {
        1
    }

    /// The key that only the lab can run, if it has one.
    fn lab_only(&self) -> Option<&'static str> {
        None
    }

    /// When the hot set jumps or changes its size, seconds into the timed phase.
    fn hot_changes_s(&self) -> Vec<u64> {
        vec![]
    }

    /// Whether it accesses nothing for a while.
    fn is_idle_at_times(&self) -> bool {
        false
    }

    /// Checks what types alone cannot say.
    ///
    /// # Errors
    /// Which key is wrong, and what to do about it.
    fn check(&self, duration_s: u64) -> Result<(), String>;
}

/// The enum of all kinds, and the way to what they have in common.
macro_rules! workloads {
    ($($(#[$doc:meta])* $kind:ident($parameters:ty),)*) => {
        /// The program under test.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, strum::IntoStaticStr)]
        #[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
        #[strum(serialize_all = "lowercase")]
        pub enum Workload {
            $($(#[$doc])* $kind($parameters),)*
        }

        impl Workload {
            fn parameters(&self) -> &dyn Parameters {
                match self {
                    $(Self::$kind(parameters) => parameters,)*
                }
            }
        }
    };
}

workloads! {
    /// Random 8-byte updates with a hot set.
    Gups(Gups),
    /// Loads and stores by a law of popularity.
    Zipf(Zipf),
    /// A random pointer chase.
    Memlat(Memlat),
    /// Loads of an array in order.
    Sequential(App),
    /// Lookups in one large index.
    Btree(App),
    /// Transactions on an in-memory store.
    Silo(Silo),
    /// Lookups of cross sections, as in neutron transport.
    Xsbench(App),
    /// Sweeps of a block stencil, as in fluid dynamics.
    Bwaves(App),
    /// Breadth-first searches of a Kronecker graph.
    Graph500(App),
    /// PageRank of a Kronecker graph.
    Pagerank(App),
    /// Coordinate descent over a skewed sparse matrix.
    Liblinear(App),
    /// Parts of memory that are used in different ways.
    Mix(Mix),
    /// Several processes in one guest, of unequal heat.
    Several(Several),
    /// A recorded program.
    Trace(Trace),
    /// Real programs, as they are.
    Program(Programs),
}

impl Workload {
    /// Its kind, as a scenario file spells it.
    pub fn kind(&self) -> &'static str {
        self.into()
    }

    /// Whether the lab has a program that does it.
    pub fn is_real(&self) -> bool {
        self.parameters().is_real()
    }

    /// Memory that it works on, MiB; of a trace only its file knows.
    pub fn size_mib(&self) -> u64 {
        self.parameters().size_mib()
    }

    /// Idle memory that is touched before, MiB.
    pub fn cold_mib(&self) -> u64 {
        self.parameters().cold_mib()
    }

    /// Whether it says what of its memory is hot.
    pub fn tells_hot_set(&self) -> bool {
        self.parameters().tells_hot_set()
    }

    /// Seconds that it may take to start, beyond what every workload may.
    pub fn start_limit_s(&self) -> u64 {
        match self {
            Self::Program(programs) => programs.start_limit_s(),
            _ => 0,
        }
    }

    /// Whether it is made of programs of which some have cgroups.
    pub fn has_cgroups(&self) -> bool {
        match self {
            Self::Program(programs) => programs.have_cgroups(),
            _ => false,
        }
    }

    /// When the hot set jumps, seconds into the timed phase.
    pub fn shift_at_s(&self) -> Option<u64> {
        self.parameters().shift_at_s()
    }

    /// Misses that a core has under way at once; with 1 each is waited for.
    pub fn in_flight(&self) -> u32 {
        self.parameters().in_flight()
    }

    /// The key that only the simulator can run, if it has one: to be left out elsewhere.
    pub fn simulated_only(&self) -> Option<&'static str> {
        self.parameters().simulated_only()
    }

    /// Programs that do it side by side.
    pub fn copies(&self) -> u32 {
        self.parameters().copies()
    }

    /// The key that only the lab can run, if it has one: to be left out elsewhere.
    pub fn lab_only(&self) -> Option<&'static str> {
        self.parameters().lab_only()
    }

    /// When the hot set jumps or changes its size, seconds into the timed phase.
    pub fn hot_changes_s(&self) -> Vec<u64> {
        self.parameters().hot_changes_s()
    }

    /// Whether it accesses nothing for a while.
    pub fn is_idle_at_times(&self) -> bool {
        self.parameters().is_idle_at_times()
    }

    /// What is wrong with its parameters in a timed phase of this length.
    pub(crate) fn check(&self, duration_s: u64) -> Result<(), String> {
        self.parameters().check(duration_s)
    }
}

fn one() -> u32 {
    1
}
