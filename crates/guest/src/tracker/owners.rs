//! Finds the process of a virtual address, for sources that do not report it.
//!
//! The lab's samples have a virtual and a physical address but no process. The mappings of all targets are cut at every
//! boundary into segments, each with the processes that map it, so that a look-up is a binary search. If several
//! processes map an address (forks, binaries without ASLR), the frame behind each one's address is compared with the
//! sample's.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use demeter_policy::{GuestPhysAddr, GuestVirtAddr, PAGE_SIZE, Pid, VirtRange};

use crate::maps::{VmaKind, read_maps};

/// Maximum number of processes per segment; later ones are ignored.
const MAX_OWNERS: usize = 16;

/// Maximum number of pagemap look-ups between two refreshes.
const MAX_FRAME_LOOKUPS: u32 = 4096;

/// The targets' address spaces.
pub(super) struct Owners {
    root: PathBuf,
    targets: Vec<Pid>,
    segments: Vec<Segment>,
    pagemaps: BTreeMap<Pid, Option<File>>,
    frame_lookups: u32,
}

/// A range of addresses with the same owners.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Segment {
    range: VirtRange,
    owners: Vec<Pid>,
}

/// The owner of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// This process.
    One(Pid),
    /// Several processes, of which this is the first; frames did not decide.
    Ambiguous(Pid),
    /// No target.
    Nobody,
}

impl Owners {
    pub(super) fn new(root: &Path) -> Self {
        Self {
            root: root.into(),
            targets: Vec::new(),
            segments: Vec::new(),
            pagemaps: BTreeMap::new(),
            frame_lookups: 0,
        }
    }

    pub(super) fn set_targets(&mut self, targets: &[Pid]) {
        self.targets = targets.to_vec();
        self.refresh();
    }

    /// Reads all targets' mappings again. An ended process owns nothing.
    pub(super) fn refresh(&mut self) {
        let ranges = self.targets.iter().flat_map(|&pid| {
            let vmas = read_maps(&self.root, pid).unwrap_or_else(|error| {
                tracing::debug!(%pid, %error, "no mappings");
                Vec::new()
            });
            vmas.into_iter()
                .filter(|vma| vma.kind != VmaKind::Special)
                .map(move |vma| (vma.range, pid))
        });
        self.segments = segments(ranges.collect());
        self.pagemaps.clear();
        self.frame_lookups = 0;
    }

    /// Finds the owner of an address whose page is in the frame of `gpa`.
    pub(super) fn find(&mut self, addr: GuestVirtAddr, gpa: GuestPhysAddr) -> Owner {
        let after = self
            .segments
            .partition_point(|segment| segment.range.start() <= addr);
        let Some(segment) = after
            .checked_sub(1)
            .map(|index| &self.segments[index])
            .filter(|segment| segment.range.contains(addr))
        else {
            return Owner::Nobody;
        };
        let first = segment.owners[0];
        if segment.owners.len() == 1 {
            return Owner::One(first);
        }
        let owners = segment.owners.clone();
        owners
            .into_iter()
            .find(|&pid| self.frame(pid, addr) == Some(gpa.0 / PAGE_SIZE))
            .map_or(Owner::Ambiguous(first), Owner::One)
    }

    /// The frame of a process's address: bits 0-54 of its pagemap entry, if bit 63 (present) is set.
    ///
    /// Without CAP_SYS_ADMIN the kernel shows frame 0.
    fn frame(&mut self, pid: Pid, addr: GuestVirtAddr) -> Option<u64> {
        const PRESENT: u64 = 1 << 63;
        const FRAME: u64 = (1 << 55) - 1;
        if self.frame_lookups == MAX_FRAME_LOOKUPS {
            return None;
        }
        self.frame_lookups += 1;
        let path = self.root.join(format!("proc/{pid}/pagemap"));
        let file = self
            .pagemaps
            .entry(pid)
            .or_insert_with(|| File::open(path).ok());
        let mut entry = [0; 8];
        file.as_ref()?
            .read_exact_at(&mut entry, addr.0 / PAGE_SIZE * 8)
            .ok()?;
        let entry = u64::from_ne_bytes(entry);
        (entry & PRESENT != 0)
            .then_some(entry & FRAME)
            .filter(|&frame| frame != 0)
    }
}

/// Cuts ranges at each other's boundaries. The order of owners stays.
fn segments(ranges: Vec<(VirtRange, Pid)>) -> Vec<Segment> {
    // For each boundary: the ranges (by index) that end and start there.
    let mut boundaries: BTreeMap<GuestVirtAddr, (Vec<usize>, Vec<usize>)> = BTreeMap::new();
    for (index, (range, _)) in ranges.iter().enumerate() {
        boundaries.entry(range.start()).or_default().1.push(index);
        boundaries.entry(range.end()).or_default().0.push(index);
    }
    let mut open: Vec<usize> = Vec::new();
    let mut segments = Vec::new();
    let mut from = GuestVirtAddr(0);
    for (at, (ending, starting)) in boundaries {
        if let Some(range) = VirtRange::new(from, at).filter(|_| !open.is_empty()) {
            let owners = open
                .iter()
                .take(MAX_OWNERS)
                .map(|&index| ranges[index].1)
                .collect();
            segments.push(Segment { range, owners });
        }
        open.retain(|index| !ending.contains(index));
        open.extend(starting);
        open.sort_unstable();
        from = at;
    }
    segments
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    fn range(start: u64, end: u64) -> VirtRange {
        VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(end)).unwrap()
    }

    /// A process in a fake root, with mappings and (page number, frame) pairs.
    fn process(root: &Path, pid: u32, mappings: &[(u64, u64)], frames: &[(u64, u64)]) {
        let dir = root.join(format!("proc/{pid}"));
        fs::create_dir_all(&dir).unwrap();
        let maps: String = mappings
            .iter()
            .map(|(start, end)| format!("{start:x}-{end:x} rw-p 0 00:00 0\n"))
            .collect();
        fs::write(dir.join("maps"), maps).unwrap();
        let mut pagemap = vec![0; 4096];
        for &(page, frame) in frames {
            let at = page as usize * 8;
            pagemap[at..at + 8].copy_from_slice(&(1 << 63 | frame).to_ne_bytes());
        }
        fs::write(dir.join("pagemap"), pagemap).unwrap();
    }

    #[test]
    fn an_address_is_owned_by_who_maps_it() {
        let root = tempfile::tempdir().unwrap();
        process(root.path(), 1, &[(0x1000, 0x3000)], &[]);
        process(root.path(), 2, &[(0x4000, 0x5000)], &[]);
        let mut owners = Owners::new(root.path());
        owners.set_targets(&[Pid(1), Pid(2), Pid(3)]);
        let mut find = |addr| owners.find(GuestVirtAddr(addr), GuestPhysAddr(0));
        assert_eq!(find(0x2fff), Owner::One(Pid(1)));
        assert_eq!(find(0x3000), Owner::Nobody);
        assert_eq!(find(0x4000), Owner::One(Pid(2)));
        assert_eq!(find(0), Owner::Nobody);
    }

    #[test]
    fn the_frame_tells_overlapping_processes_apart() {
        let root = tempfile::tempdir().unwrap();
        process(root.path(), 1, &[(0x1000, 0x3000)], &[(1, 77)]);
        process(root.path(), 2, &[(0x1000, 0x3000)], &[(1, 88)]);
        let mut owners = Owners::new(root.path());
        owners.set_targets(&[Pid(1), Pid(2)]);
        let mut find =
            |addr, frame: u64| owners.find(GuestVirtAddr(addr), GuestPhysAddr(frame << 12));
        assert_eq!(find(0x1008, 88), Owner::One(Pid(2)));
        assert_eq!(find(0x1008, 77), Owner::One(Pid(1)));
        assert_eq!(find(0x1008, 99), Owner::Ambiguous(Pid(1)));
        // Not present: frame 0 must not match a gPA of 0.
        assert_eq!(find(0x2000, 0), Owner::Ambiguous(Pid(1)));
    }

    proptest! {
        #[test]
        fn segments_say_what_the_ranges_say(
            ranges in prop::collection::vec((0u64..60, 1u64..20), 0..12),
        ) {
            let ranges: Vec<_> = ranges
                .into_iter()
                .enumerate()
                .map(|(pid, (start, len))| (range(start, start + len), Pid(pid as u32)))
                .collect();
            let segments = segments(ranges.clone());
            for addr in (0..90).map(GuestVirtAddr) {
                let expected: Vec<_> = ranges
                    .iter()
                    .filter(|(range, _)| range.contains(addr))
                    .map(|&(_, pid)| pid)
                    .collect();
                let found: Vec<_> = segments
                    .iter()
                    .filter(|segment| segment.range.contains(addr))
                    .flat_map(|segment| segment.owners.clone())
                    .collect();
                prop_assert_eq!(found, expected);
            }
        }
    }
}
