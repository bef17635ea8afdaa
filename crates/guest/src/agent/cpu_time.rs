//! CPU time of the guest's programs.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Ticks per second in /proc/stat: USER_HZ of x86-64.
const TICKS_PER_S: f64 = 100.0;

/// Minimum time between two readings: a tick is then 1 % of it.
const EVERY: Duration = Duration::from_secs(1);

/// CPU time of programs per second, from `ROOT/proc/stat`.
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
        let text = fs::read_to_string(root.join("proc/stat")).unwrap_or_default();
        self.read = user_ticks(&text).map(|ticks| (now, ticks));
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
