//! Any text as a maps file: the ranges are sorted and disjoint.
#![no_main]

use demeter_guest::maps::parse_maps;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let vmas = parse_maps(text);
    assert!(vmas.len() <= text.lines().count());
    for pair in vmas.windows(2) {
        assert!(pair[0].range.end() <= pair[1].range.start());
    }
});
