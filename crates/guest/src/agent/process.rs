//! One process that the agent looks after.

use std::path::Path;

use demeter_policy::VirtRange;

use crate::maps::{Vma, VmaKind, read_maps};
use crate::targets::Target;

/// A process and what it maps.
#[derive(Debug)]
pub(super) struct Process {
    pub target: Target,
    /// Memory that may be moved: anonymous and shared, sorted, touching mappings joined.
    pub space: Vec<VirtRange>,
}

impl Process {
    pub fn new(target: Target) -> Self {
        Self {
            target,
            space: vec![],
        }
    }

    /// Reads what the process maps now.
    pub fn read_space(&mut self, root: &Path) {
        // A process that has gone, or that may not be looked at, has no memory to move.
        let vmas = read_maps(root, self.target.pid).unwrap_or_default();
        self.space = movable(&vmas);
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
