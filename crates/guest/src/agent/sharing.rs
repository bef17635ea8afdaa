//! Shared memory: assigns each object to one of the processes that map it.
//!
//! # Problem
//! Six processes that share memory have six address spaces with the same pages. If each counted them, the memory would
//! count six times. Where one process uses it and five do not, it would look unused in most.
//!
//! # Approach
//! Each part of an object has one owner: the process that maps most of it, as long as it maps it. The engine knows the
//! memory at the owner's addresses only. Accesses of other processes are translated to these addresses. Hence heat is a
//! sum, and bytes are counted and moved once. Memory that one process must leave alone is left alone in all.
//!
//! # Properties
//! - Each byte of an object belongs to at most one process's space, and to none if a process must leave it alone.
//! - An access counts at the address of the same byte in its owner.
//! - A process stays the owner while it maps the object.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use demeter_policy::{BLOCK_SIZE, Block, GuestVirtAddr, Observation, Pid, Sample, VirtRange};

use crate::maps::{Backing, Movable, ObjectId};

/// A part of an object that a process must leave alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Held {
    pub backing: Backing,
    pub bytes: u64,
}

/// The mappings of one process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mapped<'a> {
    pub movable: &'a Movable,
    pub held: &'a [Held],
}

/// The owners of shared memory.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    owners: BTreeMap<ObjectId, Pid>,
    /// Ranges that are translated to other addresses, by process and address.
    elsewhere: BTreeMap<Pid, Vec<Elsewhere>>,
    /// Ranges that several processes map, with the number of processes, by owner and address.
    common: BTreeMap<Pid, Vec<(VirtRange, u32)>>,
}

/// A range of one process that is translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Elsewhere {
    range: VirtRange,
    /// The address of its first byte in its owner; `None` if it is left alone.
    at: Option<(Pid, GuestVirtAddr)>,
}

/// A mapping of an object.
#[derive(Debug, Clone, Copy)]
struct Mapping {
    pid: Pid,
    range: VirtRange,
    offset: u64,
}

/// A claimed part of an object, by its first byte.
#[derive(Debug, Clone, Copy)]
struct Claim {
    end: u64,
    at: Option<(Pid, GuestVirtAddr)>,
    mappers: u32,
}

impl Sharing {
    /// Divides all memory among the processes that map it. Returns each one's part, sorted and disjoint.
    pub fn divide(
        &mut self,
        processes: &BTreeMap<Pid, Mapped<'_>>,
    ) -> BTreeMap<Pid, Vec<VirtRange>> {
        let mut objects: BTreeMap<ObjectId, Vec<Mapping>> = BTreeMap::new();
        let mut held: BTreeMap<ObjectId, Vec<(u64, u64)>> = BTreeMap::new();
        let mut spaces: BTreeMap<Pid, Vec<VirtRange>> = BTreeMap::new();
        for (&pid, mapped) in processes {
            let own = spaces.entry(pid).or_default();
            for piece in &mapped.movable.pieces {
                match piece.backing {
                    None => own.push(piece.range),
                    Some(Backing { object, offset }) => {
                        objects.entry(object).or_default().push(Mapping {
                            pid,
                            range: piece.range,
                            offset,
                        });
                    }
                }
            }
            for Held { backing, bytes } in mapped.held {
                let end = backing.offset.saturating_add(*bytes);
                held.entry(backing.object)
                    .or_default()
                    .push((backing.offset, end));
            }
        }
        self.elsewhere.clear();
        self.common.clear();
        let before = std::mem::take(&mut self.owners);
        for (object, mut mappings) in objects {
            let held = held.remove(&object).unwrap_or_default();
            let mut bytes: BTreeMap<Pid, u64> = BTreeMap::new();
            for mapping in &mappings {
                *bytes.entry(mapping.pid).or_default() += mapping.range.len().0;
            }
            let owner = before.get(&object);
            mappings.sort_by_key(|m| {
                (
                    Some(&m.pid) != owner,
                    Reverse(bytes[&m.pid]),
                    m.pid,
                    m.range.start(),
                )
            });
            if bytes.len() > 1 {
                self.owners.insert(object, mappings[0].pid);
            }
            self.claim(&mappings, &held, &mut spaces);
        }
        for elsewhere in self.elsewhere.values_mut() {
            elsewhere.sort_unstable_by_key(|part| part.range.start());
        }
        for common in self.common.values_mut() {
            common.sort_unstable();
        }
        for (pid, ranges) in &mut spaces {
            ranges.sort_unstable();
            if let Some(mapped) = processes.get(pid) {
                *ranges = mapped.movable.without_forbidden(ranges.iter().copied());
            }
        }
        spaces
    }

    /// Divides one object: each part goes to the first mapping that contains it.
    fn claim(
        &mut self,
        mappings: &[Mapping],
        held: &[(u64, u64)],
        spaces: &mut BTreeMap<Pid, Vec<VirtRange>>,
    ) {
        let mut claims: BTreeMap<u64, Claim> = BTreeMap::new();
        let nobody = held.iter().map(|&(start, end)| (start, end, None));
        let somebody = mappings.iter().map(|mapping| {
            let end = mapping.offset.saturating_add(mapping.range.len().0);
            (mapping.offset, end, Some(mapping))
        });
        for (start, end, mapping) in nobody.chain(somebody) {
            let mut free = vec![];
            let mut at = start;
            let before = claims.range(..=start).next_back();
            let first = before.map_or(start, |(&first, _)| first);
            for (&from, claim) in claims.range_mut(first..end.max(first)) {
                if claim.end <= at {
                    continue;
                }
                if at < from {
                    free.push((at, from));
                    at = from;
                }
                let to = claim.end.min(end);
                if let Some(mapping) = mapping {
                    let is_other = claim.at.is_some_and(|(pid, _)| pid != mapping.pid);
                    claim.mappers += u32::from(is_other);
                    let known_at =
                        |(pid, addr): (Pid, GuestVirtAddr)| (pid, moved(addr, at - from));
                    let parts = self.elsewhere.entry(mapping.pid).or_default();
                    parts.extend(mapping.part(at, to).map(|range| Elsewhere {
                        range,
                        at: claim.at.map(known_at),
                    }));
                }
                at = to;
            }
            if at < end {
                free.push((at, end));
            }
            for (from, to) in free {
                let range =
                    mapping.and_then(|mapping| Some((mapping.pid, mapping.part(from, to)?)));
                if let Some((pid, range)) = range {
                    spaces.entry(pid).or_default().push(range);
                }
                let claim = Claim {
                    end: to,
                    at: range.map(|(pid, range)| (pid, range.start())),
                    mappers: 1,
                };
                claims.insert(from, claim);
            }
        }
        for (from, claim) in claims {
            if let (Some((pid, start)), 2..) = (claim.at, claim.mappers) {
                let range = VirtRange::new(start, moved(start, claim.end - from));
                let common = self.common.entry(pid).or_default();
                common.extend(range.map(|range| (range, claim.mappers)));
            }
        }
    }

    /// Translates a sample to its owner's address; `None` if the memory is left alone.
    pub fn place(&self, sample: Sample) -> Option<Sample> {
        let Some(part) = self.elsewhere(sample.pid, sample.addr) else {
            return Some(sample);
        };
        let (pid, start) = part.at?;
        let addr = moved(start, sample.addr.0 - part.range.start().0);
        Some(Sample {
            pid,
            addr,
            ..sample
        })
    }

    /// Translates an observation to its owner's block; `None` if the memory is left alone.
    ///
    /// Each process that maps a block is scanned. An observation counts for a part of its time, so that the sum over
    /// the processes is right.
    pub fn place_observation(&self, seen: Observation) -> Option<Observation> {
        // A mapping may begin within a block.
        let middle = moved(seen.block.start(), BLOCK_SIZE / 2);
        let (pid, addr) = match self.elsewhere(seen.pid, middle) {
            Some(part) => {
                let (pid, start) = part.at?;
                (pid, moved(start, middle.0 - part.range.start().0))
            }
            None => (seen.pid, middle),
        };
        let common = self.common.get(&pid).map_or(&[][..], Vec::as_slice);
        let next = common.partition_point(|(range, _)| range.end() <= addr);
        let mappers = common
            .get(next)
            .filter(|(range, _)| range.contains(addr))
            .map_or(1, |&(_, mappers)| mappers);
        Some(Observation {
            pid,
            block: Block::of(addr),
            exposure_ns: seen.exposure_ns / u64::from(mappers),
            ..seen
        })
    }

    fn elsewhere(&self, pid: Pid, addr: GuestVirtAddr) -> Option<&Elsewhere> {
        let parts = self.elsewhere.get(&pid)?;
        let next = parts.partition_point(|part| part.range.end() <= addr);
        parts.get(next).filter(|part| part.range.contains(addr))
    }
}

impl Mapping {
    /// The range that maps the bytes `from..to` of its object.
    fn part(&self, from: u64, to: u64) -> Option<VirtRange> {
        let at = |offset: u64| moved(self.range.start(), offset - self.offset);
        VirtRange::new(at(from), at(to))
    }
}

fn moved(addr: GuestVirtAddr, by: u64) -> GuestVirtAddr {
    GuestVirtAddr(addr.0.saturating_add(by))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::maps::{Piece, parse_maps};

    /// A mapping of an object: number, offset, length and address, in blocks of 4 KiB.
    #[derive(Debug, Clone, Copy)]
    struct Shows {
        object: u64,
        offset: u64,
        len: u64,
        held: bool,
    }

    /// A process's mappings, and the part of an object that each shows.
    #[derive(Default)]
    struct Process {
        movable: Movable,
        held: Vec<Held>,
        all: Vec<(Shows, VirtRange)>,
    }

    /// Processes; no two mappings overlap.
    struct World(BTreeMap<Pid, Process>);

    const PAGE: u64 = 4096;

    impl World {
        fn new(processes: &[Vec<Shows>]) -> Self {
            let process = |(number, shows): (usize, &Vec<Shows>)| {
                let mut process = Process::default();
                for (i, &it) in shows.iter().enumerate() {
                    let start = ((i as u64 + 1) << 32) + (number as u64 * 3 * PAGE);
                    let line = format!(
                        "{start:x}-{:x} rw-s {:x} 00:01 {} /memfd:x",
                        start + it.len * PAGE,
                        it.offset * PAGE,
                        it.object
                    );
                    let vma = parse_maps(&line)[0];
                    process.all.push((it, vma.range));
                    let (range, backing) = (vma.range, vma.backing);
                    match it.held {
                        true => process.held.extend(backing.map(|backing| Held {
                            backing,
                            bytes: range.len().0,
                        })),
                        false => process.movable.pieces.push(Piece { range, backing }),
                    }
                }
                (Pid(number as u32 + 1), process)
            };
            Self(processes.iter().enumerate().map(process).collect())
        }

        fn divide(&self, sharing: &mut Sharing) -> BTreeMap<Pid, Vec<VirtRange>> {
            let mut mapped = BTreeMap::new();
            for (&pid, Process { movable, held, .. }) in &self.0 {
                mapped.insert(pid, Mapped { movable, held });
            }
            sharing.divide(&mapped)
        }

        /// The object and byte at an address of a process.
        fn byte(&self, pid: Pid, addr: GuestVirtAddr) -> Option<(u64, u64)> {
            let mut all = self.0.get(&pid)?.all.iter();
            let (shows, range) = all.find(|(_, range)| range.contains(addr))?;
            Some((shows.object, shows.offset * PAGE + addr.0 - range.start().0))
        }
    }

    fn shows(object: u64, offset: u64, len: u64) -> Shows {
        Shows {
            object,
            offset,
            len,
            held: false,
        }
    }

    fn sample(pid: Pid, addr: GuestVirtAddr) -> Sample {
        Sample {
            pid,
            addr,
            weight: 1,
        }
    }

    #[test]
    fn memory_of_six_processes_is_one_and_its_heat_a_sum() {
        let world = World::new(&vec![vec![shows(7, 0, 4096)]; 6]);
        let mut sharing = Sharing::default();
        let spaces = world.divide(&mut sharing);
        let bytes: Vec<u64> = spaces.values().flatten().map(|r| r.len().0).collect();
        assert_eq!(bytes, [4096 * PAGE], "counted once");
        for (&pid, process) in &world.0 {
            let addr = moved(process.all[0].1.start(), 5 * BLOCK_SIZE + 8);
            let placed = sharing.place(sample(pid, addr)).unwrap();
            assert_eq!(placed.pid, Pid(1));
            assert_eq!(world.byte(placed.pid, placed.addr), world.byte(pid, addr));
            let seen = Observation {
                pid,
                block: Block::of(addr),
                events: 3,
                exposure_ns: 600,
                is_least: false,
            };
            let seen = sharing.place_observation(seen).unwrap();
            assert_eq!((seen.pid, seen.exposure_ns), (Pid(1), 100));
        }
    }

    #[test]
    fn an_owner_stays_one_while_it_maps_the_object() {
        let small_and_large = [vec![shows(7, 0, 10)], vec![shows(7, 0, 20)]];
        let mut sharing = Sharing::default();
        World::new(&small_and_large).divide(&mut sharing);
        let owner = |sharing: &Sharing| sharing.owners.values().copied().next();
        assert_eq!(owner(&sharing), Some(Pid(2)), "it maps more");
        let both_large = [vec![shows(7, 0, 30)], vec![shows(7, 0, 20)]];
        let spaces = World::new(&both_large).divide(&mut sharing);
        assert_eq!(owner(&sharing), Some(Pid(2)));
        assert_eq!(spaces[&Pid(1)][0].len().0, 10 * PAGE, "what only it maps");
        World::new(&both_large[..1]).divide(&mut sharing);
        assert_eq!(owner(&sharing), None, "nobody shares");
    }

    proptest! {
        #[test]
        fn each_byte_has_one_place_which_all_accesses_lead_to(
            processes in prop::collection::vec(
                prop::collection::vec((0u64..3, 0u64..20, 1u64..12, 0u8..8), 0..5), 1..5,
            ),
        ) {
            let processes: Vec<Vec<Shows>> = processes.iter().map(|mappings| {
                let of = |&(object, offset, len, held): &(u64, u64, u64, u8)| Shows {
                    object: object + 1, offset, len, held: held == 0,
                };
                mappings.iter().map(of).collect()
            }).collect();
            let world = World::new(&processes);
            let mut sharing = Sharing::default();
            let spaces = world.divide(&mut sharing);
            let is_held = |(object, byte): (u64, u64)| processes.iter().flatten().any(|it| {
                it.held && it.object == object
                    && (it.offset * PAGE..(it.offset + it.len) * PAGE).contains(&byte)
            });
            let mut places: BTreeMap<(u64, u64), (Pid, GuestVirtAddr)> = BTreeMap::new();
            for (&pid, ranges) in &spaces {
                prop_assert!(ranges.windows(2).all(|w| w[0].end() <= w[1].start()));
                for range in ranges {
                    for addr in (range.start().0..range.end().0).step_by(PAGE as usize) {
                        let addr = GuestVirtAddr(addr);
                        let byte = world.byte(pid, addr).unwrap();
                        prop_assert!(!is_held(byte), "left alone in all");
                        prop_assert_eq!(places.insert(byte, (pid, addr)), None, "counted once");
                    }
                }
            }
            for (&pid, process) in &world.0 {
                for piece in &process.movable.pieces {
                    for addr in (piece.range.start().0..piece.range.end().0).step_by(PAGE as usize) {
                        let addr = GuestVirtAddr(addr);
                        let byte = world.byte(pid, addr).unwrap();
                        let placed = sharing.place(sample(pid, addr)).map(|s| (s.pid, s.addr));
                        prop_assert_eq!(placed, places.get(&byte).copied());
                        prop_assert_eq!(placed.is_none(), is_held(byte));
                    }
                }
            }
        }
    }
}
