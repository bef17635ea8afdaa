//! Must fail: an engine that does not find this is blind, or nobody looks at what it says.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    assert!(!bytes.starts_with(b"demeter"), "the canary was found");
});
