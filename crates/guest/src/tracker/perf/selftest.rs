//! Tests whether the hardware event yields addresses. Some virtual PMUs accept it and deliver none.

use std::hint::black_box;
use std::time::{Duration, Instant};

use demeter_policy::{GuestVirtAddr, Pid, VirtRange};

use super::super::{Tracker, TrackerError};
use super::{EventKind, NAME, PerfTracker};

/// Size of the buffer: larger than most last-level caches, and quick to touch.
const BUFFER_BYTES: usize = 64 << 20;
const TIME: Duration = Duration::from_millis(300);
const LOADS_PER_ROUND: usize = 20_000;
const LINE_WORDS: usize = 8;
const MAX_SAMPLES: usize = 4096;

/// Makes cache-missing loads until one of them is sampled, for a limited time.
pub(super) fn check(tracker: &mut PerfTracker) -> Result<(), TrackerError> {
    let me = Pid(std::process::id());
    tracker.set_targets(&[me])?;
    // Ones, because the kernel could map zeros to a single page.
    let buffer = vec![1u64; BUFFER_BYTES / size_of::<u64>()];
    let start = GuestVirtAddr(buffer.as_ptr() as u64);
    let range = VirtRange::new(start, GuestVirtAddr(start.0 + BUFFER_BYTES as u64));

    let deadline = Instant::now() + TIME;
    let mut place = 0;
    let mut samples = Vec::new();
    while Instant::now() < deadline {
        for _ in 0..LOADS_PER_ROUND {
            // No prefetcher follows this stride; each load depends on the one before.
            let step = 2_654_435_761 * buffer[place] as usize;
            place = (place + step * LINE_WORDS) % buffer.len();
        }
        black_box(place);
        // Disabling the event makes the kernel write out buffered records.
        tracker.enable(false)?;
        samples.clear();
        tracker.take(&mut samples, MAX_SAMPLES)?;
        tracker.enable(true)?;
        let plausible = |addr| range.is_some_and(|range| range.contains(addr));
        if samples.iter().any(|sample| plausible(sample.addr)) {
            return Ok(());
        }
    }
    let (known, remedy) = match tracker.event.kind {
        EventKind::IntelLoadLatency => (
            " (a stock KVM guest has PEBS without addresses since Linux 6.9)",
            "a host whose KVM offers adaptive PEBS",
        ),
        EventKind::AmdIbs | EventKind::PageFaults => ("", "a hypervisor that hands on all of it"),
    };
    Err(TrackerError::Unavailable {
        tracker: NAME,
        why: format!(
            "the CPU accepts {:?} but gave no address in {} ms{known}",
            tracker.event.kind,
            TIME.as_millis()
        ),
        hint: format!("use the damon tracker, or {remedy}"),
    })
}
