//! Schedule of fast memory changes in the timed phase, without I/O.

use demeter_host_api::view::{TierView, VmView};
use demeter_outcome::Resize;
use demeter_scenario::ResizeCycle;

use super::sizing::NEAR_BYTES;

/// The state of a [`ResizeCycle`].
#[derive(Debug)]
pub struct CycleState {
    cycle: ResizeCycle,
    next_s: f64,
    is_grown: bool,
    /// Whether the last change was requested and is not complete.
    pub is_pending: bool,
}

impl CycleState {
    /// The state before the first change.
    pub fn new(cycle: ResizeCycle) -> Self {
        Self {
            cycle,
            next_s: cycle.from_s as f64,
            is_grown: false,
            is_pending: false,
        }
    }

    /// Whether there is anything to check or to do.
    pub fn is_awake(&self, t_s: f64) -> bool {
        self.is_pending || t_s >= self.next_s
    }

    /// The size to request, if one is due. The last change returns to the initial size.
    pub fn due(&mut self, t_s: f64, duration_s: f64, base: TierView) -> Option<TierView> {
        let every_s = self.cycle.every_s as f64;
        let may_begin = self.is_grown || self.next_s + every_s < duration_s;
        if t_s < self.next_s || !may_begin {
            return None;
        }
        self.next_s += every_s;
        self.is_grown = !self.is_grown;
        let more = if self.is_grown {
            self.cycle.fast_mib << 20
        } else {
            0
        };
        Some(TierView {
            fast_bytes: base.fast_bytes + more,
            ..base
        })
    }

    /// Records the end of the last change, and the controller's view until then.
    pub fn settle(&mut self, t_s: f64, vm: &VmView, resizes: &mut [Resize]) {
        let Some(last) = resizes.last_mut().filter(|_| self.is_pending) else {
            return;
        };
        let is_there = vm
            .owned
            .is_some_and(|owned| owned.fast_bytes.abs_diff(last.fast_bytes) <= NEAR_BYTES);
        if is_there {
            self.is_pending = false;
            last.took_s = Some(t_s - last.t_s);
            last.reason = None;
        } else if vm.problem.is_some() {
            last.reason.clone_from(&vm.problem);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: TierView = TierView {
        fast_bytes: 200 << 20,
        slow_bytes: 900 << 20,
    };

    fn owning(fast_bytes: u64) -> VmView {
        VmView {
            owned: Some(TierView { fast_bytes, ..BASE }),
            problem: Some("busy".into()),
            ..VmView::default()
        }
    }

    #[test]
    fn a_cycle_ends_as_it_began() {
        let mut cycle = CycleState::new(ResizeCycle {
            fast_mib: 64,
            from_s: 10,
            every_s: 5,
        });
        let asked: Vec<(u32, u64)> = (0..40)
            .filter_map(|t| Some((t, cycle.due(t.into(), 31.0, BASE)?.fast_bytes >> 20)))
            .collect();
        assert_eq!(asked, [(10, 264), (15, 200), (20, 264), (25, 200)]);
    }

    #[test]
    fn a_resize_takes_until_the_memory_is_there() {
        let mut cycle = CycleState::new(ResizeCycle {
            fast_mib: 64,
            from_s: 1,
            every_s: 5,
        });
        let mut resizes = vec![Resize {
            t_s: 1.0,
            fast_bytes: 264 << 20,
            ..Resize::default()
        }];
        cycle.is_pending = true;
        cycle.settle(1.5, &owning(200 << 20), &mut resizes);
        assert_eq!(
            (resizes[0].took_s, resizes[0].reason.as_deref()),
            (None, Some("busy"))
        );
        cycle.settle(3.0, &owning((264 << 20) - NEAR_BYTES), &mut resizes);
        assert_eq!(
            (resizes[0].took_s, resizes[0].reason.as_deref()),
            (Some(2.0), None)
        );
        // Later changes have other causes.
        cycle.settle(4.0, &owning(0), &mut resizes);
        assert_eq!(resizes[0].took_s, Some(2.0));
    }
}
