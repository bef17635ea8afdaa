//! Memory shared by cores: the third-level cache and the tiers behind it.

use super::assoc::Assoc;
use super::cpu::CpuModel;
use super::flat::Flat;
use super::tier::{LINE_BYTES, Tier, TierModel};

/// log2 of a cache line's bytes.
pub(crate) const LINE_BITS: u32 = LINE_BYTES.trailing_zeros();

/// A tier of the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TierId {
    /// Lower latency.
    Fast,
    /// Higher latency.
    Slow,
}

/// Third-level cache and tiers. Host-physical memory is the fast tier, then the slow one.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    pub(crate) l3: Assoc<(), 12>,
    pub(crate) l3_hit_ps: u64,
    pub(crate) tiers: [Tier; 2],
    /// Memory tiered by the memory controller.
    pub(crate) flat: Option<Box<Flat>>,
    /// First line of the slow tier.
    slow_line: u64,
}

impl Memory {
    /// `fast_end` is the host-physical address where the slow tier begins.
    pub(crate) fn new(cpu: &CpuModel, tiers: [TierModel; 2], fast_end: u64) -> Self {
        Self {
            l3: Assoc::new(cpu.caches[2].geometry),
            l3_hit_ps: cpu.caches[2].hit_ps,
            tiers: tiers.map(|t| Tier::new(t, cpu.core_stream_bytes_per_s)),
            flat: None,
            slow_line: fast_end >> LINE_BITS,
        }
    }

    /// The tier of a line.
    #[inline(always)]
    pub(crate) fn tier_of_line(&self, line: u64) -> TierId {
        if line >= self.slow_line {
            TierId::Slow
        } else {
            TierId::Fast
        }
    }

    /// The first page of slow memory, of `2^page_bits` bytes.
    pub(crate) fn first_slow_page(&self, page_bits: u32) -> u32 {
        (self.slow_line >> (page_bits - LINE_BITS)) as u32
    }
}
