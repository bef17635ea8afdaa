//! The observer's rounds; see the module `damon`.

use std::num::NonZero;
use std::time::Duration;

use super::budget::{LookBudget, Prices};
use super::estimate;
use super::memory::{Memory, State};
use super::{
    CPUS_PER_SHARE, Cost, Found, Look, Next, PERIOD, Pass, Prospect, REACH, RUNGS, SET_MAX,
};
use crate::{BLOCK_SIZE, Block, Observation, PAGE_SIZE, Pid, VirtRange};

/// A block that is still to be looked at in this round.
#[derive(Debug, Clone, Copy)]
struct Pending {
    at: (Pid, Block),
    way: Way,
}

/// The earlier looks at a block in this round.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// None, and the block is unknown.
    Unknown,
    /// None, and the block is known.
    Known,
    /// Shorter looks, which never found it accessed.
    Up,
    /// Longer looks, which always found it accessed: a lower bound of the rate.
    Down(Observation),
}

/// The blocks of a round.
#[derive(Debug, Clone, Default)]
pub(super) struct Round {
    /// Sorted by rung.
    pending: [Vec<Pending>; RUNGS.len()],
    began: Duration,
    spent: Duration,
    /// Whether it is for unknown blocks.
    is_first: bool,
    /// Whether looks go on until they cost as much as setting regions, because CPU time is scarce.
    is_thorough: bool,
    /// Number of its blocks that each rung measured.
    told: [usize; RUNGS.len()],
}

impl Round {
    pub(super) fn is_over(&self) -> bool {
        self.pending.iter().all(Vec::is_empty)
    }
}

/// Chooses the memory to look at, and when. Times count from any fixed moment.
#[derive(Debug, Clone)]
pub struct Observer {
    memory: Memory,
    budget: LookBudget,
    prices: Prices,
    pub(super) round: Round,
    wanted: Vec<(Pid, Block)>,
    /// Neighbours of newly hot blocks, with the hot block's rung.
    near: Vec<(Pid, Block, usize)>,
    /// Number of turns so far.
    turn: usize,
    /// The rung at which most of the recent unknown blocks ended; the next ones start there.
    usual_rung: usize,
}

impl Observer {
    /// Creates an observer that may spend `cpu_percent` of one CPU per `CPUS_PER_SHARE`.
    pub fn new(cpu_percent: f64, cpus: u32, now: Duration) -> Self {
        let shares = (cpus / CPUS_PER_SHARE).max(1);
        // With a share of zero, a rest would never end.
        let share = (cpu_percent / 100.0 * f64::from(shares)).max(f64::EPSILON);
        Self {
            memory: Memory::default(),
            budget: LookBudget::new(share, cpus, now),
            prices: Prices::default(),
            round: Round::default(),
            wanted: vec![],
            near: vec![],
            turn: 0,
            usual_rung: 0,
        }
    }

    /// Sets the memory of a process: its readable mappings, sorted.
    pub fn set_memory(&mut self, pid: Pid, readable: &[VirtRange]) {
        self.memory.set(pid, readable);
    }

    /// Removes all other processes.
    pub fn retain(&mut self, pids: &[Pid]) {
        self.memory.retain(pids);
        for pending in &mut self.round.pending {
            pending.retain(|pending| pids.contains(&pending.at.0));
        }
    }

    /// Clears its knowledge, but not its budget.
    pub fn clear(&mut self) {
        self.memory = Memory::default();
        self.round.pending = Default::default();
        self.wanted.clear();
        self.near.clear();
    }

    /// Replaces the blocks that the policy wants looked at first.
    pub fn want(&mut self, wanted: &[(Pid, Block)]) {
        self.wanted.clear();
        self.wanted.extend(wanted.iter().take(SET_MAX));
    }

    /// Sets the expected value of more evidence from now on.
    pub fn set_prospect(&mut self, prospect: Prospect) {
        self.budget.set_prospect(prospect);
    }

    /// Memory used for blocks, bytes, without the allocator's overhead.
    pub fn state_bytes(&self) -> usize {
        self.memory.state_bytes()
    }

    /// Number of unknown blocks.
    pub fn unknown(&self) -> usize {
        self.memory.unknown()
    }

    /// Returns the next step. Each pass is returned once.
    pub fn next(&mut self, now: Duration) -> Next {
        if self.round.is_over() {
            if self.memory.len() == 0 {
                return Next::Idle;
            }
            let is_first = self.memory.unknown() > 0;
            let due = self.budget.due(is_first, now);
            if due > now {
                return Next::Rest(due);
            }
            self.begin_round(is_first, now);
        }
        Next::Look(self.pass())
    }

    /// Chooses the blocks of a round.
    fn begin_round(&mut self, is_first: bool, now: Duration) {
        if is_first {
            self.budget.learn(now);
        }
        let (pace, saved_s) = (self.budget.pace(now), self.budget.saved_s(now));
        let quick_s = self.prices.block_s(RUNGS[0].looks);
        let is_thorough = !is_first || self.memory.unknown() as f64 * quick_s > saved_s;
        let looks = self.looks(&RUNGS[0], is_thorough);
        let share_s = self.budget.share() * PERIOD.as_secs_f64();
        let seconds = match is_first {
            // A price that rises must not overdraw the savings: the rest would be long.
            true if self.prices.is_measured() => (saved_s / 2.0).max(share_s),
            true => share_s,
            false => pace * PERIOD.as_secs_f64(),
        };
        // A round is long enough that its blocks cost as much as the fixed cost of its passes. The rest afterwards pays
        // for both.
        let fixed_s = RUNGS.len() as f64 * self.prices.pass_s();
        let seconds = (seconds - fixed_s).max(fixed_s);
        let size = (seconds / self.prices.block_s(looks)) as usize;
        let size = size.clamp(1, SET_MAX.min(self.memory.len()));
        self.round = Round {
            began: now,
            is_first,
            is_thorough,
            ..Round::default()
        };
        let mut chosen: Vec<(Pid, Block)> = vec![];
        let is_there = |&(pid, block): &(Pid, Block)| self.memory.state(pid, block).is_some();
        let wanted = self.wanted.iter().copied().filter(is_there);
        chosen.extend(wanted.take(size / 2));
        let is_due = |&(pid, block, rung): &(Pid, Block, usize)| {
            let state = self.memory.state(pid, block);
            state.is_some_and(|state| match state.is_known() {
                true => !is_first && state.rung() < rung,
                false => true,
            })
        };
        self.near.retain(is_due);
        let rest = size - chosen.len();
        let near = self.near.drain(..self.near.len().min(rest / 2));
        chosen.extend(near.map(|(pid, block, _)| (pid, block)));
        self.take_turns(size - chosen.len(), &mut chosen);
        chosen.sort_unstable();
        chosen.dedup();
        for at in chosen {
            let state = self
                .memory
                .state(at.0, at.1)
                .filter(|state| state.is_known());
            let (rung, way) = match state {
                Some(state) => (state.rung(), Way::Known),
                None => (self.usual_rung, Way::Unknown),
            };
            self.round.pending[rung].push(Pending { at, way });
        }
    }

    /// Appends the next blocks in turn; only unknown ones while there are any.
    fn take_turns(&mut self, count: usize, chosen: &mut Vec<(Pid, Block)>) {
        // A step near the square root reaches all parts soon; coprime to the length, it reaches every block.
        let len = self.memory.len();
        let mut step = len.isqrt().max(1);
        while greatest_common_divisor(step, len) > 1 {
            step += 1;
        }
        let (is_first, mut left) = (self.round.is_first, count);
        for _ in 0..len {
            if left == 0 {
                break;
            }
            self.turn = (self.turn + step) % len;
            if !is_first || !self.memory.is_known(self.turn) {
                chosen.extend(self.memory.block(self.turn));
                left -= 1;
            }
        }
    }

    /// Number of looks in a pass. Thorough passes look until that costs as much as setting the regions.
    fn looks(&self, pass: &Pass, is_thorough: bool) -> u32 {
        if !is_thorough {
            return pass.looks;
        }
        let longest = PERIOD.div_duration_f64(pass.interval) as u32;
        let paid = (self.prices.set_s() / self.prices.look_s()) as u32;
        paid.min(longest).max(pass.looks)
    }

    /// Number of blocks that the kernel visits in half of the interval. With more, its own time would lengthen the
    /// interval.
    fn fitting(&self, pass: &Pass) -> usize {
        ((pass.interval / 2).as_secs_f64() / self.prices.look_s()) as usize
    }

    /// Whether a rung exists and is usable: on a slow kernel its passes would have too few blocks to be worth their
    /// cost.
    fn has_rung(&self, rung: usize) -> bool {
        RUNGS
            .get(rung)
            .is_some_and(|pass| self.fitting(pass) >= pass.looks as usize)
    }

    /// The next pass of the round: the rung with the most blocks.
    fn pass(&mut self) -> Look {
        let count = |rung: &usize| self.round.pending[*rung].len();
        let rung = (0..RUNGS.len()).rev().max_by_key(count).unwrap_or(0);
        let mut pass = RUNGS[rung];
        pass.looks = self.looks(&pass, self.round.is_thorough);
        let fitting = self.fitting(&pass);
        let pending = &mut self.round.pending[rung];
        pending.sort_unstable_by_key(|pending| pending.at);
        let count = pending.len().min(fitting.clamp(1, SET_MAX));
        let blocks = pending[..count].iter().map(|pending| pending.at).collect();
        Look { pass, blocks, rung }
    }

    /// Takes the results of a pass and appends observations.
    ///
    /// `elapsed` is the time from a block's first look to its last. A block without a result was not looked at.
    pub fn found(
        &mut self,
        look: &Look,
        elapsed: Duration,
        cost: &Cost,
        found: &[Found],
        out: &mut Vec<Observation>,
    ) {
        let looks = look.pass.looks;
        let spent = cost.looking + cost.setting;
        self.budget.pay(spent);
        self.prices
            .add(look.blocks.len() as u64 * u64::from(looks), cost);
        self.round.spent += spent;
        // Between two looks at a region the kernel also visits all others.
        let interval = (elapsed / looks).max(look.pass.interval);
        let is_asked = |pending: &Pending| look.blocks.binary_search(&pending.at).is_ok();
        let asked: Vec<_> = self.round.pending[look.rung]
            .extract_if(.., |p| is_asked(p))
            .collect();
        let mut answers: Vec<&Found> = found.iter().collect();
        answers.sort_unstable_by_key(|found| (found.pid, found.block));
        for pending in asked {
            let answer =
                answers.binary_search_by_key(&pending.at, |found| (found.pid, found.block));
            match answer {
                Ok(answer) => self.take(pending, look, interval, answers[answer], out),
                Err(_) => self.pass_over(pending),
            }
        }
        if self.round.is_over() {
            // The savings have paid for a first round.
            if !self.round.is_first {
                self.budget.rest(self.round.began, self.round.spent);
            }
            let told = |&rung: &usize| self.round.told[rung];
            let usual = (0..RUNGS.len())
                .max_by_key(told)
                .filter(|rung| told(rung) > 0);
            self.usual_rung = usual.unwrap_or(self.usual_rung);
        }
    }

    /// Takes the result for one block.
    fn take(
        &mut self,
        pending: Pending,
        look: &Look,
        interval: Duration,
        found: &Found,
        out: &mut Vec<Observation>,
    ) {
        let (pid, block) = pending.at;
        let Some(before) = self.memory.state(pid, block) else {
            return;
        };
        let is_huge = match found.page_bytes {
            Some(bytes) => bytes.get() >= BLOCK_SIZE,
            None => before.is_huge(),
        };
        let page_bytes = if is_huge { BLOCK_SIZE } else { PAGE_SIZE };
        let page_bytes = found.page_bytes.map_or(page_bytes, NonZero::get);
        let entries = (BLOCK_SIZE as f64 / page_bytes as f64).max(1.0);
        let (looks, rung) = (look.pass.looks, look.rung);
        let mut seen = estimate::observe(pending.at, interval, looks, found.accesses, entries);
        // Without a flush, pages that stay in a TLB look untouched.
        seen.is_least |= !look.pass.is_flushed && found.accesses > 0;
        let is_always = found.accesses >= looks;
        let is_never = found.accesses == 0;
        let (next, way) = match pending.way {
            Way::Unknown | Way::Up if is_never && rung > 0 => (rung - 1, Some(Way::Up)),
            Way::Unknown | Way::Known | Way::Down(_) if is_always && self.has_rung(rung + 1) => {
                (rung + 1, Some(Way::Down(seen)))
            }
            Way::Known if is_never => (rung.saturating_sub(1), None),
            Way::Down(_) if is_never => (rung - 1, None),
            _ => (rung, None),
        };
        self.memory
            .set_state(pid, block, State::known(next, is_huge));
        if let Some(way) = way {
            let at = pending.at;
            return self.round.pending[next].push(Pending { at, way });
        }
        out.push(match pending.way {
            Way::Down(bound) if is_never => bound,
            _ => seen,
        });
        if self.round.is_first {
            self.round.told[rung] += 1;
        }
        if matches!(pending.way, Way::Down(_)) && !is_never {
            self.look_around(pending.at, rung);
        }
    }

    /// Skips a block that was not looked at. Its turn counts, or the next round would choose it again.
    fn pass_over(
        &mut self,
        Pending {
            at: (pid, block), ..
        }: Pending,
    ) {
        if let Some(state) = self.memory.state(pid, block) {
            let state = State::known(state.rung(), state.is_huge());
            self.memory.set_state(pid, block, state);
        }
    }

    /// Adds the neighbours of a block that is hotter than it was known to be.
    fn look_around(&mut self, (pid, Block(block)): (Pid, Block), rung: usize) {
        let beside = block.saturating_sub(REACH)..=block.saturating_add(REACH);
        let free = SET_MAX.saturating_sub(self.near.len());
        let near = beside.filter(|&near| near != block).take(free);
        self.near.extend(near.map(|near| (pid, Block(near), rung)));
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    match b {
        0 => a,
        _ => greatest_common_divisor(b, a % b),
    }
}
