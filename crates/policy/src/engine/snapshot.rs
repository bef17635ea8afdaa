//! Saves an engine's state between two epochs as numbers, so that a recording can start at any time.
//!
//! Reading is total: invalid states are rejected, and an accepted state breaks no property.

use super::process::Process;
use super::rechecks::Rechecks;
use super::strategy::Classify;
use super::{BYTES_MAX, Config, Engine, Figures, State, Strategy};
use crate::numbers::{NotAState, Numbers, Saved};
use crate::residency::{FAILURES_MAX, Known};
use crate::{
    Away, BLOCK_SIZE, Block, ByLevel, ByteCount, GuestVirtAddr, LEVELS, Level, Pid, RankedRange,
    Share, Socket, Spread, VirtRange,
};

/// More than any of these counters reaches.
const COUNT_MAX: u64 = 1 << 60;

impl<S: Strategy> Engine<S>
where
    S::Classifier: Saved,
{
    /// The state as numbers, if the engine sleeps or has not started.
    pub fn save(&self) -> Option<Vec<u64>> {
        let is_new = self.state == State::Refresh && self.epoch == 0;
        if !is_new && self.state != State::Asleep {
            return None;
        }
        let mut to = vec![is_new.into(), self.epoch.into(), self.refresh_at.into()];
        to.extend([self.calm.into(), self.balloon_wants.0, self.paused.into()]);
        to.push(self.thinning.into());
        to.extend(self.config.sizes.0.map(|bytes| bytes.0));
        to.push(self.usable.is_some().into());
        if let Some(usable) = self.usable {
            to.extend(usable.0.map(|bytes| bytes.0));
        }
        let turn = self.rechecks;
        to.extend([turn.next, turn.strays].map(u64::from));
        to.extend([self.slept.into(), self.moving_ns, self.repeats.into()]);
        to.push(self.wanted.len() as u64);
        for (pid, block) in &self.wanted {
            to.extend([pid.0.into(), block.0]);
        }
        to.push(self.ranking.len() as u64);
        for ranked in &self.ranking {
            to.extend([
                ranked.pid.0.into(),
                ranked.range.start().0,
                ranked.range.len().0,
            ]);
            to.extend([ranked.count.to_bits(), ranked.born_epoch.into()]);
        }
        self.strategy.save(&mut to);
        to.push(self.sockets.rooms.len() as u64);
        for ((level, socket), room) in &self.sockets.rooms {
            to.extend([level.index() as u64, socket.number().into(), room.0]);
        }
        let f = self.figures;
        to.extend([f.epochs, f.samples, f.samples_lost, f.samples_astray]);
        to.extend([f.tried.0, f.promoted.0, f.demoted.0, f.collapsed.0]);
        to.push(self.processes.len() as u64);
        for (pid, process) in &self.processes {
            to.push(pid.0.into());
            let share = self.shares.get(pid);
            let flags = u64::from(process.all_known) | u64::from(share.is_some()) << 1;
            let socket = self.sockets.of(*pid);
            to.extend([flags, process.next_recheck.0, socket.number().into()]);
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
                let spread = known.spread();
                to.extend(spread.bytes.0.map(|bytes| bytes.0));
                to.push(spread.socket.number().into());
                to.extend([known.aside_until, known.failures.into()].map(u64::from));
                to.push(known.away.map_or(0, |Away { home, now }| {
                    (1 + home.index() * LEVELS + now.index()) as u64
                }));
                to.push(known.is_collapsed.into());
            }
        }
        Some(to)
    }

    /// Restores a saved engine.
    ///
    /// # Errors
    /// The first invalid number.
    pub fn restore(strategy: S, config: Config, numbers: &[u64]) -> Result<Self, NotAState> {
        let mut from = Numbers::new(numbers);
        let from = &mut from;
        let mut engine = Self::new(strategy, config);
        if from.next(1)? == 0 {
            engine.state = State::Asleep;
        }
        engine.epoch = from.next_u32()?;
        engine.refresh_at = from.next_u32()?;
        engine.calm = from.next(super::CALM_MAX.into())? as u32;
        engine.balloon_wants.0 = from.next(BYTES_MAX)?;
        engine.paused = from.next(1)? == 1;
        engine.thinning = from.next_u32()?.max(1);
        for size in &mut engine.config.sizes.0 {
            size.0 = from.next(BYTES_MAX)?;
        }
        if from.next(1)? == 1 {
            let mut usable = ByLevel::<ByteCount>::default();
            for bytes in &mut usable.0 {
                bytes.0 = from.next(BYTES_MAX)?;
            }
            engine.usable = Some(usable);
        }
        engine.rechecks = Rechecks {
            next: from.next_u32()?,
            strays: from.next_u32()?,
        };
        engine.slept = from.next_u32()?;
        engine.moving_ns = from.next(u64::MAX)?;
        engine.repeats = from.next_u32()?;
        for _ in 0..from.next(super::carrying::WANTED_MAX as u64)? {
            let pid = Pid(from.next_u32()?);
            let block = Block(from.next(u64::MAX / BLOCK_SIZE)?);
            engine.wanted.push((pid, block));
        }
        for _ in 0..from.next_u32()? {
            let (pid, start, len) = (
                Pid(from.next_u32()?),
                from.next(u64::MAX)?,
                from.next(u64::MAX)?,
            );
            let end = from.known(start.checked_add(len))?;
            let range = VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(end));
            engine.ranking.push(RankedRange {
                pid,
                range: from.known(range)?,
                count: from.number()?,
                born_epoch: from.next_u32()?,
            });
        }
        engine.strategy.restore(from)?;
        for _ in 0..from.next((LEVELS * usize::from(Socket::MAX)) as u64)? {
            let level = Level::new(from.next(LEVELS as u64 - 1)? as usize);
            let place = (from.known(level)?, socket(from)?);
            let room = ByteCount(from.next(BYTES_MAX)?);
            engine.sockets.set_room(place, room);
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
            collapsed: ByteCount(count()?),
        };
        for _ in 0..from.next_u32()? {
            engine.restore_process(from)?;
        }
        match from.next(u64::MAX) {
            Err(_) => Ok(engine),
            Ok(_) => from.known(None),
        }
    }

    fn restore_process(&mut self, from: &mut Numbers<'_>) -> Result<(), NotAState> {
        let pid = Pid(from.next_u32()?);
        from.known((!self.processes.contains_key(&pid)).then_some(()))?;
        let mut process = Process::new(self.strategy.classifier());
        process.classifier.set_thinning(self.thinning);
        let flags = from.next(3)?;
        process.all_known = flags & 1 == 1;
        process.next_recheck = Block(from.next(u64::MAX / BLOCK_SIZE + 1)?);
        self.sockets.of.insert(pid, socket(from)?);
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
        process.classifier.set_space(&process.space);
        process.classifier.restore(from)?;
        let mut next = 0u64;
        for _ in 0..from.next_u32()? {
            let gap = from.next(u64::MAX / BLOCK_SIZE)?;
            let block = from.known(next.checked_add(gap))?;
            next = from.known(block.checked_add(1))?;
            let mut spread = Spread::default();
            let mut left = BLOCK_SIZE;
            for bytes in &mut spread.bytes.0 {
                bytes.0 = from.next(left)?;
                left -= bytes.0;
            }
            spread.socket = socket(from)?;
            let mut known = Known::at(spread);
            known.aside_until = from.next_u32()?;
            known.failures = (from.next(u8::MAX.into())? as u8).min(FAILURES_MAX);
            let away = from.next((LEVELS * LEVELS) as u64)? as usize;
            let level = |index: usize| Level::new(index % LEVELS);
            known.away = away.checked_sub(1).and_then(|away| {
                let (home, now) = (level(away / LEVELS)?, level(away)?);
                Some(Away { home, now })
            });
            known.is_collapsed = from.next(1)? == 1;
            self.residency.restore(pid, Block(block), known);
        }
        self.processes.insert(pid, process);
        Ok(())
    }
}

fn socket(from: &mut Numbers<'_>) -> Result<Socket, NotAState> {
    let number = from.next(u64::from(Socket::MAX) - 1)?;
    Ok(Socket::new(number as usize))
}
