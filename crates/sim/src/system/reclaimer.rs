//! The kernel thread that frees fast memory. There is one, so that it frees no faster than one
//! thread can, whoever waits for it.

use crate::machine::actor::Actor;
use crate::machine::cost::TICK_PERIOD_PS;

/// The thread.
#[derive(Debug, Default)]
pub(super) struct Reclaimer {
    /// Since when it has had something to do.
    woken_ps: Option<u64>,
    /// When it may have its next turn.
    busy_until_ps: u64,
}

impl Reclaimer {
    /// Memory is short.
    pub(super) fn wake(&mut self, now_ps: u64) {
        self.woken_ps.get_or_insert(now_ps);
    }

    /// Since when it has had something to do, if it may have a turn at `now_ps`.
    pub(super) fn wants_turn(&self, now_ps: u64) -> Option<u64> {
        self.woken_ps.filter(|_| now_ps >= self.busy_until_ps)
    }

    /// Its turn: until `now_ps` where it is behind; beside the program, for as long as it has let
    /// that run, at least a tick. `work` ends at the time that it is given, or when it is done: then it says so.
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
