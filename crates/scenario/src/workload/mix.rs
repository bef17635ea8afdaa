//! mix: parts of memory with different access patterns, used together or in turn.

use serde::{Deserialize, Serialize};

use super::{COMPUTE_MAX_NS, Parameters, THREADS_MAX, one};
use crate::fault::{at_least_one, refuse_if, within};

/// Maximum number of parts.
const PARTS_MAX: usize = 16;

/// Parameters of mix.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Mix {
    /// Idle memory that is touched first, MiB.
    #[serde(default)]
    pub cold_mib: u64,
    /// Threads; each accesses all parts.
    #[serde(default = "one")]
    pub threads: u32,
    /// Duration of a part's turn, seconds; by default all parts are used at once.
    #[serde(default)]
    pub turns_s: Option<u64>,
    /// Computation between two accesses, nanoseconds. Simulator only.
    #[serde(default)]
    pub compute_ns: u64,
    /// The parts, in order of allocation.
    pub parts: Vec<Part>,
}

/// A part of memory and its access pattern.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Its size, MiB.
    pub size_mib: u64,
    /// Its weight among the parts: its share of the accesses if all are used at once. An idle part has 0.
    #[serde(default = "whole")]
    pub share: f64,
    /// The order of its accesses.
    #[serde(default)]
    pub pattern: Pattern,
    /// Share of its accesses that are stores, 0 to 1.
    #[serde(default)]
    pub stores: f64,
    /// Size of its hot set, at its end, MiB; by default accesses are uniform.
    #[serde(default)]
    pub hot_mib: u64,
    /// Share of its accesses that go to the hot set, 0 to 1.
    #[serde(default)]
    pub hot_weight: f64,
    /// Interval at which the hot set moves by its own size, cyclically, seconds.
    #[serde(default)]
    pub moves_s: Option<u64>,
    /// Its initial size, MiB. It grows linearly to `size_mib` within `grows_s` seconds: `start_mib = 100, grows_s =
    /// 60`. Simulator only.
    #[serde(default)]
    pub start_mib: Option<u64>,
    /// Duration of its growth, seconds of the timed phase.
    #[serde(default)]
    pub grows_s: Option<u64>,
}

/// The order of accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// At random.
    #[default]
    Random,
    /// Line by line, repeatedly.
    Sweep,
}

fn whole() -> f64 {
    1.0
}

impl Parameters for Mix {
    fn size_mib(&self) -> u64 {
        let sizes = self.parts.iter().map(|part| part.size_mib);
        sizes.fold(0, u64::saturating_add)
    }

    fn cold_mib(&self) -> u64 {
        self.cold_mib
    }

    fn is_real(&self) -> bool {
        true
    }

    fn simulated_only(&self) -> Option<&'static str> {
        let grows = |part: &Part| part.grows_s.is_some();
        match self.compute_ns {
            0 if self.parts.iter().any(grows) => Some("workload.parts.grows_s"),
            0 => None,
            _ => Some("workload.compute_ns"),
        }
    }

    fn tells_hot_set(&self) -> bool {
        let stays = |part: &Part| part.moves_s.is_none();
        self.turns_s.is_none()
            && self.parts.iter().all(stays)
            && self.parts.iter().any(|part| part.hot_mib > 0)
    }

    fn check(&self, _duration_s: u64) -> Result<(), String> {
        self.check_below("workload")
    }
}

impl Mix {
    /// Checks the parameters.
    ///
    /// # Errors
    /// The invalid key and the fix.
    pub fn is_sound(&self) -> Result<(), String> {
        self.check(0)
    }

    /// Checks the keys of a table of this name.
    pub(super) fn check_below(&self, table: &str) -> Result<(), String> {
        let key = |key: &str| format!("{table}.{key}");
        within(&key("threads"), self.threads, 1..=THREADS_MAX)?;
        within(&key("parts, their number"), self.parts.len(), 1..=PARTS_MAX)?;
        within(&key("compute_ns"), self.compute_ns, 0..=COMPUTE_MAX_NS)?;
        if let Some(turns_s) = self.turns_s {
            at_least_one(&key("turns_s"), turns_s)?;
        }
        for (n, part) in self.parts.iter().enumerate() {
            part.check()
                .map_err(|what| format!("{table}.parts[{n}].{what}"))?;
        }
        let is_idle = |part: &Part| part.share == 0.0;
        let has_idle = self.parts.iter().any(is_idle);
        refuse_if(
            self.parts.iter().all(is_idle) || self.turns_s.is_some() && has_idle,
            || {
                format!(
                    "{table}.parts: share = 0: some part must be used, and all where turns_s is given"
                )
            },
        )
    }
}

impl Part {
    fn check(&self) -> Result<(), String> {
        let Self {
            size_mib, hot_mib, ..
        } = *self;
        at_least_one("size_mib", size_mib)?;
        within("share", self.share, 0.0..=1e6)?;
        within("stores", self.stores, 0.0..=1.0)?;
        within("hot_weight", self.hot_weight, 0.0..=1.0)?;
        refuse_if(hot_mib >= size_mib, || {
            format!("hot_mib = {hot_mib}: must be below size_mib = {size_mib}")
        })?;
        let is_in_order = self.pattern == Pattern::Sweep;
        let has_hot_keys = hot_mib > 0 || self.hot_weight > 0.0 || self.moves_s.is_some();
        refuse_if(is_in_order && has_hot_keys, || {
            "pattern = \"sweep\": has no hot set; put it into a part of its own".into()
        })?;
        refuse_if(has_hot_keys && hot_mib == 0, || {
            "hot_mib = 0: hot_weight and moves_s need a hot set".into()
        })?;
        self.check_growth(has_hot_keys || is_in_order)?;
        match self.moves_s {
            Some(moves_s) => at_least_one("moves_s", moves_s),
            None => Ok(()),
        }
    }

    fn check_growth(&self, is_uneven: bool) -> Result<(), String> {
        let (start_mib, grows_s) = match (self.start_mib, self.grows_s) {
            (None, None) => return Ok(()),
            (Some(start_mib), Some(grows_s)) => (start_mib, grows_s),
            _ => return Err("start_mib and grows_s go together: give both or none".into()),
        };
        at_least_one("grows_s", grows_s)?;
        within("start_mib", start_mib, 1..=self.size_mib)?;
        refuse_if(is_uneven, || {
            "grows_s: what grows is used evenly and at random; put a hot set or a sweep into a part of its own".into()
        })
    }
}
