//! Any bytes as a trace: frames that obey the header, then at most one error.
#![no_main]

use std::path::Path;

use demeter_sim::trace::{Frame, Reader};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(mut reader) = Reader::new(bytes, Path::new("trace")) else {
        return;
    };
    let header = reader.header().clone();
    let mut frame = Frame::default();
    let mut accesses = 0;
    while let Ok(Some(_)) = reader.next_frame(&mut frame) {
        assert!(frame.thread < header.threads && !frame.accesses.is_empty());
        for access in &frame.accesses {
            let gva = access.gva().0;
            let holds =
                |span: &demeter_sim::trace::Span| gva.wrapping_sub(span.base.0) < span.bytes;
            assert!(header.regions.iter().any(holds));
        }
        accesses += frame.accesses.len();
    }
    assert!(accesses <= bytes.len());
});
