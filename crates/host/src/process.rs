//! The processes that run VMs: who listens on a socket, and whether a process has ended, whoever got
//! its number afterwards.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use demeter_policy::Pid;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

/// A process by its file descriptor (pidfd_open(2)).
#[derive(Debug)]
pub struct Process(AsyncFd<OwnedFd>);

impl Process {
    /// Takes hold of a running process.
    pub fn open(pid: Pid) -> io::Result<Self> {
        let fd = pidfd(pid)?;
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

/// A descriptor of a running process (pidfd_open(2)).
pub(crate) fn pidfd(pid: Pid) -> io::Result<OwnedFd> {
    let number = i32::try_from(pid.0)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    let number = number.ok_or(io::ErrorKind::NotFound)?;
    Ok(pidfd_open(number, PidfdFlags::empty())?)
}

/// The process that listens on a socket, as the kernel knows it (SO_PEERCRED, unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerProcess {
    /// Its number; the hypervisor's own, when that opened the socket itself.
    pub pid: Pid,
    /// The user it runs as.
    pub uid: u32,
    /// When it was started, ticks since boot: tells it from a later one with its number.
    pub(crate) started: u64,
}

impl PeerProcess {
    /// The peer of a connected socket.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let peer = socket_peercred(socket)?;
        let pid = Pid(u32::try_from(peer.pid.as_raw_pid()).unwrap_or(0));
        Self::running(pid, peer.uid.as_raw())
    }

    /// A process that runs now, of a user that is known otherwise.
    pub(crate) fn running(pid: Pid, uid: u32) -> io::Result<Self> {
        Ok(Self {
            pid,
            uid,
            started: started(pid)?,
        })
    }

    /// Whether to believe what it says: it runs as root, as we do, or as the user that the
    /// configuration names for its VM.
    pub(crate) fn is_trusted(&self, own_uid: u32, owner_uid: Option<u32>) -> bool {
        [own_uid, 0].contains(&self.uid) || owner_uid == Some(self.uid)
    }

    /// Whether it still runs.
    pub(crate) fn is_there(&self) -> bool {
        started(self.pid).is_ok_and(|started| started == self.started)
    }
}

/// Who must have opened a socket for what comes out of it to be a VM's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opener {
    /// The process that runs the VM.
    pub process: PeerProcess,
    /// A user whose processes open sockets for the VM, too: a daemon that hands them on to its
    /// hypervisors, and may have been started anew since.
    pub user: Option<u32>,
}

impl Opener {
    /// The VM's process and nobody else.
    pub fn only(process: PeerProcess) -> Self {
        let user = None;
        Self { process, user }
    }

    /// Whether it opened the other end of a connected socket; the process that did where it did not.
    pub(crate) fn opened(&self, socket: impl AsFd) -> io::Result<Result<(), Pid>> {
        let socket = socket.as_fd();
        if self.user == Some(socket_peercred(socket)?.uid.as_raw()) {
            return Ok(Ok(()));
        }
        let found = PeerProcess::of(socket)?;
        Ok(if found == self.process {
            Ok(())
        } else {
            Err(found.pid)
        })
    }
}

/// When a process was started: field 22 of /proc/PID/stat (proc(5)). Its name, which may hold
/// anything, ends with the last parenthesis.
fn started(pid: Pid) -> io::Result<u64> {
    let stat = std::fs::read(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit(|&byte| byte == b')').next();
    fields
        .and_then(|fields| std::str::from_utf8(fields).ok())
        .and_then(|fields| fields.split_ascii_whitespace().nth(19)?.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its stat is of no use"))
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
            PeerProcess {
                pid,
                uid,
                started: 0,
            }
            .is_trusted(own, owner)
        };
        assert!(trusted(0, 1000, None), "root may do anything anyway");
        assert!(trusted(1000, 1000, None));
        assert!(trusted(107, 0, Some(107)));
        assert!(!trusted(107, 0, None));
        assert!(!trusted(107, 1000, Some(1000)));
    }
}
