//! The controller: decides which VM grows or shrinks, and when, within the pools.
//!
//! # Problem
//! VMs should own what is desired. But guests refuse, stall, crash, restart and lie; commands and
//! observations get lost; the controller itself may be killed at any point. At no instant may more
//! of a tier be committed than its pool holds.
//!
//! # Terms
//! - *desired*: memory of a tier that a VM should have. It includes the out-of-memory allowance:
//!   slow memory that the driver may give back to the guest by itself.
//! - *owned*: memory that the VM has, as its provisioner verified last; unknown after a
//!   disturbance.
//! - *committed*: upper bound of what the VM may have; it is taken from the pool.
//!
//! # Approach
//! The controller is level-triggered. [`Controller::observe`] only corrects its view.
//! [`Controller::step`] compares the view with the desired sizes and sends at most one command to a
//! VM at a time.
//!
//! Committed memory is raised *before* a VM is asked to grow, as far as the pool has room. It is
//! lowered *after* the VM was verified to have shrunk. So shrinking precedes growing, across all
//! VMs, without a plan. Each command carries a ticket; an observation with any other ticket is
//! stale and ignored. After a failure the VM is first asked what it owns.
//!
//! Committed memory survives the controller ([`Store`](crate::store::Store)): it is saved before
//! commands that rely on it are sent.
//!
//! A VM boots with all its memory and shrinks from there. So each VM also has an upper bound of
//! what it *may hold*. The bound is all its memory once its hypervisor is seen or the VM is reset,
//! even if no agent connects. It falls when the VM was verified to own less. VMs grow only by
//! memory that no VM may hold.
//!
//! A controller may start with smaller pools or more VMs than before. It then lowers wishes
//! ([`Controller::fit`]) and shrinks VMs until everything fits. A hostile VM is left alone and
//! keeps its committed memory until its hypervisor exits or an operator forgives it. The mark
//! survives the controller, too.
//!
//! # Properties
//! - The committed sum of a tier never exceeds its pool, for any inputs in any order. If it
//!   exceeded the pool when the controller started, it never grows.
//! - An honest VM never owns more than it may hold, and once it has shrunk, never more than is
//!   committed to it.
//! - While VMs may hold more of a tier than its pool has, none grows in it.
//! - A VM that fails, stalls or lies delays no other, except for the memory that it does not
//!   return.
//! - Once disturbances stop, every VM comes to own what is desired.
//! - A wish beyond a pool, below a guarantee or above a limit is refused and changes nothing.

mod limits;
mod log;
mod message;
mod pools;
mod vm;

use std::collections::BTreeMap;
use std::mem;
use std::time::Duration;

use demeter_policy::{ByteCount, PAGE_SIZE, PerTier, Tier, TierBytes};

use crate::VmName;

pub use limits::Limits;
pub use log::{LogEntry, What};
pub use message::{Millis, Observation, Order, Refusal, Ticket, VmCommand};
pub use pools::Pools;
pub use vm::{Account, State, VmStatus};

use vm::Vm;

/// Time limit of a provisioner for one command.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// Extra time that the controller waits for the observation. The VM's task bounds the work itself. On a busy host commands
/// and observations arrive late, and a command that is sent again adds to the load.
const GRACE: Duration = Duration::from_secs(12);

/// Actions that must follow a [`Controller::step`], in this order.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Step {
    /// Whether the accounts have changed and must be saved first.
    pub accounts_changed: bool,
    /// Commands to send afterwards.
    pub commands: Vec<VmCommand>,
    /// Log entries since the previous step.
    pub log: Vec<LogEntry>,
}

/// Obstacles to giving every VM all its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lacking {
    /// Memory that the pool lacks.
    pub memory: TierBytes,
    /// A VM that runs and cannot be given memory, and why.
    pub vm: Option<(VmName, String)>,
}

/// Brings VMs to their desired sizes; see the module's documentation.
#[derive(Debug)]
pub struct Controller {
    pools: TierBytes,
    vms: BTreeMap<VmName, Vm>,
    tickets: u64,
    accounts_changed: bool,
    log: Vec<LogEntry>,
    violations: u64,
    /// The maximum committed sum: the pool, or more if more was committed at the start.
    allowed: TierBytes,
    /// Whether the last log entry said that VMs may hold more than the pool.
    above: PerTier<bool>,
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
            allowed: pools,
            above: PerTier::default(),
        }
    }

    /// Adds a VM with its stored account, or with `first` as its wish.
    ///
    /// The pools may be too small for it: [`fit`](Self::fit) lowers wishes, and memory committed
    /// earlier counts.
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
            // The limits may have changed since the account was stored.
            Some(kept) => whole_pages(limits.clamp(kept.desired)),
            None => whole_pages(first),
        };
        limits.check(&name, desired)?;
        let left = |tier| {
            self.pools
                .get(tier)
                .0
                .saturating_sub(self.committed(tier).0)
        };
        let free = TierBytes::from_fn(|tier| ByteCount(left(tier)).min(*desired.get(tier)));
        let committed = kept.map_or(free, |kept| kept.committed);
        let account = Account { desired, committed };
        self.vms.insert(name, Vm::new(limits, account));
        self.accounts_changed = true;
        for tier in Tier::ALL {
            *self.allowed.get_mut(tier) = self.committed(tier).max(*self.pools.get(tier));
        }
        Ok(())
    }

    /// Changes the pools. Call [`fit`](Self::fit) afterwards.
    pub fn set_pools(&mut self, pools: TierBytes) {
        self.pools = pools;
        for tier in Tier::ALL {
            *self.allowed.get_mut(tier) = self.committed(tier).max(*pools.get(tier));
        }
    }

    /// Sets a wish that may exceed the pools. Call [`fit`](Self::fit) afterwards.
    pub fn wish(&mut self, now: Millis, name: &VmName, wish: TierBytes) {
        if let Some(vm) = self.vms.get_mut(name)
            && vm.hostile().is_none()
        {
            let wish = whole_pages(vm.limits().clamp(wish));
            if vm.desire(wish) {
                self.accounts_changed = true;
                self.log.push(LogEntry::new(now, name, What::Desired(wish)));
            }
        }
    }

    /// Changes the limits of a VM.
    pub fn set_limits(
        &mut self,
        now: Millis,
        name: &VmName,
        limits: Limits,
    ) -> Result<(), Refusal> {
        let vm = self.vms.get_mut(name);
        let vm = vm.ok_or_else(|| Refusal::Unknown(name.clone()))?;
        let before = vm.account().desired;
        vm.set_limits(limits);
        let wish = vm.account().desired;
        if wish != before {
            self.log.push(LogEntry::new(now, name, What::Desired(wish)));
        }
        self.accounts_changed = true;
        Ok(())
    }

    /// Lowers wishes until they fit into the pools. Wishes above their configured size (`first`)
    /// are lowered in proportion to their excess, and if that is not enough, wishes above their
    /// guarantee.
    pub fn fit(&mut self, now: Millis, first: impl Fn(&VmName) -> TierBytes) {
        let first: BTreeMap<VmName, TierBytes> = self
            .vms
            .keys()
            .map(|name| (name.clone(), first(name)))
            .collect();
        for tier in Tier::ALL {
            self.lower(now, tier, |name, _| first[name].get(tier).0);
            self.lower(now, tier, |_, vm| vm.limits().guarantee.get(tier).0);
        }
    }

    /// Lowers the wishes of a tier that exceed their floor, in proportion to their excess.
    fn lower(&mut self, now: Millis, tier: Tier, floor: impl Fn(&VmName, &Vm) -> u64) {
        let wished: u128 = self
            .vms
            .values()
            .map(|vm| u128::from(vm.wished(tier)))
            .sum();
        let over = wished.saturating_sub(self.pools.get(tier).0.into());
        let above = |name: &VmName, vm: &Vm| match vm.hostile() {
            // A hostile VM's account must not change.
            Some(_) => 0,
            None => {
                let least = floor(name, vm).max(vm.limits().guarantee.get(tier).0);
                u128::from(vm.wished(tier).saturating_sub(least))
            }
        };
        let above_in_all: u128 = self.vms.iter().map(|(name, vm)| above(name, vm)).sum();
        if over == 0 || above_in_all == 0 {
            return;
        }
        let cut_of = |above: u128| {
            let page = u128::from(PAGE_SIZE);
            let cut = (above * over).div_ceil(above_in_all).min(above);
            cut.next_multiple_of(page).min(above)
        };
        for (name, vm) in &mut self.vms {
            let cut = cut_of(above(name, vm));
            if cut > 0 {
                let mut wish = vm.account().desired;
                let of_tier = wish.get_mut(tier);
                // The cut never exceeds the wish.
                of_tier.0 -= u64::try_from(cut).unwrap_or(of_tier.0).min(of_tier.0);
                vm.desire(wish);
                self.accounts_changed = true;
                self.log.push(LogEntry::new(now, name, What::Desired(wish)));
            }
        }
    }

    /// Removes a VM whose hypervisor has exited for good and frees its committed memory.
    pub fn remove(&mut self, name: &VmName) {
        self.accounts_changed |= self.vms.remove(name).is_some();
    }

    /// Marks a VM as hostile, as an earlier controller did.
    pub fn mark(&mut self, name: &VmName, reason: String) {
        if let Some(vm) = self.vms.get_mut(name) {
            vm.mark(reason);
        }
    }

    /// Lifts a VM's hostile mark. Returns whether it had one; refused for an unknown VM.
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

    /// Takes the log entries since the last step.
    pub fn take_log(&mut self) -> Vec<LogEntry> {
        mem::take(&mut self.log)
    }

    /// Changes the desired sizes: all of `wishes`, or none of them.
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
            let before: u128 = self
                .vms
                .values()
                .map(|vm| u128::from(vm.wished(tier)))
                .sum();
            let wished = self.vms.iter().map(|(name, vm)| {
                let wish = desired.get(name).map(|wish| wish.get(tier).0);
                u128::from(wish.unwrap_or_else(|| vm.wished(tier)))
            });
            let wished: u128 = wished.sum();
            // A lower sum is always accepted, even if it still exceeds the pool.
            if wished > before {
                self.check_pool(tier, wished)?;
            }
        }
        for (name, wish) in desired {
            // The VM exists: it was looked up above.
            if let Some(vm) = self.vms.get_mut(name)
                && vm.desire(wish)
            {
                self.accounts_changed = true;
                self.log.push(LogEntry::new(now, name, What::Desired(wish)));
            }
        }
        Ok(())
    }

    /// Takes an observation of a VM's task. Observations of unknown VMs change nothing.
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

    /// Returns the commands that are due now.
    pub fn step(&mut self, now: Millis) -> Step {
        for (name, vm) in &mut self.vms {
            if let Some(what) = vm.give_up_on_overdue(now) {
                self.log.push(LogEntry::new(now, name, what));
            }
        }
        let left = |of: ByteCount, tier| ByteCount(self.pools.get(tier).0.saturating_sub(of.0));
        let mut room = PerTier::from_fn(|tier| left(self.committed(tier), tier));
        let mut unheld = PerTier::from_fn(|tier| left(self.may_hold(tier), tier));
        self.tell_excess(now);
        let mut commands = vec![];
        for (name, vm) in &mut self.vms {
            let before = *vm.account();
            if let Some(order) = vm.next_order(now, &mut room, &mut unheld) {
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

    /// The time of the next [`step`](Self::step) if nothing is observed or desired before.
    pub fn wake_at(&self) -> Option<Millis> {
        self.vms.values().filter_map(Vm::wake_at).min()
    }

    /// The size of a pool.
    pub fn pool(&self, tier: Tier) -> ByteCount {
        *self.pools.get(tier)
    }

    /// Memory committed from a pool.
    pub fn committed(&self, tier: Tier) -> ByteCount {
        let committed = self.vms.values().map(|vm| vm.committed(tier));
        ByteCount(committed.fold(0, u64::saturating_add))
    }

    /// Upper bound of a tier's memory that VMs hold, committed or not.
    pub fn may_hold(&self, tier: Tier) -> ByteCount {
        let held = self.vms.values().map(|vm| vm.may_hold(tier));
        ByteCount(held.fold(0, u64::saturating_add))
    }

    /// Number of steps after which more was committed than a pool holds. Must be 0; anything else
    /// is a bug.
    pub fn violations(&self) -> u64 {
        self.violations
    }

    /// The state of every VM.
    pub fn vms(&self) -> impl Iterator<Item = (&VmName, VmStatus)> {
        self.vms.iter().map(|(name, vm)| (name, vm.status()))
    }

    /// Accounts of all VMs, to be stored.
    pub fn accounts(&self) -> BTreeMap<VmName, Account> {
        let account = |(name, vm): (&VmName, &Vm)| (name.clone(), *vm.account());
        self.vms.iter().map(account).collect()
    }

    /// Hostile VMs, with the reason for each mark.
    pub fn marks(&self) -> BTreeMap<VmName, String> {
        let mark = |(name, vm): (&VmName, &Vm)| Some((name.clone(), vm.hostile()?.to_owned()));
        self.vms.iter().filter_map(mark).collect()
    }

    /// Reasons why not every VM can have all its memory. VMs of which `has_all` is true count with
    /// what is committed to them.
    pub fn lacks_for_all(&self, has_all: impl Fn(&VmName) -> bool) -> Lacking {
        let unreachable = |(name, vm): (&VmName, &Vm)| {
            let why = vm.why_not_grown()?;
            (!has_all(name)).then(|| (name.clone(), why))
        };
        let missing = |tier| {
            let needs = |(name, vm): (&VmName, &Vm)| match has_all(name) {
                true => vm.committed(tier),
                false => vm.most(tier),
            };
            let needed = self.vms.iter().map(needs);
            let needed = needed.fold(0, u64::saturating_add);
            ByteCount(needed.saturating_sub(self.pools.get(tier).0))
        };
        Lacking {
            memory: PerTier::from_fn(missing),
            vm: self.vms.iter().find_map(unreachable),
        }
    }

    /// Lifts all limits and wishes all its memory for each VM; see
    /// [`lacks_for_all`](Self::lacks_for_all). A VM that does not run needs none.
    pub fn give_all(&mut self, now: Millis, has_all: impl Fn(&VmName) -> bool) {
        for (name, vm) in self.vms.iter_mut().filter(|(name, _)| !has_all(name)) {
            vm.set_limits(Limits {
                guarantee: TierBytes::default(),
                limit: PerTier::from_fn(|_| ByteCount(u64::MAX)),
                oom: ByteCount(0),
            });
            let wish = PerTier::from_fn(|tier| ByteCount(vm.most(tier)));
            vm.desire(wish);
            self.log.push(LogEntry::new(now, name, What::Desired(wish)));
        }
        self.accounts_changed = true;
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

    /// Logs when the memory that VMs may hold rises above the pool or falls below it.
    fn tell_excess(&mut self, now: Millis) {
        for tier in Tier::ALL {
            let (held, pool) = (self.may_hold(tier), self.pool(tier));
            let was_above = std::mem::replace(self.above.get_mut(tier), held > pool);
            let what = match (was_above, held > pool) {
                (false, true) => What::Above { tier, held, pool },
                (true, false) => What::Within(tier),
                _ => continue,
            };
            self.log.push(LogEntry::of_host(now, what));
        }
    }

    /// Counts violations. An excess that an earlier controller committed is allowed as long as it
    /// only shrinks.
    fn check_invariant(&mut self, now: Millis) {
        for tier in Tier::ALL {
            let (committed, pool) = (self.committed(tier), self.pool(tier));
            let allowed = std::mem::replace(self.allowed.get_mut(tier), committed.max(pool));
            if committed > allowed.max(pool) {
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
