//! One VM in the controller's view.

use demeter_policy::{ByteCount, PerTier, Tier, TierBytes};

use super::{GRACE, Limits, Millis, Observation, Order, PATIENCE, Ticket, What};
use crate::store::Account;

/// The first pause after a failure; it doubles with every further one.
const PAUSE_MS: u64 = 250;

/// The longest pause.
const PAUSE_MS_MAX: u64 = 32_000;

/// How a VM stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It does not run, or does not answer.
    Away,
    /// It can be spoken to.
    Here,
    /// It was caught lying, and is left alone.
    Hostile(String),
}

/// A VM for a person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmStatus {
    /// How it stands.
    pub state: State,
    /// What it may be given.
    pub limits: Limits,
    /// What it shall have.
    pub desired: TierBytes,
    /// What is committed to it.
    pub committed: TierBytes,
    /// What it has, if that is known.
    pub owned: Option<TierBytes>,
    /// The most that it may hold, whatever was committed to it.
    pub may_hold: TierBytes,
    /// Why it does not have what it shall have, by what it said last.
    pub reason: Option<String>,
}

/// A command under way.
#[derive(Debug, Clone, Copy)]
struct Flight {
    ticket: Ticket,
    order: Order,
    deadline: Millis,
}

/// Pauses that grow with every failure.
#[derive(Debug, Clone, Copy, Default)]
struct Retry {
    failures: u32,
    not_before: Millis,
}

impl Retry {
    fn failed(&mut self, now: Millis) {
        let pause = (PAUSE_MS << self.failures.min(16)).min(PAUSE_MS_MAX);
        self.failures = self.failures.saturating_add(1);
        self.not_before = Millis(now.0 + pause);
    }
}

/// One VM.
#[derive(Debug)]
pub(super) struct Vm {
    limits: Limits,
    account: Account,
    state: State,
    /// Whether it could be spoken to when it was heard of last, marked or not.
    reachable: bool,
    owned: Option<TierBytes>,
    /// All its memory, once its hypervisor has named it.
    most: Option<TierBytes>,
    /// The most that it may hold; `None` as long as nothing was heard of it.
    may_hold: Option<TierBytes>,
    /// Tiers of which it cannot be given what is committed to it, because VMs hold more than there is.
    waits: PerTier<bool>,
    /// What it came to own when it was last told a target and did what it could. A VM that owns
    /// its target is told once nevertheless: its provisioner is to know what it is held to.
    reached: PerTier<Option<(ByteCount, ByteCount)>>,
    flight: Option<Flight>,
    ask: Retry,
    set: PerTier<Retry>,
    reason: Option<String>,
}

impl Vm {
    pub(super) fn new(limits: Limits, account: Account) -> Self {
        Self {
            limits,
            account,
            state: State::Away,
            reachable: false,
            owned: None,
            most: None,
            may_hold: None,
            waits: PerTier::default(),
            reached: PerTier::default(),
            flight: None,
            ask: Retry::default(),
            set: PerTier::default(),
            reason: None,
        }
    }

    /// Its limits, with no more than all its memory.
    pub(super) fn limits(&self) -> Limits {
        match self.most {
            Some(most) => self.limits.within(most),
            None => self.limits,
        }
    }

    /// Changes what it may be given, and its wish to the nearest that keeps within.
    pub(super) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
        self.account.desired = limits.clamp(self.account.desired);
        self.set = PerTier::default();
    }

    /// The most that it may hold; at first the committed amount.
    pub(super) fn may_hold(&self, tier: Tier) -> u64 {
        let known = self.may_hold.map(|held| held.get(tier).0);
        known.unwrap_or_else(|| self.committed(tier))
    }

    pub(super) fn account(&self) -> &Account {
        &self.account
    }

    pub(super) fn committed(&self, tier: Tier) -> u64 {
        self.account.committed.get(tier).0
    }

    /// What the VM will count for once everything has come to rest.
    pub(super) fn wished(&self, tier: Tier) -> u64 {
        let desired = self.account.desired.get(tier).0;
        match self.state {
            State::Hostile(_) => desired.max(self.committed(tier)),
            _ => desired,
        }
    }

    pub(super) fn hostile(&self) -> Option<&str> {
        match &self.state {
            State::Hostile(reason) => Some(reason),
            _ => None,
        }
    }

    /// Leaves it alone from now on, as a controller before this one decided.
    pub(super) fn mark(&mut self, reason: String) {
        self.state = State::Hostile(reason);
    }

    /// Speaks with it again, if it was left alone; says whether it was.
    pub(super) fn forgive(&mut self) -> bool {
        let was_marked = self.hostile().is_some();
        if was_marked {
            self.disturbed();
            self.state = match self.reachable {
                true => State::Here,
                false => State::Away,
            };
        }
        was_marked
    }

    pub(super) fn status(&self) -> VmStatus {
        VmStatus {
            state: self.state.clone(),
            limits: self.limits(),
            desired: self.account.desired,
            committed: self.account.committed,
            owned: self.owned,
            may_hold: PerTier::from_fn(|tier| ByteCount(self.may_hold(tier))),
            reason: self.reason.clone(),
        }
    }

    /// Takes a wish that was checked; says whether it is another one than before.
    pub(super) fn desire(&mut self, wish: TierBytes) -> bool {
        let changed = wish != self.account.desired;
        if changed {
            self.account.desired = wish;
            self.set = PerTier::default();
        }
        changed
    }

    pub(super) fn observe(&mut self, now: Millis, observation: Observation) -> Option<What> {
        match observation {
            Observation::Here => self.reachable = true,
            Observation::Lost | Observation::Gone => self.reachable = false,
            _ => {}
        }
        match observation {
            Observation::Gone => {
                self.state = State::Away;
                self.disturbed();
                for tier in Tier::ALL {
                    self.verified(tier, ByteCount(0));
                }
                self.most = None;
                self.may_hold = Some(TierBytes::default());
                Some(What::Gone)
            }
            Observation::Seen { most } => {
                // It may have been reset while nobody listened.
                self.most = Some(most);
                self.may_hold = Some(most);
                None
            }
            Observation::Reset if self.hostile().is_some() => {
                self.may_hold = self.most.or(self.may_hold);
                None
            }
            _ if self.hostile().is_some() => None,
            Observation::Here => {
                self.state = State::Here;
                self.disturbed();
                Some(What::Here)
            }
            Observation::Lost => {
                self.state = State::Away;
                self.disturbed();
                Some(What::Lost)
            }
            Observation::Reset => {
                self.disturbed();
                self.may_hold = self.most.or(self.may_hold);
                Some(What::Reset)
            }
            Observation::OwnedChanged => {
                self.owned = None;
                None
            }
            Observation::Hostile { reason } => {
                self.disturbed();
                self.state = State::Hostile(reason.clone());
                Some(What::Hostile(reason))
            }
            Observation::Owned { ticket, owned } => {
                self.landed(ticket)?;
                self.ask = Retry::default();
                self.owned = Some(owned);
                for tier in Tier::ALL {
                    self.verified(tier, *owned.get(tier));
                }
                None
            }
            Observation::Moved {
                ticket,
                owned,
                reason,
            } => match self.landed(ticket)? {
                Order::Ask => None,
                Order::Set { tier, target } => Some(self.moved(now, tier, target, owned, reason)),
            },
            Observation::Unfinished { ticket, reason } => {
                self.landed(ticket)?;
                self.ask = Retry::default();
                self.owned = None;
                self.reached = PerTier::default();
                self.reason = Some(reason);
                None
            }
            Observation::Failed { ticket, reason } => {
                let order = self.landed(ticket)?;
                self.failed(now, order, reason.clone());
                Some(What::Failed(reason))
            }
        }
    }

    /// Gives up on a command whose observation is overdue.
    pub(super) fn give_up_on_overdue(&mut self, now: Millis) -> Option<What> {
        let overdue = self.flight.filter(|flight| flight.deadline <= now)?;
        self.flight = None;
        self.failed(now, overdue.order, What::Overdue.to_string());
        Some(What::Overdue)
    }

    /// The next order for the VM, if any. Memory that it takes from `room` is committed to it. It
    /// grows by no more than `unheld`, memory that no VM may hold.
    pub(super) fn next_order(
        &mut self,
        now: Millis,
        room: &mut TierBytes,
        unheld: &mut TierBytes,
    ) -> Option<Order> {
        self.waits = PerTier::default();
        if self.state != State::Here || self.flight.is_some() {
            return None;
        }
        let Some(owned) = self.owned else {
            return (self.ask.not_before <= now).then_some(Order::Ask);
        };
        for tier in Tier::ALL {
            self.take(tier, room.get_mut(tier));
        }
        let mut orders = vec![];
        for tier in Tier::ALL {
            let Some(target) = self.next_target(tier) else {
                continue;
            };
            let owned = *owned.get(tier);
            let most = ByteCount(owned.0.saturating_add(unheld.get(tier).0));
            let allowed = target.min(most);
            *self.waits.get_mut(tier) = target > owned && allowed == owned;
            if self.set.get(tier).not_before <= now && !*self.waits.get(tier) {
                orders.push((tier, allowed));
            }
        }
        // Growing comes first: a VM that loses fast memory may need the slow memory for it.
        orders.sort_by_key(|(tier, target)| target < owned.get(*tier));
        let (tier, target) = *orders.first()?;
        let unheld = unheld.get_mut(tier);
        unheld.0 -= target.0.saturating_sub(owned.get(tier).0).min(unheld.0);
        Some(Order::Set { tier, target })
    }

    /// Notes that an order was sent.
    pub(super) fn sent(&mut self, now: Millis, ticket: Ticket, order: Order) {
        if let Order::Set { tier, target } = order {
            let after = self.holds_by(tier, target);
            if let Some(may_hold) = &mut self.may_hold {
                let held = may_hold.get_mut(tier);
                *held = after.max(*held);
            }
        }
        let wait_ms = (PATIENCE + GRACE).as_millis() as u64;
        self.flight = Some(Flight {
            ticket,
            order,
            deadline: Millis(now.0 + wait_ms),
        });
    }

    /// When something is due even if nothing is observed.
    pub(super) fn wake_at(&self) -> Option<Millis> {
        if let Some(flight) = self.flight {
            return Some(flight.deadline);
        }
        if self.state != State::Here {
            return None;
        }
        if self.owned.is_none() {
            return Some(self.ask.not_before);
        }
        Tier::ALL
            .into_iter()
            .filter(|&tier| self.next_target(tier).is_some() && !*self.waits.get(tier))
            .map(|tier| self.set.get(tier).not_before)
            .min()
    }

    /// The desired amount, capped by the limit.
    fn wish(&self, tier: Tier) -> ByteCount {
        let desired = *self.account.desired.get(tier);
        desired.min(*self.limits().limit.get(tier))
    }

    /// Counts as much of what is desired as there is room for.
    fn take(&mut self, tier: Tier, room: &mut ByteCount) {
        let wish = self.wish(tier).0;
        let committed = self.account.committed.get_mut(tier);
        let taken = wish.saturating_sub(committed.0).min(room.0);
        committed.0 += taken;
        room.0 -= taken;
    }

    /// What the VM is to be told to own, if it is to be told anything.
    fn next_target(&self, tier: Tier) -> Option<ByteCount> {
        let owned = *self.owned?.get(tier);
        let may_have = self.wish(tier).min(*self.account.committed.get(tier));
        let target = ByteCount(may_have.0.saturating_sub(self.limits.oom_of(tier)));
        (*self.reached.get(tier) != Some((target, owned))).then_some(target)
    }

    /// The order whose observation has come, unless the observation is stale.
    fn landed(&mut self, ticket: Ticket) -> Option<Order> {
        let flight = self.flight.take_if(|flight| flight.ticket == ticket)?;
        Some(flight.order)
    }

    fn moved(
        &mut self,
        now: Millis,
        tier: Tier,
        target: ByteCount,
        owned: ByteCount,
        reason: Option<String>,
    ) -> What {
        let mut nearer = false;
        if let Some(known) = &mut self.owned {
            let before = std::mem::replace(known.get_mut(tier), owned);
            nearer = owned.0.abs_diff(target.0) < before.0.abs_diff(target.0);
        }
        self.verified(tier, owned);
        self.reason.clone_from(&reason);
        match reason {
            None => {
                *self.set.get_mut(tier) = Retry::default();
                *self.reached.get_mut(tier) = Some((target, owned));
                What::Reached { tier, owned }
            }
            Some(reason) => {
                if nearer {
                    *self.set.get_mut(tier) = Retry::default();
                }
                self.set.get_mut(tier).failed(now);
                What::Short {
                    tier,
                    owned,
                    target,
                    reason,
                }
            }
        }
    }

    fn failed(&mut self, now: Millis, order: Order, reason: String) {
        match order {
            Order::Ask => self.ask.failed(now),
            Order::Set { tier, .. } => self.set.get_mut(tier).failed(now),
        }
        self.owned = None;
        self.reached = PerTier::default();
        self.reason = Some(reason);
    }

    /// What the VM was verified to own: what is committed beyond it is free for others, as far as
    /// the VM is not to have it anyway.
    fn verified(&mut self, tier: Tier, owned: ByteCount) {
        let before = PerTier::from_fn(|tier| ByteCount(self.may_hold(tier)));
        let held = self.holds_by(tier, owned);
        *self.may_hold.get_or_insert(before).get_mut(tier) = held;
        let has = owned.0.saturating_add(self.limits.oom_of(tier));
        let needs = ByteCount(has).max(self.wish(tier));
        let committed = self.account.committed.get_mut(tier);
        *committed = needs.min(*committed);
    }

    /// The most that it can hold by itself while it owns `owned`.
    fn holds_by(&self, tier: Tier, owned: ByteCount) -> ByteCount {
        let held = ByteCount(owned.0.saturating_add(self.limits.oom_of(tier)));
        match self.most {
            Some(most) => held.min(*most.get(tier)).max(owned),
            None => held,
        }
    }

    /// Nothing that was known of the VM holds any more.
    fn disturbed(&mut self) {
        self.owned = None;
        self.reached = PerTier::default();
        self.flight = None;
        self.ask = Retry::default();
        self.set = PerTier::default();
        self.reason = None;
    }
}
