//! Decides what is asked of which VM and when, and keeps what is committed within the pools.
//!
//! # Problem
//! VMs shall come to own what is wished, while guests refuse, stall, crash, restart and lie,
//! commands and observations get lost, and the controller itself may be killed at any point. At no
//! instant may more of a tier be committed than its pool holds.
//!
//! # Terms
//! - *desired*: what a VM shall have of a tier, with what its driver may give back to the guest by
//!   itself when that runs out of memory (the out-of-memory allowance, slow memory only).
//! - *owned*: what it has, as its provisioner verified last; unknown after every disturbance.
//! - *committed*: what it may have at most, and what is taken off the pool for it.
//!
//! # Approach
//! Level-triggered: [`Controller::observe`] only corrects the view, [`Controller::step`] compares
//! it with what is desired and sends what brings them nearer, at most one command to a VM at a
//! time. Counted is raised *before* a VM is told to grow, as far as the pool has room, and lowered
//! *after* it was verified to have shrunk: so shrinking comes before growing, across all VMs,
//! without any plan. A command carries a ticket; observations on any other than the current one are
//! stale and change nothing. After a failure the VM is asked what it owns before anything else.
//!
//! Counted survives the controller ([`Store`](crate::store::Store)): it is saved before commands
//! are sent that rely on it.
//!
//! A VM boots with all its memory and shrinks from there: what it is committed then is what it had
//! before, or its first wish, and that it is not to touch more until it was shrunk is for its
//! owner to see to. Whoever is caught lying is left alone, with all that was committed to it, until its
//! hypervisor has ended or somebody forgives it; the mark survives the controller, too.
//!
//! # Properties
//! - The committed sum of a tier never exceeds its pool, whatever comes in, in any order.
//! - What a VM that keeps to the protocol owns never exceeds what is committed to it.
//! - A VM that fails, stalls or lies delays no other, but for memory that it does not give.
//! - Once disturbances stop, every VM comes to own what is desired.
//! - A wish beyond a pool, under a guarantee or over a limit is refused, and changes nothing.

mod limits;
mod log;
mod message;
mod vm;

use std::collections::BTreeMap;
use std::mem;
use std::time::Duration;

use demeter_policy::{ByteCount, PAGE_SIZE, PerTier, Tier, TierBytes};

use crate::VmName;
use crate::store::Account;

pub use limits::Limits;
pub use log::{LogEntry, What};
pub use message::{Millis, Observation, Order, Refusal, Ticket, VmCommand};
pub use vm::{State, VmStatus};

use vm::Vm;

/// How long a provisioner may take for one command.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// How much longer the controller waits for the observation.
const GRACE: Duration = Duration::from_secs(1);

/// What is to be done after a [`Controller::step`], in this order.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Step {
    /// The accounts have changed: save them first.
    pub accounts_changed: bool,
    /// Then send these.
    pub commands: Vec<VmCommand>,
    /// What has happened since the step before.
    pub log: Vec<LogEntry>,
}

/// Brings VMs to what is desired. See the module's text.
#[derive(Debug)]
pub struct Controller {
    pools: TierBytes,
    vms: BTreeMap<VmName, Vm>,
    tickets: u64,
    accounts_changed: bool,
    log: Vec<LogEntry>,
    violations: u64,
}

impl Controller {
    /// A controller of these pools, without VMs.
    pub fn new(pools: TierBytes) -> Self {
        Self {
            pools,
            vms: BTreeMap::new(),
            tickets: 0,
            accounts_changed: false,
            log: vec![],
            violations: 0,
        }
    }

    /// Takes a VM on, with what was kept of it or with `first` as its wish.
    ///
    /// Refused where the pools cannot hold it beside the others.
    pub fn add(
        &mut self,
        name: VmName,
        limits: Limits,
        kept: Option<Account>,
        first: TierBytes,
    ) -> Result<(), Refusal> {
        if self.vms.contains_key(&name) {
            return Err(Refusal::Twice(name));
        }
        let desired = match kept {
            // The limits may have changed since.
            Some(kept) => limits.clamp(kept.desired),
            None => whole_pages(first),
        };
        limits.check(&name, desired)?;
        let committed = kept.map_or(desired, |kept| kept.committed);
        let account = Account { desired, committed };
        for tier in Tier::ALL {
            let with_others = |own: TierBytes, of: fn(&Vm, Tier) -> u64| {
                let others = self.vms.values().map(|vm| u128::from(of(vm, tier)));
                u128::from(own.get(tier).0) + others.sum::<u128>()
            };
            let wished = with_others(desired, Vm::wished);
            let committed_in_all = with_others(committed, Vm::committed);
            self.check_pool(tier, wished.max(committed_in_all))?;
        }
        self.vms.insert(name, Vm::new(limits, account));
        self.accounts_changed = true;
        Ok(())
    }

    /// Forgets a VM whose hypervisor has ended and will not come back: what was committed to it is free.
    pub fn remove(&mut self, name: &VmName) {
        self.accounts_changed |= self.vms.remove(name).is_some();
    }

    /// Leaves a VM alone, as a controller before this one had decided when it ended.
    pub fn mark(&mut self, name: &VmName, reason: String) {
        if let Some(vm) = self.vms.get_mut(name) {
            vm.mark(reason);
        }
    }

    /// Speaks with a VM again that was caught lying. Says whether it was; refused if there is none.
    pub fn forgive(&mut self, now: Millis, name: &VmName) -> Result<bool, Refusal> {
        let vm = self.vms.get_mut(name);
        let vm = vm.ok_or_else(|| Refusal::Unknown(name.clone()))?;
        let was_marked = vm.forgive();
        if was_marked {
            self.accounts_changed = true;
            self.log.push(LogEntry::new(now, name, What::Forgiven));
        }
        Ok(was_marked)
    }

    /// Changes what VMs shall have: all of `wishes`, or none of them.
    pub fn desire(&mut self, now: Millis, wishes: &[(VmName, TierBytes)]) -> Result<(), Refusal> {
        let mut desired: BTreeMap<&VmName, TierBytes> = BTreeMap::new();
        for (name, wish) in wishes {
            let vm = self.vms.get(name);
            let vm = vm.ok_or_else(|| Refusal::Unknown(name.clone()))?;
            if let Some(reason) = vm.hostile() {
                return Err(Refusal::Hostile {
                    vm: name.clone(),
                    reason: reason.to_owned(),
                });
            }
            let wish = whole_pages(*wish);
            vm.limits().check(name, wish)?;
            desired.insert(name, wish);
        }
        for tier in Tier::ALL {
            let wished = self.vms.iter().map(|(name, vm)| {
                let wish = desired.get(name).map(|wish| wish.get(tier).0);
                u128::from(wish.unwrap_or_else(|| vm.wished(tier)))
            });
            self.check_pool(tier, wished.sum())?;
        }
        for (name, wish) in desired {
            // Found above.
            if let Some(vm) = self.vms.get_mut(name)
                && vm.desire(wish)
            {
                self.accounts_changed = true;
                self.log.push(LogEntry::new(now, name, What::Desired(wish)));
            }
        }
        Ok(())
    }

    /// Takes in what a VM's task tells. Observations of VMs that are not here change nothing.
    pub fn observe(&mut self, now: Millis, name: &VmName, observation: Observation) {
        let Some(vm) = self.vms.get_mut(name) else {
            return;
        };
        let before = (*vm.account(), vm.hostile().is_some());
        if let Some(what) = vm.observe(now, observation) {
            self.log.push(LogEntry::new(now, name, what));
        }
        self.accounts_changed |= before != (*vm.account(), vm.hostile().is_some());
    }

    /// Finds out what is to be done now.
    pub fn step(&mut self, now: Millis) -> Step {
        for (name, vm) in &mut self.vms {
            if let Some(what) = vm.give_up_on_overdue(now) {
                self.log.push(LogEntry::new(now, name, what));
            }
        }
        let mut room = PerTier::from_fn(|tier| {
            ByteCount(
                self.pools
                    .get(tier)
                    .0
                    .saturating_sub(self.committed(tier).0),
            )
        });
        let mut commands = vec![];
        for (name, vm) in &mut self.vms {
            let before = *vm.account();
            if let Some(order) = vm.next_order(now, &mut room) {
                self.tickets += 1;
                let ticket = Ticket(self.tickets);
                vm.sent(now, ticket, order);
                self.log.push(LogEntry::new(now, name, What::Sent(order)));
                commands.push(VmCommand {
                    vm: name.clone(),
                    ticket,
                    order,
                });
            }
            self.accounts_changed |= before != *vm.account();
        }
        self.check_invariant(now);
        Step {
            accounts_changed: mem::take(&mut self.accounts_changed),
            commands,
            log: mem::take(&mut self.log),
        }
    }

    /// When the next [`step`](Self::step) is due if nothing is observed or desired before.
    pub fn wake_at(&self) -> Option<Millis> {
        self.vms.values().filter_map(Vm::wake_at).min()
    }

    /// The size of a pool.
    pub fn pool(&self, tier: Tier) -> ByteCount {
        *self.pools.get(tier)
    }

    /// What is committed from a pool.
    pub fn committed(&self, tier: Tier) -> ByteCount {
        ByteCount(self.vms.values().map(|vm| vm.committed(tier)).sum())
    }

    /// Steps after which more was committed than a pool holds. Zero, or this controller is wrong.
    pub fn violations(&self) -> u64 {
        self.violations
    }

    /// Every VM as it stands.
    pub fn vms(&self) -> impl Iterator<Item = (&VmName, VmStatus)> {
        self.vms.iter().map(|(name, vm)| (name, vm.status()))
    }

    /// What is to be kept of every VM.
    pub fn accounts(&self) -> BTreeMap<VmName, Account> {
        let account = |(name, vm): (&VmName, &Vm)| (name.clone(), *vm.account());
        self.vms.iter().map(account).collect()
    }

    /// Who is left alone, and why.
    pub fn marks(&self) -> BTreeMap<VmName, String> {
        let mark = |(name, vm): (&VmName, &Vm)| Some((name.clone(), vm.hostile()?.to_owned()));
        self.vms.iter().filter_map(mark).collect()
    }

    fn check_pool(&self, tier: Tier, wished: u128) -> Result<(), Refusal> {
        let pool = *self.pools.get(tier);
        if wished <= pool.0.into() {
            return Ok(());
        }
        Err(Refusal::BeyondPool {
            tier,
            wished: ByteCount(u64::try_from(wished).unwrap_or(u64::MAX)),
            pool,
        })
    }

    fn check_invariant(&mut self, now: Millis) {
        for tier in Tier::ALL {
            let (committed, pool) = (self.committed(tier), self.pool(tier));
            if committed > pool {
                self.violations += 1;
                let what = What::OverPool {
                    tier,
                    committed,
                    pool,
                };
                self.log.push(LogEntry::of_host(now, what));
            }
        }
    }
}

fn whole_pages(bytes: TierBytes) -> TierBytes {
    PerTier::from_fn(|tier| ByteCount(bytes.get(tier).0 / PAGE_SIZE * PAGE_SIZE))
}

#[cfg(test)]
mod tests;
