//! Any tracepoint format and record, and any regions: samples lie in their regions, within the
//! limit.
#![no_main]

use std::num::NonZero;
use std::time::Duration;

use demeter_guest::tracker::damon::Format;
use demeter_policy::damon::{Exposures, Region};
use demeter_policy::{GuestVirtAddr, Pid, VirtRange};
use libfuzzer_sys::fuzz_target;

type Input<'a> = (&'a str, &'a [u8], Vec<(u64, u64, u32)>, u32, u16);

fuzz_target!(|input: Input| {
    let (format, record, regions, looks, max) = input;
    let mut regions: Vec<Region> = regions
        .into_iter()
        .filter_map(|(start, end, accesses)| {
            let range = VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(end))?;
            Some(Region {
                pid: Pid(1),
                range,
                accesses,
                page_bytes: NonZero::new(u64::from(accesses % 3) << 11),
            })
        })
        .collect();
    if let Ok(format) = Format::parse(format) {
        regions.extend(format.region(record, &[Pid(1)]));
    }
    let mut exposures = Exposures::default();
    for (rung, millis) in [(0, 80), (1, 10), (0, 80)] {
        exposures.add(rung, Duration::from_millis(millis), looks, &regions);
        let mut out = Vec::new();
        exposures.samples(max.into(), &mut out);
        assert!(out.len() <= max.into());
        for sample in out {
            assert!(regions.iter().any(|r| r.range.contains(sample.addr)));
        }
    }
});
