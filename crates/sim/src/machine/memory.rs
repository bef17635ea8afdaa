//! Memory shared by cores: the third-level cache and the tiers behind it.

use demeter_policy::Tier;

use super::assoc::Assoc;
use super::cpu::CpuModel;
use super::flat::Flat;
use super::tier::{LINE_BYTES, LoadedTier, TierModel};

/// log2 of a cache line's bytes.
pub(crate) const LINE_BITS: u32 = LINE_BYTES.trailing_zeros();

/// Third-level cache and tiers. Host-physical memory is the fast tier, then the slow one.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    pub(crate) l3: Assoc<(), 12>,
    pub(crate) l3_hit_ps: u64,
    pub(crate) tiers: [LoadedTier; 2],
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
            tiers: tiers.map(|t| LoadedTier::new(t, cpu.core_stream_bytes_per_s)),
            flat: None,
            slow_line: fast_end >> LINE_BITS,
        }
    }

    /// The tier of a line.
    #[inline(always)]
    pub(crate) fn tier_of_line(&self, line: u64) -> Tier {
        if line >= self.slow_line {
            Tier::Slow
        } else {
            Tier::Fast
        }
    }

    /// The first page of slow memory, of `2^page_bits` bytes.
    pub(crate) fn first_slow_page(&self, page_bits: u32) -> u32 {
        (self.slow_line >> (page_bits - LINE_BITS)) as u32
    }
}
