//! Tiering by hint faults in the guest's kernel: Linux's own, and TPP.
//!
//! A scanner marks pages of the slow node; a page that faults and is judged hot is promoted at
//! once, if fast memory has room; if not, reclaim is woken to make some. TPP wakes it earlier,
//! whenever less is free than it wants.

use super::reclaimer::Reclaimer;
use super::scan::{Cursor, Pace};
use super::{Classify, Memory};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::memory::TierId;

/// A fault that comes within this time shows a hot page (`hot_threshold_ms`).
const HOT_MS: u32 = 1000;

/// The kernel's part.
#[derive(Debug)]
pub(crate) struct Hints {
    classify: Classify,
    reclaimer: Reclaimer,
    pace: Pace,
    cursor: Cursor,
}

impl Hints {
    /// Nothing seen yet.
    pub(crate) fn new(classify: Classify, memory: Memory) -> Self {
        Self {
            classify,
            reclaimer: Reclaimer::default(),
            pace: Pace::new(memory.bytes, memory.threads, is_tpp(classify)),
            cursor: Cursor::default(),
        }
    }

    /// Begins, with a process that is `new` or has run for a while; tells when the first scan is
    /// due.
    pub(crate) fn start(&self, now_ps: u64, new: bool) -> u64 {
        self.pace.start(now_ps, new)
    }

    /// The scanner's turn; tells when the next one is due.
    pub(crate) fn scan(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) -> u64 {
        let began_ps = actor.now_ps();
        let areas: Vec<_> = guest
            .vmas()
            .iter()
            .map(|v| v.start().0..v.end().0)
            .collect();
        let mut marked = false;
        let ended = self.cursor.scan(&areas, |stretch| {
            let any = guest.make_fault(stretch, actor);
            marked |= any;
            any
        });
        if marked {
            actor.flush_own();
        }
        if ended {
            self.pace.pass_ended();
        }
        self.pace.after(began_ps, actor.now_ps())
    }

    /// A marked page was accessed.
    pub(crate) fn fault(&mut self, gva: u64, guest: &mut Guest, actor: &mut Actor<'_>) {
        let Some(hint) = guest.hint_fault(gva, actor) else {
            return;
        };
        let hot = if is_tpp(self.classify) {
            // A page changes its list under the lock of all lists.
            guest.mark_accessed(gva);
            actor.contend(Cause::Hint, hint.pages);
            hint.active
        } else {
            hint.since_ms < HOT_MS
        };
        if !hot {
            return;
        }
        if guest.is_short() {
            self.reclaimer.wake(actor.now_ps());
        } else {
            // While it was marked nobody could have its translation.
            let moved = guest.migrate(gva, TierId::Fast, false, actor);
            self.pace.promoted(moved);
            self.took_memory(guest, actor.now_ps());
        }
    }

    /// Fast memory may have become less.
    pub(crate) fn took_memory(&mut self, guest: &Guest, now_ps: u64) {
        if is_tpp(self.classify) && guest.wants_more() {
            self.reclaimer.wake(now_ps);
        }
    }

    /// The thread that frees fast memory.
    pub(super) fn reclaimer(&self) -> &Reclaimer {
        &self.reclaimer
    }

    /// That thread's turn.
    pub(crate) fn reclaim(&mut self, now_ps: u64, guest: &mut Guest, actor: &mut Actor<'_>) {
        let work = |actor: &mut Actor<'_>, until_ps| guest.reclaim(actor, until_ps);
        self.reclaimer.turn(now_ps, actor, work);
    }
}

fn is_tpp(classify: Classify) -> bool {
    classify == Classify::RepeatedFault
}
