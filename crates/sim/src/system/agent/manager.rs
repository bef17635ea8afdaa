//! The agent as a manager of a simulated VM.

use demeter_policy::benefit::{Benefit, Observed};
use demeter_policy::engine::{Engine, Strategy};
use demeter_policy::{ByteCount, Level, PerTier, RankedRange};

use super::damon_tracker::DamonTracker;
use super::nodes::{sizes_of, usable_of};
use super::{Context, Manager, SimulatedAgent, Tracker};
use crate::error::SimError;
use crate::guest::Guest;
use crate::machine::sampler::{Record, Sampling};

impl<S: Strategy> Manager for SimulatedAgent<S> {
    fn sampling(&self, _k: u32) -> Option<Sampling> {
        let Sampling {
            period,
            threshold_ps,
        } = self.settings.sampling;
        (!self.traits.has_damon).then_some(Sampling {
            period: period * u64::from(self.thinning),
            threshold_ps,
        })
    }

    fn has_worker(&self) -> bool {
        self.traits.polls
    }

    fn ranking(&self) -> &[RankedRange] {
        self.engine.as_ref().map_or(&[], Engine::ranking)
    }

    fn start(&mut self, guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        let mut config = self.settings.engine;
        config.sizes = sizes_of(guest);
        self.sizes = config.sizes;
        let fast_size = *config.sizes.get(Level::First);
        let strategy = (self.strategy)(&self.settings, fast_size);
        self.engine = Some(Engine::new(strategy, config));
        self.next_epoch_ps = now_ps + self.settings.epoch_ps;
        self.due_ps = self.next_epoch_ps;
        if self.traits.has_damon {
            let tracker = DamonTracker::new(self.settings.vcpus, now_ps);
            self.tracker = Tracker::Damon(Box::new(tracker));
            return now_ps;
        }
        self.due_ps
    }

    /// Runs its tracker's turn, its own, or both.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let Context { guest, actor, .. } = ctx;
        if let Tracker::Damon(tracker) = &mut self.tracker {
            tracker.run(guest, actor);
        }
        if actor.now_ps() >= self.due_ps {
            self.due_ps = self.act(guest, actor);
        }
        match &self.tracker {
            Tracker::Damon(tracker) => self.due_ps.min(tracker.due_ps()),
            Tracker::Sampler(_) => self.due_ps,
        }
    }

    fn fault(&mut self) -> Option<SimError> {
        self.misuse.take().map(SimError::from)
    }

    fn take_samples(&mut self, records: &[Record]) {
        if let Tracker::Sampler(samples) = &mut self.tracker {
            samples.extend(records.iter().map(|r| r.gva));
        }
    }

    fn working_set(&self) -> Option<ByteCount> {
        let set = self.engine.as_ref()?.working_set();
        // Without samples the working set is unknown, not empty.
        set.fast_hit_permille.map(|_| set.placement.total())
    }

    fn benefit(&self, guest: &Guest, running_ms: u32) -> Option<Benefit> {
        let engine = self.engine.as_ref()?;
        let latency_ns = self.settings.gain.latency_ns;
        let observed = Observed {
            ranking: engine.ranking(),
            residency: engine.residency(),
            served: matches!(self.tracker, Tracker::Sampler(_)).then(|| engine.served()),
            latency_ns: PerTier {
                fast: *latency_ns.get(Level::First),
                slow: *latency_ns.get(self.settings.engine.slowest),
            },
            running_ms,
            loads_per_s: match self.tracker {
                Tracker::Sampler(_) => Some(engine.rate() * self.settings.sampling.period as f64),
                Tracker::Damon(_) => None,
            },
            overlaps: false,
        };
        let managed: u64 = engine.processes().map(|p| p.placement.fast.0).sum();
        let usable = managed.saturating_add(usable_of(guest, Level::First).0);
        let others = guest.owned_fast().0.saturating_sub(usable);
        Some(observed.benefit()?.beside(ByteCount(others)))
    }

    /// An in-kernel agent reads placement from page tables, so that memory is not counted.
    fn memory_overhead(&self, _guest: &Guest) -> ByteCount {
        let engine = self.engine.as_ref();
        let known = engine.map_or(0, |engine| match self.traits.in_kernel {
            true => engine.state_bytes() - engine.residency().state_bytes(),
            false => engine.state_bytes(),
        });
        let regions = match &self.tracker {
            Tracker::Damon(tracker) => tracker.region_bytes(),
            Tracker::Sampler(_) => 0,
        };
        ByteCount((known + regions) as u64)
    }

    fn samples_seen(&self) -> u64 {
        self.samples_seen
    }
}
