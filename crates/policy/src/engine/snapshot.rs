//! The engine's state between two epochs, so that a recording can start at any time.
//!
//! Restoring is total: impossible states are rejected, and an accepted state breaks no property.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::process::Process;
use super::rechecks::Rechecks;
use super::strategy::ByHeat;
use super::{Config, Engine, Figures, State};
use crate::residency::Known;
use crate::rule::Rule;
use crate::saved::{NotAState, are_bounded, check};
use crate::{
    Block, ByLevel, ByteCount, Heat, Pid, RankedRange, ResidencyMap, Share, Sockets, VirtRange,
};

/// More than any of these counters reaches.
const COUNT_MAX: u64 = 1 << 60;

/// An engine's state between two epochs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Snapshot {
    /// The engine has not started.
    is_new: bool,
    epoch: u32,
    refresh_at: u32,
    calm: u32,
    repeats: u32,
    slept: u32,
    moving_ns: u64,
    paused: bool,
    thinning: u32,
    sizes: ByLevel<ByteCount>,
    usable: Option<ByLevel<ByteCount>>,
    missing: ByLevel<ByteCount>,
    balloon_wants: ByteCount,
    rechecks: Rechecks,
    wanted: Vec<(Pid, Block)>,
    ranking: Vec<RankedRange>,
    figures: Figures,
    cpus: u32,
    rule: Rule,
    shares: BTreeMap<Pid, Share>,
    sockets: Sockets,
    processes: BTreeMap<Pid, SavedProcess>,
}

/// One process in it.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct SavedProcess {
    space: Vec<VirtRange>,
    all_known: bool,
    next_recheck: Block,
    heat: Heat,
    /// By address.
    blocks: Vec<(Block, Known)>,
}

impl Engine<ByHeat> {
    /// The state, if the engine sleeps or has not started.
    pub fn save(&self) -> Option<Snapshot> {
        let is_new = self.state == State::Refresh && self.epoch == 0;
        if !is_new && self.state != State::Asleep {
            return None;
        }
        let process = |(&pid, process): (&Pid, &Process<Heat>)| {
            let saved = SavedProcess {
                space: process.space.clone(),
                all_known: process.all_known,
                next_recheck: process.next_recheck,
                heat: process.classifier.clone(),
                blocks: self.residency.all(pid),
            };
            (pid, saved)
        };
        Some(Snapshot {
            is_new,
            epoch: self.epoch,
            refresh_at: self.refresh_at,
            calm: self.calm,
            repeats: self.repeats,
            slept: self.slept,
            moving_ns: self.moving_ns,
            paused: self.paused,
            thinning: self.thinning,
            sizes: self.config.sizes,
            usable: self.usable,
            missing: self.missing,
            balloon_wants: self.balloon_wants,
            rechecks: self.rechecks,
            wanted: self.wanted.clone(),
            ranking: self.ranking.clone(),
            figures: self.figures,
            cpus: self.strategy.cpus(),
            rule: self.strategy.rule(),
            shares: self.shares.clone(),
            sockets: self.sockets.clone(),
            processes: self.processes.iter().map(process).collect(),
        })
    }

    /// Restores a saved engine. The rule in `strategy` is replaced by the saved one, but for the facts about the machine.
    ///
    /// # Errors
    /// A part of the state is impossible.
    pub fn restore(strategy: &ByHeat, config: Config, saved: Snapshot) -> Result<Self, NotAState> {
        saved.check()?;
        let strategy = strategy.restored(saved.rule, saved.cpus)?;
        let mut engine = Self::new(strategy, config);
        if !saved.is_new {
            engine.state = State::Asleep;
        }
        engine.epoch = saved.epoch;
        engine.refresh_at = saved.refresh_at;
        engine.calm = saved.calm;
        engine.repeats = saved.repeats;
        engine.slept = saved.slept;
        engine.moving_ns = saved.moving_ns;
        engine.paused = saved.paused;
        engine.thinning = saved.thinning.max(1);
        engine.config.sizes = saved.sizes;
        engine.usable = saved.usable;
        engine.missing = saved.missing;
        engine.balloon_wants = saved.balloon_wants;
        engine.rechecks = saved.rechecks;
        engine.wanted = saved.wanted;
        engine.ranking = saved.ranking;
        engine.figures = saved.figures;
        engine.shares = saved.shares;
        engine.sockets = saved.sockets;
        for (pid, process) in saved.processes {
            let mut process = process.restore(pid, &mut engine.residency)?;
            process.classifier.set_thinning(engine.thinning);
            engine.processes.insert(pid, process);
        }
        Ok(engine)
    }
}

impl Snapshot {
    fn check(&self) -> Result<(), NotAState> {
        let f = &self.figures;
        let counters = [f.epochs, f.samples, f.samples_lost, f.samples_astray];
        let amounts = [f.tried, f.promoted, f.demoted, f.collapsed].map(|bytes| bytes.0);
        let is_counter = |count: u64| count <= COUNT_MAX;
        check("a number of calm epochs", self.calm <= super::CALM_MAX)?;
        check(
            "a counter",
            counters.into_iter().chain(amounts).all(is_counter),
        )?;
        check("a tier's size", are_bounded(&self.sizes.0))?;
        check(
            "usable memory",
            are_bounded(self.usable.iter().flat_map(|u| &u.0)),
        )?;
        check("missing memory", are_bounded(&self.missing.0))?;
        check("the balloon's wish", are_bounded([&self.balloon_wants]))?;
        check("free memory", are_bounded(self.sockets.rooms.values()))?;
        check(
            "a number of blocks",
            self.wanted.len() <= super::carrying::WANTED_MAX,
        )?;
        let is_there = |pid: &Pid| self.processes.contains_key(pid);
        check(
            "a stranger",
            self.shares
                .keys()
                .chain(self.sockets.of.keys())
                .all(is_there),
        )
    }
}

impl SavedProcess {
    fn restore(self, pid: Pid, residency: &mut ResidencyMap) -> Result<Process<Heat>, NotAState> {
        let mut pairs = self.space.windows(2);
        check(
            "the order of mappings",
            pairs.all(|pair| pair[0].end() <= pair[1].start()),
        )?;
        let mut pairs = self.blocks.windows(2);
        check(
            "the order of blocks",
            pairs.all(|pair| pair[0].0 < pair[1].0),
        )?;
        for (block, known) in self.blocks {
            check("a block's place", known.is_possible())?;
            residency.restore(pid, block, known);
        }
        Ok(Process {
            classifier: self.heat.restored(&self.space)?,
            space: self.space,
            all_known: self.all_known,
            next_recheck: self.next_recheck,
        })
    }
}
