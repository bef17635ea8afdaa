//! Context switches at a steady rate.
//!
//! QEMU's software TLB grows only when it is flushed, and a TLB that stays small slows the workload by half. A workload
//! alone on its CPU is rarely switched out. Any process that wakes up beside it, such as a tiering agent, would
//! therefore speed it up. This thread wakes at a fixed rate in every VM, under every system.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval of wakes. Ten a second grow the TLB to its full size within seconds; fifty already cost throughput.
const TICK: Duration = Duration::from_millis(100);

/// A thread that ticks until it is dropped.
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
            // It cannot panic, so its result does not matter.
            let _ = thread.join();
        }
    }
}
