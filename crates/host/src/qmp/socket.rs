//! Who is at the other end of a Unix socket.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use demeter_policy::Pid;

/// The process that listens on a socket, as the kernel knows it (SO_PEERCRED, unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its number; QEMU's own, when QEMU opened the socket itself.
    pub pid: Pid,
    /// The user it runs as.
    pub uid: u32,
}

impl Peer {
    /// The peer of a connected socket.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let mut credentials = libc::ucred {
            pid: 0,
            uid: 0,
            gid: 0,
        };
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `length` bytes into `credentials`, both of which
        // outlive the call, and the descriptor is borrowed for its duration.
        let result = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut credentials).cast(),
                &raw mut length,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        match u32::try_from(credentials.pid) {
            // 0 stands for a process that this one's PID namespace does not show.
            Ok(pid) if pid != 0 => Ok(Self {
                pid: Pid(pid),
                uid: credentials.uid,
            }),
            _ => Err(io::Error::new(
                io::ErrorKind::NotFound,
                "the process behind it is outside of this PID namespace",
            )),
        }
    }
}
