//! An engine's state between two epochs as a sequence of numbers, so that a recording can begin
//! anywhere.
//!
//! Reading is total: what could not have been written is refused, and what is accepted breaks no
//! property of what it becomes.

use super::process::Process;
use super::rechecks::Rechecks;
use super::strategy::Classify;
use super::{BYTES_MAX, Config, Engine, Figures, State, Strategy};
use crate::residency::Known;
use crate::{
    BLOCK_SIZE, Block, ByteCount, GuestVirtAddr, Pid, Placement, Room, Share, Tier, VirtRange,
};

/// More than any of these counts gets in a lifetime.
const COUNT_MAX: u64 = 1 << 60;

/// Numbers that are no engine's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("number {0} is not what an engine's state has there")]
pub struct NotAState(pub usize);

/// Reads numbers one after the other.
#[derive(Debug)]
pub struct Numbers<'a> {
    all: &'a [u64],
    at: usize,
}

impl<'a> Numbers<'a> {
    /// All of these.
    pub fn new(all: &'a [u64]) -> Self {
        Self { all, at: 0 }
    }

    /// The next one, which is at most `most`.
    ///
    /// # Errors
    /// When it is more, or there is none.
    pub fn next(&mut self, most: u64) -> Result<u64, NotAState> {
        let number = self.all.get(self.at).copied();
        let number = number.filter(|&n| n <= most).ok_or(NotAState(self.at))?;
        self.at += 1;
        Ok(number)
    }

    /// The next one, of 32 bits.
    ///
    /// # Errors
    /// Likewise.
    pub fn next_u32(&mut self) -> Result<u32, NotAState> {
        Ok(self.next(u32::MAX.into())? as u32)
    }

    /// `value`, if there is one; the number read last is wrong otherwise.
    ///
    /// # Errors
    /// When there is none.
    pub fn known<T>(&self, value: Option<T>) -> Result<T, NotAState> {
        value.ok_or(NotAState(self.at.saturating_sub(1)))
    }
}

/// A classification that can be told as numbers between two epochs.
pub trait Saved: Classify {
    /// Appends what is known.
    fn save(&self, to: &mut Vec<u64>);

    /// Takes over what was saved; `self` is new.
    ///
    /// # Errors
    /// When the numbers are not what [`Self::save`] appends.
    fn restore(&mut self, from: &mut Numbers<'_>) -> Result<(), NotAState>;
}

impl<S: Strategy> Engine<S>
where
    S::Classifier: Saved,
{
    /// The state as numbers, if it is asleep or has not begun. The last plan's ranking is not part
    /// of it.
    pub fn save(&self) -> Option<Vec<u64>> {
        let is_new = self.state == State::Refresh && self.epoch == 0;
        if !is_new && self.state != State::Asleep {
            return None;
        }
        let flags = u64::from(is_new) | u64::from(self.account.is_closed()) << 1;
        let mut to = vec![flags, self.epoch.into(), self.refresh_at.into()];
        to.extend([self.calm.into(), self.balloon_wants.0, self.paused.into()]);
        to.push(self.room.is_some().into());
        if let Some(room) = self.room {
            let amounts = [room.fast_free, room.fast_reserve, room.fast_low];
            to.extend(amounts.map(|bytes| bytes.0));
            to.push(room.slow_free.0);
        }
        let turn = self.rechecks;
        to.extend([turn.next, turn.strays].map(u64::from));
        self.account.save(&mut to);
        let f = self.figures;
        to.extend([f.epochs, f.samples, f.samples_lost, f.samples_astray]);
        to.extend([f.tried.0, f.promoted.0, f.demoted.0]);
        to.push(self.processes.len() as u64);
        for (pid, process) in &self.processes {
            to.push(pid.0.into());
            let share = self.shares.get(pid);
            let flags = u64::from(process.all_known) | u64::from(share.is_some()) << 1;
            to.extend([flags, process.next_recheck.0]);
            if let Some(share) = share {
                to.extend([share.group.into(), share.guarantee.0, share.weight.into()]);
            }
            to.push(process.space.len() as u64);
            let mut end = 0;
            for vma in &process.space {
                to.extend([vma.start().0 - end, vma.len().0]);
                end = vma.end().0;
            }
            process.classifier.save(&mut to);
            let blocks = self.residency.all(*pid);
            to.push(blocks.len() as u64);
            let mut next = 0;
            for (block, known) in blocks {
                to.push(block.0 - next);
                next = block.0 + 1;
                let Placement { fast, slow } = known.placement;
                to.extend([fast.0, slow.0]);
                to.extend([known.aside_until, known.failures].map(u64::from));
                let (to_tier, until) = match known.moved {
                    None => (0, 0),
                    Some((Tier::Fast, until)) => (1, until),
                    Some((Tier::Slow, until)) => (2, until),
                };
                to.extend([to_tier, until.into()]);
            }
        }
        Some(to)
    }

    /// An engine in a state that was saved.
    ///
    /// # Errors
    /// At the first number that no engine has.
    pub fn restore(strategy: S, config: Config, numbers: &[u64]) -> Result<Self, NotAState> {
        let mut from = Numbers::new(numbers);
        let from = &mut from;
        let mut engine = Self::new(strategy, config);
        let flags = from.next(3)?;
        if flags & 1 == 0 {
            engine.state = State::Asleep;
        }
        engine.epoch = from.next_u32()?;
        engine.refresh_at = from.next_u32()?;
        engine.calm = from.next(super::CALM_MAX.into())? as u32;
        engine.balloon_wants.0 = from.next(BYTES_MAX)?;
        engine.paused = from.next(1)? == 1;
        if from.next(1)? == 1 {
            let mut bytes = || Ok(ByteCount(from.next(2 * BYTES_MAX)?));
            engine.room = Some(Room {
                fast_free: bytes()?,
                fast_reserve: bytes()?,
                fast_low: bytes()?,
                slow_free: bytes()?,
                batch: config.batch,
            });
        }
        engine.rechecks = Rechecks {
            next: from.next_u32()?,
            strays: from.next_u32()?,
        };
        engine.account.restore(from)?;
        if flags & 2 != 0 {
            engine.account.close();
        }
        let mut count = || from.next(COUNT_MAX);
        engine.figures = Figures {
            epochs: count()?,
            samples: count()?,
            samples_lost: count()?,
            samples_astray: count()?,
            tried: ByteCount(count()?),
            promoted: ByteCount(count()?),
            demoted: ByteCount(count()?),
        };
        for _ in 0..from.next_u32()? {
            engine.restore_process(from)?;
        }
        match from.next(u64::MAX) {
            Err(_) => Ok(engine),
            Ok(_) => Err(NotAState(from.at - 1)),
        }
    }

    fn restore_process(&mut self, from: &mut Numbers<'_>) -> Result<(), NotAState> {
        let pid = Pid(from.next_u32()?);
        from.known((!self.processes.contains_key(&pid)).then_some(()))?;
        let mut process = Process::new(self.strategy.classifier());
        let flags = from.next(3)?;
        process.all_known = flags & 1 == 1;
        process.next_recheck = Block(from.next(u64::MAX / BLOCK_SIZE + 1)?);
        if flags & 2 != 0 {
            let share = Share {
                group: from.next_u32()?,
                guarantee: ByteCount(from.next(u64::MAX)?),
                weight: from.next_u32()?,
            };
            self.shares.insert(pid, share);
        }
        let mut end = 0u64;
        for _ in 0..from.next_u32()? {
            let (gap, len) = (from.next(u64::MAX)?, from.next(u64::MAX)?);
            let start = from.known(end.checked_add(gap))?;
            end = from.known(start.checked_add(len))?;
            let vma = VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(end));
            process.space.push(from.known(vma)?);
        }
        process.classifier.restore(from)?;
        let mut next = 0u64;
        for _ in 0..from.next_u32()? {
            let gap = from.next(u64::MAX / BLOCK_SIZE)?;
            let block = from.known(next.checked_add(gap))?;
            next = from.known(block.checked_add(1))?;
            let fast = from.next(BLOCK_SIZE)?;
            let slow = from.next(BLOCK_SIZE - fast)?;
            let known = Known {
                placement: Placement {
                    fast: ByteCount(fast),
                    slow: ByteCount(slow),
                },
                aside_until: from.next_u32()?,
                failures: from.next_u32()?,
                moved: match (from.next(2)?, from.next_u32()?) {
                    (0, _) => None,
                    (1, until) => Some((Tier::Fast, until)),
                    (_, until) => Some((Tier::Slow, until)),
                },
            };
            self.residency.restore(pid, Block(block), known);
        }
        self.processes.insert(pid, process);
        Ok(())
    }
}
