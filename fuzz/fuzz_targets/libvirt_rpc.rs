//! Any bytes of a libvirt daemon, in pieces of any size: decoded, or refused.
#![no_main]

use demeter_host::hypervisor::libvirt::fuzz::rpc;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u16, &[u8])| {
    let (piece, bytes) = input;
    rpc(piece.into(), bytes);
});
