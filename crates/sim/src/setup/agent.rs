//! The agent's settings in the model's units.

use demeter_policy::engine::{Config, Gain};
use demeter_policy::{ByLevel, ByteCount, SAMPLE_PERIOD_MAX};
use demeter_scenario::{Scenario, Thp};

use super::nodes;
use crate::machine::cost::PS_PER_NS;
use crate::machine::sampler::Sampling;
use crate::system::{AgentSettings, Split};

/// The agent's settings in the model's units. The agent measures latencies; the sampling threshold is the hardware's,
/// as in the lab.
pub(super) fn agent_settings(scenario: &Scenario, dilation: u64) -> AgentSettings {
    let (tuning, machine) = (&scenario.agent, &scenario.machine);
    let latency_ns = ByLevel::from_fn(|level| nodes::latency_ns(machine, level, dilation));
    let slowest_ns = latency_ns.0.into_iter().max();
    let period = tuning.loads_per_sample(slowest_ns.unwrap_or(0));
    let gain = Gain {
        loads_per_sample: Some(period),
        waits: 1.0,
        latency_ns,
        cpus: machine.vcpus,
    };
    let sampling = |period: u32| Sampling {
        period: period.into(),
        threshold_ps: u64::from(tuning.latency_threshold_ns) * dilation * PS_PER_NS,
    };
    AgentSettings {
        split: Split::of(tuning),
        gain,
        sampling: sampling(period),
        paper_sampling: sampling(tuning.sample_period.unwrap_or(SAMPLE_PERIOD_MAX)),
        epoch_ps: tuning.epoch_ms * 1_000_000_000,
        placer: nodes::placer(scenario),
        engine: Config {
            slowest: machine
                .nodes()
                .iter()
                .map(nodes::level_of)
                .max()
                .unwrap_or_default(),
            collapses: machine.thp == Thp::Always,
            ..Config::new(tuning, ByteCount(0))
        },
        vcpus: scenario.machine.vcpus,
    }
}
