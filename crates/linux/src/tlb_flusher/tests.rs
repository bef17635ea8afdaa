use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::*;

const PAGES: usize = 256;
const PAGE_BYTES: usize = 4096;

/// Small pages, few enough for a TLB to hold all their translations.
struct Table(*mut u8);

// SAFETY: the memory is accessed through atomics only, and outlives the threads that use it.
unsafe impl Sync for Table {}

impl Table {
    fn new() -> Self {
        let len = PAGES * PAGE_BYTES;
        // An inaccessible page at each end keeps the mapping apart from others. SAFETY: a new mapping at an address
        // that the kernel chooses; all of it except the ends is made accessible.
        let base = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let all = len + 2 * PAGE_BYTES;
            let first = libc::mmap(std::ptr::null_mut(), all, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(first, libc::MAP_FAILED);
            let base = first.cast::<u8>().add(PAGE_BYTES);
            let opened = libc::mprotect(base.cast(), len, libc::PROT_READ | libc::PROT_WRITE);
            assert_eq!(opened, 0);
            base
        };
        Self(base)
    }

    /// Accesses every page once.
    fn use_all(&self) {
        for page in 0..PAGES {
            // SAFETY: inside the mapping, and aligned.
            let first = unsafe { AtomicBool::from_ptr(self.0.add(page * PAGE_BYTES).cast()) };
            first.store(true, Ordering::Relaxed);
        }
    }

    /// Number of pages found accessed since the last call.
    fn take_accessed(&self) -> usize {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        fs::write("/proc/self/clear_refs", "1").unwrap();
        let own = smaps
            .split_once(&format!("{:x}-", self.0 as usize))
            .unwrap()
            .1;
        let line = own
            .lines()
            .find_map(|line| line.strip_prefix("Referenced:"));
        let kib: usize = line
            .unwrap()
            .trim()
            .trim_end_matches(" kB")
            .parse()
            .unwrap();
        kib * 1024 / PAGE_BYTES
    }
}

/// A flusher, or `None` with a message where there is none.
fn flusher() -> Option<TlbFlusher> {
    match TlbFlusher::new() {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            eprintln!("skipped: {error}");
            None
        }
        flusher => Some(flusher.unwrap()),
    }
}

/// Ends the program, even if the test fails.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn what_a_program_uses_is_found_accessed_after_a_flush() {
    let (table, is_over) = (Table::new(), AtomicBool::new(false));
    let Some(mut flusher) = flusher() else {
        return;
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                table.use_all();
            }
        });
        let _end = EndOnDrop(&is_over);
        flusher.flush_each(Duration::from_millis(2), u32::MAX);
        let mut accessed: Vec<_> = (0..21)
            .map(|_| {
                table.take_accessed();
                std::thread::sleep(Duration::from_millis(40));
                table.take_accessed()
            })
            .collect();
        accessed.sort_unstable();
        // Without flushes only a few are, except when another process happens to run.
        assert_eq!(accessed[10], PAGES, "{accessed:?}");
    });
    assert!(flusher.take_spent() > Duration::ZERO);
}

#[test]
fn no_helper_outlives_its_owner_or_holds_what_it_has_open() {
    let Some(flusher) = flusher() else {
        return;
    };
    let pids: Vec<_> = flusher.helpers.iter().map(|helper| helper.pid).collect();
    let proc = |pid: &libc::pid_t| Path::new("/proc").join(pid.to_string());
    for pid in &pids {
        let has_begun = || fs::read_to_string(proc(pid).join("comm")).unwrap() == "demeter-flush\n";
        let began = Instant::now();
        while !has_begun() && began.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        assert_eq!(fs::read_dir(proc(pid).join("fd")).unwrap().count(), 1);
    }
    drop(flusher);
    assert!(pids.iter().all(|pid| !proc(pid).exists()));
}

#[test]
fn an_order_arrives_as_it_was_given() {
    let order = Order {
        interval_ms: 80,
        times: u32::MAX,
    };
    assert_eq!(Order::from_bytes(order.to_bytes()), order);
}

#[test]
fn a_helper_that_somebody_has_stopped_is_given_up() {
    let Some(mut flusher) = flusher() else {
        return;
    };
    let first = flusher.helpers[0].pid;
    // SAFETY: stops a child of ours.
    assert_eq!(unsafe { libc::kill(first, libc::SIGSTOP) }, 0);
    let helpers = flusher.helpers.len();
    let is_there = |flusher: &TlbFlusher| flusher.helpers.iter().any(|it| it.pid == first);
    // More orders than a pipe holds.
    for _ in 0..1 << 20 {
        flusher.flush_each(Duration::from_secs(3600), 1);
        if !is_there(&flusher) {
            break;
        }
    }
    assert!(!is_there(&flusher) && flusher.helpers.len() < helpers);
    assert!(!Path::new("/proc").join(first.to_string()).exists());
}
