use demeter_policy::engine::Direction;
use demeter_policy::{Block, ByLevel, MIB};
use demeter_scenario::Curve;
use proptest::prelude::*;

use super::*;
use crate::machine::actor::Actor;
use crate::machine::actor::Vcpu;
use crate::machine::core::{Core, Tables};
use crate::machine::cost::PS_PER_NS;
use crate::machine::cpu::ICE_LAKE_SP;
use crate::machine::flush::FlushCounts;
use crate::machine::ledger::{Bill, Cause};
use crate::machine::memory::{Memory, NodeIndex};
use crate::machine::sampler::Sampler;
use crate::machine::segment::Segments;
use crate::machine::tier::TierModel;
use crate::machine::walk::Space;
use crate::program::Access;

/// A guest of 8 MiB fast and 32 MiB slow memory, and its actor.
pub(crate) struct Bench {
    pub(crate) guest: Guest,
    vcpus: Vec<Vcpu>,
    cores: Vec<Core>,
    memory: Memory,
    flushes: FlushCounts,
    k: u32,
}

impl Bench {
    pub(crate) fn new(k: u32, huge_pages: bool) -> Self {
        Self::with(
            k,
            [ByteCount(8 * MIB), ByteCount(32 * MIB)],
            huge_pages,
            Watermarks::LINUX,
        )
    }

    /// A bench with nodes of these sizes.
    pub(crate) fn with(
        k: u32,
        nodes: [ByteCount; 2],
        huge_pages: bool,
        watermarks: Watermarks,
    ) -> Self {
        let config = GuestConfig {
            levels: 4,
            page_bits: 12 + k,
            nodes: NodeConfig::of_tiers(nodes),
            orders: vec![vec![NodeIndex(0), NodeIndex(1)]],
            huge_pages,
            huge_in_slow: false,
            interleave: None,
            watermarks,
            lists: Lists::default(),
            reserved: ByteCount(0),
        };
        let tier = TierModel {
            latency_ps: 80 * PS_PER_NS,
            read_bytes_per_s: 10_000_000_000,
            write_bytes_per_s: 10_000_000_000,
            granule_lines: 1,
            curve: Curve::default(),
            loaded_percent: 100,
            others_bytes_per_s: 0,
        };
        Self {
            guest: Guest::new(&config),
            vcpus: vec![Vcpu::new(0, k); 2],
            cores: vec![Core::new(&ICE_LAKE_SP, 12 + k); 2],
            memory: Memory::of_tiers(&ICE_LAKE_SP, [tier; 2], 1 << 30),
            flushes: FlushCounts::default(),
            k,
        }
    }

    /// Loads from an address as the program, through the first core and its TLB.
    pub(crate) fn load(&mut self, gva: GuestVirtAddr) {
        let (mut sampler, mut bill) = (Sampler::new(self.k), Bill::default());
        let mut tables = Tables {
            guest: &mut self.guest.tables,
            host: &mut Radix::new(4, 12 + self.k),
            host_first_page: 0,
            segments: &Segments::default(),
            space: Space(0),
        };
        let (tables, memory) = (&mut tables, &mut self.memory);
        let (sampler, bill) = (&mut sampler, &mut bill);
        let progress = self.cores[0].run::<false, false>(
            &[Access::load(gva)],
            1,
            tables,
            memory,
            sampler,
            bill,
        );
        assert_eq!(progress.fault, None);
    }

    pub(crate) fn act<T>(&mut self, act: impl FnOnce(&mut Guest, &mut Actor<'_>) -> T) -> T {
        let mut actor = Actor {
            vcpus: &mut self.vcpus,
            cores: &mut self.cores,
            placed: &[0, 1],
            on: 0,
            busy: 2,
            memory: &mut self.memory,
            costs: &ICE_LAKE_SP.costs,
            space: Space(0),
            flushes: &mut self.flushes,
            k: self.k,
            copiers: 1,
        };
        act(&mut self.guest, &mut actor)
    }

    pub(crate) fn map(&mut self, bytes: u64) -> GuestVirtAddr {
        let name = "test".into();
        self.guest.map(&[Region {
            name,
            bytes: ByteCount(bytes),
            start: ByteCount(bytes),
            process: 0,
        }])[0]
    }

    /// Touches every page; returns the bytes that fitted.
    pub(crate) fn fill(&mut self, base: GuestVirtAddr, bytes: u64) -> u64 {
        let mut at = 0;
        while at < bytes {
            let gva = GuestVirtAddr(base.0 + at);
            if self.guest.tables.find(gva).is_none() && self.act(|g, a| g.fault(gva, a)).is_err() {
                break;
            }
            at += 1 << self.guest.page_bits;
        }
        at
    }

    fn placed(&mut self, base: GuestVirtAddr, bytes: u64) -> [u64; 2] {
        let range = VirtRange::new(base, GuestVirtAddr(base.0 + bytes)).unwrap();
        let ByLevel([fast, slow, ..]) = self.guest.spread(&range).bytes;
        [fast.0, slow.0]
    }

    /// Checks that no frame or time was lost or invented.
    fn check(&mut self) {
        self.guest.check_frames();
        let bills = self.vcpus.iter().map(|v| (v.bill.total(), v.clock_ps));
        bills.for_each(|(bill, clock)| assert_eq!(bill, clock));
    }
}

#[test]
fn threads_that_run_side_by_side_take_as_long_as_the_slowest() {
    for (threads, works_ps, elapsed_ps) in [
        (1, vec![50], 50),
        (2, vec![50, 70], 70),
        (2, vec![70, 50], 70),
        // With two CPUs, the third waits for the first.
        (3, vec![50, 10, 40], 90),
    ] {
        let mut b = Bench::new(0, false);
        let mut works = works_ps.iter();
        let all_ps = b.act(|_, actor| {
            let began_ps = actor.now_ps();
            let all_ps = actor.side_by_side(threads, |actor| {
                actor.charge(Cause::Migrate, *works.next().unwrap());
            });
            assert_eq!(actor.now_ps() - began_ps, elapsed_ps);
            all_ps
        });
        assert_eq!(all_ps, works_ps.iter().sum::<u64>());
        b.check();
    }
}

#[test]
fn first_touch_fills_the_fast_node_first_and_leaves_its_watermark() {
    let mut b = Bench::new(0, false);
    let base = b.map(20 * MIB);
    assert_eq!(b.fill(base, 20 * MIB), 20 * MIB);
    let [fast, slow] = b.placed(base, 20 * MIB);
    assert_eq!(fast + slow, 20 * MIB);
    let low = 8 * MIB * 20 / 1000;
    assert!((8 * MIB - low).abs_diff(fast) < 8192, "{fast}");
    assert_eq!(b.guest.usable(Tier::Fast).0, 0);
    b.check();
}

#[test]
fn huge_pages_in_the_fast_node_and_small_ones_where_it_overflows() {
    let mut b = Bench::new(0, true);
    let base = b.map(20 * MIB);
    b.fill(base, 20 * MIB);
    assert_eq!(b.guest.tables.find(base).unwrap().1, PageSize::Huge);
    let last = GuestVirtAddr(base.0 + 19 * MIB);
    assert_eq!(b.guest.tables.find(last).unwrap().1, PageSize::Base);
    // A program that needs too much memory gets an error.
    let more = b.map(40 * MIB);
    assert!(b.fill(more, 40 * MIB) < 40 * MIB);
    b.check();
}

#[test]
fn promised_memory_is_kept() {
    let mut b = Bench::new(0, true);
    let base = b.map(20 * MIB);
    let hot = GuestVirtAddr(base.0 + 16 * MIB);
    let hot = VirtRange::new(hot, GuestVirtAddr(hot.0 + 4 * MIB)).unwrap();
    b.guest.promise(&[hot]);
    b.fill(base, 20 * MIB);
    assert_eq!(b.placed(hot.start(), 4 * MIB), [4 * MIB, 0]);
    b.check();
}

#[test]
fn a_small_block_is_promoted_as_a_huge_page() {
    let mut b = Bench::new(2, true);
    let base = b.map(20 * MIB);
    b.fill(base, 20 * MIB);
    let (cold, hot) = (Block::of(base), Block::of(GuestVirtAddr(base.0 + 16 * MIB)));
    assert_eq!(
        b.act(|g, a| g.migrate_block(cold, Tier::Slow, a)),
        BLOCK_SIZE
    );
    assert!(b.act(|g, a| g.collapse(hot, a)));
    assert_eq!(b.placed(hot.start(), BLOCK_SIZE), [0, BLOCK_SIZE]);
    b.act(|g, a| g.migrate_block(hot, Tier::Fast, a));
    assert_eq!(b.placed(hot.start(), BLOCK_SIZE), [BLOCK_SIZE, 0]);
    assert_eq!(b.guest.tables.find(hot.start()).unwrap().1, PageSize::Huge);
    let counts = b.guest.counts;
    assert_eq!(
        (counts.promoted_bytes, counts.demoted_bytes),
        (BLOCK_SIZE, BLOCK_SIZE)
    );
    assert!(b.vcpus[0].bill.of(Cause::Migrate) > 0);
    assert!(
        b.vcpus[1].bill.of(Cause::Flush) > 0,
        "the other CPU is interrupted"
    );
    b.check();
}

#[test]
fn reclaim_demotes_what_was_not_accessed() {
    let mut b = Bench::new(0, false);
    let base = b.map(20 * MIB);
    b.fill(base, 20 * MIB);
    // The first half is in use: its accessed bits are set before every scan.
    let used = base..GuestVirtAddr(base.0 + 4 * MIB);
    // In turns of one page each: the first half is accessed before every turn.
    for _ in 0..6000 {
        let walk = |g: &mut Guest| {
            g.tables.for_each(used.clone(), |_, e, _| e.mark(false));
        };
        walk(&mut b.guest);
        b.act(|g, a| g.reclaim(a, a.now_ps() + 1));
    }
    assert!(!b.guest.is_short());
    assert_eq!(b.placed(base, 4 * MIB), [4 * MIB, 0]);
    assert!(b.guest.counts.demoted_bytes >= 8 * MIB * (40 - 20) / 1000);
    b.check();
}

#[test]
fn hint_faults_tell_when_and_how_often() {
    let mut b = Bench::new(1, false);
    let base = b.map(20 * MIB);
    b.fill(base, 20 * MIB);
    let all = base..GuestVirtAddr(base.0 + 20 * MIB);
    assert!(b.act(|g, a| g.make_fault(all.clone(), Tier::Slow, a)));
    let (fast, slow) = (base, GuestVirtAddr(base.0 + 19 * MIB));
    assert!(!b.guest.tables.find(fast).unwrap().0.is_hint());
    assert!(b.guest.tables.find(slow).unwrap().0.is_hint());
    b.vcpus[0].charge(Cause::Idle, 5_000_000_000);
    let first = b.act(|g, a| g.hint_fault(slow, a)).unwrap();
    assert!(first.since_ms >= 5 && !first.active);
    assert!(!b.guest.tables.find(slow).unwrap().0.is_hint());
    (0..2).for_each(|_| b.guest.mark_accessed(slow));
    b.act(|g, a| g.make_fault(all, Tier::Slow, a));
    assert!(b.act(|g, a| g.hint_fault(slow, a)).unwrap().active);
    assert_eq!(
        b.guest.counts.hint_faults, 4,
        "two faults, each for two real pages"
    );
}

#[test]
fn a_balloon_that_spares_what_is_hot_takes_another_block() {
    for spares_hot in [true, false] {
        let mut b = Bench::new(0, false);
        let base = b.map(20 * MIB);
        b.fill(base, 20 * MIB);
        let hot = base..GuestVirtAddr(base.0 + 4096);
        b.guest
            .tables
            .for_each(hot, |_, entry, _| entry.mark(false));
        let before = b.guest.owned_fast();
        assert!(b.act(|g, a| g.inflate(spares_hot, a)).is_some());
        assert_eq!(b.guest.owned_fast().0, before.0 - BLOCK_SIZE);
        let is_fast = b.placed(base, 4096) == [4096, 0];
        assert_eq!(is_fast, spares_hot);
        b.check();
    }
}

proptest! {
    /// Migrations lose no frame and map none twice, and time adds up.
    #[test]
    fn pages_and_time_are_conserved(
        k in 0u32..4,
        huge: bool,
        steps in prop::collection::vec((0u64..10, 0u32..6, any::<bool>()), 1..60),
    ) {
        let mut b = Bench::new(k, huge);
        let base = b.map(20 * MIB);
        b.fill(base, 20 * MIB);
        for (block, what, up) in steps {
            let gva = GuestVirtAddr(base.0 + block * BLOCK_SIZE);
            let block = Block::of(gva);
            let to = if up { Tier::Fast } else { Tier::Slow };
            b.act(|g, a| match what {
                0 => drop(g.migrate_block(block, to, a)),
                1 => {
                    let direction = if up { Direction::Promotion } else { Direction::Demotion };
                    let pages = g.pages_across(block, Level::First, direction);
                    g.migrate_singly(&pages, to, a);
                }
                2 => drop(g.migrate(gva, to, true, a)),
                3 => drop(g.collapse(block, a)),
                4 => drop(g.make_fault(gva..GuestVirtAddr(gva.0 + BLOCK_SIZE), Tier::Slow, a)),
                _ => drop(g.reclaim(a, u64::MAX)),
            });
        }
        b.check();
        let [fast, slow] = b.placed(base, 20 * MIB);
        prop_assert_eq!(fast + slow, 20 * MIB);
    }
}
