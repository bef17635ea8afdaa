//! The snapshot of the host that the API shows.

use std::sync::Arc;

use demeter_policy::provision::Policy;
use demeter_policy::{ByteCount, PerTier, Tier, TierBytes};

use super::Deciding;
use crate::config::Pool;
use crate::controller::{Controller, State, VmStatus};
use crate::hypervisor::libvirt::LeftDomain;
use crate::run::facts::VmFacts;
use crate::run::places;
use crate::view::{HostView, LeftAloneView, PoolView, VmState, VmView};
use crate::{PoolName, VmName};

impl Deciding {
    /// Replaces the API's snapshot.
    pub(super) fn publish(&mut self) {
        self.stale = false;
        let vm = |(name, vm): (&VmName, VmStatus)| {
            let pool = self.controller.pool_of(name);
            let nodes = pool
                .and_then(|pool| self.pools.get(pool))
                .map(|of| &of.nodes);
            let nodes = nodes.cloned().unwrap_or_default();
            let mut view = vm_view(name, vm, &self.facts[name], self.policy, &nodes);
            view.pool = pool.map(|pool| pool.0.clone()).unwrap_or_default();
            view
        };
        let pool = |(name, pool): (&PoolName, &Pool)| {
            let controller = self.controller.get(name)?;
            let view = pool_view(name, pool, controller);
            let problem = self.undivided.get(name).cloned();
            Some(PoolView { problem, ..view })
        };
        let view = HostView {
            version: env!("CARGO_PKG_VERSION").into(),
            policy: self.policy,
            evacuates: self.evacuates,
            pool: self.controller.sum(|pool, tier| pool.pool(tier).0).into(),
            committed: self
                .controller
                .sum(|pool, tier| pool.committed(tier).0)
                .into(),
            may_hold: self
                .controller
                .sum(|pool, tier| pool.may_hold(tier).0)
                .into(),
            pools: self.pools.iter().filter_map(pool).collect(),
            settings: self.settings_view(),
            unsaved: self.unsaved.clone(),
            violations: self.controller.violations(),
            vms: self.controller.vms().into_iter().map(vm).collect(),
            left_alone: self.left.iter().map(left_view).collect(),
        };
        self.view.send_replace(Arc::new(view));
    }
}

fn pool_view(name: &PoolName, pool: &Pool, controller: &Controller) -> PoolView {
    let numbers = |tier| pool.nodes.get(tier).iter().map(|node| node.0).collect();
    PoolView {
        name: name.0.clone(),
        fast_nodes: numbers(Tier::Fast),
        slow_nodes: numbers(Tier::Slow),
        size: TierBytes::from_fn(|tier| controller.pool(tier)).into(),
        committed: TierBytes::from_fn(|tier| controller.committed(tier)).into(),
        may_hold: TierBytes::from_fn(|tier| controller.may_hold(tier)).into(),
        problem: None,
    }
}

fn left_view((name, domain): (&String, &LeftDomain)) -> LeftAloneView {
    LeftAloneView {
        name: name.clone(),
        why: domain.why.clone(),
        memory_bytes: domain.memory.0,
    }
}

fn vm_view(
    name: &VmName,
    vm: VmStatus,
    known: &VmFacts,
    policy: Policy,
    nodes: &PerTier<Vec<demeter_policy::NodeId>>,
) -> VmView {
    let service = known.service.as_ref();
    let service =
        service.map(|service| service.view(&vm, known.benefit.as_ref(), known.protocol(), policy));
    let oom = |tier| match tier {
        Tier::Fast => 0,
        Tier::Slow => vm.limits.oom.0,
    };
    let target = |tier| ByteCount(vm.desired.get(tier).0.saturating_sub(oom(tier)));
    let (state, lie) = match vm.state {
        State::Here => (VmState::Up, None),
        State::Away => (VmState::Down, None),
        State::Hostile(lie) => (VmState::Marked, Some(lie)),
    };
    VmView {
        name: name.to_string(),
        pool: String::new(),
        provisioner: known.provisioner,
        managed_by: known.managed_by.map(Into::into),
        state,
        desired: vm.desired.into(),
        target: TierBytes::from_fn(target).into(),
        committed: vm.committed.into(),
        owned: vm.owned.map(Into::into),
        may_hold: vm.may_hold.into(),
        guarantee: vm.limits.guarantee.into(),
        limit: vm.limits.limit.into(),
        returned_bytes: known.returned.0,
        overruns: known.overruns,
        overrun: known.overrun.into(),
        fast_hit: known.fast_hit,
        relocation: known.relocation,
        working_set_bytes: known.usage.and_then(|usage| Some(usage.working_set?.0)),
        pressure: known.pressure,
        protocol: known.protocol(),
        benefit: known.benefit.clone(),
        service,
        places: known.places.as_ref().map(|of| places::view(of, nodes)),
        problem: lie
            .or_else(|| known.trouble.clone())
            .or(vm.reason)
            .or_else(|| places::problem(known.places.as_ref()?, nodes)),
    }
}
