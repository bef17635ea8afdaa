//! A plan that is not carried out, but looked at: the account's text says why.

use super::super::protocol::Direction;
use super::super::snapshot::{NotAState, Numbers};
use crate::ByteCount;

/// Ticks for which a plan has to be found right before it is carried out: with fewer, memory that is hot for two
/// seconds would be moved when it no longer is. Each loss doubles them, and the looks that have to find it right, which is one at first.
pub(super) const REHEARSAL_TICKS: u32 = 4;

/// A plan, and what the looks after it have found. All zero: there is none yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Rehearsal {
    /// What it would move, bytes.
    promoted: u64,
    demoted: u64,
    /// For how long it would have paid.
    ticks: u32,
    /// Looks that have found that.
    pub looks: u32,
    /// Whether these were enough: plans are carried out.
    pub is_over: bool,
}

impl Rehearsal {
    /// Of a plan that promotes and demotes so many bytes.
    pub fn new(promoted: ByteCount, demoted: ByteCount) -> Self {
        Self {
            promoted: promoted.0,
            demoted: demoted.0,
            ..Self::default()
        }
    }

    /// What its moves cost, nanoseconds, where a byte costs so many picoseconds in each direction.
    pub fn cost_ns(&self, prices_ps: [u64; 2]) -> u128 {
        let cost_ns = |direction: Direction, bytes: u64| {
            u128::from(prices_ps[direction as usize]) * u128::from(bytes) / 1000
        };
        cost_ns(Direction::Promotion, self.promoted) + cost_ns(Direction::Demotion, self.demoted)
    }

    /// After a look, so many ticks after the one before, has found that it pays. It is over once as many looks as are
    /// wanted have.
    pub fn confirmed(self, ticks: u32, looks_wanted: u32) -> Self {
        let ticks = self.ticks.saturating_add(ticks);
        let looks = self.looks.saturating_add(1);
        Self {
            ticks,
            looks,
            is_over: ticks >= REHEARSAL_TICKS * looks_wanted && looks >= looks_wanted,
            ..self
        }
    }

    /// Appends its state.
    pub fn save(it: Option<Self>, to: &mut Vec<u64>) {
        let Self {
            promoted,
            demoted,
            ticks,
            looks,
            is_over,
        } = it.unwrap_or_default();
        to.extend([it.is_some(), is_over].map(u64::from));
        to.extend([promoted, demoted]);
        to.extend([ticks, looks].map(u64::from));
    }

    /// What was saved.
    pub fn restore(from: &mut Numbers<'_>) -> Result<Option<Self>, NotAState> {
        let (is_there, is_over) = (from.next(1)? > 0, from.next(1)? > 0);
        let (promoted, demoted) = (from.next(u64::MAX)?, from.next(u64::MAX)?);
        let (ticks, looks) = (from.next_u32()?, from.next_u32()?);
        Ok(is_there.then_some(Self {
            promoted,
            demoted,
            ticks,
            looks,
            is_over,
        }))
    }
}
