//! Handles the signals that end a command: SIGINT, SIGTERM and SIGHUP.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{io, ptr, thread};

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Runs `end` at each of these signals, in a thread of its own.
pub fn on_end(mut end: impl FnMut() + Send + 'static) -> anyhow::Result<()> {
    let caught = || -> io::Result<Signals> {
        let mut signals = vec![SIGINT, SIGTERM];
        // Under nohup a command outlives its terminal.
        if !is_ignored(SIGHUP)? {
            signals.push(SIGHUP);
        }
        Signals::new(signals)
    };
    let mut signals = caught().context("cannot catch signals")?;
    let thread = thread::Builder::new().name("signals".into());
    thread
        .spawn(move || signals.forever().for_each(|_| end()))
        .context("cannot start a thread for signals")?;
    Ok(())
}

/// A flag that these signals set.
pub fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    on_end(move || flag.store(true, Ordering::Relaxed))?;
    Ok(stop)
}

fn is_ignored(signal: libc::c_int) -> io::Result<bool> {
    // SAFETY: all zeros is a sigaction without handler and flags.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: without a new action the call only writes the present one to our struct.
    if unsafe { libc::sigaction(signal, ptr::null(), &mut action) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(action.sa_sigaction == libc::SIG_IGN)
}

#[cfg(test)]
mod tests {
    use signal_hook::consts::SIGUSR2;

    use super::*;

    #[test]
    fn what_was_started_under_nohup_is_told_from_what_was_not() {
        assert!(!is_ignored(SIGUSR2).unwrap());
        // SAFETY: takes numbers only, and no other test uses this signal.
        unsafe { libc::signal(SIGUSR2, libc::SIG_IGN) };
        assert!(is_ignored(SIGUSR2).unwrap());
    }
}
