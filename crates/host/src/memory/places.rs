//! Where a VM's memory lies: the host's nodes of each tier's pages.
//!
//! # Problem
//! A tier is a promise about hardware, but only the hypervisor binds its backends to nodes. Without
//! a policy the kernel takes any node with free memory, and fast memory may lie on the slow node.
//!
//! # Approach
//! The kernel counts a process's pages by mapping and node (`/proc/PID/numa_maps`, numa(7)). A
//! mapping belongs to the tier whose addresses it overlaps. Two backends never share a mapping.
//! Where the host itself moves memory between its nodes, the nodes are the tiers, so all mappings are
//! counted together. Counting walks page tables, so it has a time limit, and callers repeat it rarely.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use demeter_linux::maps::MapsError;
use demeter_linux::policies::read_places;
use demeter_policy::{ByteCount, NodeId, PerTier, Pid, Tier, VirtRange};

use crate::hypervisor::{Hypervisor, HypervisorError};
use crate::outside::MayWait;

/// Resident memory by node of the host.
pub(crate) type OnNodes = BTreeMap<NodeId, ByteCount>;

/// Where a VM's memory lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Places {
    /// Each tier has memory of its own.
    OfTiers(PerTier<OnNodes>),
    /// The tiers are the host's nodes.
    Whole(OnNodes),
}

/// Time limit for counting a VM's pages. The kernel counts 40 GB of small pages in a second.
const COUNT_MAX: Duration = Duration::from_secs(2);

/// Addresses of a VM's memory in the hypervisor's process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Addresses {
    /// Addresses of each tier.
    OfTiers(PerTier<Vec<Range<u64>>>),
    /// Addresses of all memory.
    Whole(Vec<Range<u64>>),
}

impl Addresses {
    /// Asks the hypervisor for the addresses of the named backends.
    pub async fn of_tiers(
        hypervisor: &impl Hypervisor,
        memdev: &PerTier<Option<String>>,
    ) -> Result<Self, HypervisorError> {
        let mut found = PerTier::<Vec<Range<u64>>>::default();
        for tier in Tier::ALL {
            let Some(memdev) = memdev.get(tier) else {
                continue;
            };
            let mappings = hypervisor.memory_map(memdev).await?;
            let ranges = mappings
                .iter()
                .map(|of| of.host.0..of.host.0.saturating_add(of.guest.len().0));
            *found.get_mut(tier) = ranges.collect();
        }
        Ok(Self::OfTiers(found))
    }

    /// All of a VM's memory.
    pub fn whole(ranges: &[VirtRange]) -> Self {
        let ranges = ranges.iter().map(|of| of.start().0..of.end().0);
        Self::Whole(ranges.collect())
    }

    /// Counts the process's pages at these addresses, by node. `None` if there was not enough time;
    /// `root` is the parent of /proc.
    pub fn count(&self, root: &Path, pid: Pid, _: &MayWait) -> Result<Option<Places>, MapsError> {
        let mut places = match self {
            Self::OfTiers(_) => Places::OfTiers(PerTier::default()),
            Self::Whole(_) => Places::Whole(OnNodes::new()),
        };
        let mut add = |resident: &[(NodeId, ByteCount)], at: Range<u64>| {
            if let Some(sums) = self.sums(&mut places, &at) {
                for (node, bytes) in resident {
                    let sum = sums.entry(*node).or_default();
                    sum.0 = sum.0.saturating_add(bytes.0);
                }
            }
        };
        // A line has no end address, but no mapping reaches beyond the next one's start.
        let mut before = None;
        let whole = read_places(root, pid, COUNT_MAX, |place| {
            let start = place.start.0;
            if let Some(before) = before.replace(place) {
                add(&before.resident, before.start.0..start);
            }
        })?;
        if let Some(last) = before {
            add(&last.resident, last.start.0..u64::MAX);
        }
        Ok(whole.then_some(places))
    }

    /// The sums to which a mapping belongs, if it is memory of the VM.
    fn sums<'a>(&self, places: &'a mut Places, mapping: &Range<u64>) -> Option<&'a mut OnNodes> {
        let overlaps = |of: &Range<u64>| of.start < mapping.end && mapping.start < of.end;
        match (self, places) {
            (Self::OfTiers(of), Places::OfTiers(sums)) => {
                let is_in = |tier: &Tier| of.get(*tier).iter().any(overlaps);
                let tier = Tier::ALL.into_iter().find(is_in)?;
                Some(sums.get_mut(tier))
            }
            (Self::Whole(ranges), Places::Whole(sums)) => {
                ranges.iter().any(overlaps).then_some(sums)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use demeter_policy::GuestVirtAddr;

    use super::*;

    const MAPS: &str = "\
10000 default file=/usr/bin/qemu mapped=9 N1=9 kernelpagesize_kB=4
7f0000000000 bind:0 file=/memfd:node0\\040(deleted) dirty=20 N0=16 N2=4 kernelpagesize_kB=4
7f0000800000 default anon=3 N0=3 kernelpagesize_kB=4
7f0001000000 bind:2 file=/memfd:node1\\040(deleted) dirty=8 N2=8 kernelpagesize_kB=4
7f0001400000 default file=/memfd:node1\\040(deleted) dirty=2 N1=2 kernelpagesize_kB=4
7f0002000000 default stack anon=7 N0=7 kernelpagesize_kB=4
";

    fn at(start: u64, bytes: u64) -> Range<u64> {
        start..start + bytes
    }

    fn pages(of: &[(u32, u64)]) -> BTreeMap<NodeId, ByteCount> {
        let bytes = |&(node, pages): &(u32, u64)| (NodeId(node), ByteCount(pages << 12));
        of.iter().map(bytes).collect()
    }

    #[test]
    fn pages_count_for_the_tier_at_whose_addresses_they_are() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/9")).unwrap();
        fs::write(root.path().join("proc/9/numa_maps"), MAPS).unwrap();
        let addresses = Addresses::OfTiers(PerTier {
            // The guest has it in two runs, and the hypervisor in one mapping.
            fast: vec![at(0x7f00_0000_0000, 1 << 22), at(0x7f00_0040_0000, 1 << 22)],
            // The kernel has split the mapping.
            slow: vec![at(0x7f00_0100_0000, 1 << 23)],
        });
        let wait = MayWait::in_a_test();
        let places = addresses.count(root.path(), Pid(9), &wait).unwrap();
        let of_tiers = PerTier {
            fast: pages(&[(0, 16), (2, 4)]),
            slow: pages(&[(1, 2), (2, 8)]),
        };
        assert_eq!(places, Some(Places::OfTiers(of_tiers)));
        let all =
            [(0x7f00_0000_0000, 1 << 23), (0x7f00_0100_0000, 1 << 23)].map(|(start, bytes)| {
                VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(start + bytes)).unwrap()
            });
        let whole = Addresses::whole(&all).count(root.path(), Pid(9), &wait);
        let sum = pages(&[(0, 16), (1, 2), (2, 12)]);
        assert_eq!(whole.unwrap(), Some(Places::Whole(sum)));
        let gone = addresses.count(root.path(), Pid(8), &wait);
        assert!(matches!(gone, Err(MapsError::Gone(Pid(8)))), "{gone:?}");
    }
}
