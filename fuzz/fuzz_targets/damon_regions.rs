//! Any tracepoint format and records: no panic, and observations lie in mapped blocks.
#![no_main]

use std::num::NonZero;
use std::time::Duration;

use demeter_guest::tracker::damon::Format;
use demeter_policy::damon::{Cost, Found, Next, Observer};
use demeter_policy::{BLOCK_SIZE, Block, GuestVirtAddr, Pid, VirtRange};
use libfuzzer_sys::fuzz_target;

type Input<'a> = (&'a str, &'a [u8], u64, u16, Vec<(u64, u32, u32)>, u64);

fuzz_target!(|input: Input| {
    let (format, record, first, blocks, answers, elapsed_ns) = input;
    if let Ok(format) = Format::parse(format) {
        let region = format.region(record, &[Pid(1)]);
        assert!(region.is_none_or(|region| region.pid == Pid(1)));
    }
    let start = first % (1 << 34) * BLOCK_SIZE;
    let end = start + (u64::from(blocks) + 1) * BLOCK_SIZE;
    let Some(mapped) = VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(end)) else {
        return;
    };
    let mut observer = Observer::new(2.5, 1, Duration::ZERO);
    observer.set_memory(Pid(1), &[mapped]);
    let (mut now, mut out) = (Duration::ZERO, vec![]);
    for _ in 0..8 {
        match observer.next(now) {
            Next::Look(look) => {
                let found = answers.iter().map(|&(block, accesses, page_bytes)| Found {
                    pid: Pid(1),
                    block: Block(Block::of(mapped.start()).0 + block % 64),
                    accesses,
                    page_bytes: NonZero::new(page_bytes.into()),
                });
                let (found, cost) = (found.collect::<Vec<_>>(), Cost::default());
                let elapsed = Duration::from_nanos(elapsed_ns);
                observer.found(&look, elapsed, &cost, &found, &mut out);
            }
            Next::Rest(until) => now = until,
            Next::Idle => unreachable!("there is memory"),
        }
    }
    assert!(
        out.iter()
            .all(|seen| mapped.contains(seen.block.start()) && seen.exposure_ns > 0)
    );
});
