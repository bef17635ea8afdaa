//! The pools of a host, each with a controller of its own.
//!
//! A VM belongs to one pool, so limits, accounts and commitments of two pools never meet.

use std::collections::BTreeMap;

use demeter_policy::{Tier, TierBytes};

use super::{Account, Controller, Limits, Millis, Refusal, VmStatus};
use crate::{PoolName, VmName};

/// All pools and their VMs.
#[derive(Debug, Default)]
pub struct Pools {
    pools: BTreeMap<PoolName, Controller>,
    /// The pool of each VM.
    of: BTreeMap<VmName, PoolName>,
}

impl Pools {
    /// Adds and resizes pools, and removes those that are not named. Their VMs are forgotten, with
    /// their accounts. Call [`Controller::fit`] afterwards.
    pub fn set(&mut self, sizes: &BTreeMap<PoolName, TierBytes>) {
        self.pools.retain(|name, _| sizes.contains_key(name));
        self.of.retain(|_, pool| sizes.contains_key(pool));
        for (name, size) in sizes {
            let pool = self.pools.entry(name.clone());
            pool.and_modify(|pool| pool.set_pools(*size))
                .or_insert_with(|| Controller::new(*size));
        }
    }

    /// Adds a VM to a pool; see [`Controller::add`].
    pub fn add(
        &mut self,
        pool: &PoolName,
        name: &VmName,
        limits: Limits,
        kept: Option<Account>,
        first: TierBytes,
    ) -> Result<(), Refusal> {
        let controller = self.pools.get_mut(pool);
        let controller = controller.ok_or_else(|| Refusal::NoPool(name.clone()))?;
        controller.add(name.clone(), limits, kept, first)?;
        self.of.insert(name.clone(), pool.clone());
        Ok(())
    }

    /// Removes a VM and frees its committed memory.
    pub fn remove(&mut self, name: &VmName) {
        if let Some(pool) = self.of_mut(name) {
            pool.remove(name);
        }
        self.of.remove(name);
    }

    /// The pool that a VM belongs to.
    pub fn pool_of(&self, name: &VmName) -> Option<&PoolName> {
        self.of.get(name)
    }

    /// The controller of a VM's pool.
    pub fn of(&self, name: &VmName) -> Option<&Controller> {
        self.pools.get(self.of.get(name)?)
    }

    /// The controller of a VM's pool, to change it.
    pub fn of_mut(&mut self, name: &VmName) -> Option<&mut Controller> {
        self.pools.get_mut(self.of.get(name)?)
    }

    /// The pools, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&PoolName, &Controller)> {
        self.pools.iter()
    }

    /// The pools, by name, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&PoolName, &mut Controller)> {
        self.pools.iter_mut()
    }

    /// A pool by its name.
    pub fn get(&self, name: &PoolName) -> Option<&Controller> {
        self.pools.get(name)
    }

    /// The state of a VM.
    pub fn vm(&self, name: &VmName) -> Option<VmStatus> {
        let mut vms = self.of(name)?.vms();
        vms.find_map(|(vm, status)| (vm == name).then_some(status))
    }

    /// The state of every VM, by name.
    pub fn vms(&self) -> BTreeMap<&VmName, VmStatus> {
        self.pools.values().flat_map(Controller::vms).collect()
    }

    /// Accounts of all VMs, to be stored.
    pub fn accounts(&self) -> BTreeMap<VmName, Account> {
        self.pools.values().flat_map(Controller::accounts).collect()
    }

    /// Hostile VMs, with the reason for each mark.
    pub fn marks(&self) -> BTreeMap<VmName, String> {
        self.pools.values().flat_map(Controller::marks).collect()
    }

    /// A figure of each tier, summed over all pools.
    pub fn sum(&self, of: impl Fn(&Controller, Tier) -> u64) -> TierBytes {
        TierBytes::from_fn(|tier| {
            let figures = self.pools.values().map(|pool| of(pool, tier));
            demeter_policy::ByteCount(figures.fold(0, u64::saturating_add))
        })
    }

    /// Number of violations in all pools. Must be 0; anything else is a bug.
    pub fn violations(&self) -> u64 {
        self.pools.values().map(Controller::violations).sum()
    }

    /// The time of the next step if nothing is observed or desired before.
    pub fn wake_at(&self) -> Option<Millis> {
        self.pools.values().filter_map(Controller::wake_at).min()
    }
}
