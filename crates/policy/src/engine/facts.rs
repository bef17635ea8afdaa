//! Takes facts about processes, memory and the machine, and refuses impossible ones.

use super::process::Process;
use super::{Classify, Engine, Misuse, NodeFacts, Request, State, Strategy};
use crate::saved::BYTES_MAX;
use crate::{BLOCK_SIZE, ByLevel, ByteCount, Observation, Pid, Share, Socket, Spread, VirtRange};

impl<S: Strategy> Engine<S> {
    pub(super) fn start(&mut self, pid: Pid) -> Result<(), Misuse> {
        if self.processes.contains_key(&pid) {
            return Err(Misuse::KnownProcess(pid));
        }
        let mut process = Process::new(self.strategy.classifier());
        process.classifier.set_thinning(self.thinning);
        self.processes.insert(pid, process);
        Ok(())
    }

    pub(super) fn thin(&mut self, thinning: u32) {
        self.thinning = thinning.max(1);
        for process in self.processes.values_mut() {
            process.classifier.set_thinning(self.thinning);
        }
    }

    pub(super) fn end(&mut self, pid: Pid) -> Result<(), Misuse> {
        if self.processes.remove(&pid).is_none() {
            return Err(Misuse::UnknownProcess(pid));
        }
        self.residency.forget(pid);
        self.shares.remove(&pid);
        self.sockets.of.remove(&pid);
        self.ranking.retain(|r| r.pid != pid);
        self.wanted.retain(|(p, _)| *p != pid);
        self.moves.forget(pid);
        let was_asked = matches!(self.request(), Request::LookUp { pid: p, .. } if p == pid);
        self.look_ups.retain(|(p, _)| *p != pid);
        if was_asked {
            self.next_look_up();
        } else if matches!(self.state, State::Move | State::Collapse)
            && self.moves.batch[0].pid == pid
            || self.state == State::Room && !self.moves.wants_room()
        {
            self.proceed();
        }
        Ok(())
    }

    pub(super) fn set_space(&mut self, pid: Pid, vmas: &[VirtRange]) -> Result<(), Misuse> {
        if vmas.windows(2).any(|w| w[0].end() > w[1].start()) {
            return Err(Misuse::Unsorted(pid));
        }
        let process = self.processes.get_mut(&pid);
        let process = process.ok_or(Misuse::UnknownProcess(pid))?;
        if process.space != vmas {
            process.classifier.set_space(vmas);
            process.space.clear();
            process.space.extend(vmas);
            process.all_known = false;
            self.residency.restrict(pid, vmas);
            let process = &*process;
            self.moves.keep(pid, |block| process.touches(block));
            if self.state == State::Room && !self.moves.wants_room() {
                self.proceed();
            }
        }
        Ok(())
    }

    pub(super) fn set_share(&mut self, pid: Pid, share: Option<Share>) -> Result<(), Misuse> {
        if !self.processes.contains_key(&pid) {
            return Err(Misuse::UnknownProcess(pid));
        }
        match share {
            Some(share) => self.shares.insert(pid, share),
            None => self.shares.remove(&pid),
        };
        Ok(())
    }

    pub(super) fn set_machine(
        &mut self,
        sizes: ByLevel<ByteCount>,
        cpus: u32,
    ) -> Result<(), Misuse> {
        for size in sizes.0 {
            bounded(size)?;
        }
        self.config.sizes = sizes;
        self.strategy.set_cpus(cpus);
        // Nodes may have gone.
        self.sockets.rooms.clear();
        // Free memory has changed.
        self.usable = None;
        Ok(())
    }

    pub(super) fn set_socket(&mut self, pid: Pid, socket: Socket) -> Result<(), Misuse> {
        if !self.processes.contains_key(&pid) {
            return Err(Misuse::UnknownProcess(pid));
        }
        self.sockets.of.insert(pid, socket);
        Ok(())
    }

    /// Makes room for the balloon: one batch is demoted at once, the rest in later epochs.
    pub(super) fn make_room(&mut self, wanted: ByteCount) {
        let is_new = self.balloon_wants.0 == 0 && wanted.0 > 0;
        self.balloon_wants = wanted;
        // Free memory has changed.
        self.usable = None;
        self.calm = 0;
        if is_new && !self.paused && self.state == State::Asleep {
            self.look_up(true);
        }
    }

    pub(super) fn take_observation(&mut self, it: Observation) {
        self.samples += 1;
        let process = self.processes.get_mut(&it.pid);
        let Some(process) = process.filter(|p| p.touches(it.block)) else {
            self.astray += 1;
            return;
        };
        let watched_s = it.exposure_ns as f64 * 1e-9;
        let known_s = f64::from(it.events) / process.classifier.rate_of(it.block);
        // A lower bound says nothing about a block that is known to be hotter.
        let says_nothing = it.is_least && known_s < watched_s;
        let exposure_s = if says_nothing { known_s } else { watched_s };
        if !says_nothing {
            process.classifier.observe(it.block, it.events, exposure_s);
        }
        let away = match it.events {
            0 => self.residency.away_of(it.pid, it.block),
            _ => {
                let accessed = self.residency.accessed(it.pid, it.block);
                process.all_known &= !accessed.was_absent;
                accessed.away
            }
        };
        self.strategy.saw(away, it.events, Some(exposure_s));
    }

    pub(super) fn locate(&mut self, placements: &[Spread]) -> Result<(), Misuse> {
        let Some((pid, blocks)) = self.look_ups.last() else {
            return Ok(());
        };
        check(placements, blocks.len())?;
        for (&block, &placement) in blocks.iter().zip(placements) {
            if let Some(before) = self.residency.get(*pid, block) {
                self.rechecks.found(before, placement);
            }
            self.residency.set(*pid, block, placement);
        }
        self.look_ups.pop();
        self.next_look_up();
        Ok(())
    }
}

/// `bytes`, or an error if no machine has as many.
pub(super) fn bounded(bytes: ByteCount) -> Result<ByteCount, Misuse> {
    match bytes.0 {
        0..=BYTES_MAX => Ok(bytes),
        more => Err(Misuse::TooMuch(more)),
    }
}

/// Usable memory of each tier.
pub(super) fn usable(facts: ByLevel<NodeFacts>) -> Result<ByLevel<ByteCount>, Misuse> {
    for tier in &facts.0 {
        bounded(tier.free)?;
        bounded(tier.missing())?;
    }
    Ok(ByLevel(facts.0.map(|tier| tier.usable())))
}

/// Checks that these are possible places of the requested blocks.
pub(super) fn check(placements: &[Spread], asked: usize) -> Result<(), Misuse> {
    let told = placements.len();
    if told != asked {
        return Err(Misuse::Count { asked, told });
    }
    for p in placements {
        let resident = p.resident().0;
        if resident > BLOCK_SIZE {
            return Err(Misuse::Overfull(resident));
        }
    }
    Ok(())
}
