//! Must fail: it proves that the fuzzer finds failures and that they are reported.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    assert!(!bytes.starts_with(b"demeter"), "the canary was found");
});
