//! Defaults: values for all VMs that do not say otherwise.

use std::collections::BTreeMap;

use demeter_policy::provision::ProvisionerKind;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::bounds::{MIB_MAX, check_share, check_slowdown, within};
use super::error::{ConfigError, wrong};
use super::{TierConfig, VmConfig};
use crate::PoolName;

/// Values for VMs whose sections do not set them, and for discovered VMs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Defaults {
    /// The pool. Discovered VMs whose memory is bound to nodes of a pool belong to that one instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolName>,
    /// How a VM's size is changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provisioner: Option<ProvisionerKind>,
    /// Weight under the policy "shares".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<u32>,
    /// Largest slowdown against a VM whose memory is all fast, percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowdown_max_percent: Option<u32>,
    /// Out-of-memory allowance, MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oom_mib: Option<u64>,
    /// Extra memory of the hard limit, MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hard_limit_extra_mib: Option<u64>,
    /// Fast memory.
    #[serde(default, skip_serializing_if = "TierDefaults::is_empty")]
    pub fast: TierDefaults,
    /// Slow memory.
    #[serde(default, skip_serializing_if = "TierDefaults::is_empty")]
    pub slow: TierDefaults,
}

/// Values for a tier of VMs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TierDefaults {
    /// Minimum size of the tier, MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guarantee_mib: Option<u64>,
    /// Maximum size of the tier, MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_mib: Option<u64>,
}

impl Defaults {
    /// Checks the values for themselves, whether or not a VM takes them.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        check_share("defaults", self.share.unwrap_or(1))?;
        check_slowdown("defaults", self.slowdown_max_percent)?;
        within("defaults.oom_mib", self.oom_mib.unwrap_or_default())?;
        let extra_mib = self.hard_limit_extra_mib.unwrap_or_default();
        within("defaults.hard_limit_extra_mib", extra_mib)?;
        for (tier, of) in [("fast", &self.fast), ("slow", &self.slow)] {
            let limit_mib = of.limit_mib.unwrap_or(MIB_MAX);
            within(&format!("defaults.{tier}.limit_mib"), limit_mib)?;
            let guarantee_mib = of.guarantee_mib.unwrap_or_default();
            if guarantee_mib > limit_mib {
                return Err(wrong(
                    format!(
                        "defaults.{tier}.guarantee_mib = {guarantee_mib} is over its limit_mib = {limit_mib}"
                    ),
                    "change one of them",
                ));
            }
        }
        Ok(())
    }

    /// A discovered VM with these values.
    pub fn apply(&self, vm: VmConfig) -> VmConfig {
        let tier = |of: TierConfig, with: &TierDefaults| TierConfig {
            // It begins with what it has, whatever that is.
            guarantee_mib: with.guarantee_mib.unwrap_or_default().min(of.size_mib),
            limit_mib: with.limit_mib.map(|limit| limit.max(of.size_mib)),
            ..of
        };
        VmConfig {
            pool: vm.pool.or_else(|| self.pool.clone()),
            share: self.share.unwrap_or(vm.share),
            slowdown_max_percent: self.slowdown_max_percent,
            oom_mib: self.oom_mib.unwrap_or(vm.oom_mib),
            hard_limit_extra_mib: self.hard_limit_extra_mib,
            fast: tier(vm.fast, &self.fast),
            slow: tier(vm.slow, &self.slow),
            ..vm
        }
    }
}

impl Defaults {
    /// A VM's section as JSON, with these values where it sets none.
    pub fn complete(&self, section: serde_json::Value) -> Result<VmConfig, serde_json::Error> {
        let mut section = section;
        add_json(&mut section, serde_json::to_value(self)?);
        serde_json::from_value(section)
    }
}

/// Adds the keys of `more` that an object does not have.
fn add_json(object: &mut serde_json::Value, more: serde_json::Value) {
    use serde_json::Value;
    if let (Value::Object(object), Value::Object(more)) = (object, more) {
        for (key, value) in more {
            match object.get_mut(&key) {
                None | Some(Value::Null) => drop(object.insert(key, value)),
                Some(own) => add_json(own, value),
            }
        }
    }
}

impl TierDefaults {
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Sets what `defaults` has and a VM's section has not, in all sections of a document.
pub(super) fn fill(document: &mut Table, defaults: &Defaults) {
    // Plain data, so serialization cannot fail.
    let defaults = Table::try_from(defaults).unwrap_or_default();
    let Some(Value::Table(vms)) = document.get_mut("vm") else {
        return;
    };
    for (_, vm) in vms.iter_mut() {
        if let Value::Table(vm) = vm {
            add(vm, &defaults);
        }
    }
}

/// Adds the keys of `more` that a table does not have.
fn add(table: &mut Table, more: &Table) {
    let more: BTreeMap<_, _> = more.iter().collect();
    for (key, value) in more {
        match (table.get_mut(key), value) {
            (None, value) => {
                table.insert(key.clone(), value.clone());
            }
            (Some(Value::Table(own)), Value::Table(value)) => add(own, value),
            (Some(_), _) => {}
        }
    }
}
