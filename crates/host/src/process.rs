//! Whether a process has ended, whoever got its number afterwards.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
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
}
