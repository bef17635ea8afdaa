//! The kernel thread that frees fast memory. There is one, so that it frees no faster than one
//! thread can, whoever waits for it.

use crate::machine::actor::Actor;

/// The longest that it works in one turn: a tick.
const TURN_PS: u64 = 4_000_000_000;

/// The thread.
#[derive(Debug, Default)]
pub(super) struct Reclaimer {
    woken: bool,
    /// When it may have its next turn.
    busy_until_ps: u64,
}

impl Reclaimer {
    /// Memory is short.
    pub(super) fn wake(&mut self) {
        self.woken = true;
    }

    /// A moment at which it may have a turn, at the expense of whoever it runs beside. `work`
    /// ends at the time that it is given, or when it is done: then it says so.
    pub(super) fn turn(
        &mut self,
        actor: &mut Actor<'_>,
        work: impl FnOnce(&mut Actor<'_>, u64) -> bool,
    ) {
        let now_ps = actor.now_ps();
        if self.woken && now_ps >= self.busy_until_ps {
            self.woken = !work(actor, now_ps + TURN_PS);
            self.busy_until_ps = actor.now_ps();
        }
    }
}
