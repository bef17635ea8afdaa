//! Facts about a VM that the controller does not need, for the policy and for people.

use demeter_policy::benefit::Benefit;
use demeter_policy::provision::{Curve, ProvisionerKind, Smoothed, SmoothedCurve, Usage};
use demeter_policy::{ByteCount, NodeId, PerTier, TierBytes};
use demeter_proto::{NodeStats, Stats};
use tokio::sync::watch;

use super::service::Service;
use crate::agent::GuestSession;
use crate::config::VmConfig;
use crate::controller::{Limits, Observation};
use crate::memory::Places;
use crate::view::RelocationView;

/// Stall share above which a guest counts as under memory pressure.
const PRESSED_PERMILLE: u16 = 100;

/// Facts about one VM.
#[derive(Debug)]
pub(super) struct VmFacts {
    pub share: u32,
    /// Its service level, if it has one.
    pub service: Option<Service>,
    /// Its configured limits.
    pub limits: Limits,
    pub provisioner: ProvisionerKind,
    /// Component that moves its memory between tiers.
    pub managed_by: Option<&'static str>,
    nodes: PerTier<NodeId>,
    /// Where its agent reports.
    reports: Option<watch::Receiver<Option<Stats>>>,
    /// Its agent's session.
    session: Option<watch::Receiver<Option<GuestSession>>>,
    /// Memory returned to the host.
    pub returned: ByteCount,
    /// Number of overruns, and the size of the latest.
    pub overruns: u64,
    pub overrun: TierBytes,
    /// Reason why it cannot be managed.
    pub trouble: Option<String>,
    /// Its smoothed memory use; `None` until the first report.
    pub usage: Option<Usage>,
    working_set: Smoothed,
    curve: SmoothedCurve,
    /// Benefit of fast memory at the last report.
    pub benefit: Option<Benefit>,
    /// Share of sampled accesses that fast memory served.
    pub fast_hit: Option<f64>,
    /// Cost and benefit of its agent's moves.
    pub relocation: Option<RelocationView>,
    /// Share of time in which some task waited for memory.
    pub pressure: Option<f64>,
    /// Where its memory lies on the host, if known.
    pub places: Option<Places>,
    /// Memory that the driver has given back by itself since the guest's boot.
    oom_returned: ByteCount,
}

impl VmFacts {
    pub fn new(config: &VmConfig) -> Self {
        Self {
            share: config.share,
            service: config.slowdown_max_percent.map(Service::new),
            limits: limits(config),
            provisioner: config.provisioner,
            managed_by: None,
            nodes: config.nodes(),
            reports: None,
            session: None,
            returned: ByteCount(0),
            overruns: 0,
            overrun: TierBytes::default(),
            trouble: None,
            usage: None,
            working_set: Smoothed::default(),
            curve: SmoothedCurve::default(),
            benefit: None,
            fast_hit: None,
            relocation: None,
            pressure: None,
            places: None,
            oom_returned: ByteCount(0),
        }
    }

    /// Takes an observation of the VM.
    pub fn observe(&mut self, observation: &Observation) {
        if matches!(observation, Observation::Here) {
            self.trouble = None;
        }
        if matches!(
            observation,
            Observation::Lost | Observation::Gone | Observation::Reset
        ) {
            self.usage = None;
            if let Some(reports) = &mut self.reports {
                // Earlier reports are not about this guest.
                reports.mark_unchanged();
            }
            self.working_set = Smoothed::default();
            self.curve = SmoothedCurve::default();
            self.benefit = None;
            if let Some(service) = &mut self.service {
                service.forget();
            }
            self.fast_hit = None;
            self.relocation = None;
            self.pressure = None;
            self.places = None;
            self.oom_returned = ByteCount(0);
        }
    }

    /// From now on reads the reports of the guest's agent here.
    pub fn reported_at(
        &mut self,
        reports: watch::Receiver<Option<Stats>>,
        session: watch::Receiver<Option<GuestSession>>,
    ) {
        self.reports = Some(reports);
        self.session = Some(session);
    }

    /// Protocol version of its agent; `None` while none is connected.
    pub fn protocol(&self) -> Option<u16> {
        Some(self.session.as_ref()?.borrow().as_ref()?.version)
    }

    /// Takes over what may change while the VM's task goes on.
    pub fn resized(&mut self, config: &VmConfig) {
        self.share = config.share;
        self.limits = limits(config);
        let percent = self.service.as_ref().map(Service::percent);
        if percent != config.slowdown_max_percent {
            self.service = config.slowdown_max_percent.map(Service::new);
            self.estimate_service();
        }
    }

    fn estimate_service(&mut self) {
        match (&mut self.service, &self.benefit) {
            (Some(service), Some(benefit)) => service.update(benefit),
            (Some(service), None) => service.forget(),
            (None, _) => {}
        }
    }

    /// Takes the latest report of the guest's agent, if it is new. Returns the same as `used`.
    pub fn read_report(&mut self) -> bool {
        let Some(reports) = &mut self.reports else {
            return false;
        };
        if !reports.has_changed().unwrap_or(false) {
            return false;
        }
        let stats = reports.borrow_and_update().clone();
        stats.is_some_and(|stats| self.used(&stats))
    }

    /// Takes the guest's report. Returns whether the driver gave memory back by itself. A false
    /// report harms the guest alone: its share, guarantee and limit still apply.
    pub fn used(&mut self, stats: &Stats) -> bool {
        let of_node = |node: NodeId| stats.nodes.iter().find(|of| of.node == node);
        let in_use = |of: &NodeStats| {
            let not_used = of.free.0.saturating_add(of.held.0);
            ByteCount(of.total.0.saturating_sub(not_used))
        };
        let measured = stats.nodes.iter().map(|of| of.working_set.0);
        let measured = ByteCount(measured.fold(0, u64::saturating_add));
        // Without samples the working set is unknown, not empty.
        let sampled = stats.fast_hit.is_some();
        self.usage = Some(Usage {
            used: TierBytes::from_fn(|tier| {
                of_node(*self.nodes.get(tier))
                    .map(in_use)
                    .unwrap_or_default()
            }),
            working_set: sampled.then(|| self.working_set.update(measured)),
            curve: stats
                .benefit
                .as_ref()
                .map(|benefit| self.curve.update(Curve::new(benefit))),
            pressed: stats.psi_some.get() >= PRESSED_PERMILLE,
        });
        let share = |permille: demeter_proto::Permille| f64::from(permille.get()) / 1000.0;
        self.benefit.clone_from(&stats.benefit);
        self.estimate_service();
        self.fast_hit = stats.fast_hit.map(share);
        self.relocation = stats.relocation.map(|of| RelocationView {
            cost_ms: of.cost_ms,
            benefit_ms: of.benefit_ms,
            is_resting: of.is_resting,
        });
        self.pressure = Some(share(stats.psi_some));
        let before = std::mem::replace(&mut self.oom_returned, stats.oom_returned);
        before != stats.oom_returned
    }
}

/// The configured limits of a VM.
pub(super) fn limits(vm: &VmConfig) -> Limits {
    let limits = vm.limits();
    Limits {
        guarantee: vm.guarantees(),
        limit: TierBytes::from_fn(|tier| limits.get(tier).unwrap_or(ByteCount(u64::MAX))),
        oom: vm.oom(),
    }
}

#[cfg(test)]
mod tests {
    use demeter_policy::MIB;
    use demeter_proto::Permille;

    use super::*;

    #[test]
    fn usage_is_by_tier_and_forgotten_with_the_guest() {
        let config = toml::from_str(
            "qmp = \"/q\"\nfast = { size_mib = 1, node = 4 }\nslow = { size_mib = 1 }",
        );
        let mut facts = VmFacts::new(&config.unwrap());
        let node = |node, total, free, held, working_set| NodeStats {
            node: NodeId(node),
            total: ByteCount(total * MIB),
            free: ByteCount(free * MIB),
            held: ByteCount(held * MIB),
            working_set: ByteCount(working_set * MIB),
        };
        let mut stats = Stats {
            psi_some: Permille::new(100),
            psi_full: Permille::new(0),
            fast_hit: Some(Permille::new(750)),
            relocation: Some(demeter_proto::Relocation {
                benefit_ms: -7,
                ..Default::default()
            }),
            benefit: None,
            oom_returned: ByteCount(0),
            nodes: vec![
                node(1, 100, 20, 50, 3),
                node(4, 100, 10, 0, 40),
                node(7, 9, 0, 0, 0),
            ],
        };
        assert!(!facts.used(&stats));
        let usage = facts.usage.unwrap();
        assert_eq!(usage.used.fast, ByteCount(90 * MIB));
        assert_eq!(usage.used.slow, ByteCount(30 * MIB));
        assert_eq!(usage.working_set, Some(ByteCount(43 * MIB)));
        assert!(usage.pressed);
        assert_eq!((facts.fast_hit, facts.pressure), (Some(0.75), Some(0.1)));
        assert_eq!(facts.relocation.unwrap().benefit_ms, -7);

        // Overflowing sums must not panic.
        stats.nodes = vec![node(4, 1, u64::MAX / MIB, u64::MAX / MIB, u64::MAX / MIB); 8];
        stats.oom_returned = ByteCount(1);
        assert!(facts.used(&stats));
        assert!(!facts.used(&stats));
        assert_eq!(facts.usage.unwrap().used.fast, ByteCount(0));
        stats.fast_hit = None;
        facts.used(&stats);
        assert_eq!(facts.usage.unwrap().working_set, None);

        facts.trouble = Some("nobody listens".into());
        facts.observe(&Observation::Reset);
        assert!(facts.usage.is_none() && facts.fast_hit.is_none() && facts.relocation.is_none());
        facts.observe(&Observation::Here);
        assert!(facts.trouble.is_none());
    }
}
