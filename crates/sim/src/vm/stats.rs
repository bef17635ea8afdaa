//! Statistics of a VM.

use demeter_policy::GuestPhysAddr;

use super::{Host, Vm};
use crate::program::Program;

impl<P: Program> Vm<P> {
    /// Time from the start of the timed phase to the end of the program.
    pub(crate) fn elapsed_ps(&self) -> Option<u64> {
        Some(self.finished_ps? - self.start_ps)
    }

    /// Total time of its threads by `at_ps` after the start of the timed phase.
    pub(crate) fn thread_time_ps(&self, at_ps: u64) -> u64 {
        let ran_ps = self
            .elapsed_ps()
            .map_or(at_ps, |done_ps| done_ps.min(at_ps));
        self.threads.len() as u64 * ran_ps
    }

    /// Bytes promoted and demoted so far, by guest and host.
    pub(crate) fn moved_bytes(&self) -> [u64; 2] {
        let counts = self.guest.counts;
        let [promoted, demoted] = self.backing.moved_bytes;
        [
            counts.promoted_bytes + promoted,
            counts.demoted_bytes + demoted,
        ]
    }

    /// Hardware samples received by the manager.
    pub(crate) fn samples(&self) -> u64 {
        self.manager.samples_seen()
    }

    /// Share of the program's hot set in the fast tier, 0 to 1; none if the program does not declare a hot set. Where
    /// processes run on several sockets, only the nearest node counts. Unmapped memory counts as not fast.
    pub(crate) fn hot_in_fast(&mut self, host: &Host, now_ns: u64) -> Option<f64> {
        let page_bits = self.guest.page_bits();
        let (mut all, mut fast) = (0u64, 0.0);
        let hot = self.program.hot(now_ns);
        for range in &hot {
            let fast_nodes = self.guest.fast_nodes(self.guest.pid_of(range.start()));
            let mut frames = vec![];
            self.guest
                .tables
                .for_each(range.start()..range.end(), |_, entry, size| {
                    frames.push((entry.index(), size));
                });
            for (first, size) in frames {
                let count = (self.guest.bytes(size) >> page_bits) as u32;
                for frame in first..first + count {
                    let gpa = GuestPhysAddr(u64::from(frame) << page_bits);
                    let backed = self.backing.tree.frame(gpa);
                    let share = |node| f64::from(u8::from(fast_nodes.contains(&node)));
                    all += 1;
                    fast += match (backed, &host.machine.memory.flat) {
                        _ if self.backing.is_native => share(self.guest.node_of(frame)),
                        (Some(backed), Some(flat)) => flat.in_fast(backed),
                        (Some(backed), None) => share(host.hypervisor.node_of(backed)),
                        (None, _) => 0.0,
                    };
                }
            }
        }
        (!hot.is_empty()).then(|| fast / all.max(1) as f64)
    }
}
