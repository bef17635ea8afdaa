//! CPU time of threads.

use std::path::Path;
use std::time::Duration;

use demeter_policy::Pid;

/// A thread's scheduling times since it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Scheduled {
    /// Time on a CPU.
    pub ran: Duration,
    /// Time that it was runnable without a CPU.
    pub waited: Duration,
}

impl Scheduled {
    /// The difference to an earlier reading.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            ran: self.ran.saturating_sub(before.ran),
            waited: self.waited.saturating_sub(before.waited),
        }
    }
}

/// A thread's times, from the first two fields of its `schedstat`, in nanoseconds
/// (Documentation/scheduler/sched-stats.rst). `None` if the kernel does not report them.
pub fn scheduled(root: &Path, thread: Pid) -> Option<Scheduled> {
    let text = std::fs::read_to_string(root.join(format!("proc/{thread}/schedstat"))).ok()?;
    let mut fields = text.split_whitespace();
    let mut next = || Some(Duration::from_nanos(fields.next()?.parse().ok()?));
    Some(Scheduled {
        ran: next()?,
        waited: next()?,
    })
}

/// CPU time of a thread since it began; `None` if the kernel does not report it.
pub fn of(root: &Path, thread: Pid) -> Option<Duration> {
    Some(scheduled(root, thread)?.ran)
}

/// A thread's last CPU and total time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastRun {
    /// The thread.
    pub thread: Pid,
    /// The CPU.
    pub cpu: u32,
    /// Its CPU time since it began, in ticks.
    pub ticks: u64,
}

/// Maximum number of threads read per process.
pub const THREADS_MAX: usize = 256;

/// Where the threads of a process ran last: fields 14, 15 and 39 of `stat` (proc_pid_stat(5)).
///
/// Empty if the process has ended; incomplete if it has many threads.
pub fn last_runs(root: &Path, process: Pid) -> Vec<LastRun> {
    let Ok(threads) = std::fs::read_dir(root.join(format!("proc/{process}/task"))) else {
        return vec![];
    };
    let thread = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.ok()?;
        let thread = Pid(entry.file_name().to_str()?.parse().ok()?);
        let stat = std::fs::read(entry.path().join("stat")).ok()?;
        // The name in parentheses may contain any bytes; field 3 follows.
        let name_end = stat.iter().rposition(|&byte| byte == b')')?;
        let rest = str::from_utf8(stat.get(name_end + 1..)?).ok()?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        Some(LastRun {
            thread,
            cpu: u32::try_from(number(39)?).ok()?,
            ticks: number(14)?.saturating_add(number(15)?),
        })
    };
    threads.take(THREADS_MAX).filter_map(thread).collect()
}

/// CPU time of this thread.
pub fn of_this_thread() -> Duration {
    read_clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The monotonic clock, which tracepoint records use, too; nanoseconds.
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
    fn threads_tell_where_they_ran_last() {
        let root = tempfile::tempdir().unwrap();
        let task = root.path().join("proc/7/task");
        for (thread, ticks, cpu) in [(7, "3 4", 1), (8, "0 0", 5)] {
            std::fs::create_dir_all(task.join(thread.to_string())).unwrap();
            let (before, between) = ("0 ".repeat(10), "0 ".repeat(23));
            let stat = format!("{thread} (a) b) S {before}{ticks} {between}{cpu} 0\n");
            std::fs::write(task.join(format!("{thread}/stat")), stat).unwrap();
        }
        std::fs::create_dir_all(task.join("9")).unwrap();
        let mut found = last_runs(root.path(), Pid(7));
        found.sort_by_key(|run| run.thread);
        let run = |thread, cpu, ticks| LastRun { thread, cpu, ticks };
        assert_eq!(found, [run(Pid(7), 1, 7), run(Pid(8), 5, 0)]);
        assert_eq!(last_runs(root.path(), Pid(70)), []);
        let own = last_runs(Path::new("/"), Pid(std::process::id()));
        assert!(!own.is_empty() && own.len() <= THREADS_MAX, "{own:?}");
    }

    #[test]
    fn a_thread_is_charged_for_its_own_work_only() {
        let spin = |time: Duration| {
            let (before, began) = (of_this_thread(), monotonic_ns());
            while of_this_thread() - before < time {
                std::hint::spin_loop();
            }
            Duration::from_nanos(monotonic_ns() - began)
        };
        let before = of_this_thread();
        let other = std::thread::spawn(move || spin(Duration::from_millis(200)));
        let took = other.join().unwrap();
        // A CPU does no more work in a time than one thread's.
        assert!(took >= Duration::from_millis(200), "{took:?}");
        // Waiting costs next to nothing.
        assert!(of_this_thread() - before < Duration::from_millis(100));
    }
}
