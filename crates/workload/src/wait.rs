//! Waits for a time, a line on standard input, or a stop signal.

use std::io;
use std::time::Instant;

use super::Error;

/// Maximum length of a line for `--hold`.
const LINE_BYTES_MAX: usize = 4096;

/// Receives SIGTERM and SIGINT in a waitable form, besides time and input.
pub(crate) struct Waiter {
    signals: libc::c_int,
}

impl Waiter {
    /// Blocks both signals in this thread and all threads that it starts later.
    pub(crate) fn new() -> Result<Self, Error> {
        // SAFETY: plain calls on a signal set on this stack.
        let signals = unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGTERM);
            libc::sigaddset(&mut set, libc::SIGINT);
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            libc::signalfd(-1, &set, libc::SFD_CLOEXEC)
        };
        if signals < 0 {
            return Err(Error::last_os("cannot open a signalfd"));
        }
        Ok(Self { signals })
    }

    /// Waits until `deadline`; [`Error::Stopped`] if a signal arrives first.
    pub(crate) fn until(&self, deadline: Instant) -> Result<(), Error> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return self.check();
            }
            // Rounded up, so that the last wait does not spin.
            let left_ms = left.as_micros().div_ceil(1000).min(60_000);
            self.poll(None, left_ms as libc::c_int)?;
        }
    }

    /// [`Error::Stopped`] if a signal has arrived.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.poll(None, 0).map(drop)
    }

    /// Waits for one line on standard input, and reads nothing after it.
    pub(crate) fn line(&self) -> Result<(), Error> {
        for _ in 0..LINE_BYTES_MAX {
            while !self.poll(Some(libc::STDIN_FILENO), -1)? {}
            let mut byte = 0u8;
            // SAFETY: reads at most one byte into a byte.
            match unsafe { libc::read(libc::STDIN_FILENO, (&raw mut byte).cast(), 1) } {
                1 if byte == b'\n' => return Ok(()),
                1 => {}
                0 => return Err(Error::HoldClosed),
                _ => return Err(Error::last_os("cannot read standard input")),
            }
        }
        Err(Error::Arguments(format!(
            "--hold: a line of more than {LINE_BYTES_MAX} bytes"
        )))
    }

    /// Whether `input` became readable within `timeout_ms` (-1: no limit).
    fn poll(&self, input: Option<libc::c_int>, timeout_ms: libc::c_int) -> Result<bool, Error> {
        let entry = |fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // poll(2) ignores negative descriptors.
        let mut fds = [entry(self.signals), entry(input.unwrap_or(-1))];
        // SAFETY: two initialized entries.
        if unsafe { libc::poll(fds.as_mut_ptr(), 2, timeout_ms) } < 0 {
            let source = io::Error::last_os_error();
            return match source.kind() {
                io::ErrorKind::Interrupted => Ok(false),
                _ => Err(Error::System {
                    what: "poll".into(),
                    source,
                }),
            };
        }
        match (fds[0].revents, fds[1].revents) {
            (0, input) => Ok(input != 0),
            _ => Err(Error::Stopped),
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        // SAFETY: we own the descriptor, and no other code uses it.
        unsafe { libc::close(self.signals) };
    }
}
