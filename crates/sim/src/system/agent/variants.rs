//! The agent variants: the product and its ablations.

use demeter_policy::damon::WAITS;
use demeter_policy::engine::{ByHeat, Gain};

use super::super::block_counters::Blocks;
use super::super::paper_ranges::Paper;
use super::super::sequential::Sequential;
use super::{AgentSettings, SimulatedAgent};

/// Differences of a variant from the product, besides its strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Traits {
    /// A separate thread polls for samples.
    pub(super) polls: bool,
    /// Pages move one at a time, each with its own flush, instead of in batches.
    pub(super) moves_singly: bool,
    /// It is part of the guest's kernel, so it reads statistics at no cost.
    pub(super) in_kernel: bool,
    /// Its samples come from accessed bits.
    pub(super) has_damon: bool,
}

impl SimulatedAgent<ByHeat> {
    /// The product: the policy crate's heat and rule, and batched moves with joint flushes.
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
        let settings = AgentSettings {
            gain,
            ..settings.clone()
        };
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
    /// A counter for every block of 2 MiB without groups, and the host's planner for histories.
    pub(crate) fn blocks(settings: &AgentSettings) -> Self {
        Self::new(settings, Traits::default(), |_, _| Blocks)
    }
}

impl SimulatedAgent<Sequential> {
    /// The product's promotions only, page by page; reclaim frees memory.
    pub(crate) fn sequential(settings: &AgentSettings) -> Self {
        let traits = Traits {
            moves_singly: true,
            ..Traits::default()
        };
        Self::new(settings, traits, |s, _| Sequential(ByHeat::new(s.gain)))
    }
}

impl SimulatedAgent<Paper> {
    /// The paper's design: ranges that are halved, and pages exchanged one at a time, without a limit on moves per
    /// epoch.
    pub(crate) fn paper(settings: &AgentSettings) -> Self {
        let traits = Traits {
            moves_singly: true,
            in_kernel: true,
            ..Traits::default()
        };
        let settings = AgentSettings {
            sampling: settings.paper_sampling,
            ..settings.clone()
        };
        Self::new(&settings, traits, |s, capacity| Paper {
            split: s.split,
            vcpus: s.vcpus,
            capacity,
        })
    }
}
