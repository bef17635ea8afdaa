//! The kernel, through move_pages(2).

use std::ffi::{c_int, c_long, c_ulong, c_void};
use std::io;
use std::ptr;

use demeter_policy::{GuestVirtAddr, NodeId, Pid};

use super::{Errno, PAGES_PER_CALL_MAX, PageState, Pages, PagesError};

/// Move pages that only this process maps (linux/mempolicy.h).
const MPOL_MF_MOVE: c_int = 1 << 1;
/// Move pages that others map as well; needs CAP_SYS_NICE.
const MPOL_MF_MOVE_ALL: c_int = 1 << 2;

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
        self.nodes.extend(
            to.map(|node| node.0 as c_int)
                .into_iter()
                .cycle()
                .take(if to.is_some() { pages.len() } else { 0 }),
        );
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
            return Err(match source.raw_os_error() {
                Some(libc::ESRCH) => PagesError::Gone(pid),
                Some(libc::EPERM | libc::EACCES) => PagesError::Denied(pid),
                // A move that stops in the middle: pages before it may have moved, and no status
                // says which.
                Some(errno @ (libc::ENOMEM | libc::EAGAIN | libc::EBUSY)) if to.is_some() => {
                    out.extend(pages.iter().map(|_| PageState::Failed(Errno(errno))));
                    return Ok(());
                }
                _ => PagesError::Io { pid, source },
            });
        }
        out.extend(self.status.iter().map(|&status| state(status)));
        Ok(())
    }
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
        match self.call(pid, pages, Some(to), out) {
            Err(PagesError::Denied(_)) if self.flags == MPOL_MF_MOVE_ALL => {
                // Without CAP_SYS_NICE only pages that nobody else maps can be moved.
                self.flags = MPOL_MF_MOVE;
                self.call(pid, pages, Some(to), out)
            }
            result => result,
        }
    }
}
