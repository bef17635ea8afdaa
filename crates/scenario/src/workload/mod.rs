//! The workload. Each kind has a module with its parameters, defaults and checks.

mod app;
mod gups;
mod memlat;
mod mix;
mod mix_accesses;
mod program;
mod several;
mod silo;
#[cfg(test)]
pub(crate) mod tests;
mod trace;
mod zipf;

use serde::{Deserialize, Serialize};

pub use app::App;
pub use gups::{Gups, Phase};
pub use memlat::Memlat;
pub use mix::{Mix, Part, Pattern};
pub use mix_accesses::{MixAccesses, MixPart};
pub use program::{Cgroup, Figure, Number, Program, Programs, Ready};
pub use several::Several;
pub use silo::{Silo, SiloMix};
pub use trace::Trace;
pub use zipf::Zipf;

/// Maximum number of threads, equal to a VM's maximum of virtual CPUs.
pub(crate) const THREADS_MAX: u32 = 64;

/// Longest computation between two accesses, nanoseconds: a millisecond.
const COMPUTE_MAX_NS: u64 = 1_000_000;

/// Properties that the parameters of every kind have.
pub(crate) trait Parameters {
    /// Its memory, MiB; 0 if only a file knows.
    fn size_mib(&self) -> u64;

    /// Idle memory that is touched first, MiB.
    fn cold_mib(&self) -> u64 {
        0
    }

    /// Whether the lab has a program for it.
    fn is_real(&self) -> bool {
        false
    }

    /// Whether it reports its hot set.
    fn tells_hot_set(&self) -> bool {
        true
    }

    /// Second of the timed phase at which the hot set jumps.
    fn shift_at_s(&self) -> Option<u64> {
        None
    }

    /// Outstanding misses per core.
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

    /// Times at which the hot set jumps or changes its size, seconds into the timed phase.
    fn hot_changes_s(&self) -> Vec<u64> {
        vec![]
    }

    /// Whether it is idle for a while.
    fn is_idle_at_times(&self) -> bool {
        false
    }

    /// Checks values beyond their types.
    ///
    /// # Errors
    /// The invalid key and the fix.
    fn check(&self, duration_s: u64) -> Result<(), String>;
}

/// Defines the enum of all kinds, with their common properties.
macro_rules! workloads {
    ($($(#[$doc:meta])* $kind:ident($parameters:ty),)*) => {
        /// The workload.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, strum::IntoStaticStr)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
    /// Loads and stores with Zipf popularity.
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
    /// Parts of memory with different access patterns.
    Mix(Mix),
    /// Several processes in one guest, of different heat.
    Several(Several),
    /// A recorded program.
    Trace(Trace),
    /// Real programs.
    Program(Programs),
}

impl Workload {
    /// Its kind, as in scenario files.
    pub fn kind(&self) -> &'static str {
        self.into()
    }

    /// Whether the lab has a program for it.
    pub fn is_real(&self) -> bool {
        self.parameters().is_real()
    }

    /// Its memory, MiB; 0 for a trace, whose file contains it.
    pub fn size_mib(&self) -> u64 {
        self.parameters().size_mib()
    }

    /// Idle memory that is touched first, MiB.
    pub fn cold_mib(&self) -> u64 {
        self.parameters().cold_mib()
    }

    /// Whether it reports its hot set.
    pub fn tells_hot_set(&self) -> bool {
        self.parameters().tells_hot_set()
    }

    /// Additional time limit for its start, seconds.
    pub fn start_limit_s(&self) -> u64 {
        match self {
            Self::Program(programs) => programs.start_limit_s(),
            _ => 0,
        }
    }

    /// Whether some of its programs have cgroups.
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

    /// Outstanding misses per core; with 1 the core waits for each.
    pub fn in_flight(&self) -> u32 {
        self.parameters().in_flight()
    }

    /// A key that only the simulator supports, if one is set.
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

    /// Times at which the hot set jumps or changes its size, seconds into the timed phase.
    pub fn hot_changes_s(&self) -> Vec<u64> {
        self.parameters().hot_changes_s()
    }

    /// Whether it is idle for a while.
    pub fn is_idle_at_times(&self) -> bool {
        self.parameters().is_idle_at_times()
    }

    /// The error in its parameters, if any, for a timed phase of this length.
    pub(crate) fn check(&self, duration_s: u64) -> Result<(), String> {
        self.parameters().check(duration_s)
    }
}

fn one() -> u32 {
    1
}
