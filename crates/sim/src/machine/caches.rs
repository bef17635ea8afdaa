//! The data caches of a core and its prefetchers: where a line is found, and at which cost.

use super::assoc::Assoc;
use super::cpu::CpuModel;
use super::ledger::Cause;
use super::memory::Memory;

/// Streams that a core's prefetchers follow at once (assumed; the lab's plugin follows as many).
const STREAMS: usize = 8;

/// A number that no line has.
const NO_LINE: u64 = u64::MAX;

/// The data caches of a core and their latencies.
#[derive(Debug, Clone)]
pub(super) struct Caches {
    l1: Assoc<(), 12>,
    l2: Assoc<(), 16>,
    pub(super) hit_ps: [u64; 2],
    /// The last line of each stream or possible stream.
    streams: [u64; STREAMS],
    /// The stream to replace next.
    oldest: usize,
    /// The path of the last line while that line is clean. A store to it will cause a write-back over this path.
    pub(super) clean_from: Option<usize>,
    /// The core's socket, and the first of its paths to nodes.
    pub(super) socket: usize,
    first_path: usize,
}

/// Where a line was found, and the cost.
pub(super) struct Found {
    pub(super) ps: u64,
    pub(super) cause: Cause,
    /// The path that it came over; unused for data from caches.
    pub(super) path: usize,
}

impl Found {
    #[inline(always)]
    fn in_cache(ps: u64) -> Self {
        Self {
            ps,
            cause: Cause::Cache,
            path: 0,
        }
    }
}

impl Caches {
    /// Empty caches of a core on the first socket.
    pub(super) fn new(cpu: &CpuModel) -> Self {
        let [l1, l2, _] = cpu.caches;
        Self {
            l1: Assoc::new(l1.geometry),
            l2: Assoc::new(l2.geometry),
            hit_ps: [l1.hit_ps, l2.hit_ps],
            streams: [NO_LINE - 1; STREAMS],
            oldest: 0,
            clean_from: None,
            socket: 0,
            first_path: 0,
        }
    }

    /// The caches of a core on a socket with these paths to memory.
    pub(super) fn on_socket(self, socket: usize, memory: &Memory) -> Self {
        Self {
            socket,
            first_path: memory.first_path(socket),
            ..self
        }
    }

    /// Counts one write-back, for a store to the line of the last access.
    #[inline(always)]
    pub(super) fn write_back(&mut self, memory: &mut Memory) {
        if let Some(path) = self.clean_from.take() {
            let tier = &mut memory.paths[path];
            tier.lines_written += tier.granule_lines;
        }
    }

    /// Whether a miss on this line continues a stream. If not, the line may begin a stream.
    #[inline(always)]
    fn is_predicted(&mut self, line: u64) -> bool {
        let before = line.wrapping_sub(1);
        // Without branches, as any stream may match.
        let matches = self.streams.iter().enumerate();
        let matches = matches.fold(0u32, |m, (i, &last)| m | u32::from(last == before) << i);
        let is_predicted = matches != 0;
        let slot = if is_predicted {
            matches.trailing_zeros() as usize
        } else {
            self.oldest = (self.oldest + 1) % STREAMS;
            self.oldest
        };
        self.streams[slot] = line;
        is_predicted
    }

    /// Fetches a line. With `stream`, the next line in a row costs less.
    #[inline(always)]
    pub(super) fn fetch<const CACHES: bool>(
        &mut self,
        memory: &mut Memory,
        line: u64,
        stream: bool,
    ) -> Found {
        if CACHES {
            if self.l1.touch(line, ()) {
                return Found::in_cache(self.hit_ps[0]);
            }
            if self.l2.touch(line, ()) {
                return Found::in_cache(self.hit_ps[1]);
            }
            if memory.l3[self.socket].touch(line, ()) {
                return Found::in_cache(memory.l3_hit_ps);
            }
        }
        if memory.flat.is_some() {
            return self.fetch_flat(memory, line, stream);
        }
        let path = self.first_path + memory.node_of_line(line);
        let tier = &mut memory.paths[path];
        let (ps, lines) = if stream && self.is_predicted(line) {
            (tier.stream_ps, 1)
        } else {
            (tier.latency_ps, tier.granule_lines)
        };
        tier.lines_read += lines;
        let cause = tier.cause;
        if stream {
            self.clean_from = Some(path);
        }
        Found { ps, cause, path }
    }

    /// Fetches a line from memory that the memory controller tiers: path 0 leads to the fast tier, path 1 to the slow
    /// one. Out of line, as most machines have no such memory.
    #[cold]
    #[inline(never)]
    fn fetch_flat(&mut self, memory: &mut Memory, line: u64, stream: bool) -> Found {
        let is_hit = memory.flat.as_mut().is_none_or(|flat| flat.access(line));
        let (fast, slow) = memory.paths.split_at_mut(1);
        let (fast, slow) = (&mut fast[0], &mut slow[0]);
        let is_predicted = stream && self.is_predicted(line);
        if stream {
            // The memory controller has moved the accessed line to fast memory.
            self.clean_from = Some(0);
        }
        fast.lines_read += 1;
        if is_hit {
            let ps = match is_predicted {
                true => fast.stream_ps,
                false => fast.latency_ps,
            };
            let cause = Cause::Fast;
            return Found { ps, cause, path: 0 };
        }
        slow.lines_read += slow.granule_lines;
        slow.lines_written += slow.granule_lines;
        fast.lines_written += 1;
        let ps = match is_predicted {
            true => slow.stream_ps,
            false => fast.latency_ps + slow.latency_ps,
        };
        let cause = Cause::Slow;
        Found { ps, cause, path: 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::cpu::ICE_LAKE_SP;

    #[test]
    fn as_many_streams_are_followed_side_by_side_as_there_are() {
        let predicted = |streams: u64| {
            let mut caches = Caches::new(&ICE_LAKE_SP);
            let lines = (0..100).flat_map(|i| (0..streams).map(move |s| s * 10_000 + i));
            lines.filter(|&line| caches.is_predicted(line)).count() as u64
        };
        for streams in 1..=STREAMS as u64 {
            assert_eq!(predicted(streams), 99 * streams);
        }
        assert_eq!(predicted(STREAMS as u64 + 1), 0);
    }
}
