use demeter_policy::{BLOCK_SIZE, ByteCount, MIB, Tier};

use super::*;
use crate::guest::Watermarks;
use crate::guest::tests::Bench;

const PAGE: u64 = 4096;

fn bench() -> Bench {
    let nodes = [ByteCount(8 * MIB), ByteCount(32 * MIB)];
    Bench::with(0, nodes, false, Watermarks::NONE)
}

fn attrs(least: u64, looks: u32) -> Attrs {
    Attrs {
        sample_ps: 1_000_000_000,
        looks,
        bounds: Bounds {
            least,
            most: least,
            page_bytes: PAGE,
        },
    }
}

/// A kdamond over all mapped memory, after one aggregation. `touch` sets bits between its samples.
fn watch<A: Watched>(
    bench: &mut Bench,
    watched: Range<A>,
    attrs: Attrs,
    touch: impl Fn(&mut Guest),
) -> Kdamond<A> {
    let mut kdamond = bench.act(|guest, actor| Kdamond::start(watched, attrs, 1, guest, actor));
    for look in 1..=attrs.looks {
        let is_end = bench.act(|guest, actor| {
            touch(guest);
            kdamond.look(guest, actor)
        });
        assert_eq!(is_end, look == attrs.looks);
        if !is_end {
            bench.act(|guest, actor| kdamond.go_on(guest, actor));
        }
    }
    kdamond
}

#[test]
fn what_is_accessed_is_found_by_every_look_and_nothing_else_is() {
    let mut bench = bench();
    let base = bench.map(8 * BLOCK_SIZE);
    bench.fill(base, 8 * BLOCK_SIZE);
    let hot = base..GuestVirtAddr(base.0 + 2 * BLOCK_SIZE);
    let all = base..GuestVirtAddr(base.0 + 8 * BLOCK_SIZE);
    let set = |guest: &mut Guest| {
        guest
            .tables
            .for_each(hot.clone(), |_, entry, _| entry.mark(false));
    };
    let kdamond = watch(&mut bench, all, attrs(8, 5), set);
    let found: Vec<_> = kdamond.regions().iter().map(|r| r.accesses).collect();
    assert_eq!(found, [5, 5, 0, 0, 0, 0, 0, 0]);
    // Eight regions, each sampled five times.
    let look_ps = bench.act(|_, actor| actor.costs.damon_look_ps);
    assert_eq!(kdamond.spent_ps(), 8 * 5 * look_ps);
}

#[test]
fn a_node_is_watched_by_where_its_pages_are_mapped() {
    let mut bench = bench();
    let base = bench.map(4 * BLOCK_SIZE);
    bench.fill(base, 4 * BLOCK_SIZE);
    let slow = bench.guest.span(Tier::Slow);
    for b in 0..2 {
        let block = demeter_policy::Block(demeter_policy::Block::of(base).0 + b);
        bench.act(|guest, actor| guest.migrate_block(block, Tier::Slow, actor));
    }
    // Memory in the fast node is accessed, but not monitored.
    let set = |guest: &mut Guest| {
        let all = base..GuestVirtAddr(base.0 + 4 * BLOCK_SIZE);
        guest.tables.for_each(all, |_, entry, _| entry.mark(false));
    };
    let kdamond = watch(&mut bench, slow, attrs(16, 4), set);
    let bytes = |r: &Region<_>| if r.accesses > 0 { r.bytes() } else { 0 };
    assert_eq!(
        kdamond.regions().iter().map(bytes).sum::<u64>(),
        2 * BLOCK_SIZE
    );
}

/// Number of samples that find a page accessed, while the program loads from it in each interval.
fn found_of_five(is_flushed: bool) -> u32 {
    let mut bench = bench();
    let base = bench.map(PAGE);
    bench.fill(base, PAGE);
    bench.load(base);
    let watched = base..GuestVirtAddr(base.0 + PAGE);
    let attrs = attrs(1, 5);
    let mut kdamond = bench.act(|guest, actor| Kdamond::start(watched, attrs, 1, guest, actor));
    for look in 1..=5 {
        if is_flushed {
            bench.act(|_, actor| actor.flush_all());
        }
        bench.load(base);
        bench.act(|guest, actor| kdamond.look(guest, actor));
        if look < 5 {
            bench.act(|guest, actor| kdamond.go_on(guest, actor));
        }
    }
    kdamond.regions()[0].accesses
}

#[test]
fn what_stays_in_the_tlb_looks_untouched() {
    assert_eq!(found_of_five(false), 0);
    assert_eq!(found_of_five(true), 5);
}
