//! Sizes of processors' TLBs. The simulator and the lab's exact emulator model the same ones.

use crate::Cpu;

/// The shape of a set-associative array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Sets; a power of two.
    pub sets: u32,
    /// Entries in each; at least one.
    pub ways: u32,
}

/// Entries of a core's TLBs for data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TlbSizes {
    /// First level, 4 KiB pages; at most 4 ways, as the next two.
    pub l1_4k: Geometry,
    /// First level, 2 MiB pages.
    pub l1_2m: Geometry,
    /// First level, 1 GiB pages.
    pub l1_1g: Geometry,
    /// Second level, for 4 KiB and 2 MiB pages; at most 16 ways.
    pub l2: Geometry,
    /// Second level, 1 GiB pages; at most 4 ways.
    pub l2_1g: Geometry,
    /// Whether the second level holds 4 KiB pages only.
    pub is_l2_4k_only: bool,
}

const fn geometry(sets: u32, ways: u32) -> Geometry {
    Geometry { sets, ways }
}

/// From Intel's optimization manual.
const ICE_LAKE_SP: TlbSizes = TlbSizes {
    l1_4k: geometry(16, 4),
    l1_2m: geometry(8, 4),
    l1_1g: geometry(2, 4),
    l2: geometry(128, 16),
    l2_1g: geometry(4, 4),
    is_l2_4k_only: false,
};

impl Cpu {
    /// The sizes of its TLBs. The lab's own CPU stands for any; it has Ice Lake-SP's.
    pub const fn tlb(self) -> TlbSizes {
        match self {
            Self::IceLakeSp | Self::Lab | Self::LabHost => ICE_LAKE_SP,
            // The fully associative first level is modelled with four ways.
            Self::Zen3 => TlbSizes {
                l1_4k: geometry(16, 4),
                l1_2m: geometry(16, 4),
                l1_1g: geometry(16, 4),
                ..ICE_LAKE_SP
            },
            Self::SandyBridge => TlbSizes {
                l1_4k: geometry(16, 4),
                l1_2m: geometry(8, 4),
                l1_1g: geometry(1, 4),
                l2: geometry(128, 4),
                is_l2_4k_only: true,
                ..ICE_LAKE_SP
            },
        }
    }
}
