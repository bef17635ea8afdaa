//! The processes' mappings: which addresses are theirs.
//!
//! All processes of a guest share its page tables: each has a stretch of addresses of its own, one after the other.
//!
//! # Properties
//! - Mappings are sorted, disjoint, and begin on blocks of their own.
//! - A mapping grows within its limit only, and what it may become overlaps nothing.

use demeter_policy::{BLOCK_SIZE, ByteCount, GuestVirtAddr, Pid, VirtRange};

use crate::program::Region;

/// Where the first region begins: nothing is mapped below, as on real systems.
pub(super) const FIRST_BASE: u64 = 1 << 30;

/// The first process.
const FIRST_PID: u32 = 1;

/// All mappings of a guest.
#[derive(Debug, Clone, Default)]
pub(super) struct Mappings {
    /// The mappings as they are.
    vmas: Vec<VirtRange>,
    /// The same, as large as they may grow.
    limits: Vec<VirtRange>,
    /// The process of each; those of a process follow one another.
    processes: Vec<u32>,
    /// Address space before each mapping that is reserved and cannot be accessed (`PROT_NONE`).
    reserved: ByteCount,
}

impl Mappings {
    /// No mapping yet. Each will reserve this much address space before it.
    pub(super) fn new(reserved: ByteCount) -> Self {
        Self {
            reserved,
            ..Self::default()
        }
    }

    /// Maps regions one after the other; tells where they begin.
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

    /// Where the last mapping ends, when it has grown.
    pub(super) fn end(&self) -> GuestVirtAddr {
        let last = self.limits.last();
        last.map_or(GuestVirtAddr(FIRST_BASE), VirtRange::end)
    }

    /// The mappings that can be accessed, sorted: `/proc/PID/maps` without reservations.
    pub(super) fn vmas(&self) -> &[VirtRange] {
        &self.vmas
    }

    /// The same mappings, as large as they may grow.
    pub(super) fn limits(&self) -> &[VirtRange] {
        &self.limits
    }

    /// Lets the mapping that may hold `gva` grow to the end of its block.
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

    /// The mapping that holds all of a range.
    pub(super) fn holds(&self, range: &VirtRange) -> bool {
        let at = self.vmas.partition_point(|vma| vma.end() <= range.start());
        let vma = self.vmas.get(at);
        vma.is_some_and(|vma| vma.intersection(range) == Some(*range))
    }

    /// The processes, each with what it maps, in the order of their addresses.
    pub(super) fn processes(&self) -> impl Iterator<Item = (Pid, &[VirtRange])> {
        let mut from = 0;
        self.processes.chunk_by(|a, b| a == b).map(move |same| {
            let of = from..from + same.len();
            from = of.end;
            (pid(same[0]), &self.vmas[of])
        })
    }

    /// The process that has an address: the one that begins at it or below.
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
        // Its last part is no whole block.
        mappings.grow_to(inside(9 * MIB - 1));
        assert_eq!(mappings.vmas()[0], mappings.limits()[0]);
        // Nothing is mapped beyond.
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
