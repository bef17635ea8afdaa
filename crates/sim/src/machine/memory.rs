//! Memory shared by cores: the third-level caches and the nodes behind them.

use demeter_policy::{Level, Socket, Tier};

use super::assoc::Assoc;
use super::cpu::CpuModel;
use super::flat::Flat;
use super::tier::{LINE_BYTES, LoadedTier, TierModel};

/// log2 of a cache line's bytes.
pub(crate) const LINE_BITS: u32 = LINE_BYTES.trailing_zeros();

/// A memory node, by its number in the scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NodeIndex(pub(crate) usize);

impl From<Tier> for NodeIndex {
    /// The node of a tier on a machine of two nodes.
    fn from(tier: Tier) -> Self {
        Self(tier as usize)
    }
}

/// A node's tier and socket, and its memory as each socket reaches it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeModel {
    pub(crate) level: Level,
    pub(crate) socket: Socket,
    /// By socket.
    pub(crate) from: Vec<TierModel>,
}

/// Third-level caches and nodes. Host-physical memory is that of all nodes, in the order of their numbers.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    /// The cache of each socket.
    pub(crate) l3: Vec<Assoc<(), 12>>,
    pub(crate) l3_hit_ps: u64,
    /// The path from each socket to each node, those of the first socket first.
    pub(crate) paths: Vec<LoadedTier>,
    nodes: usize,
    /// Memory tiered by the memory controller.
    pub(crate) flat: Option<Box<Flat>>,
    /// First line of the second node, and of all later ones. Most machines have two nodes.
    second: u64,
    later: Vec<u64>,
}

impl Memory {
    /// `starts` are the host-physical addresses where all nodes but the first begin, in ascending order.
    pub(crate) fn new(cpu: &CpuModel, nodes: &[NodeModel], starts: &[u64]) -> Self {
        let sockets = nodes.first().map_or(1, |node| node.from.len());
        let paths_of = |socket: usize| {
            let paths = nodes
                .iter()
                .map(move |node| (node.from[socket], node.level));
            paths.map(|(model, level)| LoadedTier::new(model, level, cpu.core_stream_bytes_per_s))
        };
        let mut starts = starts.iter().map(|start| start >> LINE_BITS);
        Self {
            l3: vec![Assoc::new(cpu.caches[2].geometry); sockets],
            l3_hit_ps: cpu.caches[2].hit_ps,
            paths: (0..sockets).flat_map(paths_of).collect(),
            nodes: nodes.len(),
            flat: None,
            second: starts.next().unwrap_or(u64::MAX),
            later: starts.collect(),
        }
    }

    /// A fast and a slow node of one socket. `fast_end` is the host-physical address where the slow one begins.
    pub(crate) fn of_tiers(cpu: &CpuModel, tiers: [TierModel; 2], fast_end: u64) -> Self {
        let levels = [Level::First, Level::Second].into_iter();
        let nodes = levels.zip(tiers).map(|(level, tier)| NodeModel {
            level,
            socket: Socket::default(),
            from: vec![tier],
        });
        Self::new(cpu, &nodes.collect::<Vec<_>>(), &[fast_end])
    }

    /// The node of a line.
    #[inline(always)]
    pub(crate) fn node_of_line(&self, line: u64) -> usize {
        let node = usize::from(line >= self.second);
        match self.later.is_empty() {
            true => node,
            false => node + self.later.iter().filter(|&&start| line >= start).count(),
        }
    }

    /// The first of a socket's paths.
    pub(crate) fn first_path(&self, socket: usize) -> usize {
        socket * self.nodes
    }

    /// The fast and the slow tier of a machine of two nodes.
    pub(crate) fn tiers(&self) -> [&LoadedTier; 2] {
        [&self.paths[0], &self.paths[1]]
    }

    /// Resets all load to idle.
    pub(crate) fn rest(&mut self) {
        self.paths.iter_mut().for_each(LoadedTier::rest);
    }

    /// Ends a window of time. Its traffic sets the latency of the next window; each line stands for `2^k` real ones.
    pub(crate) fn end_window(&mut self, window_ps: u64, k: u32) {
        for node in 0..self.nodes {
            let paths = || self.paths.iter().skip(node).step_by(self.nodes);
            let lines = paths().fold([0, 0], |sum: [u64; 2], path| {
                let lines = path.lines();
                [sum[0] + lines[0], sum[1] + lines[1]]
            });
            // The node is as quick as its quickest path.
            let quickest = paths().max_by_key(|path| path.peak_bytes_per_s());
            let of_node = quickest.map_or(0.0, |path| path.used_by(lines, window_ps, k));
            for path in self.paths.iter_mut().skip(node).step_by(self.nodes) {
                let own = path.used_by(path.lines(), window_ps, k);
                path.end_window(own.max(of_node));
            }
        }
    }

    /// The first page of slow memory, of `2^page_bits` bytes.
    pub(crate) fn first_slow_page(&self, page_bits: u32) -> u32 {
        (self.second >> (page_bits - LINE_BITS)) as u32
    }
}

#[cfg(test)]
mod tests {
    use demeter_scenario::Curve;

    use super::super::cpu::ICE_LAKE_SP;
    use super::*;

    fn path(ns: u64, gbps: u64) -> TierModel {
        TierModel {
            latency_ps: ns * 1000,
            read_bytes_per_s: gbps * 1_000_000_000,
            write_bytes_per_s: gbps * 1_000_000_000,
            granule_lines: 1,
            curve: Curve::default(),
            loaded_percent: 100,
            others_bytes_per_s: 0,
        }
    }

    /// Two sockets with a node each. Windows of a millisecond, in which the paths read at these rates, GB/s.
    fn loaded(gbps: [u64; 4]) -> Vec<u64> {
        let node = |from: [TierModel; 2]| NodeModel {
            level: Level::First,
            socket: Socket::default(),
            from: from.into(),
        };
        let nodes = [
            node([path(80, 100), path(140, 40)]),
            node([path(140, 40), path(80, 100)]),
        ];
        let mut memory = Memory::new(&ICE_LAKE_SP, &nodes, &[1 << 30]);
        for _ in 0..50 {
            for (path, gbps) in memory.paths.iter_mut().zip(gbps) {
                path.lines_read = gbps * 1_000_000 / LINE_BYTES;
            }
            memory.end_window(1_000_000_000, 0);
        }
        memory.paths.iter().map(|path| path.latency_ps).collect()
    }

    #[test]
    fn a_path_is_as_busy_as_itself_or_as_the_node_behind_it() {
        // Paths by socket and node: 0 to 0, 0 to 1, 1 to 0, 1 to 1.
        assert_eq!(loaded([0; 4]), [80_000, 140_000, 140_000, 80_000]);
        let full_link = loaded([0, 0, 36, 0]);
        assert!(full_link[2] > 140_000 * 3 / 2, "{full_link:?}");
        assert!((80_001..95_000).contains(&full_link[0]), "{full_link:?}");
        assert_eq!((full_link[1], full_link[3]), (140_000, 80_000));
        // The node behind both paths is full, though no link is.
        let full_node = loaded([70, 0, 20, 0]);
        assert!(full_node[0] > 80_000 * 3 / 2, "{full_node:?}");
        assert!(full_node[2] > 140_000 * 3 / 2, "{full_node:?}");
    }
}
