//! The kernel thread that frees fast memory. There is only one, which limits the rate of reclaim.

use crate::machine::actor::Actor;
use crate::machine::cost::TICK_PERIOD_PS;

/// The reclaim thread.
#[derive(Debug, Default)]
pub(super) struct Reclaimer {
    /// Time since when it has work.
    woken_ps: Option<u64>,
    /// Earliest time of its next turn.
    busy_until_ps: u64,
}

impl Reclaimer {
    /// Wakes it, as memory is short.
    pub(super) fn wake(&mut self, now_ps: u64) {
        self.woken_ps.get_or_insert(now_ps);
    }

    /// Time since when it has work, if it may run at `now_ps`.
    pub(super) fn wants_turn(&self, now_ps: u64) -> Option<u64> {
        self.woken_ps.filter(|_| now_ps >= self.busy_until_ps)
    }

    /// One turn. If it lags behind, it runs until `now_ps`. Beside the program, it runs as long as the program did
    /// since, at least a tick. `work` ends at the time that it is given, or returns true when it is done.
    pub(super) fn turn(
        &mut self,
        now_ps: u64,
        actor: &mut Actor<'_>,
        work: impl FnOnce(&mut Actor<'_>, u64) -> bool,
    ) {
        let until_ps = if actor.now_ps() < now_ps {
            now_ps
        } else {
            let since_ps = self.woken_ps.unwrap_or(now_ps).max(self.busy_until_ps);
            now_ps + now_ps.saturating_sub(since_ps).max(TICK_PERIOD_PS)
        };
        if work(actor, until_ps) {
            self.woken_ps = None;
        }
        self.busy_until_ps = actor.now_ps();
    }
}
