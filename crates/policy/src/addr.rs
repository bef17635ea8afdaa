//! Address spaces and units as types, so that guest-virtual and guest-physical addresses cannot be confused.

use std::fmt;
use std::ops::Range;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

/// Bytes in a base page (x86-64 and the usual arm64 configuration).
pub const PAGE_SIZE: u64 = 4096;

/// Bytes in a block, the unit of moves: a huge page of x86-64.
pub const BLOCK_SIZE: u64 = 2 * MIB;

/// Bytes that may be missing in a block whose small pages become a huge one: a sixteenth. The kernel fills them with zeros.
pub const COLLAPSE_HOLES_MAX: u64 = BLOCK_SIZE / 16;

/// Bytes in a mebibyte.
pub const MIB: u64 = 1 << 20;

/// A guest-virtual address (gVA): an address in one process of the guest.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct GuestVirtAddr(pub u64);

/// A guest-physical address (gPA): physical from the guest kernel's view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct GuestPhysAddr(pub u64);

/// A number of bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct ByteCount(pub u64);

/// A process id as the guest's kernel numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Pid(pub u32);

/// A NUMA node number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// The number of a 2 MiB block in a virtual address space, the unit of moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Block(#[serde(deserialize_with = "block_number")] pub u64);

/// Deserializes a block's number: at most that of the end of all addresses.
fn block_number<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let number = u64::deserialize(from)?;
    match number <= u64::MAX / BLOCK_SIZE + 1 {
        true => Ok(number),
        false => Err(D::Error::custom("a block beyond all addresses")),
    }
}

impl Block {
    /// The block that contains `addr`.
    pub fn of(addr: GuestVirtAddr) -> Self {
        Self(addr.0 / BLOCK_SIZE)
    }

    /// The blocks that overlap `range`.
    pub fn all_of(range: &VirtRange) -> impl Iterator<Item = Self> + use<> {
        Self::numbers_of(range).map(Self)
    }

    /// The numbers of the blocks that overlap `range`.
    pub fn numbers_of(range: &VirtRange) -> Range<u64> {
        range.start().0 / BLOCK_SIZE..range.end().0.div_ceil(BLOCK_SIZE)
    }

    /// Its first address; saturates at the last address.
    pub fn start(self) -> GuestVirtAddr {
        GuestVirtAddr(self.0.saturating_mul(BLOCK_SIZE))
    }
}

/// A half-open range of guest-virtual addresses, `[start, end)`; never empty or reversed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(
    try_from = "(GuestVirtAddr, GuestVirtAddr)",
    into = "(GuestVirtAddr, GuestVirtAddr)"
)]
pub struct VirtRange {
    start: GuestVirtAddr,
    end: GuestVirtAddr,
}

/// The ends of no range: they are equal or reversed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a range that is empty or reversed")]
pub struct NotARange;

impl TryFrom<(GuestVirtAddr, GuestVirtAddr)> for VirtRange {
    type Error = NotARange;

    fn try_from((start, end): (GuestVirtAddr, GuestVirtAddr)) -> Result<Self, NotARange> {
        Self::new(start, end).ok_or(NotARange)
    }
}

impl From<VirtRange> for (GuestVirtAddr, GuestVirtAddr) {
    fn from(VirtRange { start, end }: VirtRange) -> Self {
        (start, end)
    }
}

impl VirtRange {
    /// The range `[start, end)`, or `None` if it is empty or reversed.
    pub fn new(start: GuestVirtAddr, end: GuestVirtAddr) -> Option<Self> {
        (start < end).then_some(Self { start, end })
    }

    /// First address (inclusive).
    pub fn start(&self) -> GuestVirtAddr {
        self.start
    }

    /// One past the last address (exclusive).
    pub fn end(&self) -> GuestVirtAddr {
        self.end
    }

    /// Length in bytes, at least one.
    pub fn len(&self) -> ByteCount {
        ByteCount(self.end.0 - self.start.0)
    }

    /// Always false: a range has at least one byte. Exists because `len` does.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Whether `addr` lies inside.
    pub fn contains(&self, addr: GuestVirtAddr) -> bool {
        self.start <= addr && addr < self.end
    }

    /// The common part of both ranges, if any.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        Self::new(self.start.max(other.start), self.end.min(other.end))
    }
}

/// A half-open range of guest-physical addresses, `[start, end)`; never empty or reversed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PhysRange {
    start: GuestPhysAddr,
    end: GuestPhysAddr,
}

impl PhysRange {
    /// `bytes` from `start` on, or `None` if that is empty or exceeds the address space.
    pub fn new(start: GuestPhysAddr, bytes: ByteCount) -> Option<Self> {
        let end = GuestPhysAddr(start.0.checked_add(bytes.0)?);
        (start < end).then_some(Self { start, end })
    }

    /// First address (inclusive).
    pub fn start(&self) -> GuestPhysAddr {
        self.start
    }

    /// One past the last address (exclusive).
    pub fn end(&self) -> GuestPhysAddr {
        self.end
    }

    /// Length in bytes, at least one.
    pub fn len(&self) -> ByteCount {
        ByteCount(self.end.0 - self.start.0)
    }

    /// Always false: a range has at least one byte. Exists because `len` does.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Whether all of `other` lies inside.
    pub fn covers(&self, other: &Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }
}

impl fmt::Display for ByteCount {
    /// In the largest unit that shows it exactly: `96 MiB`, `12 KiB`, `7 bytes`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("0 bytes"),
            n if n.is_multiple_of(1 << 30) => write!(f, "{} GiB", n >> 30),
            n if n.is_multiple_of(MIB) => write!(f, "{} MiB", n >> 20),
            n if n.is_multiple_of(1 << 10) => write!(f, "{} KiB", n >> 10),
            n => write!(f, "{n} bytes"),
        }
    }
}

impl fmt::Display for GuestVirtAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gVA {:#x}", self.0)
    }
}

impl fmt::Display for GuestPhysAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gPA {:#x}", self.0)
    }
}

impl fmt::Display for VirtRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gVA [{:#x}, {:#x})", self.start.0, self.end.0)
    }
}

impl fmt::Display for PhysRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gPA [{:#x}, {:#x})", self.start.0, self.end.0)
    }
}

impl fmt::Display for Pid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
