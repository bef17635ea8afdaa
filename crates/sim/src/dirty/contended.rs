//! What CPUs wait for: the lock of a VM's tables, and the interconnect that carries invalidations.

/// `mmu_lock`. Readers share it, but each changes the line that counts them; a writer has it alone.
///
/// Whoever asks is served in the order of the calls.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Lock {
    /// Until when the last writer has it.
    written_until_ps: u64,
    /// Until when the last reader has it.
    read_until_ps: u64,
    /// Until when its line is on its way to those who asked before.
    line_until_ps: u64,
}

impl Lock {
    /// When a reader has it who asks at `now_ps` and whose lines take `lines_ps`.
    pub fn read(&mut self, now_ps: u64, lines_ps: u64) -> u64 {
        let from_ps = now_ps.max(self.written_until_ps).max(self.line_until_ps);
        self.line_until_ps = from_ps + lines_ps;
        self.line_until_ps
    }

    /// A reader has it until then.
    pub fn read_until(&mut self, ps: u64) {
        self.read_until_ps = self.read_until_ps.max(ps);
    }

    /// When a writer has it who asks at `now_ps` and whose lines take `lines_ps`.
    pub fn write(&mut self, now_ps: u64, lines_ps: u64) -> u64 {
        now_ps.max(self.written_until_ps).max(self.read_until_ps) + lines_ps
    }

    /// The writer has it until then.
    pub fn written_until(&mut self, ps: u64) {
        self.written_until_ps = self.written_until_ps.max(ps);
    }
}

/// Carries invalidations to all CPUs (DVM), one after the other. A DSB waits for all that are on their way,
/// whoever sent them.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Interconnect {
    busy_until_ps: u64,
}

impl Interconnect {
    /// When a CPU goes on that sends `count` broadcasts from `now_ps` and waits for each.
    pub fn broadcast(&mut self, now_ps: u64, count: u64, alone_ps: u64, occupied_ps: u64) -> u64 {
        self.busy_until_ps = self.busy_until_ps.max(now_ps) + count * occupied_ps;
        self.busy_until_ps.max(now_ps + count * alone_ps)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// No two writers, and no reader beside a writer.
        #[test]
        fn a_writer_is_alone(steps in proptest::collection::vec((any::<bool>(), 0u64..50, 1u64..50), 1..60)) {
            let mut lock = Lock::default();
            let mut held: Vec<(bool, u64, u64)> = vec![];
            let mut now = 0;
            for (writes, pause, hold) in steps {
                now += pause;
                let from = if writes { lock.write(now, 1) } else { lock.read(now, 1) };
                let to = from + hold;
                if writes { lock.written_until(to) } else { lock.read_until(to) }
                prop_assert!(from > now);
                for &(other_writes, other_from, other_to) in &held {
                    let together = from < other_to && other_from < to;
                    prop_assert!(!together || !(writes || other_writes));
                }
                held.push((writes, from, to));
            }
        }

        /// Each broadcast takes its time of the interconnect, and nobody goes on before his own is done.
        #[test]
        fn broadcasts_wait_for_each_other(times in proptest::collection::vec(0u64..100, 1..60)) {
            let mut interconnect = Interconnect::default();
            let mut times = times;
            times.sort_unstable();
            for (n, &now) in (1u64..).zip(&times) {
                let done = interconnect.broadcast(now, 2, 7, 5);
                prop_assert!(done >= now + 14 && done <= times[0].max(now) + 14 + n * 10);
            }
            let sum = times.len() as u64 * 10;
            prop_assert!(interconnect.busy_until_ps >= times[0] + sum);
        }
    }
}
