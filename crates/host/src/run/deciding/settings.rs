//! VMs that a person adds, changes and removes while the controller runs.

use std::collections::BTreeMap;

use demeter_policy::provision::Policy;
use demeter_policy::{ByteCount, MIB, Tier, TierBytes};

use super::{Deciding, of_pool, unix_ms};
use crate::api::ChangeError;
use crate::config::{Asked, Config, Setting, VmConfig};
use crate::controller::VmStatus;
use crate::hypervisor::libvirt::LeftDomain;
use crate::run::check_descriptors;
use crate::view::SettingView;
use crate::{PoolName, VmName};

impl Deciding {
    /// Carries out a request for a VM: all of it, or nothing with the reason.
    pub(super) fn set(
        &mut self,
        name: &VmName,
        asked: Asked,
        may_run: bool,
        by: &str,
    ) -> Result<(), ChangeError> {
        let conflict = |why: String| Err(ChangeError::Conflict(why));
        let is_managed = self.controller.vm(name).is_some();
        let in_file = self.file.vms.contains_key(name);
        match &asked {
            Asked::Add(_) if is_managed => {
                return conflict(format!(
                    "VM {name} is managed already; demeter host vm set changes it"
                ));
            }
            Asked::Add(_) if in_file => {
                return conflict(format!(
                    "VM {name} is in the file and was removed by command; demeter host vm reset {name} manages \
                     it again"
                ));
            }
            Asked::Change(_) | Asked::Remove if !is_managed => {
                return Err(ChangeError::NoVm(name.clone()));
            }
            Asked::Reset if self.settings.get(name).is_none() => {
                return conflict(format!("nothing is set for VM {name} by command"));
            }
            _ => {}
        }
        if self.evacuates && !matches!(asked, Asked::Remove) {
            return conflict(self.evacuating());
        }
        let mut settings = self.settings.clone();
        let what = described(&asked);
        settings.record(name, asked, in_file || self.found.contains_key(name));
        let (used, mut unused) = settings.apply(&self.file);
        if let Some(why) = unused.remove(name) {
            return conflict(why);
        }
        check_descriptors(&used).or_else(|error| conflict(error.to_string()))?;
        let found = self.found.get(name);
        let found = found.and_then(|found| settings.apply_to_found(name, found));
        match used.vms.get(name).or(found.as_ref()) {
            Some(vm) => self.admit(&used, name, vm).or_else(conflict)?,
            None if !may_run => self.check_at_rest(name).or_else(conflict)?,
            None => {}
        }
        let before = self.found.get(name);
        let before = before.and_then(|vm| self.settings.apply_to_found(name, vm));
        self.settings = settings;
        self.unused = unused;
        let file = self.file.clone();
        self.note(Some(name), what, by);
        self.take_over(file, used, self.pools.clone());
        match (before, found) {
            (Some(before), Some(now)) => {
                self.put(name, &before, &now);
                self.fit();
            }
            (Some(before), None) => {
                self.forget(name);
                let sizes = before.sizes();
                let memory = ByteCount(sizes.fast.0.saturating_add(sizes.slow.0));
                let why = removed(name);
                self.left
                    .insert(name.to_string(), LeftDomain { why, memory });
            }
            _ => {}
        }
        self.audit(by);
        self.ask_policy();
        Ok(())
    }

    /// Reason for a refusal during an evacuation.
    pub(super) fn evacuating(&self) -> String {
        "all VMs get all their memory back; end that with demeter host policy static".into()
    }

    /// Ends the management of a VM.
    pub(super) fn forget(&mut self, name: &VmName) {
        self.controller.remove(name);
        // Dropping the sender ends its task.
        self.commands.remove(name);
        self.facts.remove(name);
        self.found.remove(name);
        self.stale = true;
    }

    /// Refuses to forget a VM that runs: its memory would no longer count.
    fn check_at_rest(&self, name: &VmName) -> Result<(), String> {
        let running = self.controller.vm(name).filter(|vm| vm.runs);
        running.map_or(Ok(()), |vm| {
            let mib = (vm.may_hold.fast.0.saturating_add(vm.may_hold.slow.0)).div_ceil(MIB);
            Err(format!(
                "VM {name} runs with up to {mib} MiB, which would no longer count against the pool; stop it \
                 first, or give --running"
            ))
        })
    }

    /// Checks that a new or changed VM fits beside the others of its pool: with its first size
    /// under the policy "static", else with its guarantee.
    pub(super) fn admit(
        &self,
        config: &Config,
        name: &VmName,
        vm: &VmConfig,
    ) -> Result<(), String> {
        let Some(pool) = config.pool_of(vm) else {
            let named = vm.pool.clone().unwrap_or_default();
            return Err(format!(
                "pool {:?} is not there; name a [[pool]] of the file",
                named.0
            ));
        };
        let is_new = self.controller.vm(name).is_none();
        let (needs, of): (_, fn(&VmStatus) -> TierBytes) = match self.policy {
            Policy::Static if is_new => (vm.sizes(), |vm| vm.desired),
            _ => (vm.guarantees(), |vm| vm.limits.guarantee),
        };
        let room = self.left_by_others(pool, name, of);
        for tier in Tier::ALL {
            let missing = needs.get(tier).0.saturating_sub(room.get(tier).0);
            if missing > 0 {
                return Err(format!(
                    "{}VM {name} does not fit: {} MiB of {tier} memory are missing; lower another VM, or enlarge \
                     the pool",
                    of_pool(pool),
                    missing.div_ceil(MIB)
                ));
            }
        }
        Ok(())
    }

    /// Memory of a pool without what counts for its other VMs.
    pub(super) fn left_by_others(
        &self,
        pool: &PoolName,
        name: &VmName,
        counts: fn(&VmStatus) -> TierBytes,
    ) -> TierBytes {
        let Some(controller) = self.controller.get(pool) else {
            return TierBytes::default();
        };
        TierBytes::from_fn(|tier| {
            let others = controller.vms().filter(|(of, _)| *of != name);
            let taken = others.map(|(_, of)| counts(&of).get(tier).0);
            let taken = taken.fold(0, u64::saturating_add);
            ByteCount(controller.pool(tier).0.saturating_sub(taken))
        })
    }

    /// Settings that take precedence over the file, for people.
    pub(super) fn settings_view(&self) -> Vec<SettingView> {
        let policy = self.policy_chosen && self.policy != self.file.policy;
        let policy = policy.then(|| SettingView {
            key: "policy".into(),
            file: Some(self.file.policy.to_string()),
            value: self.policy.to_string(),
            problem: None,
        });
        let keys = self.settings.overrides(&self.file, &self.config);
        let keys = keys.into_iter().map(|key| SettingView {
            key: key.key,
            file: key.from,
            value: key.to.unwrap_or_else(|| "not set".into()),
            problem: None,
        });
        let unused = self.unused.iter().map(|(name, why)| SettingView {
            key: format!("vm.{name}"),
            file: None,
            value: described_setting(self.settings.get(name)).into(),
            problem: Some(why.clone()),
        });
        policy.into_iter().chain(keys).chain(unused).collect()
    }

    /// Logs settings that cannot be used.
    pub(super) fn tell_unused(&self, unused: &BTreeMap<VmName, String>) {
        for (name, why) in unused {
            tracing::warn!("VM {name}: what was set by command is not in use: {why}");
            let what = format!("what was set by command is not in use: {why}");
            self.log.push(unix_ms(), Some(name.to_string()), what);
        }
    }
}

/// Why a domain that runs is not managed.
pub(super) fn removed(name: &VmName) -> String {
    format!("removed by command; demeter host vm reset {name} manages it again")
}

fn described_setting(setting: Option<&Setting>) -> &'static str {
    match setting {
        Some(Setting::Added(_)) => "added",
        Some(Setting::Removed) => "removed",
        Some(Setting::Changed(_)) | None => "changed",
    }
}

/// An event's text.
fn described(asked: &Asked) -> String {
    match asked {
        Asked::Add(_) => "added by command".into(),
        Asked::Change(change) => {
            // Plain data, so serialization cannot fail.
            let values = serde_json::to_string(change).unwrap_or_default();
            format!("set by command: {values}")
        }
        Asked::Remove => "removed by command; it keeps its memory, which no longer counts".into(),
        Asked::Reset => "follows the file again".into(),
    }
}
