//! The kernel, through move_pages(2) and process_madvise(2).

use std::ffi::{c_int, c_long, c_ulong, c_void};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use demeter_policy::{BLOCK_SIZE, Block, GuestVirtAddr, NodeId, Pid};

use super::{Errno, PAGES_PER_CALL_MAX, PageState, Pages, PagesError};

/// Move pages that only this process maps (linux/mempolicy.h).
const MPOL_MF_MOVE: c_int = 1 << 1;
/// Move pages that others map as well; needs CAP_SYS_NICE.
const MPOL_MF_MOVE_ALL: c_int = 1 << 2;

/// Make a huge page of the range, now (asm-generic/mman-common.h; Linux 6.1).
const MADV_COLLAPSE: c_int = 25;

/// What `status` holds where the kernel did not say anything: not a node, not an errno.
const UNSAID: c_int = c_int::MIN;

/// The kernel's own placement of pages.
#[derive(Debug)]
pub struct LivePages {
    flags: c_int,
    addresses: Vec<*const c_void>,
    nodes: Vec<c_int>,
    status: Vec<c_int>,
}

// SAFETY: the pointers are addresses in other processes, never followed here; they are written
// anew for each call.
unsafe impl Send for LivePages {}

impl Default for LivePages {
    fn default() -> Self {
        Self {
            flags: MPOL_MF_MOVE_ALL,
            addresses: vec![],
            nodes: vec![],
            status: vec![],
        }
    }
}

impl LivePages {
    /// One call of move_pages(2), at most [`PAGES_PER_CALL_MAX`] pages; a question without `to`.
    fn call(
        &mut self,
        pid: Pid,
        pages: &[GuestVirtAddr],
        to: Option<NodeId>,
        out: &mut Vec<PageState>,
    ) -> Result<(), PagesError> {
        assert!(pages.len() <= PAGES_PER_CALL_MAX, "the caller splits");
        if pages.is_empty() {
            return Ok(());
        }
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
        // SAFETY: the three arrays hold `pages.len()` elements each (or `nodes` is null, which
        // asks only) and outlive the call; the kernel writes `status` and nothing else of ours.
        let result: c_long = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                pid.0 as libc::pid_t,
                pages.len() as c_ulong,
                self.addresses.as_ptr(),
                nodes,
                self.status.as_mut_ptr(),
                self.flags,
            )
        };
        if result < 0 {
            let source = io::Error::last_os_error();
            return Err(match (source.raw_os_error(), to) {
                // A process that has ended and is not waited for has no memory: EINVAL.
                (Some(libc::ESRCH | libc::EINVAL), _) => PagesError::Gone(pid),
                (Some(libc::EPERM), _) if is_open_to_us() => PagesError::Denied(pid),
                (Some(libc::EPERM | libc::ENOSYS), _) => PagesError::Refused { call: CALL, source },
                (Some(libc::EACCES), Some(node)) => PagesError::NodeExcluded { pid, node },
                (Some(libc::ENODEV), Some(node)) => PagesError::NodeGone(node),
                // A move that stops in the middle: pages before it may have moved, and no status
                // says which.
                (Some(errno @ (libc::ENOMEM | libc::EAGAIN | libc::EBUSY)), Some(_)) => {
                    out.extend(pages.iter().map(|_| PageState::Failed(Errno(errno))));
                    return Ok(());
                }
                _ => PagesError::Io { call: CALL, source },
            });
        }
        out.extend(self.status.iter().map(|&status| state(status)));
        Ok(())
    }
}

/// The system call that everything here but collapsing goes through.
const CALL: &str = "move_pages";

/// Whether the call is there for us at all: asks for no page of our own process.
fn is_open_to_us() -> bool {
    // SAFETY: with no pages the kernel reads and writes none of the arrays.
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

/// Whether KSM has merged pages of a process with pages of others. They stay where they are: a move would be one for all
/// of these. The kernel says so of a process only (Linux 5.19), so that nothing else moves that others map.
fn has_merged_pages(pid: Pid) -> bool {
    let count = std::fs::read_to_string(format!("/proc/{pid}/ksm_merging_pages"));
    count.is_ok_and(|count| count.trim() != "0")
}

/// What one element of `status` means.
fn state(status: c_int) -> PageState {
    match status {
        // A call that moves some pages only leaves the rest unsaid: they were busy.
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
        // Either the process is not ours to touch, or, without CAP_SYS_NICE, pages that others map as well are not.
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

    fn collapse(&mut self, pid: Pid, blocks: &[Block]) -> Result<(), PagesError> {
        if has_merged_pages(pid) {
            return Ok(());
        }
        // SAFETY: pidfd_open takes a number and returns a new descriptor or -1.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.0 as libc::pid_t, 0) };
        if fd < 0 {
            return match io::Error::last_os_error().raw_os_error() {
                Some(libc::ESRCH) => Err(PagesError::Gone(pid)),
                // Small pages move as well.
                _ => Ok(()),
            };
        }
        // SAFETY: the descriptor is new, valid and nobody else's.
        let process = unsafe { OwnedFd::from_raw_fd(fd as c_int) };
        for block in blocks {
            let range = libc::iovec {
                iov_base: block.start().0 as *mut c_void,
                iov_len: BLOCK_SIZE as usize,
            };
            // SAFETY: one iovec that outlives the call. Its address is one of the other process;
            // collapsing changes which frames back it, not what it holds.
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
