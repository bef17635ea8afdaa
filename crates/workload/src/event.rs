//! Events of a running workload, as text or as one JSON object per line.

use std::io::{self, Write};

use demeter_outcome::Unit;
use serde::{Deserialize, Serialize};

use super::Error;

/// One line of a workload's output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum WorkloadEvent {
    /// Memory is mapped and populated; the timed phase comes next.
    Ready {
        /// Virtual address of the array.
        start: u64,
        /// Its length.
        bytes: u64,
        /// Virtual address of the hot set (memlat: of the chased region).
        hot_start: u64,
        /// Its length.
        hot_bytes: u64,
    },
    /// The store is loaded; the timed phase comes next.
    Loaded {
        /// Number of keys.
        keys: u64,
        /// Bytes per value.
        value_bytes: u64,
    },
    /// An interval of the timed phase has ended.
    Interval {
        /// Seconds since the start of the timed phase, as measured.
        t_s: f64,
        /// Number of operations in the interval.
        ops: u64,
        /// Their speed.
        #[serde(flatten)]
        rate: Rate,
    },
    /// The hot set has moved.
    Shift {
        /// Seconds since the start of the timed phase.
        t_s: f64,
        /// Virtual address of the new hot set.
        hot_start: u64,
        /// Its length.
        hot_bytes: u64,
    },
    /// The timed phase has ended.
    Done {
        /// Its length, seconds.
        t_s: f64,
        /// Total number of operations.
        ops: u64,
        /// Mean speed over the phase.
        #[serde(flatten)]
        rate: Rate,
    },
    /// All words were verified.
    Verified {
        /// Words checked.
        words: u64,
        /// Wrong words, plus one if updates are missing.
        errors: u64,
    },
}

impl WorkloadEvent {
    /// [`Self::Ready`] with an array that is entirely hot.
    pub(crate) fn all_hot(start: u64, bytes: u64) -> Self {
        Self::Ready {
            start,
            bytes,
            hot_start: start,
            hot_bytes: bytes,
        }
    }
}

/// Speed of operations.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rate {
    /// Millions of operations per second (gups).
    Mops(f64),
    /// Mean nanoseconds per operation (memlat).
    LatencyNs(f64),
    /// Requests per second (forks, kvload).
    RequestsPerS(f64),
}

impl Rate {
    /// Throughput of `ops` operations in `length_s` seconds.
    pub(crate) fn mops(ops: u64, length_s: f64) -> Self {
        Self::Mops(ops as f64 / length_s.max(1e-9) / 1e6)
    }

    /// Request rate of `ops` requests in `length_s` seconds.
    pub(crate) fn requests(ops: u64, length_s: f64) -> Self {
        Self::RequestsPerS(ops as f64 / length_s.max(1e-9))
    }

    /// Latency of `ops` successive operations in `length_s` seconds; 0 without operations.
    pub(crate) fn latency_ns(ops: u64, length_s: f64) -> Self {
        Self::LatencyNs(if ops == 0 {
            0.0
        } else {
            length_s * 1e9 / ops as f64
        })
    }
}

impl Rate {
    /// The unit of the figure.
    pub fn unit(self) -> Unit {
        match self {
            Self::Mops(_) => Unit::MOPS,
            Self::LatencyNs(_) => Unit::NS,
            Self::RequestsPerS(_) => Unit::new("requests/s"),
        }
    }

    /// The figure.
    pub fn value(self) -> f64 {
        match self {
            Self::Mops(value) | Self::LatencyNs(value) | Self::RequestsPerS(value) => value,
        }
    }

    /// The sum over parallel workloads; none if one of them has no figure, or if figures cannot be added.
    pub fn sum(rates: &[Option<Self>]) -> Option<Self> {
        let add = |sum: Option<Self>, rate: Option<Self>| match (sum?, rate?) {
            (Self::Mops(a), Self::Mops(b)) => Some(Self::Mops(a + b)),
            (Self::RequestsPerS(a), Self::RequestsPerS(b)) => Some(Self::RequestsPerS(a + b)),
            _ => None,
        };
        rates.iter().copied().reduce(add).flatten()
    }
}

impl std::fmt::Display for Rate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mops(mops) => write!(f, "{mops:.3} Mops"),
            Self::LatencyNs(ns) => write!(f, "{ns:.1} ns"),
            Self::RequestsPerS(requests) => write!(f, "{requests:.0} requests/s"),
        }
    }
}

impl std::fmt::Display for WorkloadEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const MIB: f64 = (1u64 << 20) as f64;
        match self {
            Self::Ready {
                start,
                bytes,
                hot_start,
                hot_bytes,
            } => write!(
                f,
                "ready: {:.1} MiB at {start:#x}, hot {:.1} MiB at {hot_start:#x}",
                *bytes as f64 / MIB,
                *hot_bytes as f64 / MIB
            ),
            Self::Loaded { keys, value_bytes } => {
                write!(f, "loaded: {keys} keys with {value_bytes} bytes each")
            }
            Self::Interval { t_s, rate, .. } => write!(f, "{t_s:7.1} s  {rate}"),
            Self::Shift { t_s, hot_start, .. } => {
                write!(f, "{t_s:7.1} s  hot set jumps to {hot_start:#x}")
            }
            Self::Done { t_s, ops, rate } => {
                write!(f, "done: {ops} operations in {t_s:.1} s, mean {rate}")
            }
            Self::Verified { words, errors } => {
                write!(f, "verified: {words} words, {errors} errors")
            }
        }
    }
}

/// Writes events to standard output without buffering.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    /// JSON lines instead of text.
    pub(crate) json: bool,
}

impl Output {
    /// Writes one line and flushes it.
    pub(crate) fn say(self, event: &WorkloadEvent) -> Result<(), Error> {
        let line = if self.json {
            serde_json::to_string(event).map_err(io::Error::other)
        } else {
            Ok(event.to_string())
        };
        let mut stdout = io::stdout().lock();
        line.and_then(|line| writeln!(stdout, "{line}"))
            .and_then(|()| stdout.flush())
            .map_err(|source| Error::System {
                what: "cannot write to standard output".into(),
                source,
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wire_format_is_what_readers_expect() {
        let cases = [
            (
                WorkloadEvent::Ready {
                    start: 1,
                    bytes: 2,
                    hot_start: 3,
                    hot_bytes: 4,
                },
                r#"{"event":"ready","start":1,"bytes":2,"hot_start":3,"hot_bytes":4}"#,
            ),
            (
                WorkloadEvent::Interval {
                    t_s: 1.5,
                    ops: 3_000_000,
                    rate: Rate::mops(3_000_000, 1.5),
                },
                r#"{"event":"interval","t_s":1.5,"ops":3000000,"mops":2.0}"#,
            ),
            (
                WorkloadEvent::Done {
                    t_s: 2.0,
                    ops: 4,
                    rate: Rate::latency_ns(4, 2.0),
                },
                r#"{"event":"done","t_s":2.0,"ops":4,"latency_ns":500000000.0}"#,
            ),
            (
                WorkloadEvent::Interval {
                    t_s: 2.0,
                    ops: 3,
                    rate: Rate::requests(3, 2.0),
                },
                r#"{"event":"interval","t_s":2.0,"ops":3,"requests_per_s":1.5}"#,
            ),
            (
                WorkloadEvent::Shift {
                    t_s: 30.0,
                    hot_start: 8,
                    hot_bytes: 9,
                },
                r#"{"event":"shift","t_s":30.0,"hot_start":8,"hot_bytes":9}"#,
            ),
            (
                WorkloadEvent::Verified {
                    words: 5,
                    errors: 0,
                },
                r#"{"event":"verified","words":5,"errors":0}"#,
            ),
        ];
        for (event, json) in cases {
            assert_eq!(serde_json::to_string(&event).unwrap(), json);
            assert_eq!(serde_json::from_str::<WorkloadEvent>(json).unwrap(), event);
        }
    }
}
