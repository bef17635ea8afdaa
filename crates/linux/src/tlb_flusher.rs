//! Has every CPU forget which translations it holds for programs, from outside of them.
//!
//! # Problem
//! A CPU sets the accessed bit of a page-table entry when it loads the translation into its TLB, and not while it holds it.
//! Who clears bits without a flush, as DAMON does, finds a page untouched that never leaves the TLB: of 256 small
//! pages in use, on a Zen processor, two were found accessed in 40 ms.
//!
//! # Approach
//! No system call flushes what a CPU holds for another process. But an x86 kernel tells translations of only six address
//! spaces apart on each CPU (`TLB_NR_DYN_ASIDS` in `arch/x86/mm/tlb.c`), and none where CPUs have no PCIDs:
//! whose number was given to another address space is flushed when its turn comes again. So a dozen *helpers*,
//! processes that do nothing, run for a moment on each CPU. They are forks of this process, and share its memory.
//!
//! Helpers keep the time themselves, so that nobody has to wake for it. They end when their owner does, and when this process
//! ends, however that is: their pipes are closed then.
//!
//! Not on other architectures, which have hundreds of numbers at the least; nor for programs to which newer kernels
//! give one number on all CPUs (AMD's `INVLPGB`).
//!
//! # Properties
//! - What a program uses is found accessed after its CPU was flushed.
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

/// A helper's name, for who lists processes.
const NAME: &std::ffi::CStr = c"demeter-flush";

/// When to run: all zero, not at all.
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

/// Flushes while it is told to.
#[derive(Debug)]
pub struct TlbFlusher {
    helpers: Vec<Helper>,
    /// What they were told last.
    order: Order,
    /// What [`Self::take_spent`] has told.
    told: Duration,
}

/// A process of ours, with the only end of its pipe that writes.
#[derive(Debug)]
struct Helper {
    pid: libc::pid_t,
    orders: File,
}

impl TlbFlusher {
    /// Starts the helpers. They run on the CPUs that this process may use.
    ///
    /// # Errors
    /// Where they are of no use, or the kernel gives no process or pipe.
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

    /// From now on flushes in the middle of each of so many intervals, whatever was wanted before. An interval counts in milliseconds.
    pub fn flush_each(&mut self, interval: Duration, times: u32) {
        self.order(Order {
            interval_ms: u32::try_from(interval.as_millis()).unwrap_or(u32::MAX),
            times,
        });
    }

    /// Flushes no more.
    pub fn stop(&mut self) {
        if self.order != Order::default() {
            self.order(Order::default());
        }
    }

    /// CPU time that the helpers have spent since this was last asked.
    pub fn take_spent(&mut self) -> Duration {
        let pids = self.helpers.iter().map(|helper| Pid(helper.pid as u32));
        let all = pids.filter_map(|pid| cpu::of(Path::new("/"), pid)).sum();
        let spent = Duration::saturating_sub(all, self.told);
        self.told = all;
        spent
    }

    fn order(&mut self, order: Order) {
        self.order = order;
        // A helper that somebody has ended, or stopped until its pipe is full, is missed only if most are.
        self.helpers
            .retain_mut(|helper| helper.orders.write_all(&order.to_bytes()).is_ok());
    }
}

/// How many helpers it takes.
#[cfg(target_arch = "x86_64")]
fn helpers_wanted() -> io::Result<usize> {
    /// Bit of leaf 1's ECX.
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
    // SAFETY: a set of CPUs is made of words, of which all zero is the empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes no more than the set's size to it.
    match unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) } {
        0 => Ok(set),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Helper {
    fn start(cpus: &libc::cpu_set_t) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let (reader, writer) = (OwnedFd::from(reader), OwnedFd::from(writer));
        // SAFETY: changes a flag of a descriptor of ours.
        if unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the child calls only what is safe after a fork of a process with several threads: it allocates
        // nothing, takes no lock, and never returns.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => help(reader.as_raw_fd(), cpus),
            pid => Ok(Self {
                pid,
                // SAFETY: the descriptor was just given up by its owner, and is open.
                orders: unsafe { File::from_raw_fd(writer.into_raw_fd()) },
            }),
        }
    }
}

/// The life of a helper: to run when it is time, until nobody is left to order it.
fn help(orders: RawFd, cpus: &libc::cpu_set_t) -> ! {
    // Nothing of the agent's may stay open for as long as a helper lives: locks, sockets, the ends of other pipes, without
    // which the others would not see that the agent has ended.
    // SAFETY: nothing here uses another descriptor.
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
            // A signal that nobody minds.
            -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            -1 => end(),
            _ => {
                let mut bytes = [0; Order::BYTES];
                // SAFETY: the kernel writes no more than the buffer has. An order is written at once, and read so.
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

/// Runs on each of these CPUs for a moment: on whichever it is now, at least.
fn visit(cpus: &libc::cpu_set_t) {
    // SAFETY: reads a set that is whole.
    if unsafe { libc::CPU_COUNT(cpus) } < 2 {
        return;
    }
    for cpu in 0..libc::CPU_SETSIZE as usize {
        // SAFETY: the number is less than a set has; a set of all zero is the empty one; the kernel reads no more than its size.
        unsafe {
            if libc::CPU_ISSET(cpu, cpus) {
                let mut only: libc::cpu_set_t = std::mem::zeroed();
                libc::CPU_SET(cpu, &mut only);
                // A CPU that was switched off holds nothing.
                libc::sched_setaffinity(0, size_of_val(&only), &raw const only);
            }
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let mut status = 0;
        // SAFETY: ends a child of ours that was not waited for yet, so that the number is still its own, waits for it,
        // and writes to a word of ours.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, &raw mut status, 0);
        }
    }
}

#[cfg(test)]
mod tests;
