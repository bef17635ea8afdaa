//! Any bytes in a perf ring: a bounded number of records, then at most one error.
#![no_main]

use demeter_guest::tracker::perf::{Record, access, ibs_load, raw, records};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut failed = false;
    let mut count = 0;
    for record in records(bytes) {
        assert!(!failed, "a record after an error");
        count += 1;
        match record {
            Ok(Record::Sample(sample)) => {
                let _ = access(sample);
                let _ = ibs_load(sample);
                if let Some((_, raw)) = raw(sample) {
                    assert!(raw.len() + 12 <= sample.len());
                }
            }
            Ok(_) => {}
            Err(_) => failed = true,
        }
    }
    assert!(count <= bytes.len() / 8 + 1);
});
