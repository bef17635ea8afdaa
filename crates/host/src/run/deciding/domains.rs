//! Domains of libvirt that are found, and those of before a restart.

use std::collections::BTreeSet;

use demeter_policy::provision::{Policy, ProvisionerKind};
use demeter_policy::{ByteCount, Tier, TierBytes};

use super::{Deciding, settings, unix_ms};
use crate::VmName;
use crate::config::{Config, KeyChange, VmConfig};
use crate::controller::State;
use crate::hypervisor::libvirt::{Domains, FoundDomain, LeftDomain};
use crate::run::facts::{VmFacts, limits};
use crate::store::Ledger;

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
        for (name, FoundDomain { config: vm, own }) in domains.managed {
            if self.commands.contains_key(&name) {
                self.follow(&name, own.apply(self.config.defaults.apply(vm)));
                continue;
            }
            if named.contains(name.as_str()) {
                // The VM has a section of its own, perhaps under another name.
                continue;
            }
            let memory = vm.sizes();
            let vm = own.apply(self.config.defaults.apply(vm));
            let taken_on = match self.settings.apply_to_found(&name, &vm) {
                Some(used) => self.take_on_one(&name, &used),
                None => Err(settings::removed(&name)),
            };
            if taken_on.is_ok() {
                self.found.insert(name.clone(), vm);
            }
            if let Err(why) = taken_on {
                let before = self.left.get(name.as_str());
                let is_new = before.is_none_or(|before| before.why != why);
                if is_new {
                    tracing::warn!("VM {name}: discovered, but not managed: {why}");
                    let what =
                        format!("discovered, but not managed: {why}; the controller retries");
                    self.log.push(unix_ms(), Some(name.to_string()), what);
                }
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

    /// Takes over values that changed in a discovered VM's XML, or in `[defaults]`.
    fn follow(&mut self, name: &VmName, now: VmConfig) {
        let Some(before) = self.found.get(name).filter(|before| **before != now) else {
            return;
        };
        let used = |vm| self.settings.apply_to_found(name, vm);
        if let (Some(old), Some(new)) = (used(before), used(&now)) {
            for change in KeyChange::between(&format!("vm.{name}"), &old, &new) {
                self.note(
                    Some(name),
                    format!("changed in its XML: {change}"),
                    "libvirt",
                );
            }
            self.change(name, &old, &new, false);
        }
        self.found.insert(name.clone(), now);
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
                    "it has {} fast and {} slow, but only {} and {} of the pool are free; lower \
                     another VM, or choose a policy that divides memory",
                    sizes.fast, sizes.slow, room.fast, room.slow
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
        self.commands
            .insert(name.clone(), self.tasks.start(name, vm));
        self.facts.insert(name.clone(), VmFacts::new(vm));
        self.stale = true;
        Ok(())
    }
}

/// Accounts of domains that libvirt named before a restart: the VM as it was found, and with the settings of a person. They
/// count until libvirt reports that they are not running. Their tasks start when they are discovered.
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
        let vm = VmConfig::of_domain(name, ProvisionerKind::DemeterBalloon, account.desired);
        if let Some(used) = ledger.settings.apply_to_found(name, &vm) {
            found.push((name.clone(), vm, used));
        }
    }
    found
}
