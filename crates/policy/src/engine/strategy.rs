//! The interface between the epoch loop and its decisions: classifiers and plans.

use super::moves::BATCH_BLOCKS;
use crate::heat::Heat;
use crate::rule::{self, Balance, EpochEnd, Gain, Rule};
use crate::saved::NotAState;
use crate::tier::Direction;
use crate::{
    Away, Block, ByLevel, ByteCount, ClassifiedRange, FillThreshold, GuestVirtAddr, Level, Pid,
    Plan, RankedRange, Situation, Spread, VirtRange,
};

/// A classifier: separates the hot memory of one process from the cold.
pub trait Classify: Clone + std::fmt::Debug {
    /// Sets the mappings (sorted, disjoint).
    fn set_space(&mut self, vmas: &[VirtRange]);

    /// Adds an access that represents `samples` samples. Allocates nothing if memory was accessed before.
    fn add(&mut self, addr: GuestVirtAddr, samples: u32);

    /// Adds the result of looks at a block: `events` accesses in `exposure_s` seconds.
    fn observe(&mut self, block: Block, events: u32, exposure_s: f64) {
        let _ = exposure_s;
        self.add(block.start(), events);
    }

    /// Estimated accesses per second of a block, in the units of added samples.
    fn rate_of(&self, block: Block) -> f64 {
        let _ = block;
        0.0
    }

    /// From now on each n-th sample is taken; `n` is `thinning`.
    fn set_thinning(&mut self, thinning: u32) {
        let _ = thinning;
    }

    /// Ends an epoch of `elapsed_s` seconds; visits at most `chunks_max` chunks. Returns whether a new plan is needed.
    fn end_epoch(&mut self, epoch: u32, elapsed_s: f64, chunks_max: usize) -> bool;

    /// Ends an epoch of `elapsed_s` seconds without evidence.
    fn pass_time(&mut self, elapsed_s: f64) {
        let _ = elapsed_s;
    }

    /// Number of its chunks of 1 GiB, if it has any.
    fn chunks(&self) -> usize {
        0
    }

    /// The ranges, by address.
    fn ranges(&self) -> impl Iterator<Item = ClassifiedRange>;

    /// The ranges by the heat of a window, if it has several windows.
    fn ranges_over(&self, _window: usize) -> impl Iterator<Item = ClassifiedRange> {
        self.ranges()
    }

    /// Whether nothing was accessed recently.
    fn is_cold(&self) -> bool {
        self.ranges().all(|range| range.count == 0.0)
    }

    /// Estimated accesses per second, in the units of added samples.
    fn rate(&self) -> f64 {
        0.0
    }

    /// Memory used, bytes, without the allocator's overhead.
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

    fn set_thinning(&mut self, thinning: u32) {
        Self::set_thinning(self, thinning);
    }

    fn end_epoch(&mut self, epoch: u32, elapsed_s: f64, chunks_max: usize) -> bool {
        Self::end_epoch(self, epoch, elapsed_s, chunks_max);
        true
    }

    fn pass_time(&mut self, elapsed_s: f64) {
        Self::pass_time(self, elapsed_s);
    }

    fn chunks(&self) -> usize {
        Self::chunks(self)
    }

    fn ranges(&self) -> impl Iterator<Item = ClassifiedRange> {
        Self::ranges(self).into_iter()
    }

    fn ranges_over(&self, window: usize) -> impl Iterator<Item = ClassifiedRange> {
        Self::ranges_over(self, window).into_iter()
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

/// The window whose rate determines the value of an event; long enough that each block was looked at.
const RATE_WINDOW: usize = 2;

/// The blocks that are looked up before a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LookUps {
    /// None, and this epoch has no plan.
    NoPlan,
    /// Unknown blocks, the hottest first, and a few others again; bounded.
    Some,
    /// All blocks of all processes.
    All,
}

/// The decisions of an [`Engine`](super::Engine). Defaults are those of the agent; other strategies override them.
pub trait Strategy {
    /// The classifier of one process.
    type Classifier: Classify;

    /// Whether it classifies in a separate thread. Epochs then begin during a plan, new plans queue behind it, and no
    /// epoch is skipped.
    const CLASSIFIES_APART: bool = false;

    /// Whether only moves that pay are made. Then no block is demoted for a reserve that programs have filled.
    const ONLY_WHAT_PAYS: bool = false;

    /// How often in a row promotions without room wait for the kernel's reclaim. With 0 only the plan's demotions make
    /// room, and promotions that do not fit are dropped.
    const RECLAIMS_MAX: u32 = 0;

    /// Whether it counts by block. Samples then come sorted by address, those of a block together. Ranges, which are
    /// for people and look-ups only, are computed sometimes.
    const COUNTS_BLOCKS: bool = false;

    /// A classifier for a new process, without knowledge.
    fn classifier(&self) -> Self::Classifier;

    /// The look-ups of this epoch. `has_news`: whether any classifier needs a new plan.
    fn look_ups(&self, has_news: bool, hottest: Option<&RankedRange>) -> LookUps {
        let _ = (has_news, hottest);
        LookUps::Some
    }

    /// This epoch's relocations.
    fn plan(&mut self, situation: &Situation<'_>, heats: &[(Pid, &Self::Classifier)]) -> Plan;

    /// Sets the number of CPUs for programs.
    fn set_cpus(&mut self, cpus: u32) {
        let _ = cpus;
    }

    /// Notes the latency of each tier under its load now, where it was measured.
    fn loaded(&mut self, latency_ns: &ByLevel<Option<u32>>) {
        let _ = latency_ns;
    }

    /// Notes an access to moved memory.
    fn saw(&mut self, away: Option<Away>, events: u32, exposure_s: Option<f64>) {
        let _ = (away, events, exposure_s);
    }

    /// Notes that an epoch's samples are complete.
    fn end_epoch(&mut self, end: &EpochEnd) {
        let _ = end;
    }

    /// Notes the CPU time of a batch; `is_ordered` if it was for the host.
    fn moved(&mut self, direction: Direction, tried: ByteCount, cpu_ns: u64, is_ordered: bool) {
        let _ = (direction, tried, cpu_ns, is_ordered);
    }

    /// Notes the CPU time of a batch of collapses.
    fn collapsed(&mut self, tried: ByteCount, cpu_ns: u64) {
        let _ = (tried, cpu_ns);
    }

    /// Notes that a block has crossed the boundary below a tier; `below` is its place on the slower side.
    fn crossed(
        &mut self,
        classifier: &Self::Classifier,
        block: Block,
        way: (Level, Direction),
        below: &Spread,
    ) {
        let _ = (classifier, block, way, below);
    }

    /// Whether it knows what moves cost, or does not ask. Until then its plans are trials.
    fn knows_prices(&self) -> bool {
        true
    }

    /// Maximum number of blocks in one batch.
    fn batch_blocks(&self) -> usize {
        BATCH_BLOCKS
    }

    /// The number of threads that move a batch together.
    fn movers(&self) -> usize {
        1
    }

    /// Cost and benefit of moves so far, if it tracks them.
    fn balance(&self) -> Balance {
        Balance::default()
    }

    /// Memory used for blocks, bytes, without the allocator's overhead.
    fn state_bytes(&self) -> usize {
        0
    }
}

/// The agent's strategy: heat of each block, and exchanges whose loss has reached their cost.
#[derive(Debug, Clone)]
pub struct ByHeat(Rule);

impl ByHeat {
    /// A new strategy, with this gain per sample.
    pub fn new(gain: Gain) -> Self {
        Self(Rule::new(gain))
    }

    /// The rule's state. It does not contain the facts about the machine.
    pub(super) fn rule(&self) -> Rule {
        self.0.clone()
    }

    /// CPUs of the machine.
    pub(super) fn cpus(&self) -> u32 {
        self.0.cpus()
    }

    /// A saved rule on this strategy's machine, which had this number of CPUs.
    pub(super) fn restored(&self, rule: Rule, cpus: u32) -> Result<Self, NotAState> {
        self.0.restored(rule, cpus).map(Self)
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

    fn loaded(&mut self, latency_ns: &ByLevel<Option<u32>>) {
        self.0.loaded(latency_ns);
    }

    #[inline]
    fn saw(&mut self, away: Option<Away>, events: u32, exposure_s: Option<f64>) {
        self.0.saw(away, events, exposure_s);
    }

    fn end_epoch(&mut self, end: &EpochEnd) {
        self.0.end_epoch(end);
    }

    fn moved(&mut self, direction: Direction, tried: ByteCount, cpu_ns: u64, is_ordered: bool) {
        self.0.moved(direction, tried, cpu_ns, is_ordered);
    }

    fn collapsed(&mut self, tried: ByteCount, cpu_ns: u64) {
        self.0.collapsed(tried, cpu_ns);
    }

    fn crossed(&mut self, heat: &Heat, block: Block, way: (Level, Direction), below: &Spread) {
        self.0.crossed(heat, block, way, below);
    }

    fn knows_prices(&self) -> bool {
        self.0.knows_prices()
    }

    fn batch_blocks(&self) -> usize {
        self.0.batch_blocks(BATCH_BLOCKS)
    }

    fn movers(&self) -> usize {
        self.0.movers()
    }

    fn balance(&self) -> Balance {
        self.0.balance()
    }

    fn state_bytes(&self) -> usize {
        self.0.state_bytes()
    }
}

/// An engine's settings, without its strategy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Config {
    /// Limit of promotions, and of demotions, per epoch.
    pub batch: ByteCount,
    /// Number of samples from which a range is promoted into free memory.
    pub fill: FillThreshold,
    /// Time between two epochs, milliseconds; at least 1.
    pub epoch_ms: u64,
    /// Size of each tier; that of the slowest is ignored.
    pub sizes: ByLevel<ByteCount>,
    /// The slowest tier of the machine.
    pub slowest: Level,
    /// Whether small pages may become huge ones in place: transparent huge pages are always on.
    pub collapses: bool,
}

impl Config {
    /// Settings from a tuning, for a machine of two tiers with `fast_size` of fast memory.
    pub fn new(tuning: &crate::Tuning, fast_size: ByteCount) -> Self {
        Self {
            batch: tuning.batch(),
            fill: FillThreshold(f64::from(tuning.tau_split)),
            epoch_ms: tuning.epoch_ms.max(1),
            sizes: ByLevel([fast_size, ByteCount(0), ByteCount(0), ByteCount(0)]),
            slowest: Level::Second,
            collapses: false,
        }
    }
}
