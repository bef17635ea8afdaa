//! The seam between the epoch loop and what it decides by: a classification and a plan.

use super::moves::BATCH_BLOCKS;
use super::protocol::Direction;
use super::snapshot::{NotAState, Numbers};
use crate::heat::Heat;
use crate::rule::{self, Balance, EpochEnd, Rule};
use crate::{
    Away, Block, ByLevel, ByteCount, ClassifiedRange, FillThreshold, GuestVirtAddr, Level, Pid,
    Plan, RankedRange, Situation, VirtRange,
};

/// Tells the hot memory of one process from the cold.
pub trait Classify: Clone + std::fmt::Debug {
    /// Covers these mappings (sorted, disjoint) from now on.
    fn set_space(&mut self, vmas: &[VirtRange]);

    /// Takes an access that stands for `samples` of them. Allocates nothing where memory was accessed before.
    fn add(&mut self, addr: GuestVirtAddr, samples: u32);

    /// Takes the result of a look at a block: `events` accesses were found while it was watched for `exposure_s` seconds.
    fn observe(&mut self, block: Block, events: u32, exposure_s: f64) {
        let _ = exposure_s;
        self.add(block.start(), events);
    }

    /// Accesses a second of a block as far as known, in units of what is added.
    fn rate_of(&self, block: Block) -> f64 {
        let _ = block;
        0.0
    }

    /// Ends an epoch that took `elapsed_s` seconds, and looks at no more than `chunks_max` of its chunks for that. Whether
    /// there is reason to plan anew.
    fn end_epoch(&mut self, epoch: u32, elapsed_s: f64, chunks_max: usize) -> bool;

    /// Chunks of 1 GiB of which it remembers anything, where it has such.
    fn chunks(&self) -> usize {
        0
    }

    /// The ranges, by address.
    fn ranges(&self) -> impl Iterator<Item = ClassifiedRange>;

    /// Whether nothing was accessed of late.
    fn is_cold(&self) -> bool {
        self.ranges().all(|range| range.count == 0.0)
    }

    /// Accesses a second as far as known, in units of what is added.
    fn rate(&self) -> f64 {
        0.0
    }

    /// Bytes of what it remembers, without what an allocator adds.
    fn state_bytes(&self) -> usize;
}

impl Classify for Heat {
    fn set_space(&mut self, vmas: &[VirtRange]) {
        Self::set_space(self, vmas);
    }

    #[inline]
    fn add(&mut self, addr: GuestVirtAddr, samples: u32) {
        Self::add(self, Block::of(addr), samples);
    }

    fn observe(&mut self, block: Block, events: u32, exposure_s: f64) {
        Self::observe(self, block, events, exposure_s);
    }

    fn rate_of(&self, block: Block) -> f64 {
        self.estimate(RATE_WINDOW, block).rate
    }

    fn end_epoch(&mut self, epoch: u32, elapsed_s: f64, chunks_max: usize) -> bool {
        Self::end_epoch(self, epoch, elapsed_s, chunks_max);
        true
    }

    fn chunks(&self) -> usize {
        Self::chunks(self)
    }

    fn ranges(&self) -> impl Iterator<Item = ClassifiedRange> {
        Self::ranges(self).into_iter()
    }

    fn is_cold(&self) -> bool {
        Self::is_cold(self)
    }

    fn rate(&self) -> f64 {
        Self::rate(self, RATE_WINDOW)
    }

    fn state_bytes(&self) -> usize {
        Self::state_bytes(self)
    }
}

/// The window whose rate tells what an event is worth: long enough that each block was looked at.
const RATE_WINDOW: usize = 2;

/// Which blocks are looked up before a plan is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LookUps {
    /// None, and no plan is made in this epoch.
    NoPlan,
    /// Those of unknown place, hottest first, and a few others again; bounded.
    Some,
    /// All blocks of all processes.
    All,
}

/// What an [`Engine`](super::Engine) decides by. What is given here is the product's own way;
/// others name what they do differently.
pub trait Strategy {
    /// What is known of one process.
    type Classifier: Classify;

    /// Whether it classifies in a thread of its own: then epochs begin while a plan is still
    /// being carried out, new plans queue up behind it, and no epoch is left out.
    const CLASSIFIES_APART: bool = false;

    /// Whether only what pays moves: then no block leaves fast memory for the sake of a reserve that programs have
    /// filled.
    const ONLY_WHAT_PAYS: bool = false;

    /// How often in a row promotions that find no room wait for the kernel to reclaim some. With
    /// 0 only demotions of the plan make room, and what then does not fit is given up.
    const RECLAIMS_MAX: u32 = 0;

    /// Whether it counts by block. Samples then come in order of address, those of a block at once. Ranges, which are for
    /// people and look-ups only, are ranked anew now and then.
    const COUNTS_BLOCKS: bool = false;

    /// What is known of a process that was just found: nothing.
    fn classifier(&self) -> Self::Classifier;

    /// What to look up in this epoch. `has_news`: whether any classifier has reason to plan anew.
    fn look_ups(&self, has_news: bool, hottest: Option<&RankedRange>) -> LookUps {
        let _ = (has_news, hottest);
        LookUps::Some
    }

    /// This epoch's relocations.
    fn plan(&mut self, situation: &Situation<'_>, heats: &[(Pid, &Self::Classifier)]) -> Plan;

    /// Takes note of how many CPUs programs run on from now on.
    fn set_cpus(&mut self, cpus: u32) {
        let _ = cpus;
    }

    /// Takes note of an access in memory that was moved to a tier.
    fn saw(&mut self, away: Option<Away>, events: u32, exposure_s: Option<f64>) {
        let _ = (away, events, exposure_s);
    }

    /// Takes note that an epoch's samples are complete.
    fn end_epoch(&mut self, end: &EpochEnd) {
        let _ = end;
    }

    /// Takes note of what a batch took; `is_ordered` if the host has asked for it.
    fn moved(&mut self, direction: Direction, tried: ByteCount, took_ns: u64, is_ordered: bool) {
        let _ = (direction, tried, took_ns, is_ordered);
    }

    /// The most blocks that one call shall move.
    fn batch_blocks(&self) -> usize {
        BATCH_BLOCKS
    }

    /// Cost and benefit of moves so far, if it keeps account.
    fn balance(&self) -> Balance {
        Balance::default()
    }

    /// Appends what it knows between two epochs.
    fn save(&self, to: &mut Vec<u64>) {
        let _ = to;
    }

    /// Takes over what was saved.
    ///
    /// # Errors
    /// When the numbers are not what [`Self::save`] appends.
    fn restore(&mut self, from: &mut Numbers<'_>) -> Result<(), NotAState> {
        let _ = from;
        Ok(())
    }
}

/// The product's own way: the heat of each block, and exchanges that have paid for themselves by the time they are made.
#[derive(Debug, Clone)]
pub struct ByHeat(Rule);

impl ByHeat {
    /// One that knows nothing yet, where samples are worth that.
    pub fn new(gain: Gain) -> Self {
        Self(Rule::new(gain))
    }
}

impl Strategy for ByHeat {
    type Classifier = Heat;

    const ONLY_WHAT_PAYS: bool = true;

    const COUNTS_BLOCKS: bool = true;

    fn classifier(&self) -> Heat {
        Heat::default()
    }

    fn plan(&mut self, situation: &Situation<'_>, heats: &[(Pid, &Heat)]) -> Plan {
        rule::plan(&mut self.0, situation, heats)
    }

    fn set_cpus(&mut self, cpus: u32) {
        self.0.set_cpus(cpus);
    }

    #[inline]
    fn saw(&mut self, away: Option<Away>, events: u32, exposure_s: Option<f64>) {
        self.0.saw(away, events, exposure_s);
    }

    fn end_epoch(&mut self, end: &EpochEnd) {
        self.0.end_epoch(end);
    }

    fn moved(&mut self, direction: Direction, tried: ByteCount, took_ns: u64, is_ordered: bool) {
        self.0.moved(direction, tried, took_ns, is_ordered);
    }

    fn batch_blocks(&self) -> usize {
        self.0.batch_blocks(BATCH_BLOCKS)
    }

    fn balance(&self) -> Balance {
        self.0.balance()
    }

    fn save(&self, to: &mut Vec<u64>) {
        self.0.save(to);
    }

    fn restore(&mut self, from: &mut Numbers<'_>) -> Result<(), NotAState> {
        self.0.restore(from)
    }
}

/// The facts of a machine that tell what a sample is worth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gain {
    /// Loads that a sample stands for; nothing where the tracker cannot say.
    pub loads_per_sample: Option<u32>,
    /// Share of its time that a program is taken to wait for memory, at most.
    pub waits: f64,
    /// Latency of a load from each tier, nanoseconds; as measured.
    pub latency_ns: ByLevel<u32>,
    /// CPUs that programs run on.
    pub cpus: u32,
}

impl Gain {
    /// The extra cost of an event in each tier compared with the fastest, seconds: the loads that it stands for times the
    /// difference of the latencies. At `events_per_s` all events together cost no more than a program saves that waits for
    /// the slowest memory for `waits` of its time.
    pub(crate) fn event_s(&self, events_per_s: f64) -> ByLevel<f64> {
        let fastest = self.latency_ns.0[0];
        let slowest = self.latency_ns.0.into_iter().fold(1, u32::max);
        ByLevel::from_fn(|level| {
            let more_ns = f64::from(self.latency_ns.get(level).saturating_sub(fastest));
            let time_saved = self.waits * f64::from(self.cpus) * more_ns / f64::from(slowest);
            let most_s = time_saved / events_per_s.max(f64::MIN_POSITIVE);
            let known_s = self
                .loads_per_sample
                .map(|loads| f64::from(loads) * more_ns * 1e-9);
            known_s.map_or(most_s, |known_s| known_s.min(most_s))
        })
    }
}

/// What an engine is set to, beside its strategy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Config {
    /// The most that is promoted, and the most that is demoted, in one epoch.
    pub batch: ByteCount,
    /// From how many samples on a range is worth filling free memory with.
    pub fill: FillThreshold,
    /// Time between two epochs, milliseconds; at least 1.
    pub epoch_ms: u64,
    /// Size of each tier. That of the slowest is of no matter.
    pub sizes: ByLevel<ByteCount>,
    /// The slowest tier of the machine.
    pub slowest: Level,
}

impl Config {
    /// As a person tuned it, on a machine of two tiers with `fast_size` of fast memory.
    pub fn new(tuning: &crate::Tuning, fast_size: ByteCount) -> Self {
        Self {
            batch: tuning.batch(),
            fill: FillThreshold(f64::from(tuning.tau_split)),
            epoch_ms: tuning.epoch_ms.max(1),
            sizes: ByLevel([fast_size, ByteCount(0), ByteCount(0), ByteCount(0)]),
            slowest: Level::Second,
        }
    }
}
