//! A program's memory: regions in allocation order, their addresses, and first touch.

use std::ops::Range;

use demeter_policy::{ByteCount, GuestVirtAddr, VirtRange};

use crate::{Access, Batch, Region};

/// Bytes of a cache line.
pub(crate) const LINE: u64 = 64;

/// The regions of a program, and their addresses once placed.
#[derive(Debug, Clone)]
pub(crate) struct ProgramMemory {
    regions: Vec<Region>,
    /// Number of regions before the program's own: the idle one, if any.
    skip: usize,
    bases: Vec<GuestVirtAddr>,
    /// Processes that still touch memory for the first time. They take turns.
    untouched: Vec<Untouched>,
    /// The process whose turn it is.
    turn: usize,
}

/// Regions that one process touches in order.
#[derive(Debug, Clone)]
struct Untouched {
    regions: Range<usize>,
    /// The next page of the first region.
    offset: u64,
}

/// A part of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Index among the program's own regions.
    pub(crate) region: usize,
    /// Byte offset into it.
    pub(crate) offset: u64,
    /// Length.
    pub(crate) bytes: u64,
}

impl ProgramMemory {
    /// Memory of these regions, not yet placed. It follows `idle_bytes` that are touched first and never again.
    pub(crate) fn new(idle_bytes: u64, mut regions: Vec<Region>) -> Self {
        let skip = usize::from(idle_bytes > 0);
        if skip > 0 {
            regions.insert(0, region("idle", idle_bytes));
        }
        Self {
            bases: vec![GuestVirtAddr(0); regions.len()],
            untouched: vec![Untouched {
                regions: 0..regions.len(),
                offset: 0,
            }],
            turn: 0,
            regions,
            skip,
        }
    }

    /// The memory of processes that start together: they touch their pages in turn, instead of one after the other.
    pub(crate) fn touched_in_turn(self) -> Self {
        let mut from = 0;
        let of_processes = self.regions.chunk_by(|a, b| a.process == b.process);
        let untouched = of_processes.map(|regions| {
            let first = from;
            from += regions.len();
            Untouched {
                regions: first..from,
                offset: 0,
            }
        });
        let untouched = untouched.collect();
        Self { untouched, ..self }
    }

    /// All regions, the idle one first.
    pub(crate) fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Stores the address of each region.
    pub(crate) fn place(&mut self, bases: &[GuestVirtAddr]) {
        self.bases.clear();
        self.bases.extend_from_slice(bases);
    }

    /// The address of the program's `region`.
    #[inline]
    pub(crate) fn base(&self, region: usize) -> u64 {
        self.bases[self.skip + region].0
    }

    /// The extent's addresses; none if it is empty.
    pub(crate) fn range(&self, extent: Extent) -> Option<VirtRange> {
        let start = self.base(extent.region) + extent.offset;
        VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(start + extent.bytes))
    }

    /// Appends stores to untouched pages that are mapped from the start, until the batch is full. They follow
    /// allocation and address order. Returns false if none was left.
    pub(crate) fn populate(&mut self, page_bytes: u64, out: &mut Batch) -> bool {
        while out.room() > 0 && !self.untouched.is_empty() {
            self.turn %= self.untouched.len();
            let process = &mut self.untouched[self.turn];
            let region = process.regions.start;
            if process.regions.is_empty() {
                self.untouched.remove(self.turn);
            } else if process.offset >= self.regions[region].start.0 {
                process.regions.start += 1;
                process.offset = 0;
            } else {
                out.push(store(self.bases[region].0 + process.offset));
                process.offset += page_bytes;
                self.turn += 1;
            }
        }
        !out.accesses().is_empty()
    }
}

/// A region of a program.
pub(crate) fn region(name: &str, bytes: u64) -> Region {
    Region {
        name: name.into(),
        bytes: ByteCount(bytes),
        start: ByteCount(bytes),
        process: 0,
    }
}

/// A load of the byte address `gva`.
#[inline]
pub(crate) fn load(gva: u64) -> Access {
    Access::load(GuestVirtAddr(gva))
}

/// A store to the byte address `gva`.
#[inline]
pub(crate) fn store(gva: u64) -> Access {
    Access::store(GuestVirtAddr(gva))
}
