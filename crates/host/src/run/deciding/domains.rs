//! Domains of libvirt that are found, and those of before a restart.

use std::collections::{BTreeMap, BTreeSet};

use demeter_policy::provision::{Policy, ProvisionerKind};
use demeter_policy::{ByteCount, NodeId, PerTier, Tier, TierBytes};
use demeter_proto::shown;

use super::{Deciding, of_pool, settings, unix_ms};
use crate::config::{Config, KeyChange, Pool, VmConfig};
use crate::controller::State;
use crate::hypervisor::libvirt::{Domains, FoundDomain, LeftDomain};
use crate::run::facts::limits;
use crate::store::Ledger;
use crate::{PoolName, VmName};

impl Deciding {
    /// Adds newly discovered VMs and removes discovered ones that no longer run.
    pub(super) fn take_on(&mut self, domains: Domains) {
        let away: BTreeSet<_> = self
            .controller
            .vms()
            .into_iter()
            .filter(|(_, vm)| vm.state == State::Away)
            .map(|(name, _)| name.clone())
            .collect();
        let ended = |name: &&VmName| !domains.managed.contains_key(*name) && away.contains(*name);
        let ended: Vec<_> = self.found.keys().filter(ended).cloned().collect();
        for name in ended {
            self.forget(&name);
            let what = "no longer runs; removed".into();
            self.log.push(unix_ms(), Some(name.to_string()), what);
        }
        let sections = self.config.vms.values();
        let named: BTreeSet<_> = sections.filter_map(|vm| vm.libvirt.clone()).collect();
        let mut left = domains.left;
        for (name, domain) in domains.managed {
            let is_managed = self.commands.contains_key(&name);
            // The VM may have a section of its own, perhaps under another name.
            let has_section = match is_managed {
                true => !self.found.contains_key(&name),
                false => named.contains(name.as_str()),
            };
            if has_section {
                continue;
            }
            let vm = self.described(&domain);
            let taken = self.used(&name, &vm, &domain.bound).and_then(|used| {
                match is_managed {
                    true => self.follow(&name, &vm, &used),
                    false => self.take_on_one(&name, &used)?,
                }
                self.found.insert(name.clone(), vm);
                Ok(())
            });
            if let Err(why) = taken {
                let what = match is_managed {
                    true => format!("its XML is not followed: {why}"),
                    false => format!("discovered, but not managed: {why}; the controller retries"),
                };
                let before = self.left.get(name.as_str());
                if before.is_none_or(|before| before.why != why) {
                    tracing::warn!("VM {name}: {what}");
                    self.log.push(unix_ms(), Some(name.to_string()), what);
                }
                let memory = domain.config.sizes();
                let memory = ByteCount(memory.fast.0.saturating_add(memory.slow.0));
                left.insert(name.to_string(), LeftDomain { why, memory });
            }
        }
        for (name, domain) in &left {
            if self
                .left
                .get(name)
                .is_none_or(|before| before.why != domain.why)
            {
                tracing::info!("domain {name:?} is left alone: {}", domain.why);
            }
        }
        self.stale |= self.left != left;
        self.left = left;
    }

    /// A discovered VM with the pool of its nodes, `[defaults]`, and the values that its owner sets.
    fn described(&self, domain: &FoundDomain) -> VmConfig {
        let mut vm = domain.config.clone();
        vm.pool = pool_of_nodes(&self.pools, &domain.bound);
        domain.own.apply(self.config.defaults.apply(vm))
    }

    /// A discovered VM with the settings of a person. The error is the reason why it cannot be managed.
    fn used(
        &self,
        name: &VmName,
        vm: &VmConfig,
        bound: &PerTier<Vec<NodeId>>,
    ) -> Result<VmConfig, String> {
        let used = self.settings.apply_to_found(name, vm);
        let used = used.ok_or_else(|| settings::removed(name))?;
        match self.config.pool_of(&used) {
            Some(_) => Ok(used),
            None => Err(no_pool(&used, bound)),
        }
    }

    /// Takes over values that changed in a discovered VM's XML, or in `[defaults]`. `used` is the VM
    /// with the settings of a person.
    fn follow(&mut self, name: &VmName, now: &VmConfig, used: &VmConfig) {
        let Some(before) = self.found.get(name).filter(|before| *before != now) else {
            return;
        };
        if let Some(old) = self.settings.apply_to_found(name, before) {
            for change in KeyChange::between(&format!("vm.{name}"), &old, used) {
                self.note(
                    Some(name),
                    format!("changed in its XML: {change}"),
                    "libvirt",
                );
            }
            self.put(name, &old, used);
        }
        self.fit();
        self.ask_policy();
    }

    /// Adds one discovered VM. The error is the reason why it cannot be added yet.
    fn take_on_one(&mut self, name: &VmName, vm: &VmConfig) -> Result<(), String> {
        let pool = self.config.pool_of(vm).cloned().unwrap_or_default();
        let room = self.left_by_others(&pool, name, |vm| vm.desired);
        let sizes = vm.sizes();
        // State that an earlier controller stored.
        let kept = self.controller.accounts().get(name).copied();
        let fits = Tier::ALL
            .into_iter()
            .all(|tier| sizes.get(tier) <= room.get(tier));
        let first = match self.policy {
            Policy::Static if !fits && kept.is_none() => {
                return Err(format!(
                    "{}it has {} fast and {} slow, but only {} and {} of the pool are free; lower \
                     another VM, or choose a policy that divides memory",
                    of_pool(&pool),
                    sizes.fast,
                    sizes.slow,
                    room.fast,
                    room.slow
                ));
            }
            Policy::Static => sizes,
            // The policy decides before the first order.
            _ => {
                let guarantees = vm.guarantees();
                TierBytes::from_fn(|tier| {
                    (*sizes.get(tier))
                        .min(*room.get(tier))
                        .max(*guarantees.get(tier))
                })
            }
        };
        let mark = self.controller.marks().remove(name);
        self.controller.remove(name);
        let added = self.controller.add(&pool, name, limits(vm), kept, first);
        if let (Some(reason), Some(pool)) = (mark, self.controller.of_mut(name)) {
            pool.mark(name, reason);
        }
        added.map_err(|refusal| {
            self.facts.remove(name);
            self.found.remove(name);
            refusal.to_string()
        })?;
        self.start_task(name, vm);
        self.stale = true;
        Ok(())
    }

    /// The pools of discovered VMs, to be stored. A host with one pool stores none.
    pub(super) fn pools_of_found(&self) -> BTreeMap<VmName, PoolName> {
        let pool = |name: &VmName| Some((name.clone(), self.controller.pool_of(name)?.clone()));
        match self.pools.len() {
            0 | 1 => BTreeMap::new(),
            _ => self.found.keys().filter_map(pool).collect(),
        }
    }
}

/// The pool, of several, to whose nodes a VM's memory is bound. Its tiers do not matter here: memory on the other tier's
/// node of the same pool is a problem that the count of its pages shows.
fn pool_of_nodes(
    pools: &BTreeMap<PoolName, Pool>,
    bound: &PerTier<Vec<NodeId>>,
) -> Option<PoolName> {
    let is_bound = Tier::ALL.iter().all(|tier| !bound.get(*tier).is_empty());
    if pools.len() < 2 || !is_bound {
        return None;
    }
    let all = || Tier::ALL.into_iter().flat_map(|tier| bound.get(tier));
    let has = |pool: &Pool, node| {
        Tier::ALL
            .iter()
            .any(|tier| pool.nodes.get(*tier).contains(node))
    };
    let mut pools = pools.iter();
    // A node belongs to one pool at most.
    let found = pools.find(|(_, pool)| all().all(|node| has(pool, node)));
    found.map(|(name, _)| name.clone())
}

/// The reason why the pool of a discovered VM is unknown.
fn no_pool(vm: &VmConfig, bound: &PerTier<Vec<NodeId>>) -> String {
    const HINT: &str = "name a [[pool]] in its metadata (<vm pool=\"NAME\"/>)";
    if let Some(PoolName(named)) = &vm.pool {
        return format!("its pool {:?} is not there; {HINT}", shown(named));
    }
    let nodes = |tier| {
        let nodes: Vec<_> = bound.get(tier).iter().map(ToString::to_string).collect();
        match nodes.is_empty() {
            true => "no node".to_owned(),
            false => format!("node {}", nodes.join(",")),
        }
    };
    format!(
        "its pool is unknown, because its fast memory is bound to {} and its slow memory to {}; bind both to the \
         nodes of one pool, or {HINT}",
        nodes(Tier::Fast),
        nodes(Tier::Slow)
    )
}

/// Accounts of domains that libvirt named before a restart: the VM as it was found, and with the settings of a person. They
/// count until libvirt reports that they are not running. Their tasks start when they are discovered. A VM whose pool is no
/// longer there counts from then on.
pub(super) fn found_before(config: &Config, ledger: &Ledger) -> Vec<(VmName, VmConfig, VmConfig)> {
    let mut found = vec![];
    for (name, account) in &ledger.accounts {
        if config.vms.contains_key(name) {
            continue;
        }
        if config.discover.is_none() {
            tracing::warn!(
                "VM {name} is no longer in the configuration; its memory no longer counts"
            );
            continue;
        }
        let mut vm = VmConfig::of_domain(name, ProvisionerKind::DemeterBalloon, account.desired);
        vm.pool = match config.pool.len() {
            0 | 1 => None,
            _ => ledger.pools.get(name).cloned(),
        };
        let Some(used) = ledger.settings.apply_to_found(name, &vm) else {
            continue;
        };
        match config.pool_of(&used) {
            Some(_) => found.push((name.clone(), vm, used)),
            None => tracing::warn!(
                "VM {name}: its pool is not in the configuration; its memory counts again once libvirt \
                 reports where it is bound"
            ),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(fast: &[u32], slow: &[u32]) -> PerTier<Vec<NodeId>> {
        let ids = |of: &[u32]| of.iter().copied().map(NodeId).collect();
        PerTier {
            fast: ids(fast),
            slow: ids(slow),
        }
    }

    #[test]
    fn all_nodes_of_a_domain_must_be_one_pools() {
        let pool = |name: &str, fast: &[u32], slow: &[u32]| {
            let pool = Pool {
                sizes: TierBytes::default(),
                nodes: nodes(fast, slow),
            };
            (PoolName(name.into()), pool)
        };
        let two: BTreeMap<_, _> = [pool("s0", &[0, 1], &[4]), pool("s1", &[2, 3], &[5])].into();
        for (fast, slow, want) in [
            (&[0][..], &[4][..], Some("s0")),
            (&[2, 3], &[5], Some("s1")),
            // The cells are turned round. The count of pages shows it.
            (&[5], &[2], Some("s1")),
            (&[1, 2], &[4], None),
            (&[2], &[4], None),
            (&[2], &[9], None),
            (&[2], &[], None),
            (&[], &[], None),
        ] {
            let found = pool_of_nodes(&two, &nodes(fast, slow));
            assert_eq!(
                found,
                want.map(|name| PoolName(name.into())),
                "{fast:?} {slow:?}"
            );
        }
        // An only pool needs no nodes to be found.
        let one: BTreeMap<_, _> = [pool("s0", &[0], &[4])].into();
        assert_eq!(pool_of_nodes(&one, &nodes(&[0], &[4])), None);
    }
}
