//! Identity of the processes that run VMs: the opener of a socket, and whether a process has ended.
//!
//! A process that reuses another's number is never taken for it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use demeter_policy::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

/// A handle of a process (pidfd_open(2)).
#[derive(Debug)]
pub struct Process(AsyncFd<OwnedFd>);

impl Process {
    /// Opens a running process.
    pub fn open(pid: Pid) -> io::Result<Self> {
        let fd = pidfd(pid)?;
        // A pidfd is readable once its process has ended.
        // SAFETY: an owned descriptor stays open, and the same, for as long as the AsyncFd has it.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        Ok(Self(fd))
    }

    /// Waits up to `limit` for the process's end. Returns whether it has ended.
    pub async fn ends_within(&self, limit: Duration) -> bool {
        matches!(timeout(limit, self.0.readable()).await, Ok(Ok(_)))
    }
}

/// Opens a pidfd of a running process (pidfd_open(2)).
pub(crate) fn pidfd(pid: Pid) -> io::Result<OwnedFd> {
    let number = i32::try_from(pid.0)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    let number = number.ok_or(io::ErrorKind::NotFound)?;
    Ok(pidfd_open(number, PidfdFlags::empty())?)
}

/// The process that opened a listening socket, as the kernel reports it (SO_PEERCRED, unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PeerProcess {
    /// Its number; the hypervisor's own, if the hypervisor opened the socket.
    pub pid: Pid,
    /// The user it runs as.
    pub uid: u32,
    /// Start time in ticks since boot; distinguishes it from a later process with its number.
    pub(crate) started: u64,
}

impl PeerProcess {
    /// The peer of a connected socket.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let peer = socket_peercred(&socket)?;
        let pid = Pid(u32::try_from(peer.pid.as_raw_pid()).unwrap_or(0));
        // Hold a pidfd during the inspection, if the kernel supports it, so that the number is not
        // reused.
        let held = peer_pidfd(socket.as_fd())?;
        let found = Self::running(pid, peer.uid.as_raw())?;
        if held.is_some_and(|pidfd| has_ended(&pidfd)) {
            return Err(ended());
        }
        Ok(found)
    }

    /// A running process of a known user.
    pub(crate) fn running(pid: Pid, uid: u32) -> io::Result<Self> {
        Ok(Self {
            pid,
            uid,
            started: started(pid)?,
        })
    }

    /// Whether to trust the process. It must run as the configured user of its VM; by default, as
    /// root or as our own user.
    pub(crate) fn is_trusted(&self, own_uid: u32, owner_uid: Option<u32>) -> bool {
        match owner_uid {
            Some(owner) => self.uid == owner,
            None => [own_uid, 0].contains(&self.uid),
        }
    }

    /// Whether the process still runs.
    pub(crate) fn is_there(&self) -> bool {
        started(self.pid).is_ok_and(|started| started == self.started)
    }
}

/// SO_PEERPIDFD (linux/socket.h), since Linux 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

/// A pidfd of the socket's opener; `None` if the kernel does not support it.
fn peer_pidfd(socket: BorrowedFd) -> io::Result<Option<OwnedFd>> {
    let mut found: libc::c_int = -1;
    let mut size = size_of_val(&found) as libc::socklen_t;
    // SAFETY: the kernel writes no more than `size` bytes, which `found` has.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut found).cast(),
            &raw mut size,
        )
    };
    if result == 0 {
        // SAFETY: the kernel has made this descriptor just now, for us alone.
        return Ok(Some(unsafe { OwnedFd::from_raw_fd(found) }));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENOPROTOOPT) => Ok(None),
        // The opener has ended; another process keeps the socket open.
        Some(libc::ESRCH | libc::EINVAL | libc::ENODATA) => Err(ended()),
        _ => Err(error),
    }
}

fn has_ended(process: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(process, PollFlags::IN)];
    // A pidfd is readable once its process has ended.
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

fn ended() -> io::Error {
    let why = "the process that opened the socket has ended, and another one keeps it open";
    io::Error::new(io::ErrorKind::NotFound, why)
}

/// The processes that may open a VM's socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opener {
    /// The process that runs the VM.
    pub process: PeerProcess,
    /// A user whose processes may also open sockets of the VM. Such a daemon passes them to its
    /// hypervisors and may have restarted since.
    pub user: Option<u32>,
}

impl Opener {
    /// Only the VM's own process.
    pub fn only(process: PeerProcess) -> Self {
        let user = None;
        Self { process, user }
    }

    /// Checks the opener of a connected socket's other end. The inner error is the actual opener.
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

/// Start time of a process: field 22 of /proc/PID/stat (proc(5)). Its name may contain any
/// characters, but ends with the last parenthesis.
fn started(pid: Pid) -> io::Result<u64> {
    let stat = std::fs::read(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit(|&byte| byte == b')').next();
    fields
        .and_then(|fields| std::str::from_utf8(fields).ok())
        .and_then(|fields| fields.split_ascii_whitespace().nth(19)?.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its stat file is invalid"))
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
        assert!(
            !trusted(0, 0, Some(107)),
            "another VM's, which runs as root"
        );
    }

    /// Starts a process with a given number; `None` if that is not permitted.
    fn heir_of(number: libc::pid_t) -> Option<libc::pid_t> {
        // SAFETY: all zeros is a valid value of this plain structure.
        let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
        args.exit_signal = libc::SIGCHLD as u64;
        args.set_tid = (&raw const number) as u64;
        args.set_tid_size = 1;
        // SAFETY: `args` and `number` live through the call. The child, a copy of this process, only waits
        // for its end.
        let heir = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) };
        if heir == 0 {
            loop {
                // SAFETY: waits for a signal, and nothing else.
                unsafe { libc::pause() };
            }
        }
        (heir > 0).then_some(heir as libc::pid_t)
    }

    #[test]
    fn a_process_that_inherited_a_number_is_not_believed() {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, socket};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        // SAFETY: the child only listens and ends.
        let opener = unsafe { libc::fork() };
        if opener == 0 {
            // SAFETY: both are allowed in a child of a process with threads.
            unsafe {
                libc::listen(listener.as_raw_fd(), 1);
                libc::_exit(0);
            }
        }
        // SAFETY: waits for a child of this test's.
        unsafe { libc::waitpid(opener, std::ptr::null_mut(), 0) };
        let stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let Some(heir) = heir_of(opener) else {
            eprintln!("skipped: only root chooses the number of a process");
            return;
        };
        let is_told = !matches!(peer_pidfd(stream.as_fd()), Ok(None));
        let found = PeerProcess::of(&stream);
        // SAFETY: ends and waits for the child that was made above.
        unsafe {
            libc::kill(heir, libc::SIGKILL);
            libc::waitpid(heir, std::ptr::null_mut(), 0);
        }
        if !is_told {
            eprintln!("skipped: SO_PEERPIDFD needs Linux 6.5");
            return;
        }
        let said = found.unwrap_err().to_string();
        assert!(said.contains("has ended"), "{said}");
    }
}
