//! Any bytes in the pipe between guest and host, in pieces of any size.
//!
//! A decoded message can be encoded again, and a whole frame that follows is decoded at once.
#![no_main]

use demeter_proto::{Decoder, Message, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u16, &[u8])| {
    let (piece, bytes) = input;
    let mut decoder = Decoder::default();
    for piece in bytes.chunks(usize::from(piece).max(1)) {
        decoder.push(piece);
        while let Some(found) = decoder.next().transpose() {
            let Ok(message) = found else { continue };
            let mut again = vec![];
            encode(&message, &mut again).expect("what was decoded can be sent");
            let mut other = Decoder::default();
            other.push(&again);
            assert_eq!(other.next(), Ok(Some(message)));
        }
    }
    let mut frame = vec![];
    encode(&Message::Ping { nonce: 1 }, &mut frame).expect("a ping can be sent");
    decoder.push(&frame);
    let last = std::iter::from_fn(|| decoder.next().transpose()).last();
    assert_eq!(last, Some(Ok(Message::Ping { nonce: 1 })));
});
