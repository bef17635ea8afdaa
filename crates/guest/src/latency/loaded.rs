//! Measures the latency of loads under the load of programs, again and again.
//!
//! # Approach
//! The agent keeps 64 KiB of memory in each node. A measurement flushes lines of it and loads them, each load dependent on
//! the one before. The median of a few rounds counts, as a round may be interrupted. Lines of so little memory are quicker
//! than those of larger memory: no translation is missing, and rows of DRAM stay open. So the least latency that was ever
//! measured stands for that of an idle node, and others are seen in relation to it.
//!
//! Hypervisors and processors may not flush: where the first measurements are not near the latency that larger memory had,
//! nothing is measured later.

use std::collections::BTreeMap;
use std::time::Instant;

use demeter_policy::{ByLevel, Level, NodeId};

use super::NodeBuffer;
use crate::nodes::Tiers;

/// Steps through the memory of a node, all of which a measurement takes.
pub(super) const STEPS: usize = 64;

/// Rounds of a measurement; an odd number.
const ROUNDS: usize = 5;

/// A probe works if it finds no more than this multiple of the latency known, and no less than its inverse.
const NEAR: u32 = 2;

/// Memory in each node whose latency can be measured at any time.
#[derive(Debug, Default)]
pub struct LoadProbe(BTreeMap<NodeId, (NodeBuffer, Idle)>);

/// The latency of an idle node, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Idle {
    /// In larger memory.
    known_ns: u32,
    /// The least that was measured here. It is no more than the other one, as the node may be loaded from the start, and is
    /// near it.
    least_ns: u32,
}

impl Idle {
    /// The latency that larger memory has now, where lines that were flushed take `ns`.
    fn loaded_ns(&mut self, ns: u32) -> u32 {
        self.least_ns = self.least_ns.min(ns).max(self.known_ns / NEAR).max(1);
        let loaded_ns = u64::from(self.known_ns) * u64::from(ns) / u64::from(self.least_ns);
        u32::try_from(loaded_ns).unwrap_or(u32::MAX)
    }
}

impl LoadProbe {
    /// Memory in these nodes, whose latency was measured. It is empty where a probe of one of them does not work.
    pub fn on(measured_ns: &BTreeMap<NodeId, u32>) -> Self {
        if !cfg!(target_arch = "x86_64") {
            return Self::default();
        }
        let mut buffers = BTreeMap::new();
        for (&node, &known_ns) in measured_ns {
            let buffer = match NodeBuffer::on(node, STEPS) {
                Ok(buffer) => buffer,
                Err(error) => {
                    tracing::info!("load of node {node} is not followed: {error}");
                    return Self::default();
                }
            };
            let ns = loaded_ns(&buffer);
            if ns > known_ns.saturating_mul(NEAR) || ns < known_ns / NEAR {
                tracing::info!(
                    "load of nodes is not followed: node {node} takes {ns} ns for lines that were flushed, and {known_ns} \
                     ns for others"
                );
                return Self::default();
            }
            let least_ns = ns.min(known_ns);
            let idle = Idle { known_ns, least_ns };
            buffers.insert(node, (buffer, idle));
        }
        Self(buffers)
    }

    /// Latency now of each tier that is one node, nanoseconds. Latency of several nodes depends on where the agent runs.
    pub fn of_tiers(&mut self, tiers: &Tiers) -> ByLevel<Option<u32>> {
        let is_simple = tiers.nodes().count() == tiers.count();
        ByLevel::from_fn(|level: Level| match tiers.at(level) {
            [node] if is_simple => {
                let (memory, idle) = self.0.get_mut(node)?;
                Some(idle.loaded_ns(loaded_ns(memory)))
            }
            _ => None,
        })
    }
}

/// The median latency of a few rounds, nanoseconds.
fn loaded_ns(memory: &NodeBuffer) -> u32 {
    let mut rounds = [0; ROUNDS];
    for round in &mut rounds {
        memory.flush();
        let began = Instant::now();
        let mut at = 0;
        for _ in 0..STEPS {
            at = memory.next(at);
        }
        std::hint::black_box(at);
        let ns = began.elapsed().as_nanos() / STEPS as u128;
        *round = u32::try_from(ns).unwrap_or(u32::MAX).max(1);
    }
    rounds.sort_unstable();
    rounds[ROUNDS / 2]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latency::load_ns;

    #[test]
    fn a_probe_that_does_not_agree_with_the_latency_known_is_not_used() {
        let node = NodeId(0);
        let buffer = NodeBuffer::on(node, STEPS).unwrap();
        let ns = loaded_ns(&buffer);
        let tiers: Tiers = "0/1".parse().unwrap();
        let of = |known_ns| LoadProbe::on(&[(node, known_ns)].into()).of_tiers(&tiers);
        assert_eq!(of(ns.saturating_mul(100)).0, [None; 4]);
        assert_eq!(of(ns / 100).0, [None; 4]);
    }

    #[test]
    fn load_is_seen_in_relation_to_the_least_latency_that_was_measured() {
        let mut idle = Idle {
            known_ns: 126,
            least_ns: 126,
        };
        // Nothing quicker was seen as yet: it may be load.
        assert_eq!(idle.loaded_ns(252), 252);
        assert_eq!(idle.loaded_ns(78), 126);
        assert_eq!(idle.loaded_ns(156), 252);
        assert_eq!(idle.loaded_ns(u32::MAX), u32::MAX);
        assert_eq!(idle.loaded_ns(0), 0);
    }

    /// It needs a machine whose loads take about as long twice; other programs make that a matter of luck.
    #[test]
    #[ignore = "depends on the machine"]
    fn flushed_lines_take_as_long_as_memory_that_no_cache_holds() {
        let known_ns = load_ns(NodeId(0)).unwrap();
        let tiers: Tiers = "0/1".parse().unwrap();
        let mut probe = LoadProbe::on(&[(NodeId(0), known_ns)].into());
        let began = Instant::now();
        let measured = probe.of_tiers(&tiers).0;
        let took = began.elapsed();
        eprintln!("{known_ns} ns before, {measured:?} now, in {took:?}");
        let ns = measured[0].expect("a latency");
        assert!(ns <= known_ns * 2 && ns >= known_ns / 2);
    }
}
