//! Checks the system calls and capabilities that the agent needs, on this process.
//!
//! Capabilities and system calls are checked separately, since a seccomp filter may refuse a call although its
//! capability is there.

use std::ffi::{c_int, c_long, c_void};
use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::{fs, io, ptr};

use super::{Advice, Permissions};

/// Prefer memory of a node (linux/mempolicy.h).
const MPOL_PREFERRED: c_int = 1;

/// Numbers of the first process and user namespaces (linux/proc_ns.h).
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";
const FIRST_USER_NAMESPACE: &str = "user:[4026531837]";

/// A system call of the agent, tried in a way that needs no capability and changes nothing.
struct Call {
    name: &'static str,
    try_it: fn() -> io::Result<()>,
    /// The agent cannot work without it.
    blocks: bool,
    /// The loss without it.
    without: &'static str,
}

const CALLS: [Call; 6] = [
    Call {
        name: "move_pages",
        try_it: locate_own_page,
        blocks: true,
        without: "no page can be moved",
    },
    Call {
        name: "flock",
        try_it: try_flock,
        blocks: true,
        without: "the agent cannot lock its tracker",
    },
    Call {
        name: "epoll_wait",
        try_it: try_epoll_wait,
        blocks: true,
        without: "neither status nor the balloon can be served",
    },
    Call {
        name: "mbind",
        try_it: try_mbind,
        blocks: false,
        without: "latencies are assumed instead of measured",
    },
    Call {
        name: "pidfd_open",
        try_it: || own_pidfd().map(drop),
        blocks: false,
        without: "small pages are not made huge before they are promoted",
    },
    Call {
        name: "process_madvise",
        try_it: try_process_madvise,
        blocks: false,
        without: "small pages are not made huge before they are promoted",
    },
];

/// Refused calls, missing capabilities, and files hidden by namespaces, the gravest first.
pub fn missing(root: &Path) -> Vec<Advice> {
    let mut missing = refused_calls();
    missing.extend(missing_capabilities(&Permissions::read(root)));
    missing.extend(hidden(root));
    missing.sort_by_key(|advice| !advice.blocks);
    missing
}

/// System calls that the kernel refuses.
fn refused_calls() -> Vec<Advice> {
    let refused = CALLS.iter().filter_map(|call| {
        let error = (call.try_it)().err()?;
        // An unknown call or a refusal is a problem; any other error means that the call works.
        let hint = match error.raw_os_error()? {
            libc::EPERM | libc::EACCES => format!(
                "let the container's or service's seccomp filter allow {}",
                call.name
            ),
            libc::ENOSYS => format!(
                "let the seccomp filter allow {}, or use a kernel that has it (CONFIG_NUMA)",
                call.name
            ),
            _ => return None,
        };
        Some(Advice {
            blocks: call.blocks,
            what: format!("{}: {} is refused ({error})", call.without, call.name),
            hint,
        })
    });
    refused.collect()
}

pub(super) fn missing_capabilities(permissions: &Permissions) -> Vec<Advice> {
    let mut missing = vec![];
    let mut need = |has: bool, what: &str, hint: &str| {
        if !has {
            missing.push(Advice {
                blocks: false,
                what: what.into(),
                hint: hint.into(),
            });
        }
    };
    // Being root is not enough: /proc requires all capabilities of the inspected process.
    need(
        permissions.sys_ptrace,
        "processes of other users, and those with more capabilities, cannot be looked at",
        "run as root, or grant CAP_SYS_PTRACE",
    );
    need(
        permissions.sys_nice,
        "pages that several processes map cannot be moved",
        "run as root, or grant CAP_SYS_NICE",
    );
    missing
}

/// Files hidden by namespaces and by the mount of /proc.
fn hidden(root: &Path) -> Vec<Advice> {
    let is_first = |name: &str, first: &str| {
        let link = fs::read_link(root.join("proc/self/ns").join(name));
        link.map_or(true, |link| link == Path::new(first))
    };
    let mut hidden = vec![];
    let mut say = |what: &str, hint: &str| {
        hidden.push(Advice {
            blocks: false,
            what: what.into(),
            hint: hint.into(),
        });
    };
    if !is_first("pid", FIRST_PID_NAMESPACE) {
        say(
            "only processes of this PID namespace are seen, not the machine's others",
            "run in the machine's PID namespace (docker run --pid=host)",
        );
    } else if root.join("proc/self").exists() && !root.join("proc/1").exists() {
        say(
            "/proc hides processes of other users (hidepid)",
            "grant CAP_SYS_PTRACE, or mount /proc with hidepid=0",
        );
    }
    if !is_first("user", FIRST_USER_NAMESPACE) {
        say(
            "capabilities count within this user namespace only: DAMON and perf stay closed",
            "run in the machine's user namespace (docker run --userns=host)",
        );
    }
    hidden
}

/// Looks up the node of one page of ours.
fn locate_own_page() -> io::Result<()> {
    let here = 0u8;
    let page = (&raw const here).cast::<c_void>();
    let mut status: c_int = 0;
    // SAFETY: one address and one status, which outlive the call; without target nodes nothing is moved.
    checked(unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            1usize,
            &raw const page,
            ptr::null::<c_int>(),
            &raw mut status,
            0,
        )
    })
    .map(drop)
}

fn try_flock() -> io::Result<()> {
    let file = File::open("/proc/self/exe")?;
    file.try_lock_shared()?;
    file.unlock()
}

fn try_epoll_wait() -> io::Result<()> {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // The descriptor is invalid: a seccomp filter refuses the call before the kernel checks it. SAFETY: room for one
    // event, which outlives the call.
    checked(unsafe { libc::epoll_wait(-1, &raw mut event, 1, 0) }.into()).map(drop)
}

fn try_mbind() -> io::Result<()> {
    let nodes = [1u64];
    // SAFETY: an empty range, so nothing is bound. The mask has as many bits as the call reads.
    checked(unsafe {
        libc::syscall(
            libc::SYS_mbind,
            ptr::null::<c_void>(),
            0usize,
            MPOL_PREFERRED,
            nodes.as_ptr(),
            64usize,
            0,
        )
    })
    .map(drop)
}

fn own_pidfd() -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let fd = checked(unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) })?;
    // SAFETY: the descriptor is new, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) })
}

fn try_process_madvise() -> io::Result<()> {
    // The descriptor is invalid: a seccomp filter refuses the call before the kernel checks it. SAFETY: no range is
    // given.
    checked(unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            -1,
            ptr::null::<libc::iovec>(),
            0usize,
            libc::MADV_COLD,
            0,
        )
    })
    .map(drop)
}

/// The result of a call that returns -1 for an error.
fn checked(result: c_long) -> io::Result<c_long> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_namespaces_hide_is_said() {
        let said = |pid: &str, user: &str, has_first: bool| {
            let root = tempfile::tempdir().unwrap();
            let namespaces = root.path().join("proc/self/ns");
            fs::create_dir_all(&namespaces).unwrap();
            std::os::unix::fs::symlink(pid, namespaces.join("pid")).unwrap();
            std::os::unix::fs::symlink(user, namespaces.join("user")).unwrap();
            if has_first {
                fs::create_dir(root.path().join("proc/1")).unwrap();
            }
            hidden(root.path())
                .iter()
                .fold(String::new(), |all, it| all + &it.what + "\n")
        };
        assert_eq!(said(FIRST_PID_NAMESPACE, FIRST_USER_NAMESPACE, true), "");
        assert!(said("pid:[4026532000]", FIRST_USER_NAMESPACE, true).contains("PID namespace"));
        assert!(said(FIRST_PID_NAMESPACE, "user:[4026532001]", true).contains("user namespace"));
        assert!(said(FIRST_PID_NAMESPACE, FIRST_USER_NAMESPACE, false).contains("hidepid"));
        // Unreadable namespaces are not reported.
        assert!(hidden(tempfile::tempdir().unwrap().path()).is_empty());
    }

    #[test]
    fn each_missing_capability_is_named_with_what_it_is_for() {
        let none = Permissions {
            sys_nice: false,
            sys_ptrace: false,
            perfmon: false,
            sys_admin: false,
            perf_event_paranoid: None,
        };
        let hints: Vec<_> = missing_capabilities(&none)
            .into_iter()
            .map(|it| it.hint)
            .collect();
        assert_eq!(hints.len(), 2);
        assert!(hints[0].contains("CAP_SYS_PTRACE") && hints[1].contains("CAP_SYS_NICE"));
    }
}
