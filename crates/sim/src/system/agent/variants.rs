//! The agents that there are: the product, and others that differ from it in one thing or another.

use demeter_policy::damon::WAITS;
use demeter_policy::engine::{ByHeat, Gain};

use super::super::block_counters::Blocks;
use super::super::paper_ranges::Paper;
use super::super::sequential::Sequential;
use super::{AgentSettings, SimulatedAgent};

/// What an agent does as others do not, beside what it decides by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Traits {
    /// A thread of its own polls for samples.
    pub(super) polls: bool,
    /// Pages move one by one, each flushed alone, instead of in batches.
    pub(super) moves_singly: bool,
    /// It is part of the guest's kernel, where numbers lie at hand.
    pub(super) in_kernel: bool,
    /// Its samples are made of accessed bits.
    pub(super) has_damon: bool,
}

impl SimulatedAgent<ByHeat> {
    /// The product: the policy crate's heat and rule, and moves in batches whose translations are flushed together.
    pub(crate) fn product(settings: &AgentSettings) -> Self {
        Self::new(settings, Traits::default(), |s, _| ByHeat::new(s.gain))
    }

    /// The product in a guest without a sampling unit.
    pub(crate) fn on_damon(settings: &AgentSettings) -> Self {
        let traits = Traits {
            has_damon: true,
            ..Traits::default()
        };
        let gain = Gain {
            loads_per_sample: None,
            waits: WAITS,
            ..settings.gain
        };
        let settings = AgentSettings { gain, ..*settings };
        Self::new(&settings, traits, |s, _| ByHeat::new(s.gain))
    }

    /// The product, with a thread that polls for samples.
    pub(crate) fn polling(settings: &AgentSettings) -> Self {
        let traits = Traits {
            polls: true,
            ..Traits::default()
        };
        Self::new(settings, traits, |s, _| ByHeat::new(s.gain))
    }
}

impl SimulatedAgent<Blocks> {
    /// A counter for every block of 2 MiB, without groups, and the planner that a host uses for its guests' histories.
    pub(crate) fn blocks(settings: &AgentSettings) -> Self {
        Self::new(settings, Traits::default(), |_, _| Blocks)
    }
}

impl SimulatedAgent<Sequential> {
    /// The product's promotions only, page by page; reclaim makes room.
    pub(crate) fn sequential(settings: &AgentSettings) -> Self {
        let traits = Traits {
            moves_singly: true,
            ..Traits::default()
        };
        Self::new(settings, traits, |s, _| Sequential(ByHeat::new(s.gain)))
    }
}

impl SimulatedAgent<Paper> {
    /// The paper's: ranges that are halved; pages exchanged one by one, without a limit to what
    /// moves in an epoch.
    pub(crate) fn paper(settings: &AgentSettings) -> Self {
        let traits = Traits {
            moves_singly: true,
            in_kernel: true,
            ..Traits::default()
        };
        Self::new(settings, traits, |s, capacity| Paper {
            split: s.split,
            vcpus: s.vcpus,
            capacity,
        })
    }
}
