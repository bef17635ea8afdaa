//! CPU time of the guest's programs, without the agent.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Ticks per second in /proc: USER_HZ of x86-64.
const TICKS_PER_S: f64 = 100.0;

/// Minimum time between two readings: a tick is then 1 % of it.
const EVERY: Duration = Duration::from_secs(1);

/// CPU time of programs per second, from `ROOT/proc/stat` and `ROOT/proc/self/stat`.
#[derive(Debug)]
pub(super) struct CpuTime {
    read: Option<(Instant, u64)>,
    running_ms: u32,
}

impl CpuTime {
    /// Until it was read twice, `cpus` CPUs count as busy.
    pub fn new(cpus: u32) -> Self {
        Self {
            read: None,
            running_ms: cpus.saturating_mul(1000),
        }
    }

    /// Milliseconds per second, over about the last second.
    pub fn running_ms(&mut self, root: &Path, now: Instant) -> u32 {
        let before = self.read;
        if before.is_some_and(|(at, _)| now.duration_since(at) < EVERY) {
            return self.running_ms;
        }
        let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let own = own_user_ticks(&read("proc/self/stat")).unwrap_or(0);
        self.read = user_ticks(&read("proc/stat")).map(|all| (now, all.saturating_sub(own)));
        if let (Some((from, old)), Some((to, new))) = (before, self.read) {
            let ticks = new.saturating_sub(old) as f64;
            let ms = ticks / TICKS_PER_S * 1000.0 / to.duration_since(from).as_secs_f64();
            self.running_ms = ms as u32;
        }
        self.running_ms
    }
}

/// CPU time in user mode since boot. The kernel's time, such as for moves, is no program's.
fn user_ticks(stat: &str) -> Option<u64> {
    let mut words = stat.lines().next()?.split_whitespace();
    words.next().filter(|&word| word == "cpu")?;
    let mut ticks = || words.next()?.parse::<u64>().ok();
    ticks()?.checked_add(ticks()?)
}

/// CPU time in user mode of a process since its start. Its name may have any characters.
fn own_user_ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    // proc_pid_stat(5): utime is field 14, and the state after the name is field 3.
    fields.split_whitespace().nth(14 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_time_is_that_of_programs() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("proc")).unwrap();
        let path = root.path().join("proc/stat");
        let now = Instant::now();
        let at = |s| now + Duration::from_secs(s);
        let mut time = CpuTime::new(2);
        fs::write(&path, "cpu  1000 100 9 9 0 0 0 0 0 0\ncpu0 1\n").unwrap();
        assert_eq!(time.running_ms(root.path(), at(0)), 2000);
        fs::write(&path, "cpu  1100 200 99 9 0 0 0 0 0 0\n").unwrap();
        assert_eq!(time.running_ms(root.path(), now), 2000, "read too early");
        assert_eq!(time.running_ms(root.path(), at(2)), 1000);
        let own = root.path().join("proc/self/stat");
        fs::create_dir(own.parent().unwrap()).unwrap();
        fs::write(&own, "7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 50 9 0 0 20 0").unwrap();
        fs::write(&path, "cpu  1200 250 99 9 0 0 0 0 0 0\n").unwrap();
        assert_eq!(time.running_ms(root.path(), at(4)), 500, "without its own");
        fs::remove_file(&own).unwrap();
        fs::write(&path, "cpu  1200 200 9 9").unwrap();
        time.running_ms(root.path(), at(5));
        fs::write(&path, "cpu  1250 250 9 9").unwrap();
        assert_eq!(time.running_ms(root.path(), at(6)), 1000);
        for broken in [
            "",
            "cpu",
            "cpu x y",
            "cpu 18446744073709551615 1",
            "intr 1 2",
        ] {
            fs::write(&path, broken).unwrap();
            assert_eq!(time.running_ms(root.path(), at(9)), 1000, "{broken}");
        }
        // Counters that fall back, as after a restored snapshot.
        fs::write(&path, "cpu 5 5").unwrap();
        time.running_ms(root.path(), at(20));
        fs::write(&path, "cpu 1 1").unwrap();
        assert_eq!(time.running_ms(root.path(), at(30)), 0);
    }
}
