//! The signals that end a command, all on one path: Ctrl-C, SIGTERM, and the terminal that goes away.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{io, ptr, thread};

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Runs `end` at each of them, in a thread of its own.
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

/// A flag that they set.
pub fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    on_end(move || flag.store(true, Ordering::Relaxed))?;
    Ok(stop)
}

fn is_ignored(signal: libc::c_int) -> io::Result<bool> {
    // SAFETY: all zeros is a sigaction without a handler and without flags.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: with null as the new action it only writes the present one, to where there is room.
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
        // SAFETY: it takes numbers only, and no other test has to do with this signal.
        unsafe { libc::signal(SIGUSR2, libc::SIG_IGN) };
        assert!(is_ignored(SIGUSR2).unwrap());
    }
}
