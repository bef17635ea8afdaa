//! A perf ring with any head, tail and contents.
//!
//! The result is the bytes between head and tail, or an error. Afterwards the ring is in step.
#![no_main]

use std::fs::File;
use std::os::unix::fs::FileExt;

use arbitrary::Arbitrary;
use demeter_linux::perf::ring::Ring;
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Turn {
    /// Forward step of the head, and its absolute position if it jumps.
    forward: u16,
    jump: Option<u64>,
    tail: Option<u64>,
    /// Place and content of written bytes.
    at: u16,
    bytes: Vec<u8>,
}

/// Constants of `linux/perf_event.h`.
const HEAD: u64 = 1024;
const TAIL: u64 = 1032;
const CONTROL: u64 = 4096;
const DATA: u64 = 4096;

thread_local! {
    static SHARED: (File, Ring) = {
        let (_, file) = demeter_fuzz::shared_memory("perf", CONTROL + DATA);
        let ring = Ring::map(&file, DATA as usize).expect("a mapping");
        (file, ring)
    };
}

fn word(file: &File, at: u64) -> u64 {
    let mut word = [0; 8];
    file.read_exact_at(&mut word, at).expect("it is there");
    u64::from_ne_bytes(word)
}

fn put(file: &File, at: u64, word: u64) {
    let written = file.write_all_at(&word.to_ne_bytes(), at);
    written.expect("it is there");
}

fuzz_target!(|turns: Vec<Turn>| SHARED.with(|(file, ring)| case(turns, file, ring)));

fn case(turns: Vec<Turn>, file: &File, ring: &Ring) {
    put(file, HEAD, 0);
    put(file, TAIL, 0);
    let mut taken = vec![0xff];
    for turn in turns.into_iter().take(16) {
        let head = word(file, HEAD).wrapping_add(u64::from(turn.forward) * 8);
        put(file, HEAD, turn.jump.unwrap_or(head));
        if let Some(tail) = turn.tail {
            put(file, TAIL, tail);
        }
        let at = u64::from(turn.at) % DATA;
        let fits = turn.bytes.len().min((DATA - at) as usize);
        let written = file.write_all_at(&turn.bytes[..fits], CONTROL + at);
        written.expect("it is there");

        let (head, tail) = (word(file, HEAD), word(file, TAIL));
        let len = head.wrapping_sub(tail);
        let sound = len <= DATA && (head | tail) % 8 == 0;
        let result = ring.take(&mut taken);
        assert_eq!(
            result.is_ok(),
            sound,
            "head {head}, tail {tail}: {result:?}"
        );
        let mut data = vec![0; DATA as usize];
        file.read_exact_at(&mut data, CONTROL).expect("it is there");
        let expected =
            (0..if sound { len } else { 0 }).map(|i| data[(tail.wrapping_add(i) % DATA) as usize]);
        assert!(expected.eq(taken.iter().copied()));
        // The ring is in step again, and empty.
        assert_eq!(word(file, TAIL), head & !7);
        put(file, HEAD, head & !7);
        assert_eq!(ring.take(&mut taken), Ok(()));
        assert!(taken.is_empty());
    }
}
