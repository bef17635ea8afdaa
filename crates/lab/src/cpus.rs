//! CPU affinity of a scenario's workload.

use std::io;

/// CPU affinity of this thread and its children; dropping it restores the old affinity.
#[derive(Debug)]
pub struct Pinned {
    before: Vec<u32>,
}

impl Pinned {
    /// Pins this thread to `cpus`.
    pub fn to(cpus: &[u32]) -> io::Result<Self> {
        let before = allowed()?;
        pin(cpus)?;
        Ok(Self { before })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // The kernel replaces a CPU that went offline meanwhile.
        let _ = pin(&self.before);
    }
}

/// The CPUs allowed for this thread.
pub fn allowed() -> io::Result<Vec<u32>> {
    // SAFETY: a CPU set is plain bits; the kernel fills it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) != 0 {
            return Err(io::Error::last_os_error());
        }
        let cpus = 0..libc::CPU_SETSIZE as usize;
        Ok(cpus
            .filter(|&cpu| libc::CPU_ISSET(cpu, &set))
            .map(|cpu| cpu as u32)
            .collect())
    }
}

/// Keeps this thread on `cpus`. Safe between fork and exec.
pub fn pin(cpus: &[u32]) -> io::Result<()> {
    // SAFETY: a CPU set is plain bits; larger numbers are skipped.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &cpu in cpus.iter().filter(|&&cpu| (cpu as i32) < libc::CPU_SETSIZE) {
            libc::CPU_SET(cpu as usize, &mut set);
        }
        match libc::sched_setaffinity(0, size_of_val(&set), &raw const set) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_pinned_for_a_while() {
        let before = allowed().unwrap();
        let one = [*before.last().unwrap()];
        let pinned = Pinned::to(&one).unwrap();
        assert_eq!(allowed().unwrap(), one);
        let child = std::thread::spawn(|| allowed().unwrap()).join().unwrap();
        assert_eq!(child, one, "what it starts is pinned, too");
        drop(pinned);
        assert_eq!(allowed().unwrap(), before);
    }
}
