//! Any bytes in the pipe between guest and host: bounded memory, and a whole frame that follows
//! is understood at once.
#![no_main]

use demeter_proto::{Decoder, Message, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|chunks: Vec<&[u8]>| {
    let mut decoder = Decoder::default();
    for chunk in chunks {
        decoder.push(chunk);
        loop {
            match decoder.next() {
                Ok(Some(message)) => {
                    let mut again = vec![];
                    encode(&message, &mut again).expect("what was decoded can be sent");
                    let mut other = Decoder::default();
                    other.push(&again);
                    assert_eq!(other.next(), Ok(Some(message)));
                }
                Ok(None) => break,
                Err(_) => {}
            }
        }
    }
    let mut frame = vec![];
    encode(&Message::Ping { nonce: 1 }, &mut frame).expect("a ping can be sent");
    decoder.push(&frame);
    let last = std::iter::from_fn(|| decoder.next().transpose()).last();
    assert_eq!(last, Some(Ok(Message::Ping { nonce: 1 })));
});
