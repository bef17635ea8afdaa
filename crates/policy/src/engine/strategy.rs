//! The seam between the epoch loop and what it decides by: a classification and a plan.

use super::account::{Gain, STAKE_NS};
use crate::{
    ByteCount, ClassifiedRange, Classifier, ClassifierConfig, FillThreshold, GuestVirtAddr, Plan,
    RankedRange, Situation, VirtRange, plan,
};

/// Tells the hot memory of one process from the cold.
pub trait Classify: Clone + std::fmt::Debug {
    /// Covers these mappings (sorted, disjoint) from now on.
    fn set_space(&mut self, vmas: &[VirtRange]);

    /// Takes an access that stands for `samples` of them. Allocates nothing.
    fn add(&mut self, addr: GuestVirtAddr, samples: u32);

    /// Ends the epoch. Whether there is reason to plan anew.
    fn end_epoch(&mut self) -> bool;

    /// The ranges, by address.
    fn ranges(&self) -> impl Iterator<Item = ClassifiedRange>;

    /// Bytes of what it remembers, without what an allocator adds.
    fn state_bytes(&self) -> usize;
}

impl Classify for Classifier {
    fn set_space(&mut self, vmas: &[VirtRange]) {
        Self::set_space(self, vmas);
    }

    #[inline]
    fn add(&mut self, addr: GuestVirtAddr, samples: u32) {
        Self::add(self, addr, samples);
    }

    fn end_epoch(&mut self) -> bool {
        Self::end_epoch(self);
        true
    }

    fn ranges(&self) -> impl Iterator<Item = ClassifiedRange> {
        Self::ranges(self)
    }

    fn state_bytes(&self) -> usize {
        Self::state_bytes(self)
    }
}

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

    /// Whether the engine keeps an account of what moves cost and bring, and stops where it is
    /// empty.
    const KEEPS_ACCOUNT: bool = true;

    /// How often in a row promotions that find no room wait for the kernel to reclaim some. With
    /// 0 only demotions of the plan make room, and what then does not fit is given up.
    const RECLAIMS_MAX: u32 = 0;

    /// What is known of a process that was just found: nothing.
    fn classifier(&self) -> Self::Classifier;

    /// What to look up in this epoch. `has_news`: whether any classifier has reason to plan anew.
    fn look_ups(&self, has_news: bool, hottest: Option<&RankedRange>) -> LookUps {
        let _ = (has_news, hottest);
        LookUps::Some
    }

    /// This epoch's relocations.
    fn plan(&self, situation: &Situation<'_>) -> Plan {
        plan(situation)
    }
}

/// The product's own way: ranges that split and merge, free memory filled, then exchanges.
#[derive(Debug, Clone, Copy, Default)]
pub struct Ranges(pub ClassifierConfig);

impl Strategy for Ranges {
    type Classifier = Classifier;

    fn classifier(&self) -> Classifier {
        Classifier::new(self.0)
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
    /// Size of fast memory.
    pub fast_size: ByteCount,
    /// What samples are worth.
    pub gain: Gain,
    /// Time that moves may take before they have brought anything, nanoseconds.
    pub stake_ns: u64,
}

impl Config {
    /// As a person tuned it, on a machine with so much fast memory where samples are worth that.
    pub fn new(tuning: &crate::Tuning, fast_size: ByteCount, gain: Gain) -> Self {
        Self {
            batch: tuning.batch(),
            fill: FillThreshold(f64::from(tuning.tau_split)),
            epoch_ms: tuning.epoch_ms.max(1),
            fast_size,
            gain,
            stake_ns: STAKE_NS,
        }
    }
}
