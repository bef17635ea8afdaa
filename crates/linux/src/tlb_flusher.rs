//! Flushes user translations from the TLBs of all CPUs, by short helper processes.
//!
//! # Problem
//! A CPU sets the accessed bit of a page-table entry when it loads the translation into its TLB, but not on a TLB hit.
//! If bits are cleared without a flush, as DAMON does, a page that stays in the TLB looks unaccessed. On a Zen
//! processor, two of 256 small pages in use were found accessed in 40 ms.
//!
//! # Approach
//! No system call flushes another process's translations. But an x86 kernel keeps the translations of only six address
//! spaces on each CPU (`TLB_NR_DYN_ASIDS` in `arch/x86/mm/tlb.c`), and of one without PCIDs. When an address space has
//! lost its number to another one, its translations are flushed before it runs again. So a dozen *helpers*, idle
//! processes, run for a moment on each CPU. They are forks of this process, and share its memory.
//!
//! Helpers keep the time themselves, so that no other process needs to wake. They end with their owner and with this
//! process, because their pipes are closed then.
//!
//! This does not work on other architectures, which have hundreds of numbers at least, nor for programs to which newer
//! kernels give one number on all CPUs (AMD's `INVLPGB`).
//!
//! # Properties
//! - After a flush, pages in use are found accessed.
//! - No helper outlives its owner.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use demeter_policy::Pid;
#[cfg(target_arch = "x86_64")]
use demeter_policy::damon::SPACES_TO_FLUSH;

use crate::cpu;

/// A helper's name in lists of processes.
const NAME: &std::ffi::CStr = c"demeter-flush";

/// A schedule of flushes; all zero means none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Order {
    interval_ms: u32,
    times: u32,
}

impl Order {
    const BYTES: usize = 8;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let [interval_ms, times] = [self.interval_ms, self.times].map(u64::from);
        (interval_ms << 32 | times).to_ne_bytes()
    }

    fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let both = u64::from_ne_bytes(bytes);
        Self {
            interval_ms: (both >> 32) as u32,
            times: both as u32,
        }
    }
}

/// Flushes TLBs on a schedule.
#[derive(Debug)]
pub struct TlbFlusher {
    helpers: Vec<Helper>,
    /// The schedule that the helpers got last.
    order: Order,
    /// CPU time that [`Self::take_spent`] has returned.
    told: Duration,
}

/// A helper process, with the writing end of its pipe.
#[derive(Debug)]
struct Helper {
    pid: libc::pid_t,
    orders: File,
}

impl TlbFlusher {
    /// Starts the helpers, on the CPUs that this process may use.
    ///
    /// # Errors
    /// Helpers have no effect on this CPU, or no process or pipe can be created.
    pub fn new() -> io::Result<Self> {
        let cpus = cpus()?;
        let mut flusher = Self {
            helpers: vec![],
            order: Order::default(),
            told: Duration::ZERO,
        };
        for _ in 0..helpers_wanted()? {
            flusher.helpers.push(Helper::start(&cpus)?);
        }
        Ok(flusher)
    }

    /// Replaces the schedule: a flush in the middle of each of `times` intervals, in whole milliseconds.
    pub fn flush_each(&mut self, interval: Duration, times: u32) {
        self.order(Order {
            interval_ms: u32::try_from(interval.as_millis()).unwrap_or(u32::MAX),
            times,
        });
    }

    /// Stops flushing.
    pub fn stop(&mut self) {
        if self.order != Order::default() {
            self.order(Order::default());
        }
    }

    /// CPU time of the helpers since the last call.
    pub fn take_spent(&mut self) -> Duration {
        let pids = self.helpers.iter().map(|helper| Pid(helper.pid as u32));
        let all = pids.filter_map(|pid| cpu::of(Path::new("/"), pid)).sum();
        let spent = Duration::saturating_sub(all, self.told);
        self.told = all;
        spent
    }

    fn order(&mut self, order: Order) {
        self.order = order;
        // A helper that was killed, or stopped until its pipe is full, is dropped; the others suffice.
        self.helpers
            .retain_mut(|helper| helper.orders.write_all(&order.to_bytes()).is_ok());
    }
}

/// Number of helpers to start.
#[cfg(target_arch = "x86_64")]
fn helpers_wanted() -> io::Result<usize> {
    /// The PCID bit in ECX of leaf 1.
    const PCID: u32 = 1 << 17;
    let has_pcids = std::arch::x86_64::__cpuid(1).ecx & PCID != 0;
    Ok(if has_pcids { SPACES_TO_FLUSH } else { 1 })
}

#[cfg(not(target_arch = "x86_64"))]
fn helpers_wanted() -> io::Result<usize> {
    Err(io::ErrorKind::Unsupported.into())
}

/// The CPUs that this process may use.
fn cpus() -> io::Result<libc::cpu_set_t> {
    // SAFETY: a set of CPUs consists of words; all zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most the set's size.
    match unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) } {
        0 => Ok(set),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Helper {
    fn start(cpus: &libc::cpu_set_t) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let (reader, writer) = (OwnedFd::from(reader), OwnedFd::from(writer));
        // SAFETY: changes a flag of our own descriptor.
        if unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the child calls only functions that are safe after a fork of a threaded process: it allocates
        // nothing, takes no lock, and never returns.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => help(reader.as_raw_fd(), cpus),
            pid => Ok(Self {
                pid,
                // SAFETY: the owner has just released the descriptor, which is open.
                orders: unsafe { File::from_raw_fd(writer.into_raw_fd()) },
            }),
        }
    }
}

/// A helper's main loop: runs on schedule until the pipe is closed.
fn help(orders: RawFd, cpus: &libc::cpu_set_t) -> ! {
    // A helper must not keep the agent's locks and sockets open, nor the ends of other pipes, by which other helpers
    // see that the agent has ended. SAFETY: nothing here uses another descriptor.
    unsafe {
        let close = |first: libc::c_uint, last: libc::c_uint| {
            libc::syscall(libc::SYS_close_range, first, last, 0) == 0
        };
        let are_closed = (orders == 0 || close(0, orders.cast_unsigned() - 1))
            && close(orders.cast_unsigned() + 1, libc::c_uint::MAX);
        if !are_closed {
            end();
        }
        libc::prctl(libc::PR_SET_NAME, NAME.as_ptr());
    }
    let mut order = Order::default();
    let mut is_first = true;
    loop {
        let interval_ms = order.interval_ms >> u32::from(is_first);
        let wait_ms = match order.times {
            0 => -1,
            _ => libc::c_int::try_from(interval_ms).unwrap_or(libc::c_int::MAX),
        };
        let mut waited = libc::pollfd {
            fd: orders,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry, which the kernel writes to.
        match unsafe { libc::poll(&raw mut waited, 1, wait_ms) } {
            0 => {
                order.times -= 1;
                is_first = false;
                visit(cpus);
            }
            // A signal without a handler.
            -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            -1 => end(),
            _ => {
                let mut bytes = [0; Order::BYTES];
                // SAFETY: the kernel writes at most the buffer's size. An order is written and read as a whole.
                let read = unsafe { libc::read(orders, bytes.as_mut_ptr().cast(), bytes.len()) };
                if read != bytes.len() as isize {
                    end();
                }
                order = Order::from_bytes(bytes);
                is_first = true;
            }
        }
    }
}

/// Ends a helper.
fn end() -> ! {
    // SAFETY: ends the process at once, without the agent's destructors.
    unsafe { libc::_exit(0) }
}

/// Runs on each of these CPUs for a moment; at least on the present one.
fn visit(cpus: &libc::cpu_set_t) {
    // SAFETY: reads a complete set.
    if unsafe { libc::CPU_COUNT(cpus) } < 2 {
        return;
    }
    for cpu in 0..libc::CPU_SETSIZE as usize {
        // SAFETY: the number is below a set's size; all zero is the empty set; the kernel reads no more than its size.
        unsafe {
            if libc::CPU_ISSET(cpu, cpus) {
                let mut only: libc::cpu_set_t = std::mem::zeroed();
                libc::CPU_SET(cpu, &mut only);
                // An offline CPU has no translations.
                libc::sched_setaffinity(0, size_of_val(&only), &raw const only);
            }
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let mut status = 0;
        // SAFETY: kills a child that was not waited for yet, so that the pid is still its own; waits for it, and writes
        // to a word of ours.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, &raw mut status, 0);
        }
    }
}

#[cfg(test)]
mod tests;
