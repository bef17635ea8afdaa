//! Processes that have touched a region once and are idle, as most of a database's are.

use std::io::{Read, Write, pipe};
use std::sync::atomic::Ordering::Relaxed;

use super::Error;
use super::region::{PAGE_BYTES, Region};

/// Starts `count` processes that map `region`, which is shared, and waits until each has touched all of it. They end with
/// this thread.
pub(crate) fn start(region: &Region, count: u32) -> Result<(), Error> {
    let (mut done, said) = pipe().map_err(|source| Error::System {
        what: "cannot open a pipe".into(),
        source,
    })?;
    let parent = std::process::id();
    for _ in 0..count {
        // SAFETY: there is one thread so far, so that the child finds everything as it was.
        match unsafe { libc::fork() } {
            0 => idle(region, said, parent),
            pid if pid < 0 => {
                return Err(Error::last_os("cannot start a process that shares memory"));
            }
            _ => {}
        }
    }
    drop(said);
    let mut bytes = vec![];
    let read = done.by_ref().take(count.into()).read_to_end(&mut bytes);
    match read {
        Ok(read) if read == count as usize => Ok(()),
        Ok(read) => Err(Error::Arguments(format!(
            "{read} of {count} processes could touch the memory that they share"
        ))),
        Err(source) => Err(Error::System {
            what: "cannot read from a pipe".into(),
            source,
        }),
    }
}

/// The life of such a process.
fn idle(region: &Region, mut said: impl Write, parent: u32) -> ! {
    // SAFETY: plain calls without memory of ours.
    let is_alone = unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 || libc::getppid() as u32 != parent
    };
    if !is_alone {
        for word in region.words().iter().step_by(PAGE_BYTES as usize / 8) {
            word.load(Relaxed);
        }
        let _ = said.write_all(b".");
        drop(said);
        loop {
            // SAFETY: waits for the signal that ends it.
            unsafe { libc::pause() };
        }
    }
    // SAFETY: ends this process at once, without what its parent has set up.
    unsafe { libc::_exit(1) }
}
