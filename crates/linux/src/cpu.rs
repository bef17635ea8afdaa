//! CPU time that was spent.

use std::path::Path;
use std::time::Duration;

use demeter_policy::Pid;

/// A thread's time since it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Scheduled {
    /// It ran.
    pub ran: Duration,
    /// It would have run, but no CPU was free.
    pub waited: Duration,
}

impl Scheduled {
    /// What came since.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            ran: self.ran.saturating_sub(before.ran),
            waited: self.waited.saturating_sub(before.waited),
        }
    }
}

/// A thread's time: the first two fields of its `schedstat`, nanoseconds
/// (Documentation/scheduler/sched-stats.rst). Nothing where the kernel does not tell.
pub fn scheduled(root: &Path, thread: Pid) -> Option<Scheduled> {
    let text = std::fs::read_to_string(root.join(format!("proc/{thread}/schedstat"))).ok()?;
    let mut fields = text.split_whitespace();
    let mut next = || Some(Duration::from_nanos(fields.next()?.parse().ok()?));
    Some(Scheduled {
        ran: next()?,
        waited: next()?,
    })
}

/// What a thread has spent since it began. Nothing where the kernel does not tell.
pub fn of(root: &Path, thread: Pid) -> Option<Duration> {
    Some(scheduled(root, thread)?.ran)
}

/// What this thread has spent.
pub fn of_this_thread() -> Duration {
    read_clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Nanoseconds of the monotonic clock, which a tracepoint's records tell, too.
pub fn monotonic_ns() -> u64 {
    u64::try_from(read_clock(libc::CLOCK_MONOTONIC).as_nanos()).unwrap_or(u64::MAX)
}

fn read_clock(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes to `time`, which outlives the call.
    let failed = unsafe { libc::clock_gettime(clock, &raw mut time) } != 0;
    if failed {
        return Duration::ZERO;
    }
    let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_fields_are_what_counts() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("proc/7")).unwrap();
        std::fs::write(root.path().join("proc/7/schedstat"), "2500000 7 3\n").unwrap();
        assert_eq!(of(root.path(), Pid(7)), Some(Duration::from_micros(2500)));
        let waited = scheduled(root.path(), Pid(7)).unwrap().waited;
        assert_eq!(waited, Duration::from_nanos(7));
        assert_eq!(of(root.path(), Pid(8)), None);
    }

    #[test]
    fn this_thread_spends_what_it_spends() {
        let before = of_this_thread();
        while of_this_thread() == before {
            std::hint::spin_loop();
        }
    }
}
