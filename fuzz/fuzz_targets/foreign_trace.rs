//! Any bytes as lackey's text and as ChampSim's records: bounded events, or an error.
#![no_main]

use std::path::Path;

use demeter_sim::trace::{champsim, lackey};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut events = 0;
    let _ = lackey(bytes, Path::new("lackey"), |found| {
        events += found.len();
        Ok(())
    });
    assert!(events <= bytes.len());
    let mut events = 0;
    let read = champsim(bytes, Path::new("champsim"), |found| {
        events += found.len();
        Ok(())
    });
    assert_eq!(read.is_ok(), bytes.len() % 64 == 0);
    assert!(events <= bytes.len() / 64 * 7);
});
