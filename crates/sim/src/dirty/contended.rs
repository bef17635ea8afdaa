//! Shared resources: the lock of a VM's tables, and the interconnect for invalidations.

/// A model of `mmu_lock`. Readers share it, but each modifies the cache line with their count. A writer holds it
/// exclusively.
///
/// Requests are served in call order.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Lock {
    /// Time until which the last writer holds it.
    written_until_ps: u64,
    /// Time until which the last reader holds it.
    read_until_ps: u64,
    /// Time until which its cache line is in transit to earlier requesters.
    line_until_ps: u64,
}

impl Lock {
    /// Time at which a reader gets the lock that it requests at `now_ps`. Its cache lines take `lines_ps`.
    pub fn read(&mut self, now_ps: u64, lines_ps: u64) -> u64 {
        let from_ps = now_ps.max(self.written_until_ps).max(self.line_until_ps);
        self.line_until_ps = from_ps + lines_ps;
        self.line_until_ps
    }

    /// Lets a reader hold the lock until `ps`.
    pub fn read_until(&mut self, ps: u64) {
        self.read_until_ps = self.read_until_ps.max(ps);
    }

    /// Time at which a writer gets the lock that it requests at `now_ps`. Its cache lines take `lines_ps`.
    pub fn write(&mut self, now_ps: u64, lines_ps: u64) -> u64 {
        now_ps.max(self.written_until_ps).max(self.read_until_ps) + lines_ps
    }

    /// Lets the writer hold the lock until `ps`.
    pub fn written_until(&mut self, ps: u64) {
        self.written_until_ps = self.written_until_ps.max(ps);
    }
}

/// The interconnect, which broadcasts invalidations to all CPUs (DVM) one at a time. A DSB waits for all broadcasts in
/// flight, from any CPU.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Interconnect {
    busy_until_ps: u64,
}

impl Interconnect {
    /// Time at which a CPU has sent `count` broadcasts. It sends them from `now_ps` on and waits for each.
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
        /// There are never two writers, or a reader and a writer.
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

        /// Each broadcast occupies the interconnect, and no CPU continues before its broadcast is complete.
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
