//! The emulator's process of a domain: found, watched and killed.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::daemon::Daemon;
use crate::error::Error;

/// Time limit for a killed emulator to exit, and for libvirt to notice.
const END_LIMIT: Duration = Duration::from_secs(5);

/// Interval between checks of libvirt's state.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The emulator of a running domain.
#[derive(Debug)]
pub struct Domain {
    pid: u32,
    process: OwnedFd,
    /// Exists as long as libvirt considers the domain running.
    pid_file: PathBuf,
    /// The daemon must outlive its domains.
    _daemon: Arc<Daemon>,
}

impl Domain {
    pub(super) fn open(daemon: &Arc<Daemon>, name: &str) -> Result<Self, Error> {
        let pid_file = daemon.pid_file_of(name);
        let failed = Error::io("find the domain's process in", &pid_file);
        let open = || -> io::Result<(u32, OwnedFd)> {
            let text = fs::read_to_string(&pid_file)?;
            let pid: i32 = text.trim().parse().map_err(io::Error::other)?;
            let of = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidData)?;
            Ok((pid as u32, pidfd_open(of, PidfdFlags::empty())?))
        };
        let (pid, process) = open().map_err(failed)?;
        Ok(Self {
            pid,
            process,
            pid_file,
            _daemon: daemon.clone(),
        })
    }

    /// PID of the emulator.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Kills it and waits until libvirt has noticed. It can then be started again.
    pub fn kill(&self) {
        // Fails only if it has exited already.
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
        let deadline = Instant::now() + END_LIMIT;
        while Instant::now() < deadline && (!self.is_gone() || self.pid_file.exists()) {
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn is_gone(&self) -> bool {
        // If the state cannot be read, do not wait.
        self.has_ended().unwrap_or(true)
    }

    /// Whether it has exited.
    pub fn has_ended(&self) -> io::Result<bool> {
        let mut process = [PollFd::new(&self.process, PollFlags::IN)];
        Ok(poll(&mut process, Some(&Timespec::default()))? > 0)
    }
}
