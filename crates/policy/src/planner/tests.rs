use proptest::prelude::*;

use std::collections::BTreeMap;

use super::*;
use crate::{ClassifiedRange, TierBytes, VirtRange, rank};

const FILL: FillThreshold = FillThreshold(15.0);

fn blocks(n: u64) -> ByteCount {
    ByteCount(n * BLOCK_SIZE)
}

/// A machine whose processes have ranges of (blocks, blocks of them in fast memory, samples).
#[derive(Debug, Clone)]
struct Machine {
    ranking: Vec<RankedRange>,
    residency: ResidencyMap,
    shares: BTreeMap<Pid, Share>,
    sockets: Sockets,
    room: Room,
}

impl Machine {
    /// One process.
    fn new(ranges: &[(u64, u64, f64)], room: Room) -> Self {
        let of_one = ranges.iter().map(|&range| (Pid(1), range));
        Self::of(&of_one.collect::<Vec<_>>(), room)
    }

    fn of(ranges: &[(Pid, (u64, u64, f64))], room: Room) -> Self {
        let mut residency = ResidencyMap::default();
        let mut at = 0;
        let mut classified = BTreeMap::<Pid, Vec<ClassifiedRange>>::new();
        for &(pid, (len, fast, count)) in ranges {
            for b in at..at + len {
                let in_fast = b < at + fast;
                let placement = TierBytes {
                    fast: blocks(u64::from(in_fast)),
                    slow: blocks(u64::from(!in_fast)),
                };
                residency.set(pid, Block(b), placement);
            }
            let range = VirtRange::new(Block(at).start(), Block(at + len).start()).unwrap();
            classified.entry(pid).or_default().push(ClassifiedRange {
                range,
                count,
                born_epoch: 0,
            });
            at += len;
        }
        Self {
            ranking: rank(classified),
            residency,
            shares: BTreeMap::new(),
            sockets: Sockets::default(),
            room,
        }
    }

    fn plan(&self) -> Plan {
        plan(&Situation {
            ranking: &self.ranking,
            residency: &self.residency,
            shares: &self.shares,
            sockets: &self.sockets,
            level: Level::First,
            planned: &[],
            room: self.room,
            fill: FILL,
            budget: MoveBudget::NONE,
            balloon_waits: false,
            epoch: 0,
            epoch_ms: 500,
            collapses: false,
        })
    }

    /// Carries out a plan exactly.
    fn apply(&mut self, plan: &Plan) {
        // The two directions interleave, so slow memory needs room for the difference only.
        self.room.slow_free.0 += sum(&plan.promotions);
        self.room.slow_free.0 -= sum(&plan.demotions);
        for r in &plan.demotions {
            let p = self.residency.get(r.pid, r.block).unwrap().at(Level::First);
            let slow = ByteCount(p.slow.0 + r.bytes.0);
            self.residency.set(
                r.pid,
                r.block,
                TierBytes {
                    fast: ByteCount(p.fast.0 - r.bytes.0),
                    slow,
                },
            );
            self.room.fast_free.0 += r.bytes.0;
        }
        for r in &plan.promotions {
            let p = self.residency.get(r.pid, r.block).unwrap().at(Level::First);
            let fast = ByteCount(p.fast.0 + r.bytes.0);
            self.residency.set(
                r.pid,
                r.block,
                TierBytes {
                    fast,
                    slow: ByteCount(p.slow.0 - r.bytes.0),
                },
            );
            self.room.fast_free.0 -= r.bytes.0;
        }
    }
}

fn sum(relocations: &[Relocation]) -> u64 {
    relocations.iter().map(|r| r.bytes.0).sum()
}

fn room(fast_free: u64, batch: u64) -> Room {
    Room {
        fast_free: blocks(fast_free),
        fast_reserve: blocks(4),
        fast_missing: ByteCount(0),
        fast_low: blocks(2),
        slow_free: blocks(1000),
        batch: blocks(batch),
    }
}

#[test]
fn free_memory_is_filled_then_exchanged() {
    // 10 free blocks, 6 of them above the reserve; 20 hot blocks in slow memory, 30 cold ones in fast memory.
    let mut m = Machine::new(&[(30, 30, 0.0), (20, 0, 800.0)], room(10, 100));
    let p = m.plan();
    assert_eq!((p.promotions.len(), p.demotions.len()), (20, 14));
    m.apply(&p);
    assert_eq!(m.room.fast_free, blocks(4));
    assert!(m.plan().is_empty());
}

#[test]
fn a_difference_that_may_be_chance_moves_nothing() {
    let m = Machine::new(&[(30, 30, 20.0), (20, 0, 22.0)], room(4, 100));
    assert!(m.plan().is_empty());
}

#[test]
fn cold_ranges_do_not_fill() {
    let m = Machine::new(&[(20, 0, 0.0), (20, 0, 14.0)], room(30, 100));
    assert!(m.plan().is_empty());
}

#[test]
fn below_low_the_coldest_leave_until_the_reserve_is_back() {
    let ranges = [(10, 10, 500.0), (10, 10, 0.0)];
    assert!(Machine::new(&ranges, room(2, 100)).plan().is_empty());
    let p = Machine::new(&ranges, room(1, 100)).plan();
    assert_eq!((p.promotions.len(), p.demotions.len()), (0, 3));
    assert!(
        p.demotions.iter().all(|r| r.block.0 >= 10),
        "a hot block left: {p:?}"
    );
}

#[test]
fn a_block_that_is_set_aside_is_left_alone() {
    let mut m = Machine::new(&[(2, 2, 0.0), (2, 0, 800.0)], room(4, 100));
    m.residency.failed(Pid(1), Block(2), 0);
    let p = m.plan();
    assert_eq!(
        p.promotions.iter().map(|r| r.block.0).collect::<Vec<_>>(),
        [3]
    );
}

/// Each process is its own group.
fn machines() -> impl Strategy<Value = Machine> {
    let range = (1u64..40, 0u64..40, prop_oneof![Just(0.0), 0.0..2000.0f64]);
    let range = ((1u32..4).prop_map(Pid), range);
    let room = (0u64..50, 0u64..8, 0u64..8, 0u64..60, 0u64..80);
    (prop::collection::vec(range, 0..20), room).prop_map(
        |(ranges, (free, reserve, low, slow, batch))| {
            let ranges: Vec<_> = ranges
                .iter()
                .map(|&(pid, (len, fast, n))| (pid, (len, fast.min(len), n)))
                .collect();
            let room = Room {
                fast_free: blocks(free),
                fast_reserve: blocks(reserve),
                fast_missing: ByteCount(0),
                fast_low: blocks(low.min(reserve)),
                slow_free: blocks(slow),
                batch: blocks(batch),
            };
            Machine::of(&ranges, room)
        },
    )
}

proptest! {
    #[test]
    fn neither_capacity_nor_batch_is_exceeded(m in machines()) {
        let p = m.plan();
        let (up, down) = (sum(&p.promotions), sum(&p.demotions));
        prop_assert!(up <= m.room.batch.0 && down <= m.room.batch.0);
        prop_assert!(up <= m.room.fast_free.0 + down);
        prop_assert!(down <= m.room.slow_free.0 + up);
        // Free memory is not below its former value, or not below the reserve.
        let free = m.room.fast_free.0 + down - up;
        prop_assert!(free >= m.room.fast_free.min(m.room.fast_reserve).0);
        let mut seen = std::collections::BTreeSet::new();
        for (r, promoted) in p.promotions.iter().map(|r| (r, true)).chain(p.demotions.iter().map(|r| (r, false))) {
            let at = m.residency.get(r.pid, r.block).unwrap().at(Level::First);
            prop_assert_eq!(r.bytes, if promoted { at.slow } else { at.fast });
            prop_assert!(seen.insert(r.block), "moved twice");
        }
    }

    #[test]
    fn promotions_and_demotions_are_equal_once_fast_memory_is_full(mut m in machines()) {
        m.room.fast_free = m.room.fast_reserve;
        let p = m.plan();
        prop_assert_eq!(sum(&p.promotions), sum(&p.demotions));
    }

    #[test]
    fn a_stable_ranking_comes_to_rest(mut m in machines()) {
        m.room.batch = blocks(m.room.batch.0 / BLOCK_SIZE + 1);
        for _ in 0..1000 {
            let p = m.plan();
            if p.is_empty() {
                prop_assert!(m.plan().is_empty());
                return Ok(());
            }
            m.apply(&p);
        }
        prop_assert!(false, "still moving after 1000 epochs");
    }

    #[test]
    fn same_input_same_plan(m in machines()) {
        prop_assert_eq!(m.plan(), m.clone().plan());
    }

    #[test]
    fn a_promoted_range_is_hotter_than_a_demoted_one(mut m in machines()) {
        m.room.fast_free = m.room.fast_reserve;
        let p = m.plan();
        let density = |r: &Relocation| m.ranking.iter()
            .find(|x| x.pid == r.pid && x.range.contains(r.block.start())).unwrap().density();
        for (up, down) in p.promotions.iter().zip(&p.demotions) {
            prop_assert!(density(up) > density(down));
        }
    }
}
