use super::*;
use crate::machine::cpu::ICE_LAKE_SP;
use crate::machine::tier::TierModel;

#[test]
fn as_many_streams_are_followed_side_by_side_as_there_are() {
    let predicted = |streams: u64| {
        let mut caches = Core::new(&ICE_LAKE_SP, 12).caches;
        let lines = (0..100).flat_map(|i| (0..streams).map(move |s| s * 10_000 + i));
        lines.filter(|&line| caches.is_predicted(line)).count() as u64
    };
    for streams in 1..=STREAMS as u64 {
        assert_eq!(predicted(streams), 99 * streams);
    }
    assert_eq!(predicted(STREAMS as u64 + 1), 0);
}

#[test]
fn a_soft_tlb_holds_huge_pages_piecewise_and_forgets_them_at_a_switch() {
    use TlbKind::{Hardware, Soft};
    const START: GuestVirtAddr = GuestVirtAddr(1 << 30);
    // Whether the accessed bit is set anew by an access at `offset` after it was cleared.
    let is_seen = |kind, switch: bool, offset: u64| {
        let mut cpu = ICE_LAKE_SP;
        cpu.tlb.kind = kind;
        let mut core = Core::new(&cpu, 12);
        let (mut guest, mut host) = (Radix::new(4, 12), Radix::new(4, 12));
        guest.map(START, PageSize::Huge, 512);
        let tier = TierModel {
            latency_ps: 80_000,
            read_bytes_per_s: 1 << 36,
            write_bytes_per_s: 1 << 36,
            granule_lines: 1,
            others_bytes_per_s: 0,
        };
        let mut memory = Memory::new(&cpu, [tier; 2], 1 << 40);
        let (mut sampler, mut bill) = (Sampler::new(0), Bill::default());
        for at in [START.0, START.0 + offset] {
            if let Some((entry, _)) = guest.find_mut(START) {
                entry.take_accessed();
            }
            if switch {
                core.switch(Space(0));
            }
            let mut tables = Tables {
                guest: &mut guest,
                host: &mut host,
                host_first_page: 0,
                segments: &Segments::default(),
                space: Space(0),
            };
            let access = [Access::load(GuestVirtAddr(at))];
            let (memory, sampler) = (&mut memory, &mut sampler);
            core.run::<false, false>(&access, 1, &mut tables, memory, sampler, &mut bill);
        }
        guest
            .find_mut(START)
            .is_some_and(|(e, _)| e.take_accessed())
    };
    assert!(!is_seen(Hardware, false, 3 << 12) && !is_seen(Hardware, true, 3 << 12));
    assert!(is_seen(Soft, false, 3 << 12));
    assert!(!is_seen(Soft, false, 64));
    assert!(is_seen(Soft, true, 64));
}

#[test]
fn misses_that_overlap_are_charged_a_part_and_walks_are_not() {
    const START: GuestVirtAddr = GuestVirtAddr(1 << 30);
    const PAGES: u64 = 512;
    // What a program is charged that goes through pages again and again, a line of each.
    let bill = |in_flight, core_stream_bytes_per_s| {
        let cpu = CpuModel {
            in_flight,
            core_stream_bytes_per_s,
            ..ICE_LAKE_SP
        };
        let mut core = Core::new(&cpu, 12);
        let (mut guest, mut host) = (Radix::new(4, 12), Radix::new(4, 12));
        for page in 0..PAGES {
            let at = GuestVirtAddr(START.0 + page * 4096);
            guest.map(at, PageSize::Base, page as u32);
        }
        let tier = TierModel {
            latency_ps: 80_000,
            read_bytes_per_s: 1 << 36,
            write_bytes_per_s: 1 << 36,
            granule_lines: 1,
            others_bytes_per_s: 0,
        };
        let mut memory = Memory::new(&cpu, [tier; 2], 1 << 40);
        let (mut sampler, mut bill) = (Sampler::new(1), Bill::default());
        let mut tables = Tables {
            guest: &mut guest,
            host: &mut host,
            host_first_page: 0,
            segments: &Segments::default(),
            space: Space(0),
        };
        let line = |i: u64| START.0 + (i * 37 % PAGES) * 4096 + (i % 64) * 64;
        let accesses: Vec<_> = (0..2000)
            .map(|i| Access::load(GuestVirtAddr(line(i))))
            .collect();
        let (tables, memory) = (&mut tables, &mut memory);
        let progress = core.run::<false, true>(
            &accesses,
            accesses.len(),
            tables,
            memory,
            &mut sampler,
            &mut bill,
        );
        (bill, progress)
    };
    let (one, waited) = bill(1, 1 << 40);
    for in_flight in 2..=64 {
        let (overlapped, progress) = bill(in_flight, 1 << 40);
        let misses = one.of(Cause::Fast) / 80_000;
        assert_eq!(overlapped.of(Cause::Fast), misses * (80_000 / in_flight));
        assert_eq!(overlapped.of(Cause::Walk), one.of(Cause::Walk));
        assert_eq!(overlapped.of(Cause::Cache), one.of(Cause::Cache));
        // A load is as long under way as before: the sampling unit sees that.
        assert_eq!(progress, waited);
    }
    // 12 GB/s: a line takes 5.3 ns, however many are under way.
    let (bound, _) = bill(64, 12_000_000_000);
    assert_eq!(bound.of(Cause::Fast), one.of(Cause::Fast) / 80_000 * 5333);
}
