//! Settings: VMs that a person added, changed or removed while the controller ran.
//!
//! They are kept in the state file. For each key the order is: a setting, then the VM's section in
//! the file, then `[defaults]`. The file itself is never written.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Config, KeyChange, TierDefaults, VmConfig};
use crate::{PoolName, VmName};

/// Values of a VM that take precedence over its section; unset ones follow the file.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmChange {
    /// The pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolName>,
    /// Weight under the policy "shares".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<u32>,
    /// Largest slowdown against a VM whose memory is all fast, percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowdown_max_percent: Option<u32>,
    /// Guarantee and limit of fast memory.
    #[serde(skip_serializing_if = "TierDefaults::is_empty")]
    pub fast: TierDefaults,
    /// Guarantee and limit of slow memory.
    #[serde(skip_serializing_if = "TierDefaults::is_empty")]
    pub slow: TierDefaults,
}

impl VmChange {
    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Takes the values that `later` sets.
    fn merge(&mut self, later: Self) {
        let tier = |of: &mut TierDefaults, later: TierDefaults| {
            of.guarantee_mib = later.guarantee_mib.or(of.guarantee_mib);
            of.limit_mib = later.limit_mib.or(of.limit_mib);
        };
        self.pool = later.pool.or(self.pool.take());
        self.share = later.share.or(self.share);
        self.slowdown_max_percent = later.slowdown_max_percent.or(self.slowdown_max_percent);
        tier(&mut self.fast, later.fast);
        tier(&mut self.slow, later.slow);
    }

    /// The VM with these values. Its first sizes move between guarantee and limit.
    pub fn apply(&self, mut vm: VmConfig) -> VmConfig {
        for (of, change) in [(&mut vm.fast, &self.fast), (&mut vm.slow, &self.slow)] {
            of.guarantee_mib = change.guarantee_mib.unwrap_or(of.guarantee_mib);
            of.limit_mib = change.limit_mib.or(of.limit_mib);
            of.size_mib = of.size_mib.min(of.limit_mib.unwrap_or(u64::MAX));
            of.size_mib = of.size_mib.max(of.guarantee_mib);
        }
        vm.pool = self.pool.clone().or(vm.pool);
        vm.share = self.share.unwrap_or(vm.share);
        vm.slowdown_max_percent = self.slowdown_max_percent.or(vm.slowdown_max_percent);
        vm
    }
}

/// A person's setting for one VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Setting {
    /// A VM that was added, with its section.
    Added(Box<VmConfig>),
    /// Other values for a VM of the file or a discovered one.
    Changed(VmChange),
    /// A VM of the file or a discovered one that is not managed.
    Removed,
}

/// A person's request for a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// Manage this VM, too.
    Add(Box<VmConfig>),
    /// Change its values.
    Change(VmChange),
    /// Manage it no longer.
    Remove,
    /// Follow the file again.
    Reset,
}

/// The settings of all VMs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Settings(BTreeMap<VmName, Setting>);

impl Settings {
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The setting of a VM, if there is one.
    pub fn get(&self, name: &VmName) -> Option<&Setting> {
        self.0.get(name)
    }

    /// Records a request for a VM. `has_source` is whether the file or libvirt has it.
    pub fn record(&mut self, name: &VmName, asked: Asked, has_source: bool) {
        let setting = match (asked, self.0.remove(name)) {
            (Asked::Add(vm), _) => Some(Setting::Added(vm)),
            (Asked::Change(change), Some(Setting::Added(vm))) => {
                Some(Setting::Added(Box::new(change.apply(*vm))))
            }
            (Asked::Change(change), Some(Setting::Changed(mut before))) => {
                before.merge(change);
                Some(Setting::Changed(before))
            }
            (Asked::Change(change), _) => Some(Setting::Changed(change)),
            (Asked::Remove, _) => has_source.then_some(Setting::Removed),
            (Asked::Reset, _) => None,
        };
        self.0
            .extend(setting.map(|setting| (name.clone(), setting)));
    }

    /// The configuration in use, and settings that cannot be used with this file, with the reason.
    pub fn apply(&self, file: &Config) -> (Config, BTreeMap<VmName, String>) {
        let (mut all, mut unused) = (file.clone(), BTreeMap::new());
        for (name, setting) in &self.0 {
            if let Err(why) = put(&mut all, name, setting) {
                unused.insert(name.clone(), why);
            }
        }
        if all.check_keys().is_ok() {
            return (all, unused);
        }
        // Find out which ones.
        let mut used = file.clone();
        for (name, setting) in &self.0 {
            let mut with = used.clone();
            match put(&mut with, name, setting)
                .and_then(|()| with.check_keys().map_err(|error| error.bare()))
            {
                Ok(()) => used = with,
                Err(why) => drop(unused.insert(name.clone(), why)),
            }
        }
        (used, unused)
    }

    /// A discovered VM with its setting; `None` if it was removed.
    pub fn apply_to_found(&self, name: &VmName, found: &VmConfig) -> Option<VmConfig> {
        match self.0.get(name) {
            Some(Setting::Removed) => None,
            Some(Setting::Changed(change)) => Some(change.apply(found.clone())),
            Some(Setting::Added(_)) | None => Some(found.clone()),
        }
    }

    /// Keys whose values differ between the file and what is used. An added or removed VM is one.
    pub fn overrides(&self, file: &Config, used: &Config) -> Vec<KeyChange> {
        let mut overrides = vec![];
        for (name, setting) in &self.0 {
            let in_file = file.vms.get(name);
            let whole = |to: &str| KeyChange {
                key: format!("vm.{name}"),
                from: in_file.map(|_| "described".into()),
                to: Some(to.into()),
                ..KeyChange::default()
            };
            match (setting, in_file) {
                (Setting::Removed, _) => overrides.push(whole("removed")),
                (Setting::Added(_), None) if used.vms.contains_key(name) => {
                    overrides.push(whole("added"));
                }
                (Setting::Changed(change), None) if file.discover.is_some() => {
                    overrides.extend(change.keys(name));
                }
                // It is not in use.
                (Setting::Added(_) | Setting::Changed(_), None) => {}
                (_, Some(section)) => {
                    let now = used.vms.get(name).unwrap_or(section);
                    overrides.extend(KeyChange::between(&format!("vm.{name}"), section, now));
                }
            }
        }
        overrides
    }
}

impl VmChange {
    /// The keys that it sets for a VM without a section.
    fn keys(&self, name: &VmName) -> Vec<KeyChange> {
        KeyChange::between(&format!("vm.{name}"), &Self::default(), self)
    }
}

/// Puts one setting into a configuration.
fn put(config: &mut Config, name: &VmName, setting: &Setting) -> Result<(), String> {
    match setting {
        Setting::Added(vm) => drop(config.vms.insert(name.clone(), *vm.clone())),
        Setting::Removed => drop(config.vms.remove(name)),
        Setting::Changed(change) => match config.vms.remove(name) {
            Some(vm) => drop(config.vms.insert(name.clone(), change.apply(vm))),
            // libvirt may find it.
            None if config.discover.is_some() => {}
            None => return Err("the file does not have this VM".into()),
        },
    }
    Ok(())
}

#[cfg(test)]
mod tests;
