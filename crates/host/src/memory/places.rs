//! Where a VM's memory lies: the host's nodes of each tier's pages.
//!
//! # Problem
//! A tier is a promise about hardware, but only the hypervisor binds its backends to nodes. Without
//! a policy the kernel takes any node with free memory, and fast memory may lie on the slow node.
//!
//! # Approach
//! The kernel counts a process's pages by mapping and node (`/proc/PID/numa_maps`, numa(7)). A
//! mapping belongs to the tier whose addresses it overlaps. Two backends never share a mapping.
//! Counting walks page tables, so it has a time limit, and callers repeat it rarely.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use demeter_linux::maps::MapsError;
use demeter_linux::policies::read_places;
use demeter_policy::{ByteCount, NodeId, PerTier, Pid, Tier};

use crate::hypervisor::{Hypervisor, HypervisorError};
use crate::outside::MayWait;

/// Resident memory of each tier, by node of the host.
pub(crate) type Places = PerTier<BTreeMap<NodeId, ByteCount>>;

/// Time limit for counting a VM's pages. The kernel counts 40 GB of small pages in a second.
const COUNT_MAX: Duration = Duration::from_secs(2);

/// Addresses of each tier's memory in the hypervisor's process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TierAddresses(PerTier<Vec<Range<u64>>>);

impl TierAddresses {
    /// Asks the hypervisor for the addresses of the named backends.
    pub async fn find(
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
        Ok(Self(found))
    }

    /// Counts the process's pages at these addresses, by node. `None` if there was not enough time;
    /// `root` is the parent of /proc.
    pub fn count(&self, root: &Path, pid: Pid, _: &MayWait) -> Result<Option<Places>, MapsError> {
        let mut places = Places::default();
        // A line has no end address, but no mapping reaches beyond the next one's start.
        let mut before = None;
        let whole = read_places(root, pid, COUNT_MAX, |place| {
            let start = place.start.0;
            if let Some(before) = before.replace(place) {
                self.add(&before.resident, before.start.0..start, &mut places);
            }
        })?;
        if let Some(last) = before {
            self.add(&last.resident, last.start.0..u64::MAX, &mut places);
        }
        Ok(whole.then_some(places))
    }

    fn add(&self, resident: &[(NodeId, ByteCount)], at: Range<u64>, places: &mut Places) {
        let overlaps = |of: &Range<u64>| of.start < at.end && at.start < of.end;
        let is_in = |tier: &Tier| self.0.get(*tier).iter().any(overlaps);
        if let Some(tier) = Tier::ALL.into_iter().find(is_in) {
            for (node, bytes) in resident {
                let sum = places.get_mut(tier).entry(*node).or_default();
                sum.0 = sum.0.saturating_add(bytes.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

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
        let addresses = TierAddresses(PerTier {
            // The guest has it in two runs, and the hypervisor in one mapping.
            fast: vec![at(0x7f00_0000_0000, 1 << 22), at(0x7f00_0040_0000, 1 << 22)],
            // The kernel has split the mapping.
            slow: vec![at(0x7f00_0100_0000, 1 << 23)],
        });
        let wait = MayWait::in_a_test();
        let places = addresses.count(root.path(), Pid(9), &wait).unwrap();
        let places = places.unwrap();
        assert_eq!(places.fast, pages(&[(0, 16), (2, 4)]));
        assert_eq!(places.slow, pages(&[(1, 2), (2, 8)]));
        let gone = addresses.count(root.path(), Pid(8), &wait);
        assert!(matches!(gone, Err(MapsError::Gone(Pid(8)))), "{gone:?}");
    }
}
