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
//! A VM boots with all its memory and shrinks from there. So each VM also has an upper bound of what it
//! *may hold*. The bound is all its memory once its hypervisor is seen or the VM is reset, even if no agent
//! speaks. It falls when the VM was verified to own less. VMs grow only by memory that no VM may hold.
//!
//! A controller that starts with pools that are smaller than what was committed before, or with more VMs,
//! lowers wishes ([`Controller::fit`]) and shrinks VMs until all is within. A VM that is caught lying is left
//! alone, with all that was committed to it, until its hypervisor has ended or somebody forgives it. The mark
//! survives the controller, too.
//!
//! # Properties
//! - The committed sum of a tier never exceeds its pool, whatever comes in, in any order; where it did when
//!   the controller started, it never grows.
//! - Memory that an honest VM owns never exceeds what it may hold, and once it was shrunk never
//!   what is committed to it.
//! - While VMs may hold more of a tier than its pool has, none grows in it.
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
    /// The most that may be committed: the pool, or more where it was so already.
    allowed: TierBytes,
    /// Whether VMs may hold more than there is, by the last log entry.
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

    /// Takes a VM on, with what was kept of it or with `first` as its wish. The pools need not have it:
    /// [`fit`](Self::fit) makes wishes that they have, and what is committed already counts.
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

    /// From now on the pools are these. [`fit`](Self::fit) makes wishes that they have.
    pub fn set_pools(&mut self, pools: TierBytes) {
        self.pools = pools;
        for tier in Tier::ALL {
            *self.allowed.get_mut(tier) = self.committed(tier).max(*pools.get(tier));
        }
    }

    /// Makes a wish that the pools may not have yet; [`fit`](Self::fit) comes after it.
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

    /// Changes what a VM may be given.
    pub fn set_limits(&mut self, name: &VmName, limits: Limits) -> Result<(), Refusal> {
        let vm = self.vms.get_mut(name);
        let vm = vm.ok_or_else(|| Refusal::Unknown(name.clone()))?;
        vm.set_limits(limits);
        self.accounts_changed = true;
        Ok(())
    }

    /// Lowers wishes until the pools have them all. Each goes the same share of the way to its configured
    /// size (`first`), and where that is not enough, to its guarantee.
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

    /// Lowers wishes of a tier that are above their floor, each by the same share of what it is above.
    fn lower(&mut self, now: Millis, tier: Tier, floor: impl Fn(&VmName, &Vm) -> u64) {
        let wished: u128 = self
            .vms
            .values()
            .map(|vm| u128::from(vm.wished(tier)))
            .sum();
        let over = wished.saturating_sub(self.pools.get(tier).0.into());
        let above = |name: &VmName, vm: &Vm| match vm.hostile() {
            // Its account stays as it is.
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
                // No larger than the wish.
                of_tier.0 -= u64::try_from(cut).unwrap_or(of_tier.0).min(of_tier.0);
                vm.desire(wish);
                self.accounts_changed = true;
                self.log.push(LogEntry::new(now, name, What::Desired(wish)));
            }
        }
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
            // Where it is too much already, less is welcome.
            if wished > before {
                self.check_pool(tier, wished)?;
            }
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
        let committed = self.vms.values().map(|vm| vm.committed(tier));
        ByteCount(committed.fold(0, u64::saturating_add))
    }

    /// The most that VMs may hold of a tier, whatever was committed to them.
    pub fn may_hold(&self, tier: Tier) -> ByteCount {
        let held = self.vms.values().map(|vm| vm.may_hold(tier));
        ByteCount(held.fold(0, u64::saturating_add))
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

    /// Tells when VMs begin, and when they cease, to hold more than there is.
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

    /// More than the pool, committed by a controller before this one, is no fault of this one, as long as it only
    /// gets less.
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
