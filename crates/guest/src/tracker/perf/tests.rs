//! Live tests with page faults, which every kernel samples. If the system refuses perf_event_open, they say so and
//! pass.

use demeter_policy::{GuestVirtAddr, VirtRange};

use super::*;

const PAGE: usize = demeter_policy::PAGE_SIZE as usize;

/// Anonymous memory with untouched pages.
pub(in crate::tracker) struct Untouched {
    memory: Vec<u8>,
    touched: usize,
}

impl Untouched {
    pub fn new(pages: usize) -> Self {
        // A large zeroed allocation has untouched pages.
        Self {
            memory: vec![0; pages * PAGE],
            touched: 0,
        }
    }

    /// Causes page faults on the next pages.
    pub fn touch(&mut self, pages: usize) {
        for page in self.touched..self.touched + pages {
            self.memory[page * PAGE] = 1;
        }
        std::hint::black_box(&self.memory);
        self.touched += pages;
    }

    pub fn range(&self) -> VirtRange {
        let start = self.memory.as_ptr() as u64;
        let end = GuestVirtAddr(start + self.memory.len() as u64);
        VirtRange::new(GuestVirtAddr(start), end).unwrap()
    }
}

/// A tracker of page faults, or `None` with a message if the system forbids it.
pub(in crate::tracker) fn page_faults() -> Option<PerfTracker> {
    match PerfTracker::with_event(EventKind::PageFaults, &Settings::default()) {
        Ok(tracker) => Some(tracker),
        Err(error) if error.to_string().contains("CAP_PERFMON") => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn faults_of_a_target_carry_their_addresses() {
    let Some(mut tracker) = page_faults() else {
        return;
    };
    tracker.set_targets(&[Pid(std::process::id())]).unwrap();
    let mut memory = Untouched::new(4096);
    memory.touch(4096);
    let mut out = Vec::new();
    tracker.drain(&mut out, 100_000).unwrap();
    let inside = out
        .iter()
        .filter(|sample| memory.range().contains(sample.addr))
        .count();
    // With huge pages one fault maps 512 pages.
    assert!(inside >= 4096 / 512, "{inside} samples of {}", out.len());
    assert!(
        out.iter()
            .all(|sample| sample.pid == Pid(std::process::id()))
    );
}

#[test]
fn records_without_an_address_are_no_sign_of_life() {
    let drained = |taken, lost, rejected| Drained {
        taken,
        lost,
        rejected,
        is_repeat: false,
    };
    assert!(is_life(&drained(1, 0, 9)) && is_life(&drained(0, 1, 9)));
    assert!(!is_life(&drained(0, 0, 9)));
}

#[test]
fn a_thread_that_was_running_before_is_covered() {
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        wait.recv().unwrap();
        let mut memory = Untouched::new(512);
        memory.touch(512);
        memory
    });
    let Some(mut tracker) = page_faults() else {
        return;
    };
    tracker.set_targets(&[Pid(std::process::id())]).unwrap();
    go.send(()).unwrap();
    let memory = thread.join().unwrap();
    let mut out = Vec::new();
    tracker.drain(&mut out, 100_000).unwrap();
    assert!(
        out.iter()
            .any(|sample| memory.range().contains(sample.addr))
    );
}

#[test]
fn a_child_is_a_stranger_until_it_is_a_target() {
    let Some(mut tracker) = page_faults() else {
        return;
    };
    tracker.set_targets(&[]).unwrap();
    let mut out = Vec::new();
    let status = std::process::Command::new("true").status().unwrap();
    assert!(status.success());
    let drained = tracker.drain(&mut out, 100_000).unwrap();
    assert!(out.is_empty());
    assert!(drained.rejected > 0);
}

#[test]
fn a_calm_agent_gets_fewer_samples_and_all_of_them_when_something_happens() {
    let Some(mut tracker) = page_faults() else {
        return;
    };
    tracker.set_targets(&[Pid(std::process::id())]).unwrap();
    let calm = Prospect {
        is_calm: true,
        ..Prospect::OPEN
    };
    let faults = |tracker: &mut PerfTracker| {
        let (mut memory, mut out) = (Untouched::new(16_384), vec![]);
        let range = memory.range();
        // SAFETY: the range is this process's own; the advice changes the size of pages that are not there yet.
        let advised = unsafe {
            let start = range.start().0.next_multiple_of(PAGE as u64) as *mut libc::c_void;
            libc::madvise(start, range.len().0 as usize - PAGE, libc::MADV_NOHUGEPAGE)
        };
        assert_eq!(advised, 0);
        for _ in 0..8 {
            memory.touch(2048);
            tracker.drain(&mut out, 1 << 20).unwrap();
        }
        out.iter()
            .filter(|sample| memory.range().contains(sample.addr))
            .count()
    };
    let all = faults(&mut tracker);
    assert!(all > 16_000, "{all}");
    tracker.epoch_ended(calm).unwrap();
    assert_eq!(tracker.thinning(), 8);
    assert_eq!(tracker.loads_per_sample(), Some(1));
    let some = faults(&mut tracker);
    assert!((all / 9..all / 7).contains(&some), "{some} of {all}");
    tracker.epoch_ended(Prospect::OPEN).unwrap();
    assert_eq!(tracker.thinning(), 1);
    let again = faults(&mut tracker);
    assert!(again > 16_000, "{again}");
}
