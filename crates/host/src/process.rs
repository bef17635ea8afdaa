//! The processes that run VMs: who listens on a socket, and whether a process has ended, whoever got
//! its number afterwards.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use demeter_policy::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

/// A process by its file descriptor (pidfd_open(2)).
#[derive(Debug)]
pub struct Process(AsyncFd<OwnedFd>);

impl Process {
    /// Takes hold of a running process.
    pub fn open(pid: Pid) -> io::Result<Self> {
        // SAFETY: takes numbers, returns a new descriptor or -1.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.0 as libc::pid_t, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, valid and nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
        // Readable means ended.
        // SAFETY: an owned descriptor stays open, and the same, for as long as the AsyncFd has it.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        Ok(Self(fd))
    }

    /// Waits for its end, no longer than `limit`; says whether it came.
    pub async fn ends_within(&self, limit: Duration) -> bool {
        matches!(timeout(limit, self.0.readable()).await, Ok(Ok(_)))
    }
}

/// The process that listens on a socket, as the kernel knows it (SO_PEERCRED, unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerProcess {
    /// Its number; the hypervisor's own, when that opened the socket itself.
    pub pid: Pid,
    /// The user it runs as.
    pub uid: u32,
}

impl PeerProcess {
    /// Whether to believe what it says: it runs as root, as we do, or as the user that the
    /// configuration names for its VM.
    pub(crate) fn is_trusted(&self, own_uid: u32, owner_uid: Option<u32>) -> bool {
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

    #[tokio::test]
    async fn the_end_of_a_process_is_seen() {
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .unwrap();
        let process = Process::open(Pid(child.id())).unwrap();
        assert!(!process.ends_within(Duration::from_millis(20)).await);
        child.kill().unwrap();
        assert!(process.ends_within(Duration::from_secs(10)).await);
        child.wait().unwrap();
        assert!(
            process.ends_within(Duration::from_secs(10)).await,
            "and stays ended"
        );
        assert!(Process::open(Pid(child.id())).is_err());
    }

    #[test]
    fn a_socket_of_somebody_else_is_not_trusted() {
        let trusted = |uid, own, owner| {
            let pid = Pid(1);
            PeerProcess { pid, uid }.is_trusted(own, owner)
        };
        assert!(trusted(0, 1000, None), "root may do anything anyway");
        assert!(trusted(1000, 1000, None));
        assert!(trusted(107, 0, Some(107)));
        assert!(!trusted(107, 0, None));
        assert!(!trusted(107, 1000, Some(1000)));
    }
}
