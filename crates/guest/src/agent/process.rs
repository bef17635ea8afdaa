//! One process that the agent looks after.

use std::path::Path;

use demeter_policy::{
    Block, Classifier, ClassifierConfig, GuestVirtAddr, Pid, ResidencyMap, VirtRange,
};

use crate::maps::{Vma, VmaKind, read_maps};
use crate::status::TargetStatus;
use crate::targets::Target;

/// A process, its memory and what is hot in it.
#[derive(Debug)]
pub(super) struct Process {
    pub target: Target,
    pub classifier: Classifier,
    /// Memory that may be moved: anonymous and shared, sorted, touching mappings joined.
    pub space: Vec<VirtRange>,
    /// Whether the place of every block was looked up at least once.
    pub all_known: bool,
    /// Where the next recheck begins.
    next_recheck: Block,
}

impl Process {
    pub fn new(target: Target, config: ClassifierConfig) -> Self {
        Self {
            target,
            classifier: Classifier::new(config),
            space: vec![],
            all_known: false,
            next_recheck: Block(0),
        }
    }

    /// Reads what the process maps now. True when it is not what it was.
    pub fn read_space(&mut self, root: &Path) -> bool {
        // A process that has gone, or that may not be looked at, has no memory to move.
        let vmas = read_maps(root, self.target.pid).unwrap_or_default();
        let space = movable(&vmas);
        let changed = space != self.space;
        if changed {
            self.classifier.set_space(&space);
            self.space = space;
            self.all_known = false;
        }
        changed
    }

    /// Whether `addr` lies in memory that may be moved.
    pub fn maps(&self, addr: GuestVirtAddr) -> bool {
        let next = self.space.partition_point(|r| r.end() <= addr);
        self.space.get(next).is_some_and(|r| r.contains(addr))
    }

    /// Whether nothing is known to be accessed.
    pub fn is_cold(&self) -> bool {
        self.classifier.ranges().all(|r| r.count == 0.0)
    }

    /// The next `n` blocks in turn, to be looked up again.
    pub fn recheck(&mut self, n: usize) -> Vec<Block> {
        let blocks: Vec<Block> = self
            .space
            .iter()
            .flat_map(|r| {
                let first = Block::of(r.start()).max(self.next_recheck);
                let end = Block::of(GuestVirtAddr(r.end().0 - 1)).0 + 1;
                (first.0..end).map(Block)
            })
            .take(n)
            .collect();
        self.next_recheck = match blocks.last() {
            Some(last) if blocks.len() == n => Block(last.0 + 1),
            _ => Block(0),
        };
        blocks
    }

    pub fn status(&self, pid: Pid, residency: &ResidencyMap) -> TargetStatus {
        let whole = self.space.first().zip(self.space.last());
        let whole = whole.and_then(|(first, last)| VirtRange::new(first.start(), last.end()));
        let placement = whole
            .map(|r| residency.placement(pid, &r))
            .unwrap_or_default();
        TargetStatus {
            pid: pid.0,
            comm: self.target.comm.clone(),
            ranges: self.classifier.ranges().len() as u64,
            heat: self.classifier.ranges().map(|r| r.count).sum(),
            fast_bytes: placement.fast.0,
            slow_bytes: placement.slow.0,
        }
    }
}

/// The parts of an address space that may be moved.
fn movable(vmas: &[Vma]) -> Vec<VirtRange> {
    let mut space: Vec<VirtRange> = vec![];
    for vma in vmas {
        let ours = matches!(vma.kind, VmaKind::Anonymous | VmaKind::Shmem)
            && (vma.readable || vma.writable);
        if !ours {
            continue;
        }
        match space.last_mut() {
            Some(last) if last.end() == vma.range.start() => {
                *last = VirtRange::new(last.start(), vma.range.end()).unwrap_or(*last);
            }
            _ => space.push(vma.range),
        }
    }
    space
}
