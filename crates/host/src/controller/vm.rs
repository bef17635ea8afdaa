//! The controller's state for one VM.

use demeter_policy::{ByteCount, PerTier, Tier, TierBytes};

use super::{GRACE, Limits, Millis, Observation, Order, PATIENCE, Ticket, What};

/// Stored state of one VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Account {
    /// Desired size.
    pub desired: TierBytes,
    /// Upper bound of its memory, which counts against the pools.
    pub committed: TierBytes,
}

/// First retry interval after a failure; it doubles with each further failure.
const PAUSE_MS: u64 = 250;

/// Maximum retry interval. All VMs have their sizes within twice this after their faults end.
const PAUSE_MS_MAX: u64 = 16_000;

/// Whether a VM can be managed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It is not running or does not answer.
    Away,
    /// It can be managed.
    Here,
    /// It sent false data and is left alone.
    Hostile(String),
}

/// A VM's state for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmStatus {
    /// Whether it can be managed.
    pub state: State,
    /// Its limits.
    pub limits: Limits,
    /// Its desired size.
    pub desired: TierBytes,
    /// Memory committed to it.
    pub committed: TierBytes,
    /// Memory that it owns, if known.
    pub owned: Option<TierBytes>,
    /// The most that it may hold, including memory that is not committed.
    pub may_hold: TierBytes,
    /// Whether its hypervisor was seen and has not exited since.
    pub runs: bool,
    /// Reason why it does not own the desired size, as it reported last.
    pub reason: Option<String>,
}

/// A command in flight.
#[derive(Debug, Clone, Copy)]
struct Flight {
    ticket: Ticket,
    order: Order,
    deadline: Millis,
}

/// Back-off: retry intervals that grow with every failure.
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
    /// Whether the latest report said that it can be managed; also kept while it is marked.
    reachable: bool,
    owned: Option<TierBytes>,
    /// All its memory, once its hypervisor has reported it.
    most: Option<TierBytes>,
    /// The most that it may hold; `None` until the first report.
    may_hold: Option<TierBytes>,
    /// Tiers in which its committed memory cannot be given yet, because VMs hold more than the
    /// pool.
    waits: PerTier<bool>,
    /// Last target and the size reached for it. A VM that already owns its target is still sent it
    /// once, so that its provisioner knows the bound.
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

    /// Its limits, capped by all its memory.
    pub(super) fn limits(&self) -> Limits {
        match self.most {
            Some(most) => self.limits.within(most),
            None => self.limits,
        }
    }

    /// Changes its limits, and moves its wish to the nearest allowed one.
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

    /// All its memory; none while it does not run.
    pub(super) fn most(&self, tier: Tier) -> u64 {
        self.most.map_or(0, |most| most.get(tier).0)
    }

    /// The reason why it runs and cannot be given memory, if any.
    pub(super) fn why_not_grown(&self) -> Option<String> {
        self.most?;
        match &self.state {
            State::Here => None,
            State::Away => Some("runs, and its agent is not connected".into()),
            State::Hostile(reason) => Some(format!("is marked ({reason})")),
        }
    }

    pub(super) fn account(&self) -> &Account {
        &self.account
    }

    pub(super) fn committed(&self, tier: Tier) -> u64 {
        self.account.committed.get(tier).0
    }

    /// Memory that the VM will count for once it has settled.
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

    /// Marks it as hostile, as an earlier controller did.
    pub(super) fn mark(&mut self, reason: String) {
        self.state = State::Hostile(reason);
    }

    /// Lifts its hostile mark. Returns whether it had one.
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
            runs: self.most.is_some(),
            reason: self.reason.clone(),
        }
    }

    /// Takes a checked wish. Returns whether it has changed.
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
            Observation::Gone => Some(self.gone()),
            Observation::Seen { most } => {
                // It may have been reset while the controller was not running.
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

    /// It is verified to have ended, so it owns nothing.
    fn gone(&mut self) -> What {
        self.state = State::Away;
        self.disturbed();
        for tier in Tier::ALL {
            self.verified(tier, ByteCount(0));
        }
        self.most = None;
        self.may_hold = Some(TierBytes::default());
        What::Gone
    }

    /// Gives up on a command whose observation is overdue.
    pub(super) fn give_up_on_overdue(&mut self, now: Millis) -> Option<What> {
        let overdue = self.flight.filter(|flight| flight.deadline <= now)?;
        self.flight = None;
        self.failed(now, overdue.order, What::Overdue.to_string());
        Some(What::Overdue)
    }

    /// The next order for the VM, if any. Memory taken from `room` is committed to it. It grows by
    /// at most `unheld`, which is memory that no VM may hold.
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
        // Grow before shrinking: a VM that loses fast memory may need slow memory for it.
        orders.sort_by_key(|(tier, target)| target < owned.get(*tier));
        let (tier, target) = *orders.first()?;
        let unheld = unheld.get_mut(tier);
        unheld.0 -= target.0.saturating_sub(owned.get(tier).0).min(unheld.0);
        Some(Order::Set { tier, target })
    }

    /// Records that an order was sent.
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

    /// Time of the next action if nothing is observed before.
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

    /// Commits as much of the desired amount as there is room for.
    fn take(&mut self, tier: Tier, room: &mut ByteCount) {
        let wish = self.wish(tier).0;
        let committed = self.account.committed.get_mut(tier);
        let taken = wish.saturating_sub(committed.0).min(room.0);
        committed.0 += taken;
        room.0 -= taken;
    }

    /// The next target for the VM, if it needs one.
    fn next_target(&self, tier: Tier) -> Option<ByteCount> {
        let owned = *self.owned?.get(tier);
        let may_have = self.wish(tier).min(*self.account.committed.get(tier));
        let target = ByteCount(may_have.0.saturating_sub(self.limits.oom_of(tier)));
        (*self.reached.get(tier) != Some((target, owned))).then_some(target)
    }

    /// The order that this ticket belongs to; `None` if the ticket is stale.
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

    /// Records verified owned memory. Committed memory beyond it becomes free for others, unless
    /// the VM is desired to have it.
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

    /// Discards all knowledge of the VM's owned memory.
    fn disturbed(&mut self) {
        self.owned = None;
        self.reached = PerTier::default();
        self.flight = None;
        self.ask = Retry::default();
        self.set = PerTier::default();
        self.reason = None;
    }
}
