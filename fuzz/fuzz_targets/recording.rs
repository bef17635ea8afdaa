//! Any bytes as a recording of an agent: events that a replay accepts or refuses, then at most one
//! error.
#![no_main]

use std::path::Path;

use demeter_guest::recording::{Reader, replay};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(mut reader) = Reader::new(bytes, Path::new("recording")) else {
        return;
    };
    let mut decisions = 0;
    if let Ok(replayed) = replay(&mut reader, &mut |_| decisions += 1) {
        assert_eq!(replayed.decisions, decisions);
        assert!(reader.offset() <= bytes.len() as u64);
    }
    let mut events = 0;
    while let Ok(Some(_)) = reader.next_event() {
        events += 1;
    }
    assert!(decisions + events <= bytes.len() as u64);
});
