use demeter_scenario::Curve;

use super::*;
use crate::machine::cpu::ICE_LAKE_SP;
use crate::machine::sampler::Sampling;
use crate::machine::tier::TierModel;

const START: GuestVirtAddr = GuestVirtAddr(1 << 30);
const LATENCY_PS: u64 = 80_000;

/// A core and its memory; both tiers are equal.
struct Rig {
    core: Core,
    guest: Radix<GuestVirtAddr>,
    host: Radix<GuestPhysAddr>,
    memory: Memory,
    sampler: Sampler,
    bill: Bill,
}

impl Rig {
    /// A rig with nothing mapped.
    fn new(cpu: &CpuModel) -> Self {
        let tier = TierModel {
            latency_ps: LATENCY_PS,
            read_bytes_per_s: 1 << 36,
            write_bytes_per_s: 1 << 36,
            granule_lines: 1,
            curve: Curve::default(),
            loaded_percent: 100,
            others_bytes_per_s: 0,
        };
        Self {
            core: Core::new(cpu, 12),
            guest: Radix::new(4, 12),
            host: Radix::new(4, 12),
            memory: Memory::of_tiers(cpu, [tier; 2], 1 << 40),
            sampler: Sampler::new(0),
            bill: Bill::default(),
        }
    }

    fn run<const CACHES: bool>(&mut self, accesses: &[Access]) -> Progress {
        let mut tables = Tables {
            guest: &mut self.guest,
            host: &mut self.host,
            host_first_page: 0,
            segments: &Segments::default(),
            space: Space(0),
        };
        let (memory, sampler, bill) = (&mut self.memory, &mut self.sampler, &mut self.bill);
        let all = accesses.len();
        self.core
            .run::<false, CACHES>(accesses, all, &mut tables, memory, sampler, bill)
    }
}

#[test]
fn a_soft_tlb_holds_huge_pages_piecewise_and_forgets_them_at_a_switch() {
    use TlbKind::{Hardware, Modelled, Soft};
    // Whether an access at `offset` sets the accessed bit again after it was cleared.
    let is_seen = |kind, switch: bool, offset: u64| {
        let mut cpu = ICE_LAKE_SP;
        cpu.tlb.kind = kind;
        let mut rig = Rig::new(&cpu);
        rig.guest.map(START, PageSize::Huge, 512);
        for at in [START.0, START.0 + offset] {
            if let Some((entry, _)) = rig.guest.find_mut(START) {
                entry.take_accessed();
            }
            if switch {
                rig.core.switch(Space(0));
            }
            rig.run::<false>(&[Access::load(GuestVirtAddr(at))]);
        }
        let entry = rig.guest.find_mut(START);
        entry.is_some_and(|(e, _)| e.take_accessed())
    };
    assert!(!is_seen(Hardware, false, 3 << 12) && !is_seen(Hardware, true, 3 << 12));
    assert!(is_seen(Soft, false, 3 << 12));
    assert!(!is_seen(Soft, false, 64));
    assert!(is_seen(Soft, true, 64));
    assert!(!is_seen(Modelled, false, 3 << 12) && is_seen(Modelled, true, 64));
}

#[test]
fn misses_that_overlap_are_charged_a_part_and_walks_are_not() {
    const PAGES: u64 = 512;
    // The bill of a program that cycles through pages, one line in each.
    let bill = |in_flight, core_stream_bytes_per_s| {
        let mut rig = Rig::new(&CpuModel {
            core_stream_bytes_per_s,
            ..ICE_LAKE_SP
        });
        rig.core = rig.core.overlapping(in_flight);
        let sampling = Sampling {
            period: 3,
            threshold_ps: LATENCY_PS,
        };
        rig.sampler.start(sampling, 0);
        let page_at = |page: u64| GuestVirtAddr(START.0 + page * 4096);
        for page in 0..PAGES {
            rig.guest.map(page_at(page), PageSize::Base, page as u32);
        }
        let line = |i: u64| page_at(i * 37 % PAGES).0 + (i % 64) * 64;
        let load = |i| Access::load(GuestVirtAddr(line(i)));
        let accesses: Vec<_> = (0..2000).map(load).collect();
        let progress = rig.run::<true>(&accesses);
        (rig.bill, progress)
    };
    let (one, waited) = bill(1, 1 << 40);
    let misses = one.of(Cause::Fast) / LATENCY_PS;
    assert!(waited.records > 0);
    for in_flight in 2..=64 {
        let (overlapped, progress) = bill(in_flight, 1 << 40);
        let part_ps = LATENCY_PS / u64::from(in_flight);
        assert_eq!(overlapped.of(Cause::Fast), misses * part_ps);
        assert_eq!(overlapped.of(Cause::Walk), one.of(Cause::Walk));
        assert_eq!(overlapped.of(Cause::Cache), one.of(Cause::Cache));
        // Overlap does not shorten the latency that the sampling unit sees.
        assert_eq!(progress, waited);
    }
    // 12 GB/s: a line takes 5.3 ns, with any number in flight.
    let (bound, _) = bill(64, 12_000_000_000);
    assert_eq!(bound.of(Cause::Fast), misses * 5333);
}
