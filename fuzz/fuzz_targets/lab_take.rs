//! The lab's device with any heads, tails, counts and records.
//!
//! A drain returns at most the requested number of records, reports invalid ones, and leaves the
//! ring in step.
#![no_main]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::LazyLock;

use arbitrary::Arbitrary;
use demeter_guest::tracker::lab::LabTracker;
use demeter_guest::tracker::{Settings, Tracker};
use demeter_policy::Pid;
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Turn {
    vcpu: u8,
    forward: u8,
    head: Option<u64>,
    tail: Option<u64>,
    dropped: u64,
    /// Place and content of written records.
    at: u8,
    addresses: Vec<(u64, u64)>,
    max: u8,
}

/// Constants of `crates/lab/plugin/shared_page.h`.
const CONTROL: u64 = 4096;
const HEADER: u64 = 64;
const RECORD: u64 = 32;
const VCPUS: u64 = 3;
const RECORDS: u64 = 8;
const RING: u64 = HEADER + RECORDS * RECORD;
const MAGIC: u32 = 0x3152_5444;

static DEVICE: LazyLock<(PathBuf, File)> =
    LazyLock::new(|| demeter_fuzz::shared_memory("lab", CONTROL + VCPUS * RING));

fn word(at: u64) -> u64 {
    let mut word = [0; 8];
    DEVICE.1.read_exact_at(&mut word, at).expect("it is there");
    u64::from_le_bytes(word)
}

fn put(at: u64, word: u64) {
    let written = DEVICE.1.write_all_at(&word.to_le_bytes(), at);
    written.expect("it is there");
}

fuzz_target!(|turns: Vec<Turn>| {
    let layout = [MAGIC, 1, VCPUS as u32, RECORDS as u32];
    for (i, field) in layout.into_iter().enumerate() {
        let written = DEVICE.1.write_all_at(&field.to_le_bytes(), i as u64 * 4);
        written.expect("it is there");
    }
    let ring = |vcpu: u64| CONTROL + vcpu * RING;
    let is_sound = |vcpu| word(ring(vcpu)).wrapping_sub(word(ring(vcpu) + 8)) <= RECORDS;
    let tracker = LabTracker::open(&DEVICE.0, &Settings::default());
    let mut tracker = tracker.expect("a sound layout");
    let own = Pid(std::process::id());
    tracker.set_targets(&[own]).expect("this process");
    for turn in turns.into_iter().take(8) {
        let ring_at = ring(u64::from(turn.vcpu) % VCPUS);
        let head = word(ring_at).wrapping_add(u64::from(turn.forward));
        put(ring_at, turn.head.unwrap_or(head));
        if let Some(tail) = turn.tail {
            put(ring_at + 8, tail);
        }
        put(ring_at + 16, turn.dropped);
        for (i, (gva, gpa)) in turn.addresses.into_iter().take(8).enumerate() {
            let record = (u64::from(turn.at) + i as u64) % RECORDS;
            put(ring_at + HEADER + record * RECORD, gva);
            put(ring_at + HEADER + record * RECORD + 8, gpa);
        }
        let sound = (0..VCPUS).all(is_sound);
        let mut samples = vec![];
        let drained = tracker.drain(&mut samples, usize::from(turn.max));
        assert_eq!(drained.is_ok(), sound, "{drained:?}");
        assert!(samples.len() <= usize::from(turn.max));
        assert!(samples.iter().all(|sample| sample.pid == own));
        if let Ok(drained) = drained {
            assert_eq!(drained.taken, samples.len() as u64);
        }
        assert!((0..VCPUS).all(|vcpu| word(ring(vcpu)) == word(ring(vcpu) + 8)));
        let again = tracker.drain(&mut samples, 0).expect("in step again");
        assert_eq!(again.taken, 0);
    }
});
