//! Any bytes as a process's stat file: no name can hide the start time.
#![no_main]

use demeter_guest::targets::parse_stat;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (&[u8], u64)| {
    let (bytes, start) = input;
    let _ = parse_stat(bytes);
    let mut stat = b"1 (".to_vec();
    stat.extend(bytes);
    stat.extend(format!(") S {}{start} 0", "0 ".repeat(18)).bytes());
    let parsed = parse_stat(&stat).map(|stat| (stat.comm, stat.start_ticks));
    assert_eq!(parsed, Some((bytes, start)));
});
