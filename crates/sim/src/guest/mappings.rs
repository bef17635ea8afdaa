//! Virtual memory mappings of a guest's processes.
//!
//! All processes of a guest share its page tables. Each process has its own contiguous part of the address space.
//!
//! # Properties
//! - Mappings are sorted and disjoint; each begins on its own block.
//! - A mapping grows only within its limit, and limits do not overlap.

use demeter_policy::{BLOCK_SIZE, ByteCount, GuestVirtAddr, Pid, VirtRange};

use crate::program::Region;

/// Address of the first mapping. As on real systems, low addresses are unmapped.
pub(super) const FIRST_BASE: u64 = 1 << 30;

/// PID of the first process.
const FIRST_PID: u32 = 1;

/// All mappings of a guest.
#[derive(Debug, Clone, Default)]
pub(super) struct Mappings {
    /// Current mappings.
    vmas: Vec<VirtRange>,
    /// The mappings at their maximum size.
    limits: Vec<VirtRange>,
    /// The process of each mapping, in ascending order.
    processes: Vec<u32>,
    /// Inaccessible address space (`PROT_NONE`) reserved before each mapping.
    reserved: ByteCount,
}

impl Mappings {
    /// No mappings. Each will reserve this much address space before it.
    pub(super) fn new(reserved: ByteCount) -> Self {
        Self {
            reserved,
            ..Self::default()
        }
    }

    /// Maps regions in order; returns their addresses.
    pub(super) fn map(&mut self, regions: &[Region]) -> Vec<GuestVirtAddr> {
        let mut bases = vec![];
        for region in regions {
            let start = (self.end().0 + self.reserved.0).next_multiple_of(BLOCK_SIZE);
            let range = |bytes: u64| {
                VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(start + bytes.max(1)))
            };
            if let (Some(vma), Some(limit)) = (range(region.start.0), range(region.bytes.0)) {
                self.vmas.push(vma);
                self.limits.push(limit);
                self.processes.push(region.process);
            }
            bases.push(GuestVirtAddr(start));
        }
        bases
    }

    /// End of the last mapping at its maximum size.
    pub(super) fn end(&self) -> GuestVirtAddr {
        let last = self.limits.last();
        last.map_or(GuestVirtAddr(FIRST_BASE), VirtRange::end)
    }

    /// Accessible mappings, sorted: `/proc/PID/maps` without reservations.
    pub(super) fn vmas(&self) -> &[VirtRange] {
        &self.vmas
    }

    /// The mappings at their maximum size.
    pub(super) fn limits(&self) -> &[VirtRange] {
        &self.limits
    }

    /// Grows the mapping whose limit covers `gva` to the end of its block.
    pub(super) fn grow_to(&mut self, gva: GuestVirtAddr) {
        let at = self.limits.partition_point(|limit| limit.end() <= gva);
        let (Some(vma), Some(limit)) = (self.vmas.get_mut(at), self.limits.get(at)) else {
            return;
        };
        if limit.contains(gva) && vma.end() <= gva {
            let end = GuestVirtAddr((gva.0 + 1).next_multiple_of(BLOCK_SIZE));
            if let Some(grown) = VirtRange::new(vma.start(), end.min(limit.end())) {
                *vma = grown;
            }
        }
    }

    /// Whether one mapping covers a whole range.
    pub(super) fn holds(&self, range: &VirtRange) -> bool {
        let at = self.vmas.partition_point(|vma| vma.end() <= range.start());
        let vma = self.vmas.get(at);
        vma.is_some_and(|vma| vma.intersection(range) == Some(*range))
    }

    /// The processes and their mappings, in address order.
    pub(super) fn processes(&self) -> impl Iterator<Item = (Pid, &[VirtRange])> {
        let mut from = 0;
        self.processes.chunk_by(|a, b| a == b).map(move |same| {
            let of = from..from + same.len();
            from = of.end;
            (pid(same[0]), &self.vmas[of])
        })
    }

    /// The number of a process, from 0.
    pub(super) fn number(pid: Pid) -> u32 {
        pid.0 - FIRST_PID
    }

    /// The process of an address: the last one that starts at or below it.
    pub(super) fn pid_of(&self, gva: GuestVirtAddr) -> Pid {
        let after = self.limits.partition_point(|limit| limit.start() <= gva);
        let process = self.processes.get(after.saturating_sub(1));
        pid(process.copied().unwrap_or(0))
    }
}

fn pid(process: u32) -> Pid {
    Pid(FIRST_PID + process)
}

#[cfg(test)]
mod tests {
    use demeter_policy::MIB;

    use super::*;

    fn region(process: u32, start_mib: u64, mib: u64) -> Region {
        Region {
            name: "test".into(),
            bytes: ByteCount(mib * MIB),
            start: ByteCount(start_mib * MIB),
            process,
        }
    }

    #[test]
    fn mappings_lie_apart_and_grow_within_their_limits() {
        let mut mappings = Mappings::new(ByteCount(64 * MIB));
        let bases = mappings.map(&[region(0, 2, 9), region(0, 4, 4), region(1, 4, 4)]);
        let before = mappings.vmas().to_vec();
        assert!(bases.iter().all(|base| base.0.is_multiple_of(BLOCK_SIZE)));
        assert!(
            before
                .windows(2)
                .all(|w| w[0].end().0 + 64 * MIB <= w[1].start().0)
        );

        let inside = |at: u64| GuestVirtAddr(bases[0].0 + at);
        mappings.grow_to(inside(5 * MIB));
        assert_eq!(mappings.vmas()[0].len().0, 6 * MIB);
        // The last part is smaller than a block.
        mappings.grow_to(inside(9 * MIB - 1));
        assert_eq!(mappings.vmas()[0], mappings.limits()[0]);
        // Nothing can be mapped beyond the limit.
        mappings.grow_to(inside(9 * MIB));
        assert_eq!(mappings.vmas()[0].len().0, 9 * MIB);
        assert_eq!(mappings.vmas()[1..], before[1..]);
    }

    #[test]
    fn an_address_belongs_to_the_process_that_has_it() {
        let mut mappings = Mappings::new(ByteCount(0));
        let bases = mappings.map(&[region(0, 4, 4), region(0, 4, 4), region(1, 4, 4)]);
        let pids = bases.iter().map(|&base| mappings.pid_of(base).0);
        assert_eq!(pids.collect::<Vec<_>>(), [1, 1, 2]);
        let of: Vec<_> = mappings
            .processes()
            .map(|(pid, vmas)| (pid.0, vmas.len()))
            .collect();
        assert_eq!(of, [(1, 2), (2, 1)]);
    }
}
