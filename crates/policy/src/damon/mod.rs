//! Decides which memory to look at without a sampling unit: the observer behind the tracker on DAMON.
//!
//! # Problem
//! A kernel can tell whether a page was accessed since its accessed bit was cleared. A look costs CPU time, and so does
//! telling the kernel where to look. Memory has up to half a million blocks of 2 MiB. One waiting time does not fit
//! all of them: a cold huge page is always found accessed after 80 ms, a hot small page seldom after 1 ms.
//!
//! # Approach
//! Looks are a resource with a measured price and a budget. The observer chooses *rounds* of blocks: one half as the
//! policy wishes, one quarter neighbours of newly hot blocks, and the rest in turn. The order of turns is scattered,
//! so that a hot set which has moved is met soon, and its neighbours show how far it reaches.
//!
//! Each block has a *rung*, the waiting time of its looks. A block that is always found accessed goes one rung down, to
//! a shorter time, and is looked at again in the same round. A block that is never found goes one rung up. A *pass* takes
//! blocks of one rung, and no more than the kernel visits in half of the waiting time: it clears all bits before it reads
//! the first. A pass of the same blocks needs no new regions.
//!
//! [`estimate`] makes a rate of what looks found. A lower bound is reported only where no shorter look corrects it:
//! its long exposure would outweigh the better estimate.
//!
//! Blocks that nobody has looked at come first, and are paid for out of savings. Otherwise each round is paid for by a
//! rest. While the agent is calm, the rest is longer and the savings grow. See [`budget`].
//!
//! DAMON does not flush TLBs when it clears bits: a page that never leaves a TLB looks untouched. So the driver flushes
//! them once in each interval that is long enough. A huge page that is always found by a flushed look, and never
//! by the shorter one without, is such a page: its lower bound is reported.
//!
//! # Properties
//! - All known memory is looked at again in turn: as many rounds as it takes, each block once.
//! - Memory that nobody has looked at comes before memory that somebody has.
//! - A round looks at each of its blocks once at a rung, and reports it at most once.
//! - A pass never has more blocks than [`SET_MAX`], nor more than the kernel visits in half of its interval at the measured price.
//! - Nothing is spent on memory that is not mapped; knowledge stays when a mapping grows.
//! - CPU time stays within the share, the savings, and one round.

mod budget;
mod estimate;
mod memory;

use std::num::NonZero;
use std::time::Duration;

use crate::{BLOCK_SIZE, Block, Observation, PAGE_SIZE, Pid, VirtRange};
use budget::{Budget, Prices};
use memory::{Memory, State};

/// The most that looking may take of one CPU, %, for each [`CPUS_PER_SHARE`]: the lab's VM of 8 GiB is covered in a minute.
pub const CPU_PERCENT: f64 = 2.5;

/// CPUs that bring another share: a VM with 1 TiB has about 64, and sixteen times the blocks of one with 64 GiB.
const CPUS_PER_SHARE: u32 = 8;

/// The part of the share that a calm agent spends: 0.3 % of one CPU in a VM with 16.
const CALM_PART: f64 = 1.0 / 16.0;

/// CPU time that can be saved for each CPU, and is there at the start: 8 GiB cost 3 s in the emulator, 1 TiB up to 26 s on hardware.
const SAVED_PER_CPU: Duration = Duration::from_secs(2);

/// Time from one round to the next while nothing is new: a move is verified soon, and a pass's fixed cost is small in it.
const PERIOD: Duration = Duration::from_secs(2);

/// The most blocks of a pass: the kernel keeps about 2 KiB for each of its regions.
pub const SET_MAX: usize = 4096;

/// Neighbours on each side of a newly hot block that are looked at next: a hot set's edge is found in steps of that.
const REACH: u64 = 2;

/// What a look and setting a region cost where they cost most, in the emulator: the first round goes by that.
const HIGHEST_PRICES: (Duration, Duration) =
    (Duration::from_micros(35), Duration::from_micros(400));

/// Address spaces that a CPU must run to forget another one's translations: x86 kernels tell six apart
/// (`TLB_NR_DYN_ASIDS`), twice that since the next number may be one just used.
pub const SPACES_TO_FLUSH: usize = 12;

/// Waiting times, longest first. No round figures, so that they do not keep step with a program. Flushes need longer
/// times than user space can hardly keep.
pub const RUNGS: [Pass; 4] = [
    Pass::new(80_021, 4, true),
    Pass::new(10_007, 8, true),
    Pass::new(1499, 8, false),
    Pass::new(251, 8, false),
];

/// How a pass looks at each of its regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// From clearing an accessed bit to reading it.
    pub interval: Duration,
    /// Looks at each region.
    pub looks: u32,
    /// Whether CPUs have to forget their translations once in each interval.
    pub is_flushed: bool,
}

impl Pass {
    const fn new(interval_us: u64, looks: u32, is_flushed: bool) -> Self {
        Self {
            interval: Duration::from_micros(interval_us),
            looks,
            is_flushed,
        }
    }

    /// How long it takes, without the kernel's own time.
    pub fn length(&self) -> Duration {
        self.interval * self.looks
    }
}

/// A pass, and its blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// How it looks.
    pub pass: Pass,
    /// At these blocks, in order of process and address; at least one.
    pub blocks: Vec<(Pid, Block)>,
    rung: usize,
}

/// What there is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// A pass, to be carried out now; [`Observer::found`] answers it.
    Look(Look),
    /// Nothing until then.
    Rest(Duration),
    /// Nothing before there is memory.
    Idle,
}

/// What a pass found of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The process.
    pub pid: Pid,
    /// Its block.
    pub block: Block,
    /// Looks that found an access.
    pub accesses: u32,
    /// Bytes that one page-table entry maps there; nothing where nobody has asked.
    pub page_bytes: Option<NonZero<u64>>,
}

/// CPU time that a pass has cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Visiting pages, flushes included.
    pub looking: Duration,
    /// Setting regions, and all else that the agent did for the pass.
    pub setting: Duration,
    /// Regions that were set: none where the kernel had them.
    pub set: u64,
}

/// A block of a round that is still to be looked at.
#[derive(Debug, Clone, Copy)]
struct Pending {
    at: (Pid, Block),
    way: Way,
}

/// Which looks of this round came before.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// None; nobody has ever looked.
    Unknown,
    /// None.
    Known,
    /// Shorter ones, which never found it accessed.
    Up,
    /// Longer ones, which always found it accessed: a rate of at least that.
    Down(Observation),
}

/// Blocks that were chosen together.
#[derive(Debug, Clone, Default)]
struct Round {
    /// By rung.
    pending: [Vec<Pending>; RUNGS.len()],
    began: Duration,
    spent: Duration,
    /// The part of one CPU that it was chosen for.
    pace: f64,
    /// Whether it is for blocks that nobody has looked at.
    is_first: bool,
    /// Whether it looks until that has cost as much as setting regions: CPU time is scarcer than time.
    is_thorough: bool,
    /// Of these blocks, how many each rung could tell.
    told: [usize; RUNGS.len()],
}

impl Round {
    fn is_over(&self) -> bool {
        self.pending.iter().all(Vec::is_empty)
    }
}

/// Chooses what to look at, and when. Times are since any fixed moment.
#[derive(Debug, Clone)]
pub struct Observer {
    memory: Memory,
    budget: Budget,
    prices: Prices,
    round: Round,
    wanted: Vec<(Pid, Block)>,
    /// Neighbours of newly hot blocks, with the rung of those.
    near: Vec<(Pid, Block, usize)>,
    /// Turns so far.
    turn: usize,
    /// The rung that told most of the blocks of the last first look: the next ones begin there.
    usual_rung: usize,
}

impl Observer {
    /// One that knows nothing yet. For each eight CPUs it may spend so much of one, %.
    pub fn new(cpu_percent: f64, cpus: u32, now: Duration) -> Self {
        let shares = cpus.max(1).div_ceil(CPUS_PER_SHARE);
        // A share of nothing would never pay.
        let share = (cpu_percent / 100.0 * f64::from(shares)).max(f64::EPSILON);
        Self {
            memory: Memory::default(),
            budget: Budget::new(share, cpus, now),
            prices: Prices::default(),
            round: Round::default(),
            wanted: vec![],
            near: vec![],
            turn: 0,
            usual_rung: 0,
        }
    }

    /// The memory of a process from now on: its readable mappings, sorted.
    pub fn set_memory(&mut self, pid: Pid, readable: &[VirtRange]) {
        self.memory.set(pid, readable);
    }

    /// Forgets all other processes.
    pub fn retain(&mut self, pids: &[Pid]) {
        self.memory.retain(pids);
        for pending in &mut self.round.pending {
            pending.retain(|pending| pids.contains(&pending.at.0));
        }
    }

    /// Forgets what it has seen, not what it has spent.
    pub fn clear(&mut self) {
        self.memory = Memory::default();
        self.round.pending = Default::default();
        self.wanted.clear();
        self.near.clear();
    }

    /// The blocks that the policy most wants to have looked at, in place of those before.
    pub fn want(&mut self, wanted: &[(Pid, Block)]) {
        self.wanted.clear();
        self.wanted.extend(wanted.iter().take(SET_MAX));
    }

    /// Whether the agent finds nothing to do: news can wait.
    pub fn set_calm(&mut self, is_calm: bool, now: Duration) {
        self.budget.set_calm(is_calm, now);
    }

    /// Blocks that nobody has looked at.
    pub fn unknown(&self) -> usize {
        self.memory.unknown()
    }

    /// What there is to do now. A look is given once.
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

    /// Chooses blocks.
    fn begin_round(&mut self, is_first: bool, now: Duration) {
        let (pace, saved_s) = (self.budget.pace(), self.budget.saved_s(now));
        let quick_s = self.prices.block_s(RUNGS[0].looks);
        let is_thorough = !is_first || self.memory.unknown() as f64 * quick_s > saved_s;
        let looks = self.looks(&RUNGS[0], is_thorough);
        let seconds = match is_first {
            true => saved_s.max(self.budget.share() * PERIOD.as_secs_f64()),
            false => pace * PERIOD.as_secs_f64(),
        };
        let size = (seconds / self.prices.block_s(looks)) as usize;
        let size = size.clamp(1, SET_MAX.min(self.memory.len()));
        self.round = Round {
            began: now,
            pace,
            is_first,
            is_thorough,
            ..Round::default()
        };
        let mut chosen: Vec<(Pid, Block)> = vec![];
        let is_mapped = |&(pid, block): &(Pid, Block)| self.memory.index(pid, block).is_some();
        let wanted = self.wanted.iter().copied().filter(is_mapped);
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

    /// Appends the next blocks in turn, or only unknown ones while there are any.
    fn take_turns(&mut self, count: usize, chosen: &mut Vec<(Pid, Block)>) {
        // A step of about the root visits all parts soon, and one without a common factor visits every block.
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

    /// The looks of a pass. A thorough one looks until that has cost as much as setting its regions.
    fn looks(&self, pass: &Pass, is_thorough: bool) -> u32 {
        if !is_thorough {
            return pass.looks;
        }
        let longest = PERIOD.div_duration_f64(pass.interval) as u32;
        let paid = (self.prices.set_s() / self.prices.look_s()) as u32;
        paid.min(longest).max(pass.looks)
    }

    /// Blocks that the kernel visits in half of the interval: with more, its own time makes a longer one of it.
    fn fitting(&self, pass: &Pass) -> usize {
        ((pass.interval / 2).as_secs_f64() / self.prices.look_s()) as usize
    }

    /// Whether a rung is there, and the kernel is quick enough to use it: a pass of a few blocks costs more than it tells.
    fn has_rung(&self, rung: usize) -> bool {
        RUNGS
            .get(rung)
            .is_some_and(|pass| self.fitting(pass) >= pass.looks as usize)
    }

    /// The next blocks of the round, of the rung with the most of them.
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

    /// Takes what a pass has found, whose first look of each block to the last took so long, and appends what that
    /// tells. A block without an answer was not looked at.
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
        // The kernel visits all other regions from one look to the next, too.
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
            let Round {
                began, spent, pace, ..
            } = self.round;
            self.budget.rest(began, spent, pace);
            let told = |&rung: &usize| self.round.told[rung];
            let usual = (0..RUNGS.len())
                .max_by_key(told)
                .filter(|rung| told(rung) > 0);
            self.usual_rung = usual.unwrap_or(self.usual_rung);
        }
    }

    /// Takes what a pass has found of a block.
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
        let seen = estimate::observe(pending.at, interval, looks, found.accesses, entries);
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

    /// A block was not looked at: it has had its turn, or the next round would choose it again.
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

    /// A block has turned out to be hotter than it was known to be: its neighbours are next.
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

#[cfg(test)]
mod machine;
#[cfg(test)]
mod tests;
