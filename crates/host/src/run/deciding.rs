//! The deciding task: the controller, the policy and the state file.

mod evacuation;
mod reload;
mod shown;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use demeter_policy::provision::{self, Policy, ProvisionerKind};
use demeter_policy::{ByteCount, MIB, PerTier, Tier, TierBytes};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::known::Known;
use super::{RunError, Tasks};
use crate::VmName;
use crate::api::{Change, ChangeError};
use crate::config::{Config, Pool, VmConfig};
use crate::controller::{Limits, Millis, Observation, PoolName, Pools, State, VmCommand, VmStatus};
use crate::hypervisor::libvirt::{Domains, LeftDomain};
use crate::outside::Outside;
use crate::store::{Ledger, Store};
use crate::view::{EventLog, HostView};
use crate::vm::News;

/// Interval between decisions of the policy.
const POLICY_EVERY: Duration = Duration::from_secs(1);

/// Minimum change of a size by a policy.
const STEP_MIN: ByteCount = ByteCount(16 * MIB);

/// Minimum interval between updates of the view.
const VIEW_EVERY: Duration = Duration::from_millis(50);

/// Time limit for writing the state file to a busy disk.
const SAVE_MAX: Duration = Duration::from_secs(10);

/// Wake-up time when nothing is due.
const FAR: Duration = Duration::from_secs(3600);

/// The controller with its inputs and outputs.
pub(super) struct Deciding {
    controller: Pools,
    /// The pools on this machine.
    pools: BTreeMap<PoolName, Pool>,
    policy: Policy,
    /// Whether all VMs get all their memory back, whatever their limits.
    evacuates: bool,
    /// Whether the policy was chosen over the API.
    policy_chosen: bool,
    store: Store,
    /// Access to the state file's disk, which may hang.
    outside: Outside,
    tasks: Tasks,
    commands: BTreeMap<VmName, mpsc::Sender<VmCommand>>,
    /// Discovered VMs, which are not in the configuration.
    found: BTreeSet<VmName>,
    /// Domains that are not managed, by name.
    left: BTreeMap<String, LeftDomain>,
    /// The configuration in use, and its file.
    config: Config,
    source: PathBuf,
    known: BTreeMap<VmName, Known>,
    log: EventLog,
    view: watch::Sender<Arc<HostView>>,
    config_out: watch::Sender<Arc<Config>>,
    started: Instant,
    /// Reason why committed memory is not saved. No command is sent until it is.
    unsaved: Option<String>,
    /// Whether the view may be out of date.
    stale: bool,
}

impl Deciding {
    /// Adds the configured VMs with their stored state.
    pub(super) fn new(
        config: &Config,
        source: &Path,
        store: Store,
        ledger: Ledger,
        mut tasks: Tasks,
        log: EventLog,
        (view, config_out): (watch::Sender<Arc<HostView>>, watch::Sender<Arc<Config>>),
    ) -> Result<Self, RunError> {
        let pools = config.pools_in(source, &tasks.files.root)?;
        let mut controller = Pools::default();
        controller.set(&sizes(&pools));
        let mut vms = config.vms.clone();
        let mut found = BTreeSet::new();
        for (name, account) in &ledger.accounts {
            if vms.contains_key(name) {
                continue;
            }
            if config.discover.is_none() {
                tracing::warn!(
                    "VM {name} is no longer in the configuration; its memory no longer counts"
                );
                continue;
            }
            // Counts until libvirt reports that it is not running. Its task starts when it is
            // discovered.
            let kind = ProvisionerKind::DemeterBalloon;
            let vm = VmConfig::of_domain(name, kind, account.desired);
            vms.insert(name.clone(), vm);
            found.insert(name.clone());
        }
        for (name, vm) in &vms {
            let kept = ledger.accounts.get(name).copied();
            let pool = config.pool_of(vm).cloned().unwrap_or_default();
            controller
                .add(&pool, name, limits(vm), kept, vm.sizes())
                .map_err(|refusal| RunError::Refused {
                    vm: name.clone(),
                    refusal,
                })?;
        }
        for (name, reason) in ledger.marks {
            if let Some(pool) = controller.of_mut(&name) {
                pool.mark(&name, reason);
            }
        }
        // There may be more VMs than before, or smaller pools.
        for (_, pool) in controller.iter_mut() {
            pool.fit(Millis(0), |name| vms[name].sizes());
        }
        let known = |(name, vm): (&VmName, &VmConfig)| (name.clone(), Known::new(vm));
        Ok(Self {
            controller,
            pools,
            evacuates: false,
            policy: ledger.policy.unwrap_or(config.policy),
            policy_chosen: ledger.policy.is_some(),
            store,
            outside: Outside::default(),
            commands: config
                .vms
                .iter()
                .map(|(name, vm)| (name.clone(), tasks.start(name, vm)))
                .collect(),
            tasks,
            found,
            left: BTreeMap::new(),
            config: config.clone(),
            source: source.into(),
            known: vms.iter().map(known).collect(),
            log,
            view,
            config_out,
            started: Instant::now(),
            unsaved: None,
            stale: false,
        })
    }

    /// Decides until cancelled.
    pub(super) async fn run(
        mut self,
        mut news: mpsc::Receiver<(VmName, News)>,
        mut changes: mpsc::Receiver<Change>,
        mut found: mpsc::Receiver<Domains>,
    ) -> Infallible {
        let mut policy_due = interval(POLICY_EVERY);
        policy_due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.publish();
        let mut view_due = interval(VIEW_EVERY);
        view_due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.advance().await;
            let due = self.controller.wake_at();
            let due = due.map_or(FAR, |at| Duration::from_millis(at.0));
            // The first two channels stay open as long as this task; the third only while VMs are
            // discovered.
            tokio::select! {
                Some((name, news)) = news.recv() => self.take_in(&name, news),
                Some(change) = changes.recv() => self.make(change).await,
                Some(domains) = found.recv() => self.take_on(domains),
                _ = policy_due.tick() => self.ask_policy(),
                _ = view_due.tick(), if self.stale => self.publish(),
                () = sleep_until(self.started + due) => {}
            }
        }
    }

    fn now(&self) -> Millis {
        Millis(self.started.elapsed().as_millis() as u64)
    }

    fn observe(&mut self, name: &VmName, observation: Observation) {
        let now = self.now();
        if let Some(pool) = self.controller.of_mut(name) {
            pool.observe(now, name, observation);
        }
    }

    fn take_in(&mut self, name: &VmName, news: News) {
        self.stale = true;
        let Some(known) = self.known.get_mut(name) else {
            return;
        };
        match news {
            News::Observation(observation) => {
                known.heard(&observation);
                let is_here = observation == Observation::Here;
                self.observe(name, observation);
                // Ask the policy before the first order, because until now the VM kept its initial
                // size.
                if is_here {
                    self.ask_policy();
                }
            }
            News::Returned(bytes) => known.returned.0 += bytes.0,
            News::Overrun(overrun) => {
                known.overruns += 1;
                known.overrun = overrun;
                let [fast, slow] = Tier::ALL.map(|tier| overrun.get(tier).0 >> 10);
                let what = format!(
                    "used memory that it does not own: {fast} KiB fast, {slow} KiB slow; the \
                     controller reclaims it"
                );
                tracing::warn!("VM {name}: {what}");
                self.log.push(unix_ms(), Some(name.to_string()), what);
                // Observing again makes the VM list its held memory, which is then punched again.
                self.observe(name, Observation::OwnedChanged);
            }
            News::Usage(stats) => {
                if known.used(&stats) {
                    self.observe(name, Observation::OwnedChanged);
                }
            }
            News::Places(places) => known.places = places,
            News::Managed(by) => {
                if known.managed_by.replace(by) != Some(by) {
                    tracing::info!("VM {name}: managed by {by}");
                    let what = format!("now managed by {by}");
                    self.log.push(unix_ms(), Some(name.to_string()), what);
                }
            }
            News::Trouble(why) => {
                if known.trouble.as_ref() != Some(&why) {
                    tracing::warn!("VM {name}: {why}");
                    self.log
                        .push(unix_ms(), Some(name.to_string()), why.clone());
                    known.trouble = Some(why);
                }
            }
        }
    }

    /// Adds newly discovered VMs and removes discovered ones that no longer run.
    fn take_on(&mut self, domains: Domains) {
        let away: BTreeSet<_> = self
            .controller
            .vms()
            .into_iter()
            .filter(|(_, vm)| vm.state == State::Away)
            .map(|(name, _)| name.clone())
            .collect();
        let ended = |name: &VmName| !domains.managed.contains_key(name) && away.contains(name);
        for name in self.found.extract_if(.., |name| ended(name)) {
            self.controller.remove(&name);
            // Dropping the sender ends its task.
            self.commands.remove(&name);
            self.known.remove(&name);
            let what = "no longer runs; removed".into();
            self.log.push(unix_ms(), Some(name.to_string()), what);
            self.stale = true;
        }
        let sections = self.config.vms.values();
        let named: BTreeSet<_> = sections.filter_map(|vm| vm.libvirt.clone()).collect();
        let mut left = domains.left;
        for (name, vm) in domains.managed {
            if self.commands.contains_key(&name) {
                continue;
            }
            if named.contains(name.as_str()) {
                // The VM has a section of its own, perhaps under another name.
                continue;
            }
            let memory = vm.sizes();
            let vm = self.config.defaults.apply(vm);
            if let Err(why) = self.take_on_one(&name, &vm) {
                let before = self.left.get(name.as_str());
                let is_new = before.is_none_or(|before| before.why != why);
                if is_new {
                    tracing::warn!("VM {name}: discovered, but not managed: {why}");
                    let what =
                        format!("discovered, but not managed: {why}; the controller retries");
                    self.log.push(unix_ms(), Some(name.to_string()), what);
                }
                let memory = ByteCount(memory.fast.0.saturating_add(memory.slow.0));
                left.insert(name.to_string(), LeftDomain { why, memory });
            }
        }
        for (name, domain) in &left {
            if self
                .left
                .get(name)
                .is_none_or(|before| before.why != domain.why)
            {
                tracing::info!("domain {name:?} is left alone: {}", domain.why);
            }
        }
        self.stale |= self.left != left;
        self.left = left;
    }

    /// Adds one discovered VM. The error is the reason why it cannot be added yet.
    fn take_on_one(&mut self, name: &VmName, vm: &VmConfig) -> Result<(), String> {
        let pool = self.config.pool_of(vm).cloned().unwrap_or_default();
        let room = |tier| {
            let Some(controller) = self.controller.get(&pool) else {
                return 0;
            };
            let others = controller.vms().filter(|(of, _)| *of != name);
            let wished = others.map(|(_, of)| of.desired.get(tier).0);
            let wished = wished.fold(0, u64::saturating_add);
            controller.pool(tier).0.saturating_sub(wished)
        };
        let (room, sizes) = (TierBytes::from_fn(|tier| ByteCount(room(tier))), vm.sizes());
        // State that an earlier controller stored.
        let kept = self.controller.accounts().get(name).copied();
        let fits = Tier::ALL
            .into_iter()
            .all(|tier| sizes.get(tier) <= room.get(tier));
        let first = match self.policy {
            Policy::Static if !fits && kept.is_none() => {
                return Err(format!(
                    "it has {} fast and {} slow, but only {} and {} of the pool are free; lower \
                     another VM, or choose a policy that divides memory",
                    sizes.fast, sizes.slow, room.fast, room.slow
                ));
            }
            Policy::Static => sizes,
            // The policy decides before the first order.
            _ => {
                let guarantees = vm.guarantees();
                TierBytes::from_fn(|tier| {
                    (*sizes.get(tier))
                        .min(*room.get(tier))
                        .max(*guarantees.get(tier))
                })
            }
        };
        let mark = self.controller.marks().remove(name);
        self.controller.remove(name);
        let added = self.controller.add(&pool, name, limits(vm), kept, first);
        if let (Some(reason), Some(pool)) = (mark, self.controller.of_mut(name)) {
            pool.mark(name, reason);
        }
        added.map_err(|refusal| {
            self.known.remove(name);
            self.found.remove(name);
            refusal.to_string()
        })?;
        self.commands
            .insert(name.clone(), self.tasks.start(name, vm));
        self.known.insert(name.clone(), Known::new(vm));
        self.found.insert(name.clone());
        self.stale = true;
        Ok(())
    }

    /// Applies a change, saves it and answers.
    async fn make(&mut self, change: Change) {
        let (answer, refusal) = match change {
            Change::Reload { answer } => {
                let reloaded = self.reload().await;
                self.advance().await;
                self.publish();
                // The client may have stopped waiting.
                let _ = answer.send(reloaded);
                return;
            }
            Change::SetTiers { vm, tiers, answer } => (answer, self.set_tiers(&vm, tiers).err()),
            Change::Forgive { vm, answer } => (answer, self.forgive(&vm).err()),
            Change::Evacuate { answer } => {
                let refusal = self.evacuate().err();
                if refusal.is_none() {
                    self.save().await;
                }
                (answer, refusal)
            }
            Change::SetPolicy { policy, answer } => {
                self.end_evacuation();
                self.policy = policy;
                self.policy_chosen = true;
                self.log
                    .push(unix_ms(), None, format!("policy is now {policy}"));
                self.save().await;
                self.ask_policy();
                (answer, None)
            }
        };
        self.advance().await;
        self.publish();
        let unsaved = || self.unsaved.clone().map(ChangeError::State);
        // The client may have stopped waiting.
        let _ = answer.send(refusal.or_else(unsaved).map_or(Ok(()), Err));
    }

    fn set_tiers(
        &mut self,
        name: &VmName,
        tiers: PerTier<Option<ByteCount>>,
    ) -> Result<(), ChangeError> {
        let vm = self.controller.vm(name);
        let vm = vm.ok_or_else(|| ChangeError::NoVm(name.clone()))?;
        if self.evacuates {
            let why = "all VMs get all their memory back; end that with demeter host policy static";
            return Err(ChangeError::Conflict(why.into()));
        }
        if self.policy != Policy::Static {
            return Err(ChangeError::Conflict(format!(
                "policy {} decides about sizes; choose policy static first",
                self.policy
            )));
        }
        let wish = TierBytes::from_fn(|tier| tiers.get(tier).unwrap_or(*vm.desired.get(tier)));
        let now = self.now();
        let pool = self.controller.of_mut(name);
        let pool = pool.ok_or_else(|| ChangeError::NoVm(name.clone()))?;
        pool.desire(now, &[(name.clone(), wish)])
            .map_err(|refusal| ChangeError::Conflict(refusal.to_string()))
    }

    fn forgive(&mut self, name: &VmName) -> Result<(), ChangeError> {
        let now = self.now();
        match self
            .controller
            .of_mut(name)
            .map(|pool| pool.forgive(now, name))
        {
            Some(Ok(true)) => Ok(()),
            Some(Ok(false)) => Err(ChangeError::Conflict(format!("VM {name} is not marked"))),
            Some(Err(_)) | None => Err(ChangeError::NoVm(name.clone())),
        }
    }

    /// Sets the sizes that the policy wants.
    fn ask_policy(&mut self) {
        if self.policy == Policy::Static {
            return;
        }
        let (policy, now) = (self.policy, self.now());
        for (pool, controller) in self.controller.iter_mut() {
            let sizes = TierBytes::from_fn(|tier| controller.pool(tier));
            let vms: Vec<_> = controller.vms().collect();
            let claims: Vec<_> = vms
                .iter()
                .map(|(name, vm)| claim(vm, &self.known[*name]))
                .collect();
            let wishes: Vec<_> = match provision::allocate(policy, sizes, &claims, STEP_MIN) {
                Ok(grants) => vms
                    .iter()
                    .zip(&claims)
                    .zip(grants)
                    .filter(|((_, claim), _)| !claim.pinned)
                    .map(|(((name, _), _), grant)| ((*name).clone(), grant))
                    .collect(),
                Err(overbooked) => {
                    tracing::warn!("policy {policy}: {}{overbooked}", of_pool(pool));
                    continue;
                }
            };
            if let Err(refusal) = controller.desire(now, &wishes) {
                tracing::warn!("policy {policy}: {}{refusal}", of_pool(pool));
            }
        }
    }

    /// Saves committed memory, then sends the commands that are due.
    async fn advance(&mut self) {
        let now = self.now();
        let (mut accounts_changed, mut commands) = (false, vec![]);
        for (pool, controller) in self.controller.iter_mut() {
            let step = controller.step(now);
            accounts_changed |= step.accounts_changed;
            self.stale |= step.accounts_changed || !step.log.is_empty();
            commands.extend(step.commands);
            for entry in step.log {
                let vm = entry.vm.map(|vm| vm.to_string());
                let what = match vm {
                    Some(_) => entry.what.to_string(),
                    None => format!("{}{}", of_pool(pool), entry.what),
                };
                tracing::debug!("{}: {what}", vm.as_deref().unwrap_or("host"));
                self.log.push(unix_ms(), vm, what);
            }
        }
        if accounts_changed || self.unsaved.is_some() {
            self.save().await;
        }
        if self.unsaved.is_none() {
            for command in commands {
                // If the task is busy or has given up, the command becomes overdue and is then
                // repeated.
                if let Some(task) = self.commands.get(&command.vm) {
                    let _ = task.try_send(command);
                }
            }
        }
    }

    async fn save(&mut self) {
        let ledger = Ledger {
            policy: self.policy_chosen.then_some(self.policy),
            accounts: self.controller.accounts(),
            marks: self.controller.marks(),
        };
        let store = self.store.clone();
        let saving = self
            .outside
            .ask_within(SAVE_MAX, "writing the state file", move |_| {
                store.save(&ledger)
            });
        let failed = match saving.await {
            Ok(saved) => saved.err().map(|error| error.to_string()),
            Err(_) => Some(format!(
                "the disk of the state file does not answer within {SAVE_MAX:?}"
            )),
        };
        if let Some(why) = &failed
            && self.unsaved.is_none()
        {
            tracing::error!("{why}; no VM gets a command until this is fixed");
            self.log.push(unix_ms(), None, why.clone());
        }
        self.unsaved = failed;
    }
}

/// The sizes of pools.
fn sizes(pools: &BTreeMap<PoolName, Pool>) -> BTreeMap<PoolName, TierBytes> {
    let size = |(name, pool): (&PoolName, &Pool)| (name.clone(), pool.sizes);
    pools.iter().map(size).collect()
}

/// The beginning of a line about a pool, if it has a name.
fn of_pool(pool: &PoolName) -> String {
    match pool.0.as_str() {
        "" => String::new(),
        name => format!("pool {name}: "),
    }
}

pub(super) fn limits(vm: &VmConfig) -> Limits {
    let limits = vm.limits();
    Limits {
        guarantee: vm.guarantees(),
        limit: TierBytes::from_fn(|tier| limits.get(tier).unwrap_or(ByteCount(u64::MAX))),
        oom: vm.oom(),
    }
}

/// A VM's claim, as the policy sees it.
fn claim(vm: &VmStatus, known: &Known) -> provision::Claim {
    let pinned = vm.state != State::Here;
    provision::Claim {
        share: known.share,
        guarantee: vm.limits.guarantee,
        limit: vm.limits.limit,
        current: match vm.state {
            // A hostile VM keeps its memory.
            State::Hostile(_) => {
                TierBytes::from_fn(|tier| *vm.desired.get(tier).max(vm.committed.get(tier)))
            }
            _ => TierBytes::from_fn(|tier| *vm.desired.get(tier).min(vm.limits.limit.get(tier))),
        },
        usage: known.usage,
        pinned,
    }
}

/// Milliseconds since 1970, for people.
fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}
