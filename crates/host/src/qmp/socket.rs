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
    /// Whether to believe what it says: it runs as root, as we do, or as the user that the
    /// configuration names for its VM.
    pub(super) fn is_trusted(&self, own_uid: u32, owner_uid: Option<u32>) -> bool {
        [own_uid, 0].contains(&self.uid) || owner_uid == Some(self.uid)
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_of_somebody_else_is_not_trusted() {
        let trusted = |uid, own, owner| {
            let pid = Pid(1);
            Peer { pid, uid }.is_trusted(own, owner)
        };
        assert!(trusted(0, 1000, None), "root may do anything anyway");
        assert!(trusted(1000, 1000, None));
        assert!(trusted(107, 0, Some(107)));
        assert!(!trusted(107, 0, None));
        assert!(!trusted(107, 1000, Some(1000)));
    }
}
