//! Context switches at a steady rate.
//!
//! QEMU's software TLB grows only when it is flushed, and a TLB that stays small slows the
//! workload by half. A workload alone on its CPU is hardly ever switched out, so whatever merely
//! wakes now and then beside it, a tiering agent for example, would make it faster. A thread
//! therefore wakes at the same rate in every VM, whatever its system.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two wakes: ten a second bring the TLB to its full size within seconds, while
/// fifty already cost throughput.
const TICK: Duration = Duration::from_millis(100);

/// Ticks until it is dropped.
#[derive(Debug)]
pub struct Ticker {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// Starts ticking.
    pub fn start() -> Self {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {}
        });
        Self {
            stop: Some(stop),
            thread: Some(thread),
        }
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            // It cannot panic; there is nothing to learn from how it ended.
            let _ = thread.join();
        }
    }
}
