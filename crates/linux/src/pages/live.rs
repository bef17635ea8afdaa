//! The kernel's page placement, through move_pages(2) and process_madvise(2).

use std::ffi::{c_int, c_long, c_ulong, c_void};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::panic::resume_unwind;
use std::time::Duration;
use std::{ptr, thread};

use demeter_policy::{BLOCK_SIZE, Block, GuestVirtAddr, NodeId, Pid};

use super::{Errno, PAGES_PER_CALL_MAX, PageState, Pages, PagesError};
use crate::cpu;

/// Move pages that only this process maps (linux/mempolicy.h).
const MPOL_MF_MOVE: c_int = 1 << 1;
/// Move pages that other processes map, too; needs CAP_SYS_NICE.
const MPOL_MF_MOVE_ALL: c_int = 1 << 2;

/// Collapse the range to a huge page now (asm-generic/mman-common.h; Linux 6.1).
const MADV_COLLAPSE: c_int = 25;

/// Initial value of `status`: neither a node nor an errno.
const UNSAID: c_int = c_int::MIN;

/// The page placement of this machine's kernel.
#[derive(Debug)]
pub struct LivePages {
    flags: c_int,
    /// Arrays of the calls that are made at the same time, one for each mover.
    calls: Vec<Call>,
    /// CPU time of the movers but this thread.
    helped: Duration,
}

/// The arrays of one call.
#[derive(Debug, Default)]
struct Call {
    addresses: Vec<*const c_void>,
    nodes: Vec<c_int>,
    status: Vec<c_int>,
}

// SAFETY: the pointers are addresses in other processes and never dereferenced here. They are rewritten for each call.
unsafe impl Send for Call {}

impl Default for LivePages {
    fn default() -> Self {
        Self {
            flags: MPOL_MF_MOVE_ALL,
            calls: vec![Call::default()],
            helped: Duration::ZERO,
        }
    }
}

impl LivePages {
    /// Calls move_pages(2) for at most [`PAGES_PER_CALL_MAX`] pages; without `to` it only looks up. Moves are split between
    /// all movers.
    fn call(
        &mut self,
        pid: Pid,
        pages: &[GuestVirtAddr],
        to: Option<NodeId>,
        out: &mut Vec<PageState>,
    ) -> Result<(), PagesError> {
        assert!(pages.len() <= PAGES_PER_CALL_MAX, "the caller splits");
        let movers = if to.is_some() { self.calls.len() } else { 1 };
        let part = pages.len().div_ceil(movers).max(1);
        let flags = self.flags;
        let mut parts = self.calls.iter_mut().zip(pages.chunks(part));
        let first = parts.next();
        let (results, helped) = thread::scope(|scope| {
            let others = parts.map(|(call, pages)| {
                let make = move || (call.make(pid, pages, to, flags), cpu::of_this_thread());
                (pages, thread::Builder::new().spawn_scoped(scope, make))
            });
            // They have to be started before any is waited for.
            let others: Vec<_> = others.collect();
            let first = first.map(|(call, pages)| call.make(pid, pages, to, flags));
            let mut results: Vec<_> = first.into_iter().collect();
            let mut helped = Duration::ZERO;
            for (pages, other) in others {
                // Where no thread can be had, these pages are tried again later.
                let (result, took) = other.map_or_else(
                    |_| (Ok(failed(pages, libc::EAGAIN)), Duration::ZERO),
                    |other| other.join().unwrap_or_else(|panic| resume_unwind(panic)),
                );
                results.push(result);
                helped += took;
            }
            (results, helped)
        });
        self.helped += helped;
        // All or nothing: the caller may try again with the same `out`.
        let states: Result<Vec<_>, _> = results.into_iter().collect();
        out.extend(states?.into_iter().flatten());
        Ok(())
    }
}

impl Call {
    /// Calls move_pages(2) once.
    fn make(
        &mut self,
        pid: Pid,
        pages: &[GuestVirtAddr],
        to: Option<NodeId>,
        flags: c_int,
    ) -> Result<Vec<PageState>, PagesError> {
        self.addresses.clear();
        self.addresses
            .extend(pages.iter().map(|a| a.0 as *const c_void));
        self.status.clear();
        self.status.resize(pages.len(), UNSAID);
        self.nodes.clear();
        if let Some(node) = to {
            self.nodes.resize(pages.len(), node.0 as c_int);
        }
        let nodes = if to.is_some() {
            self.nodes.as_ptr()
        } else {
            ptr::null()
        };
        // SAFETY: the three arrays have `pages.len()` elements each (or `nodes` is null, which only looks up) and
        // outlive the call; of our memory the kernel writes only `status`.
        let result: c_long = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                pid.0 as libc::pid_t,
                pages.len() as c_ulong,
                self.addresses.as_ptr(),
                nodes,
                self.status.as_mut_ptr(),
                flags,
            )
        };
        if result < 0 {
            let source = io::Error::last_os_error();
            return Err(match (source.raw_os_error(), to) {
                // A zombie process has no memory: EINVAL.
                (Some(libc::ESRCH | libc::EINVAL), _) => PagesError::Gone(pid),
                (Some(libc::EPERM), _) if is_open_to_us() => PagesError::Denied(pid),
                (Some(libc::EPERM | libc::ENOSYS), _) => PagesError::Refused { call: CALL, source },
                (Some(libc::EACCES), Some(node)) => PagesError::NodeExcluded { pid, node },
                (Some(libc::ENODEV), Some(node)) => PagesError::NodeGone(node),
                // The move was aborted: earlier pages may have moved, and no status tells which.
                (Some(errno @ (libc::ENOMEM | libc::EAGAIN | libc::EBUSY)), Some(_)) => {
                    return Ok(failed(pages, errno));
                }
                _ => PagesError::Io { call: CALL, source },
            });
        }
        Ok(self.status.iter().map(|&status| state(status)).collect())
    }
}

/// The system call of all operations here except collapsing.
const CALL: &str = "move_pages";

/// Whether the call is permitted: it asks for no page of our own process.
fn is_open_to_us() -> bool {
    // SAFETY: with no pages the kernel accesses none of the arrays.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            0 as c_ulong,
            ptr::null::<*const c_void>(),
            ptr::null::<c_int>(),
            ptr::null_mut::<c_int>(),
            0,
        )
    };
    result == 0
}

/// Whether KSM has merged pages of a process with other processes' pages. Such pages must stay, because a move would
/// affect all of these processes. The kernel reports it per process (Linux 5.19), so no shared page of it moves.
fn has_merged_pages(pid: Pid) -> bool {
    let count = std::fs::read_to_string(format!("/proc/{pid}/ksm_merging_pages"));
    count.is_ok_and(|count| count.trim() != "0")
}

/// The state of pages none of which is known to have moved.
fn failed(pages: &[GuestVirtAddr], errno: c_int) -> Vec<PageState> {
    vec![PageState::Failed(Errno(errno)); pages.len()]
}

/// Decodes one element of `status`.
fn state(status: c_int) -> PageState {
    match status {
        // A call that moves only some pages leaves the status of busy ones unset.
        UNSAID => PageState::Failed(Errno(libc::EBUSY)),
        node if node >= 0 => PageState::On(NodeId(node as u32)),
        // ENOENT: not present. EFAULT: not mapped, or the zero page.
        error if -error == libc::ENOENT || -error == libc::EFAULT => PageState::Absent,
        error => PageState::Failed(Errno(-error)),
    }
}

impl Pages for LivePages {
    fn locate(
        &mut self,
        pid: Pid,
        pages: &[GuestVirtAddr],
        out: &mut Vec<PageState>,
    ) -> Result<(), PagesError> {
        let flags = std::mem::replace(&mut self.flags, 0);
        let result = self.call(pid, pages, None, out);
        self.flags = flags;
        result
    }

    fn migrate(
        &mut self,
        pid: Pid,
        pages: &[GuestVirtAddr],
        to: NodeId,
        out: &mut Vec<PageState>,
    ) -> Result<(), PagesError> {
        if has_merged_pages(pid) && self.flags == MPOL_MF_MOVE_ALL {
            self.flags = MPOL_MF_MOVE;
            let result = self.call(pid, pages, Some(to), out);
            self.flags = MPOL_MF_MOVE_ALL;
            return result;
        }
        let result = self.call(pid, pages, Some(to), out);
        if !matches!(result, Err(PagesError::Denied(_))) || self.flags == MPOL_MF_MOVE {
            return result;
        }
        // Either this process may not be changed, or, without CAP_SYS_NICE, its shared pages may not.
        self.flags = MPOL_MF_MOVE;
        let result = self.call(pid, pages, Some(to), out);
        match result {
            Err(PagesError::Denied(_)) => self.flags = MPOL_MF_MOVE_ALL,
            _ => tracing::warn!(
                "pages that several processes map stay where they are: EPERM; grant CAP_SYS_NICE"
            ),
        }
        result
    }

    fn set_movers(&mut self, movers: usize) {
        self.calls.resize_with(movers.max(1), Call::default);
    }

    fn take_helped(&mut self) -> Duration {
        std::mem::take(&mut self.helped)
    }

    fn collapse(&mut self, pid: Pid, blocks: &[Block]) -> Result<(), PagesError> {
        if has_merged_pages(pid) {
            return Ok(());
        }
        // SAFETY: pidfd_open takes a number and returns a new descriptor or -1.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.0 as libc::pid_t, 0) };
        if fd < 0 {
            return match io::Error::last_os_error().raw_os_error() {
                Some(libc::ESRCH) => Err(PagesError::Gone(pid)),
                // Collapsing is optional: small pages can be moved, too.
                _ => Ok(()),
            };
        }
        // SAFETY: the descriptor is new and valid, and nothing else owns it.
        let process = unsafe { OwnedFd::from_raw_fd(fd as c_int) };
        for block in blocks {
            let range = libc::iovec {
                iov_base: block.start().0 as *mut c_void,
                iov_len: BLOCK_SIZE as usize,
            };
            // SAFETY: one iovec that outlives the call. Its address is in the other process; collapsing changes the
            // frames of a range, not its contents.
            let advised = unsafe {
                libc::syscall(
                    libc::SYS_process_madvise,
                    process.as_raw_fd(),
                    &raw const range,
                    1usize,
                    MADV_COLLAPSE,
                    0,
                )
            };
            if advised < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH) {
                return Err(PagesError::Gone(pid));
            }
        }
        Ok(())
    }
}
