//! CPU models: sizes and latencies of real processors' caches and TLBs, with sources. Figures without a source are
//! marked *assumed*.

use demeter_scenario::{Cpu, Geometry, TlbSizes};

use super::assoc::{WAYS_MAX, is_sound};
use super::cost::{CostModel, EMULATED_COSTS, EMULATED_HOST_COSTS, EXACT_COSTS, X86_COSTS};

/// The kind of a core's TLB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlbKind {
    /// Hardware TLB: tagged by address space, one entry for a page of any size.
    Hardware,
    /// Emulated TLB (QEMU's `cputlb`). It holds huge pages in pieces, as base pages. Dropping one of them, or a context
    /// switch, drops everything. Walks are the emulator's own work.
    Soft,
    /// The TLB that the lab's exact emulator models: entries as in hardware, but walks take no time. Its CPUs have no
    /// PCID, so a context switch drops everything.
    Modelled,
}

/// TLBs and page-walk caches of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TlbModel {
    /// How it is implemented.
    pub kind: TlbKind,
    /// Entries of the TLBs.
    pub sizes: TlbSizes,
    /// Page-walk caches of one dimension: for entries that map 2 MiB, 1 GiB, 512 GiB and 256 TiB;
    /// at most 4 ways each.
    pub walk: [Geometry; 4],
    /// A hit in the second level.
    pub l2_hit_ps: u64,
}

/// A level of data cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheModel {
    /// Its shape, in lines of 64 bytes.
    pub geometry: Geometry,
    /// Load-to-use latency of a hit.
    pub hit_ps: u64,
}

/// A processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuModel {
    /// Its name.
    pub name: &'static str,
    /// Levels of its page tables, 4 or 5, for guest and second-level tables.
    pub levels: u32,
    /// TLBs and page-walk caches.
    pub tlb: TlbModel,
    /// First and second level of each core, and the shared third level; at most 12, 16 and 12 ways.
    pub caches: [CacheModel; 3],
    /// Costs of events.
    pub costs: CostModel,
    /// Bytes per second that one core can stream.
    pub core_stream_bytes_per_s: u64,
    /// Comparing an address with a segment's bounds: one cycle, as assumed by the authors of direct segments.
    pub bound_check_ps: u64,
}

const fn geometry(sets: u32, ways: u32) -> Geometry {
    Geometry { sets, ways }
}

/// Intel Ice Lake-SP (Xeon Gold 6354 class), 2.9 GHz.
///
/// The L2 of 20 ways and the L3 are rounded to sizes that the model
/// supports (16 and 12 ways, a power of two of sets).
pub const ICE_LAKE_SP: CpuModel = CpuModel {
    name: "ice-lake-sp",
    levels: 4,
    tlb: TlbModel {
        kind: TlbKind::Hardware,
        sizes: Cpu::IceLakeSp.tlb(),
        // Assumed, as for Skylake.
        walk: [
            geometry(8, 4),
            geometry(1, 4),
            geometry(1, 4),
            geometry(1, 2),
        ],
        // 7 cycles.
        l2_hit_ps: 2400,
    },
    caches: [
        // 48 KiB, 5 cycles, of which an out-of-order core hides most: assumed 1 cycle.
        CacheModel {
            geometry: geometry(64, 12),
            hit_ps: 345,
        },
        // 1 MiB, 14 cycles.
        CacheModel {
            geometry: geometry(1024, 16),
            hit_ps: 4800,
        },
        // 48 MiB, about 70 cycles.
        CacheModel {
            geometry: geometry(65536, 12),
            hit_ps: 24_000,
        },
    ],
    costs: X86_COSTS,
    core_stream_bytes_per_s: 12_000_000_000,
    bound_check_ps: 345,
};

/// AMD Zen 3 (Milan), 3.4 GHz.
pub const ZEN_3: CpuModel = CpuModel {
    name: "zen-3",
    tlb: TlbModel {
        sizes: Cpu::Zen3.tlb(),
        ..ICE_LAKE_SP.tlb
    },
    caches: [
        CacheModel {
            geometry: geometry(64, 8),
            hit_ps: 300,
        },
        CacheModel {
            geometry: geometry(1024, 8),
            hit_ps: 3500,
        },
        CacheModel {
            geometry: geometry(65536, 8),
            hit_ps: 14_000,
        },
    ],
    bound_check_ps: 294,
    ..ICE_LAKE_SP
};

/// Intel Sandy Bridge-EN (Xeon E5-2430 class: six cores a socket), 2.2 GHz.
///
/// Caches are from Intel's optimization manual. The L3 of 20 ways is
/// rounded to 12. The authors of direct segments do not name their exact model.
pub const SANDY_BRIDGE: CpuModel = CpuModel {
    name: "sandy-bridge",
    tlb: TlbModel {
        sizes: Cpu::SandyBridge.tlb(),
        // 7 cycles.
        l2_hit_ps: 3200,
        ..ICE_LAKE_SP.tlb
    },
    caches: [
        // 32 KiB; assumed 1 cycle, as of Ice Lake.
        CacheModel {
            geometry: geometry(64, 8),
            hit_ps: 455,
        },
        // 256 KiB, 12 cycles.
        CacheModel {
            geometry: geometry(512, 8),
            hit_ps: 5500,
        },
        // 15 MiB, about 30 cycles.
        CacheModel {
            geometry: geometry(16384, 12),
            hit_ps: 13_600,
        },
    ],
    bound_check_ps: 455,
    ..ICE_LAKE_SP
};

/// The lab's emulator.
///
/// Its only cache is the plugin's filter of 16 Ki lines. Hits and translations are free: the emulator's work for them
/// is part of the time of the next miss.
pub(crate) fn emulator() -> CpuModel {
    let nothing = CacheModel {
        geometry: geometry(1, 1),
        hit_ps: 0,
    };
    CpuModel {
        name: "emulator",
        levels: 4,
        tlb: TlbModel {
            kind: TlbKind::Soft,
            sizes: TlbSizes {
                l1_4k: geometry(1 << 15, 4),
                ..Cpu::Lab.tlb()
            },
            l2_hit_ps: 0,
            ..ICE_LAKE_SP.tlb
        },
        caches: [
            CacheModel {
                geometry: geometry(1 << 14, 1),
                ..nothing
            },
            nothing,
            nothing,
        ],
        costs: EMULATED_COSTS,
        core_stream_bytes_per_s: EMULATED_STREAM,
        bound_check_ps: 0,
    }
}

/// The lab's exact emulator (docs/src/emulator.md).
pub(crate) fn exact_emulator() -> CpuModel {
    let emulator = emulator();
    CpuModel {
        name: "exact-emulator",
        tlb: TlbModel {
            kind: TlbKind::Modelled,
            sizes: Cpu::Lab.tlb(),
            ..emulator.tlb
        },
        costs: EXACT_COSTS,
        core_stream_bytes_per_s: EXACT_STREAM,
        ..emulator
    }
}

/// The emulator as a host of VMs.
pub(crate) fn emulated_host() -> CpuModel {
    CpuModel {
        name: "emulated-host",
        costs: EMULATED_HOST_COSTS,
        ..emulator()
    }
}

/// Bytes per second that the emulated CPU copies, limited by its own instructions. Measured: 320 MiB of huge pages in a
/// second.
const EMULATED_STREAM: u64 = 350_000_000;

/// Bytes per second that a CPU copies by the exact emulator's clock, at a nanosecond an instruction: 2 MiB take 0.27 ms
/// (docs/src/emulator.md).
const EXACT_STREAM: u64 = 7_700_000_000;

/// Error: a geometry that the model does not support.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{part} of {sets} sets and {ways} ways: give a power of two of sets and 1 to {ways_max} ways"
)]
pub struct UnsoundGeometry {
    part: &'static str,
    sets: u32,
    ways: u32,
    ways_max: usize,
}

impl CpuModel {
    /// Checks the geometry of every array.
    pub fn check(&self) -> Result<(), UnsoundGeometry> {
        let tlb = &self.tlb;
        let sizes = &tlb.sizes;
        let small = [sizes.l1_4k, sizes.l1_2m, sizes.l1_1g, sizes.l2_1g].map(|g| ("a TLB", g, 4));
        let walk = tlb.walk.map(|g| ("a page-walk cache", g, 4));
        let [l1, l2, l3] = self.caches.map(|c| c.geometry);
        let large = [
            ("the second-level TLB", sizes.l2, WAYS_MAX),
            ("the first-level cache", l1, 12),
            ("the second-level cache", l2, WAYS_MAX),
            ("the third-level cache", l3, 12),
        ];
        let unsound = small
            .into_iter()
            .chain(walk)
            .chain(large)
            .find(|&(_, g, ways_max)| !is_sound(g, ways_max));
        match unsound {
            None => Ok(()),
            Some((part, Geometry { sets, ways }, ways_max)) => Err(UnsoundGeometry {
                part,
                sets,
                ways,
                ways_max,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_models_are_sound_and_bad_ones_are_not() {
        for cpu in [
            ICE_LAKE_SP,
            ZEN_3,
            SANDY_BRIDGE,
            emulator(),
            exact_emulator(),
            emulated_host(),
        ] {
            cpu.check().unwrap();
        }
        let mut bad = ZEN_3;
        bad.caches[2].geometry.ways = 0;
        assert!(bad.check().unwrap_err().to_string().contains("0 ways"));
        bad = ZEN_3;
        bad.tlb.sizes.l2.sets = 96;
        assert!(bad.check().unwrap_err().to_string().contains("96 sets"));
    }
}
