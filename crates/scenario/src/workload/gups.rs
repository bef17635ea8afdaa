//! gups: random 8-byte updates with a hot set.

use serde::{Deserialize, Serialize};

use super::{COMPUTE_MAX_NS, Parameters, THREADS_MAX, one};
use crate::check::RESERVE_MAX_MIB;
use crate::fault::{at_least_one, refuse_if, within};

/// Maximum number of changes of a hot set's size.
const PHASES_MAX: usize = 100;

/// Maximum number of outstanding misses per core: more than any core has buffers for.
const IN_FLIGHT_MAX: u32 = 64;

/// Most processes that share an array.
const SHARED_BY_MAX: u32 = 64;

/// Most copies of the program.
const COPIES_MAX: u32 = 16;

/// Size of a block in MiB; scattered hot sets consist of blocks.
const BLOCK_MIB: u64 = 2;

/// Parameters of gups.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Gups {
    /// Size of the array, MiB.
    pub size_mib: u64,
    /// Size of the hot set, MiB.
    pub hot_mib: u64,
    /// Share of the updates that go to the hot set, 0 to 1.
    pub hot_weight: f64,
    /// Hot set at the end of the array instead of its start.
    #[serde(default)]
    pub reverse: bool,
    /// Threads.
    #[serde(default = "one")]
    pub threads: u32,
    /// Second of the timed phase at which the hot set jumps to the array's middle.
    #[serde(default)]
    pub shift_at_s: Option<u64>,
    /// Changes of the hot set's size, in order of time.
    #[serde(default)]
    pub phases: Vec<Phase>,
    /// Outstanding misses per core; updates are independent of each other. With 1 the core waits for each miss, as in
    /// the lab's emulator. Simulator only.
    #[serde(default = "one")]
    pub in_flight: u32,
    /// Whether the hot set is scattered over the array by the seed, in single blocks of 2 MiB, instead of one piece.
    /// With `hot_mib = 400` there are 200 of them. They jump, grow and shrink as one piece does. Simulator only.
    #[serde(default)]
    pub scattered: bool,
    /// Computation between two updates, nanoseconds. With `compute_ns = 4000` it is a server that waits for memory 5 %
    /// of its time, if an update takes 200 ns. Simulator only.
    #[serde(default)]
    pub compute_ns: u64,
    /// Copies of the program side by side, each with memory of its own and a figure of its own. On a machine of several
    /// sockets copy 0 runs on socket 0, and so on.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub copies: u32,
    /// Nodes that the array is bound to (`mbind` with `MPOL_BIND`), of copy 0. Lab only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bind: Vec<u32>,
    /// Nodes that the array's pages come from in turn (`MPOL_INTERLEAVE`), of copy 0. Lab only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub interleave: Vec<u32>,
    /// Nodes that a cgroup allows copy 0 (`cpuset.mems`). Lab only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cpuset: Vec<u32>,
    /// Processes that map the array: one updates it, the others have touched it once and are idle. Lab only.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub shared_by: u32,
    /// Address space without access (`PROT_NONE`) that is reserved on both sides of the array, MiB. Lab only.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub reserve_mib: u64,
}

fn is_zero(mib: &u64) -> bool {
    *mib == 0
}

fn is_one(count: &u32) -> bool {
    *count == 1
}

/// A change: the hot set has another size from then on and keeps its end, or the program is idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// Time of the change, seconds into the timed phase.
    pub at_s: u64,
    /// New size of the hot set, MiB. With 0 the program accesses nothing: lab only.
    pub hot_mib: u64,
}

impl Gups {
    /// One with these sizes and weight, and the default of each other key.
    pub fn new(size_mib: u64, hot_mib: u64, hot_weight: f64) -> Self {
        Self {
            size_mib,
            hot_mib,
            hot_weight,
            reverse: false,
            threads: one(),
            shift_at_s: None,
            phases: vec![],
            in_flight: one(),
            scattered: false,
            compute_ns: 0,
            copies: one(),
            bind: vec![],
            interleave: vec![],
            cpuset: vec![],
            shared_by: one(),
            reserve_mib: 0,
        }
    }
}

impl Phase {
    /// Whether the program accesses nothing.
    pub fn is_idle(&self) -> bool {
        self.hot_mib == 0
    }
}

impl Parameters for Gups {
    fn size_mib(&self) -> u64 {
        self.size_mib.saturating_mul(self.copies.into())
    }

    fn copies(&self) -> u32 {
        self.copies
    }

    fn lab_only(&self) -> Option<&'static str> {
        match self {
            Self { shared_by: 2.., .. } => Some("workload.shared_by above 1"),
            Self {
                reserve_mib: 1.., ..
            } => Some("workload.reserve_mib"),
            Self { bind, .. } if !bind.is_empty() => Some("workload.bind"),
            Self { interleave, .. } if !interleave.is_empty() => Some("workload.interleave"),
            Self { cpuset, .. } if !cpuset.is_empty() => Some("workload.cpuset"),
            _ => None,
        }
    }

    fn is_real(&self) -> bool {
        true
    }

    fn shift_at_s(&self) -> Option<u64> {
        self.shift_at_s
    }

    fn in_flight(&self) -> u32 {
        self.in_flight
    }

    fn simulated_only(&self) -> Option<&'static str> {
        match self {
            Self { in_flight: 2.., .. } => Some("workload.in_flight above 1"),
            Self {
                scattered: true, ..
            } => Some("workload.scattered"),
            Self {
                compute_ns: 1.., ..
            } => Some("workload.compute_ns"),
            _ => None,
        }
    }

    fn hot_changes_s(&self) -> Vec<u64> {
        let phases = self.phases.iter().map(|phase| phase.at_s);
        self.shift_at_s.into_iter().chain(phases).collect()
    }

    fn is_idle_at_times(&self) -> bool {
        self.phases.iter().any(Phase::is_idle)
    }

    fn check(&self, duration_s: u64) -> Result<(), String> {
        let Self {
            size_mib, hot_mib, ..
        } = *self;
        at_least_one("workload.size_mib", size_mib)?;
        at_least_one("workload.hot_mib", hot_mib)?;
        refuse_if(hot_mib >= size_mib, || {
            format!("workload.hot_mib = {hot_mib}: must be below workload.size_mib = {size_mib}")
        })?;
        within("workload.hot_weight", self.hot_weight, 0.0..=1.0)?;
        within("workload.threads", self.threads, 1..=THREADS_MAX)?;
        within("workload.copies", self.copies, 1..=COPIES_MAX)?;
        within("workload.shared_by", self.shared_by, 1..=SHARED_BY_MAX)?;
        within(
            "workload.reserve_mib",
            self.reserve_mib,
            0..=RESERVE_MAX_MIB,
        )?;
        let has_two = !self.bind.is_empty() && !self.interleave.is_empty();
        refuse_if(has_two, || {
            "workload.bind and workload.interleave exclude each other: memory has one policy: remove one".into()
        })?;
        within("workload.in_flight", self.in_flight, 1..=IN_FLIGHT_MAX)?;
        within("workload.compute_ns", self.compute_ns, 0..=COMPUTE_MAX_NS)?;
        self.check_scattered()?;
        self.check_phases(duration_s)?;
        let Some(shift_at_s) = self.shift_at_s else {
            return Ok(());
        };
        refuse_if(!(1..duration_s).contains(&shift_at_s), || {
            format!(
                "workload.shift_at_s = {shift_at_s}: must be at least 1 and below duration_s = \
                 {duration_s}"
            )
        })?;
        // The hot set jumps to the array's middle, and must not overlap its former place.
        refuse_if(hot_mib > size_mib / 2, || {
            format!(
                "workload.hot_mib = {hot_mib}: with shift_at_s it must be at most half of \
                 size_mib = {size_mib}"
            )
        })
    }
}

impl Gups {
    fn check_scattered(&self) -> Result<(), String> {
        let sizes = [self.size_mib, self.hot_mib].into_iter();
        let sizes = sizes.chain(self.phases.iter().map(|phase| phase.hot_mib));
        let odd = sizes.filter(|mib| !mib.is_multiple_of(BLOCK_MIB)).min();
        match odd {
            Some(odd) if self.scattered => Err(format!(
                "workload.scattered: {odd} MiB are no whole blocks of 2 MiB: make size_mib and each hot_mib even"
            )),
            _ => Ok(()),
        }
    }

    fn check_phases(&self, duration_s: u64) -> Result<(), String> {
        refuse_if(self.phases.len() > PHASES_MAX, || {
            format!("workload.phases: at most {PHASES_MAX}")
        })?;
        refuse_if(self.shift_at_s.is_some() && !self.phases.is_empty(), || {
            "workload.shift_at_s and workload.phases exclude each other: remove one".into()
        })?;
        let mut last_s = 0;
        for &Phase { at_s, hot_mib } in &self.phases {
            refuse_if(!(last_s + 1..duration_s).contains(&at_s), || {
                format!(
                    "workload.phases: at_s = {at_s}: must be above {last_s}, as phases follow in \
                     order of time, and below duration_s = {duration_s}"
                )
            })?;
            refuse_if(hot_mib >= self.size_mib, || {
                format!(
                    "workload.phases: hot_mib = {hot_mib}: must be below size_mib = {}",
                    self.size_mib
                )
            })?;
            last_s = at_s;
        }
        Ok(())
    }
}
