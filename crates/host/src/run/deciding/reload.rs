//! Takes over a changed configuration while VMs run.

use std::collections::BTreeMap;
use std::sync::Arc;

use demeter_policy::provision::Policy;
use demeter_policy::{NodeId, PerTier};

use super::{Deciding, limits, nodes_of, sizes, unix_ms};
use crate::api::ChangeError;
use crate::config::{Config, KeyChange, Manage, Pool, VmConfig};
use crate::controller::{Account, Observation};
use crate::run::check_descriptors;
use crate::run::facts::VmFacts;
use crate::{PoolName, VmName};

impl Deciding {
    /// Applies the configuration's file, all of it or nothing. Returns the keys that changed.
    pub(super) async fn reload(&mut self, by: &str) -> Result<Vec<KeyChange>, ChangeError> {
        let path = self.source.clone();
        let reading = self
            .outside
            .ask("the configuration", move |_| Config::load(&path));
        let read = reading.await.map_err(|stuck| stuck.to_string());
        let read = read.and_then(|read| read.map_err(|error| error.to_string()));
        let enough = |config: &Config| check_descriptors(config).map_err(|e| e.to_string());
        let new = read.and_then(|config| enough(&config).map(|()| config));
        let new = new.map_err(|why| self.not_reloaded(why))?;
        let pools = self.pools_of(&new).map_err(|why| self.not_reloaded(why))?;
        let (used, unused) = self.settings.apply(&new);
        let newly_unused = unused
            .iter()
            .find(|(name, _)| !self.unused.contains_key(*name));
        if let Some((name, why)) = newly_unused {
            return Err(self.not_reloaded(format!(
                "what was set for VM {name} by command does not fit this file ({why}); take it back with demeter \
                 host vm reset {name}, or change the file"
            )));
        }
        let overridden = self.settings.overrides(&new, &used);
        let mut changes = self.file.changes(&new);
        for change in &mut changes {
            let keys = overridden.iter().map(|key| key.key.as_str());
            change.is_overridden = change.is_within(keys)
                || change.key == "policy" && self.policy_chosen && self.policy != new.policy;
        }
        self.unused = unused;
        self.take_over(new, used, pools);
        for change in &changes {
            self.note(None, format!("reloaded: {change}"), by);
        }
        self.audit(by);
        self.ask_policy();
        Ok(changes)
    }

    /// Puts another configuration into use. `file` is the file's part of it.
    pub(super) fn take_over(&mut self, file: Config, new: Config, pools: BTreeMap<PoolName, Pool>) {
        let old_file = std::mem::replace(&mut self.file, file);
        let old = std::mem::replace(&mut self.config, new.clone());
        self.config_out.send_replace(Arc::new(new.clone()));
        for name in old.vms.keys().filter(|name| !new.vms.contains_key(*name)) {
            self.forget(name);
            let what = "no longer managed; it keeps its memory, which no longer counts";
            self.log
                .push(unix_ms(), Some(name.to_string()), what.into());
        }
        // VMs of a pool that goes, or that change their pool, take their accounts along.
        let (accounts, marks) = (self.controller.accounts(), self.controller.marks());
        let pools_before = std::mem::replace(&mut self.pools, pools);
        let nodes_before = |vm: &VmConfig| {
            let pool = old.pool_of(vm).and_then(|pool| pools_before.get(pool));
            pool.map(|pool| pool.nodes.clone()).unwrap_or_default()
        };
        self.controller.set(&sizes(&self.pools));
        for (name, now) in &new.vms {
            match old.vms.get(name) {
                Some(before) if self.controller.pool_of(name) == new.pool_of(now) => {
                    let size = |file: &Config| file.vms.get(name).map(VmConfig::sizes);
                    let is_resized = size(&old_file) != size(&self.file);
                    if before != now {
                        self.change(name, before, now, is_resized);
                    } else if now.manage != Manage::Agent && self.nodes_of(now) != nodes_before(now)
                    {
                        // The thread that moves its memory knows the old nodes.
                        self.start_task(name, now);
                        self.observe(name, Observation::Lost);
                    }
                }
                _ => {
                    self.found.remove(name);
                    self.place(name, now, accounts.get(name).copied(), marks.get(name));
                }
            }
        }
        if !self.policy_chosen {
            self.policy = new.policy;
        }
        self.fit();
        self.stale = true;
    }

    /// Lowers wishes until they fit into the pools.
    pub(super) fn fit(&mut self) {
        let (known, now) = (self.controller.accounts(), self.now());
        for (_, pool) in self.controller.iter_mut() {
            pool.fit(now, |name| match self.config.vms.get(name) {
                Some(vm) => vm.sizes(),
                None => known.get(name).map(|of| of.desired).unwrap_or_default(),
            });
        }
    }

    fn not_reloaded(&self, why: String) -> ChangeError {
        tracing::warn!("not reloaded: {why}");
        let what = format!("not reloaded: {why}");
        self.log.push(unix_ms(), None, what);
        ChangeError::Conflict(why)
    }

    /// The pools of a new configuration on this machine.
    fn pools_of(&self, new: &Config) -> Result<BTreeMap<PoolName, Pool>, String> {
        let pools = new.pools_in(&self.source, &self.tasks.files.root);
        let pools = pools.map_err(|error| error.to_string())?;
        for name in self.found.keys() {
            let pool = self.controller.pool_of(name);
            if let Some(pool) = pool.filter(|pool| !pools.contains_key(*pool)) {
                return Err(format!(
                    "discovered VM {name} is in pool {:?}, which this file does not have; keep the pool's name, or \
                     start the controller again",
                    pool.0
                ));
            }
        }
        Ok(pools)
    }

    /// The host's nodes of a VM's pool.
    fn nodes_of(&self, vm: &VmConfig) -> PerTier<Vec<NodeId>> {
        nodes_of(&self.config, &self.pools, vm)
    }

    /// Puts other values of a discovered VM into use. It takes its account along to another pool.
    pub(super) fn put(&mut self, name: &VmName, before: &VmConfig, now: &VmConfig) {
        if self.controller.pool_of(name) == self.config.pool_of(now) {
            return self.change(name, before, now, false);
        }
        let account = self.controller.accounts().get(name).copied();
        let mark = self.controller.marks().remove(name);
        self.place(name, now, account, mark.as_ref());
    }

    /// Changes a VM that stays in its pool. `is_resized` is whether the file has another size.
    pub(super) fn change(
        &mut self,
        name: &VmName,
        before: &VmConfig,
        now: &VmConfig,
        is_resized: bool,
    ) {
        let at = self.now();
        let is_static = self.policy == Policy::Static;
        if let Some(pool) = self.controller.of_mut(name) {
            // Cannot fail: the VM exists and its limits were checked.
            let _ = pool.set_limits(at, name, limits(now));
            if is_resized && is_static {
                pool.wish(at, name, now.sizes());
            }
        }
        if before.differs_in_sizes_only(now) {
            if let Some(known) = self.facts.get_mut(name) {
                known.resized(now);
            }
        } else {
            self.start_task(name, now);
            self.observe(name, Observation::Lost);
        }
    }

    /// Adds a VM to its pool, with the account that it had in another one or as a discovered VM.
    fn place(
        &mut self,
        name: &VmName,
        vm: &VmConfig,
        kept: Option<Account>,
        mark: Option<&String>,
    ) {
        self.controller.remove(name);
        let pool = self.config.pool_of(vm).cloned().unwrap_or_default();
        let added = self
            .controller
            .add(&pool, name, limits(vm), kept, vm.sizes());
        if let Err(refusal) = added {
            tracing::warn!("VM {name}: {refusal}");
            return;
        }
        if let (Some(reason), Some(pool)) = (mark, self.controller.of_mut(name)) {
            pool.mark(name, reason.clone());
        }
        self.start_task(name, vm);
    }

    /// Starts a VM's task. A former one ends, because its sender is dropped.
    pub(super) fn start_task(&mut self, name: &VmName, vm: &VmConfig) {
        let nodes = self.nodes_of(vm);
        self.commands
            .insert(name.clone(), self.tasks.start(name, vm, nodes));
        self.facts.insert(name.clone(), VmFacts::new(vm));
    }
}
