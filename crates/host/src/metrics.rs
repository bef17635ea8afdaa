//! The host's snapshot in Prometheus' text format (OpenMetrics).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use crate::view::{HostView, PoolView, TierView, VmState, VmView};

/// The metrics of a snapshot.
pub fn text(view: Arc<HostView>) -> String {
    let mut registry = Registry::with_prefix("demeter_host");
    registry.register_collector(Box::new(Snapshot(view)));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)
        .expect("writing to a string does not fail");
    text
}

#[derive(Debug)]
struct Snapshot(Arc<HostView>);

/// Labels of a figure of a pool.
type Labels = Vec<(&'static str, String)>;

/// A figure of a pool: name, help text and value.
type PoolFigure = (&'static str, &'static str, fn(&PoolView) -> TierView);

const POOL_FIGURES: [PoolFigure; 4] = [
    ("pool", "Memory to divide between VMs", |pool| pool.size),
    ("committed", "Memory committed to VMs", |pool| {
        pool.committed
    }),
    (
        "may_hold",
        "Upper bound of the memory that VMs hold",
        |pool| pool.may_hold,
    ),
    (
        "excess",
        "Memory that VMs may hold beyond the pool; no VM grows meanwhile",
        PoolView::excess,
    ),
];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VmLabel {
    vm: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VmTierLabel {
    vm: String,
    tier: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VmNodeLabel {
    vm: String,
    tier: &'static str,
    node: u32,
}

fn tiers(view: TierView) -> [(&'static str, i64); 2] {
    let gauge = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
    [
        ("fast", gauge(view.fast_bytes)),
        ("slow", gauge(view.slow_bytes)),
    ]
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (host, encoder) = (&*self.0, &mut encoder);
        controller(host, encoder)?;
        pools(host, encoder)?;
        attention(host, encoder)?;
        sizes(host, encoder)?;
        nodes(host, encoder)?;
        guests(host, encoder)?;
        relocation_cost(host, encoder)?;
        counts(host, encoder)
    }
}

/// The controller itself.
fn controller(host: &HostView, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let build = Info::new([("version", host.version.clone())]);
    build.encode(encoder.encode_descriptor(
        "build",
        "The controller's version",
        None,
        build.metric_type(),
    )?)?;
    let violations = ConstCounter::new(host.violations);
    violations.encode(encoder.encode_descriptor(
        "violations",
        "Number of times that committed memory exceeded the pool; must be 0",
        None,
        violations.metric_type(),
    )?)
}

/// The figures of each pool.
fn pools(host: &HostView, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    for (name, help, of) in POOL_FIGURES {
        let family = Family::<Labels, Gauge>::default();
        // Without a name there is no label, as before there were several pools.
        for pool in &host.pools {
            let name = (!pool.name.is_empty()).then(|| ("pool", pool.name.clone()));
            for (tier, bytes) in tiers(of(pool)) {
                let tier = Some(("tier", tier.to_owned()));
                let labels: Labels = [tier, name.clone()].into_iter().flatten().collect();
                family.get_or_create(&labels).set(bytes);
            }
        }
        let kind = family.metric_type();
        family.encode(encoder.encode_descriptor(name, help, Some(&Unit::Bytes), kind)?)?;
    }
    Ok(())
}

/// Counts of what a person should look at.
fn attention(host: &HostView, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let unused = host.settings.iter().filter(|of| of.problem.is_some());
    for (name, help, unit, value) in [
        (
            "left_alone",
            "Running libvirt domains that are not managed",
            None,
            host.left_alone.len() as u64,
        ),
        (
            "left_alone_memory",
            "Memory of domains that are not managed",
            Some(&Unit::Bytes),
            host.left_alone.iter().map(|of| of.memory_bytes).sum(),
        ),
        (
            "unsaved",
            "Whether the state file cannot be written; no VM gets a command meanwhile",
            None,
            host.unsaved.is_some().into(),
        ),
        (
            "settings_unused",
            "VMs whose settings by command are not in use, because the file contradicts them",
            None,
            unused.count() as u64,
        ),
    ] {
        let gauge: Gauge = Gauge::default();
        gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        let kind = gauge.metric_type();
        gauge.encode(encoder.encode_descriptor(name, help, unit, kind)?)?;
    }
    Ok(())
}

/// Sizes of each VM by tier.
fn sizes(host: &HostView, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let mut by_tier = |name, help, of: fn(&VmView) -> Option<TierView>| {
        let family = Family::<VmTierLabel, Gauge>::default();
        for vm in &host.vms {
            for (tier, bytes) in of(vm).into_iter().flat_map(tiers) {
                let vm = vm.name.clone();
                family.get_or_create(&VmTierLabel { vm, tier }).set(bytes);
            }
        }
        let kind = family.metric_type();
        family.encode(encoder.encode_descriptor(name, help, Some(&Unit::Bytes), kind)?)
    };
    by_tier("vm_desired", "Desired memory of a VM", |vm| {
        Some(vm.desired)
    })?;
    by_tier("vm_target", "Memory that a VM is asked to own", |vm| {
        Some(vm.target)
    })?;
    by_tier("vm_committed", "Memory committed to a VM", |vm| {
        Some(vm.committed)
    })?;
    by_tier(
        "vm_owned",
        "Memory that a VM owns, as last verified",
        |vm| vm.owned,
    )?;
    by_tier(
        "vm_may_hold",
        "Upper bound of the memory that a VM holds",
        |vm| Some(vm.may_hold),
    )?;
    by_tier("vm_guarantee", "Guaranteed memory of a VM", |vm| {
        Some(vm.guarantee)
    })?;
    by_tier("vm_limit", "Maximum memory of a VM", |vm| Some(vm.limit))?;
    by_tier(
        "vm_elsewhere",
        "Memory of a VM's tier on nodes of the host that are not the tier's",
        |vm| vm.places.as_ref()?.elsewhere,
    )
}

/// Where each VM's memory lies.
fn nodes(host: &HostView, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let family = Family::<VmNodeLabel, Gauge>::default();
    for vm in &host.vms {
        let Some(places) = &vm.places else { continue };
        for (tier, places) in [("fast", &places.fast), ("slow", &places.slow)] {
            for place in places {
                let (vm, node) = (vm.name.clone(), place.node);
                let bytes = i64::try_from(place.bytes).unwrap_or(i64::MAX);
                family
                    .get_or_create(&VmNodeLabel { vm, tier, node })
                    .set(bytes);
            }
        }
    }
    let kind = family.metric_type();
    family.encode(encoder.encode_descriptor(
        "vm_on_node",
        "Memory of a VM's tier on a node of the host",
        Some(&Unit::Bytes),
        kind,
    )?)
}

/// State of each VM, and the reports of its agent.
fn guests(host: &HostView, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let mut by_vm = |name, help, of: fn(&VmView) -> Option<f64>| {
        let family = Family::<VmLabel, Gauge<f64, AtomicU64>>::default();
        for vm in &host.vms {
            if let Some(value) = of(vm) {
                let vm = vm.name.clone();
                family.get_or_create(&VmLabel { vm }).set(value);
            }
        }
        let kind = family.metric_type();
        family.encode(encoder.encode_descriptor(name, help, None, kind)?)
    };
    by_vm("vm_up", "Whether a VM is connected and trusted", |vm| {
        Some(if vm.state == VmState::Up { 1.0 } else { 0.0 })
    })?;
    by_vm(
        "vm_marked",
        "Whether a VM is marked as hostile and left alone, because its guest sent false data",
        |vm| Some(f64::from(u8::from(vm.state == VmState::Marked))),
    )?;
    by_vm(
        "vm_service_unmet",
        "Whether a VM's slowdown_max_percent is not met, or not known to be met",
        |vm| Some(f64::from(u8::from(vm.service.as_ref()?.unmet.is_some()))),
    )?;
    by_vm(
        "vm_speed_ratio",
        "Speed of a VM's programs against fast memory alone; the lower bound of its agent's estimate",
        |vm| Some(1.0 / vm.slowdown()?.max),
    )?;
    by_vm(
        "vm_fast_hit_ratio",
        "Share of sampled accesses that fast memory served",
        |vm| vm.fast_hit,
    )?;
    by_vm(
        "vm_relocation_benefit_seconds",
        "Estimated time saved by the moves of a VM's agent; negative if they did harm",
        |vm| Some(vm.relocation?.benefit_ms as f64 / 1000.0),
    )?;
    by_vm(
        "vm_relocation_resting",
        "Whether a VM's agent has stopped moving because moves brought no benefit",
        |vm| Some(f64::from(u8::from(vm.relocation?.is_resting))),
    )?;
    by_vm(
        "vm_pressure_ratio",
        "Share of time in which some task of the guest waited for memory",
        |vm| vm.pressure,
    )
}

/// Time that each agent has spent on moves.
fn relocation_cost(host: &HostView, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let spent = Family::<VmLabel, Counter<f64, AtomicU64>>::default();
    for vm in &host.vms {
        if let Some(relocation) = vm.relocation {
            let label = VmLabel {
                vm: vm.name.clone(),
            };
            let seconds = relocation.cost_ms as f64 / 1000.0;
            spent.get_or_create(&label).inc_by(seconds);
        }
    }
    let kind = spent.metric_type();
    spent.encode(encoder.encode_descriptor(
        "vm_relocation_cost",
        "Time that a VM's agent has spent on moves since it started",
        Some(&Unit::Seconds),
        kind,
    )?)
}

/// Counters of each VM.
fn counts(host: &HostView, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let mut counted = |name, help, unit: Option<&Unit>, of: fn(&VmView) -> u64| {
        let family = Family::<VmLabel, Counter>::default();
        for vm in &host.vms {
            let label = VmLabel {
                vm: vm.name.clone(),
            };
            family.get_or_create(&label).inc_by(of(vm));
        }
        let kind = family.metric_type();
        family.encode(encoder.encode_descriptor(name, help, unit, kind)?)
    };
    counted(
        "vm_overruns",
        "How often a VM used memory that it did not own",
        None,
        |vm| vm.overruns,
    )?;
    counted(
        "vm_returned",
        "Memory that a VM returned to the host",
        Some(&Unit::Bytes),
        |vm| vm.returned_bytes,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{PlaceView, PlacesView, RelocationView, ServiceView};

    #[test]
    #[expect(clippy::too_many_lines, reason = "a whole page of metrics")]
    fn the_snapshot_is_told_by_vm_and_tier() {
        let tiers = |fast_bytes, slow_bytes| TierView {
            fast_bytes,
            slow_bytes,
        };
        let vm = VmView {
            name: "db".into(),
            state: VmState::Up,
            owned: Some(tiers(7, 8)),
            service: Some(ServiceView {
                slowdown_max_percent: 10,
                needs_bytes: Some(8),
                unmet: Some("it owns 7 so far".into()),
            }),
            benefit: serde_json::from_str(
                "{\"points\": [[0, 0], [14, 1000]], \"fast_latency_ns\": 100, \"slow_latency_ns\": 200, \
                 \"running_ms\": 1, \"waits_min_permille\": 0, \"waits_max_permille\": 500}",
            )
            .unwrap(),
            may_hold: tiers(77, 8),
            returned_bytes: 9,
            overruns: 2,
            fast_hit: Some(0.5),
            places: Some(PlacesView {
                fast: vec![PlaceView { node: 2, bytes: 5 }],
                slow: vec![],
                elsewhere: Some(tiers(5, 0)),
            }),
            relocation: Some(RelocationView {
                cost_ms: 1500,
                benefit_ms: -250,
                is_resting: true,
            }),
            ..VmView::default()
        };
        let other = VmView {
            name: "web".into(),
            state: VmState::Down,
            ..VmView::default()
        };
        let text = text(Arc::new(HostView {
            pools: vec![
                PoolView {
                    size: tiers(100, 200),
                    committed: tiers(70, 80),
                    may_hold: tiers(130, 80),
                    ..PoolView::default()
                },
                PoolView {
                    name: "socket1".into(),
                    size: tiers(5, 6),
                    ..PoolView::default()
                },
            ],
            version: "1.2".into(),
            violations: 3,
            unsaved: Some("the disk is full".into()),
            vms: vec![vm, other],
            ..HostView::default()
        }));
        for line in [
            "demeter_host_violations_total 3",
            "demeter_host_pool_bytes{tier=\"slow\"} 200",
            "demeter_host_pool_bytes{tier=\"fast\",pool=\"socket1\"} 5",
            "demeter_host_build_info{version=\"1.2\"} 1",
            "demeter_host_may_hold_bytes{tier=\"fast\"} 130",
            "demeter_host_unsaved 1",
            "demeter_host_settings_unused 0",
            "demeter_host_excess_bytes{tier=\"fast\"} 30",
            "demeter_host_excess_bytes{tier=\"slow\"} 0",
            "demeter_host_vm_may_hold_bytes{vm=\"db\",tier=\"fast\"} 77",
            "demeter_host_vm_elsewhere_bytes{vm=\"db\",tier=\"fast\"} 5",
            "demeter_host_vm_on_node_bytes{vm=\"db\",tier=\"fast\",node=\"2\"} 5",
            "demeter_host_vm_marked{vm=\"db\"} 0.0",
            "demeter_host_vm_service_unmet{vm=\"db\"} 1.0",
            "demeter_host_vm_speed_ratio{vm=\"db\"} 0.8",
            "demeter_host_committed_bytes{tier=\"fast\"} 70",
            "demeter_host_vm_owned_bytes{vm=\"db\",tier=\"slow\"} 8",
            "demeter_host_vm_up{vm=\"web\"} 0.0",
            "demeter_host_vm_fast_hit_ratio{vm=\"db\"} 0.5",
            "demeter_host_vm_relocation_cost_seconds_total{vm=\"db\"} 1.5",
            "demeter_host_vm_relocation_benefit_seconds{vm=\"db\"} -0.25",
            "demeter_host_vm_relocation_resting{vm=\"db\"} 1.0",
            "demeter_host_vm_overruns_total{vm=\"db\"} 2",
            "demeter_host_vm_returned_bytes_total{vm=\"db\"} 9",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        for of_some in ["vm_owned_bytes", "vm_service_unmet", "vm_speed_ratio"] {
            assert!(!text.contains(&format!("{of_some}{{vm=\"web\"")), "{text}");
        }
        assert!(text.ends_with("# EOF\n"));
        let counters = text
            .lines()
            .filter_map(|line| line.strip_suffix(" counter"));
        for name in counters.filter_map(|line| line.strip_prefix("# TYPE ")) {
            assert!(text.contains(&format!("\n{name}_total")), "{name}");
        }
    }
}
