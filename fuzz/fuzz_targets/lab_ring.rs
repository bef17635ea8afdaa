//! Any bytes in the lab's shared memory: an accepted layout lies inside it, and records are user
//! accesses.
#![no_main]

use demeter_guest::tracker::lab::{Layout, records};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u64, &[u8])| {
    let (len, bytes) = input;
    if let Ok(layout) = Layout::parse(bytes, len) {
        assert!(layout.bytes() as u64 <= len);
        assert!(layout.ring_records.is_power_of_two());
    }
    let found: Vec<_> = records(bytes).collect();
    assert_eq!(found.len(), bytes.len() / 32);
    assert!(found.iter().flatten().all(|record| record.gva.0 >> 63 == 0));
});
