//! Any bytes on a QMP socket, in pieces of any size, and any text as a memory tree: decoded, or
//! refused.

#![no_main]

use demeter_host::hypervisor::qemu::decode::{Decoder, Message};
use demeter_host::hypervisor::qemu::mtree;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|pieces: Vec<&[u8]>| {
    let mut decoder = Decoder::default();
    for piece in pieces {
        if let Ok(text) = std::str::from_utf8(piece) {
            let _ = mtree::parse(text);
        }
        decoder.push(piece);
        loop {
            match decoder.next_message() {
                Ok(Some(Message::Return { value, .. })) => {
                    if let Some(text) = value.as_str() {
                        let _ = mtree::parse(text);
                    }
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
});
