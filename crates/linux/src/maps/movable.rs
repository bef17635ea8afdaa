//! Divides a process's mappings into movable and forbidden memory.

use demeter_policy::{BLOCK_SIZE, Block, VirtRange};

use super::largest::Largest;
use super::{Backing, Vma, VmaKind};

/// Movable memory of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Movable {
    /// Anonymous and shared memory, and files of which at least a block is mapped: sorted, disjoint, at most
    /// [`super::RANGES_MAX`].
    pub pieces: Vec<Piece>,
    /// Number of smaller pieces beyond the limit.
    pub left_out: u64,
    /// Blocks with memory that must not move, since memory moves by the block: sorted, disjoint.
    pub forbidden: Vec<VirtRange>,
}

/// A piece of movable memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Its addresses. Adjacent private memory is one piece.
    pub range: VirtRange,
    /// The mapped part of an object, if others may map it, too.
    pub backing: Option<Backing>,
}

impl Movable {
    /// The parts of sorted, disjoint ranges outside of forbidden blocks. Adjacent parts are joined.
    pub fn without_forbidden(&self, ranges: impl IntoIterator<Item = VirtRange>) -> Vec<VirtRange> {
        let mut left: Vec<VirtRange> = vec![];
        for range in ranges {
            let mut start = range.start();
            let next = self.forbidden.partition_point(|f| f.end() <= start);
            for forbidden in &self.forbidden[next..] {
                if forbidden.start() >= range.end() {
                    break;
                }
                join(&mut left, VirtRange::new(start, forbidden.start()));
                start = forbidden.end();
            }
            join(&mut left, VirtRange::new(start, range.end()));
        }
        left
    }
}

/// Appends a range that starts after the last one's start; adjacent or overlapping ranges are joined.
fn join(ranges: &mut Vec<VirtRange>, range: Option<VirtRange>) {
    let Some(range) = range else { return };
    match ranges.last_mut().filter(|last| last.end() >= range.start()) {
        Some(last) => {
            let end = last.end().max(range.end());
            *last = VirtRange::new(last.start(), end).unwrap_or(range);
        }
        None => ranges.push(range),
    }
}

/// Divides mappings into movable and forbidden memory.
pub(super) struct Sorting {
    pieces: Largest<Piece>,
    forbidden: Vec<VirtRange>,
}

impl Sorting {
    pub(super) fn new() -> Self {
        Self {
            pieces: Largest::new(|piece: &Piece| piece.range.len().0),
            forbidden: vec![],
        }
    }

    pub(super) fn add(&mut self, vma: &Vma, may_move: &mut impl FnMut(&Vma) -> bool) {
        if vma.kind == VmaKind::Special {
            return;
        }
        if !may_move(vma) {
            let blocks = Block::numbers_of(&vma.range);
            let (start, end) = (Block(blocks.start).start(), Block(blocks.end).start());
            return join(&mut self.forbidden, VirtRange::new(start, end));
        }
        let is_movable = match vma.kind {
            VmaKind::Anonymous | VmaKind::Shmem => true,
            // A program maps dozens of small libraries, which many programs share.
            VmaKind::File => vma.range.len().0 >= BLOCK_SIZE,
            VmaKind::Stack | VmaKind::Special => false,
        };
        if !is_movable || !(vma.readable || vma.writable) {
            return;
        }
        let touched = self.pieces.last_mut().filter(|last| {
            last.range.end() == vma.range.start() && last.backing.is_none() && vma.backing.is_none()
        });
        let joined = touched.and_then(|last| {
            let joined = VirtRange::new(last.range.start(), vma.range.end())?;
            Some((last, joined))
        });
        match joined {
            Some((last, joined)) => last.range = joined,
            None => self.pieces.push(Piece {
                range: vma.range,
                backing: vma.backing,
            }),
        }
    }

    pub(super) fn finish(self) -> Movable {
        let (pieces, left_out) = self.pieces.finish();
        Movable {
            pieces,
            left_out,
            forbidden: self.forbidden,
        }
    }
}
