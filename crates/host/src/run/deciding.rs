//! The one task that decides: the controller, the policy, and what is kept on disk.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
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
use crate::config::{Config, VmConfig};
use crate::controller::{Controller, Limits, Millis, Observation, State, VmCommand, VmStatus};
use crate::hypervisor::libvirt::Domains;
use crate::outside::Outside;
use crate::store::{Ledger, Store};
use crate::view::{EventLog, HostView, VmState, VmView};
use crate::vm::News;

/// How often the policy is asked.
const POLICY_EVERY: Duration = Duration::from_secs(1);

/// The least that a policy moves.
const STEP_MIN: ByteCount = ByteCount(16 * MIB);

/// How often the view is made anew, at most.
const VIEW_EVERY: Duration = Duration::from_millis(50);

/// How long a busy disk may take to keep what was committed.
const SAVE_MAX: Duration = Duration::from_secs(10);

/// When nothing is due.
const FAR: Duration = Duration::from_secs(3600);

/// The controller and what it needs of the world.
pub(super) struct Deciding {
    controller: Controller,
    policy: Policy,
    /// Chosen while running, now or before.
    policy_chosen: bool,
    store: Store,
    /// The way to the disk that the state file is on.
    outside: Outside,
    tasks: Tasks,
    commands: BTreeMap<VmName, mpsc::Sender<VmCommand>>,
    /// VMs that are not in the configuration.
    found: BTreeSet<VmName>,
    /// Those of them that cannot be taken on; told once.
    refused: BTreeSet<VmName>,
    known: BTreeMap<VmName, Known>,
    log: EventLog,
    view: watch::Sender<Arc<HostView>>,
    started: Instant,
    /// Why what was committed is not on disk. As long as it is not, nothing is ordered.
    unsaved: Option<String>,
    /// Something may have happened since the view was made.
    stale: bool,
}

impl Deciding {
    /// Takes on the configured VMs with what was kept of them.
    pub(super) fn new(
        config: &Config,
        store: Store,
        ledger: Ledger,
        mut tasks: Tasks,
        log: EventLog,
        view: watch::Sender<Arc<HostView>>,
    ) -> Result<Self, RunError> {
        let pools = config.pool.sizes();
        let mut controller = Controller::new(pools);
        let mut vms = config.vms.clone();
        let mut found = BTreeSet::new();
        for (name, account) in &ledger.accounts {
            if vms.contains_key(name) {
                continue;
            }
            if config.discover.is_none() {
                tracing::warn!(
                    "VM {name} is not in the configuration any more; what it has counts no longer"
                );
                continue;
            }
            // Counted until libvirt says that it does not run. Its task begins when it is found.
            let kind = ProvisionerKind::DemeterBalloon;
            let vm = VmConfig::of_domain(name, kind, account.desired);
            vms.insert(name.clone(), vm);
            found.insert(name.clone());
        }
        for (name, vm) in &vms {
            let kept = ledger.accounts.get(name).copied();
            controller
                .add(name.clone(), limits(vm), kept, vm.sizes())
                .map_err(|refusal| RunError::Refused {
                    vm: name.clone(),
                    refusal,
                })?;
        }
        for (name, reason) in ledger.marks {
            controller.mark(&name, reason);
        }
        let known = |(name, vm): (&VmName, &VmConfig)| (name.clone(), Known::new(vm));
        Ok(Self {
            controller,
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
            refused: BTreeSet::new(),
            known: vms.iter().map(known).collect(),
            log,
            view,
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
            // The first two channels' other ends live as long as this task; the third's does where VMs
            // are looked for.
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

    fn take_in(&mut self, name: &VmName, news: News) {
        let now = self.now();
        self.stale = true;
        let Some(known) = self.known.get_mut(name) else {
            return;
        };
        match news {
            News::Observation(observation) => {
                known.heard(&observation);
                self.controller.observe(now, name, observation);
            }
            News::Returned(bytes) => known.returned.0 += bytes.0,
            News::Overrun(overrun) => {
                known.overruns += 1;
                known.overrun = overrun;
                let [fast, slow] = Tier::ALL.map(|tier| overrun.get(tier).0 >> 10);
                let what = format!(
                    "memory that it was to leave alone was touched: {fast} KiB fast, {slow} KiB slow; \
                     what is held is taken back"
                );
                tracing::warn!("VM {name}: {what}");
                self.log.push(unix_ms(), Some(name.to_string()), what);
                // Asked anew, the VM names what it holds, and that is punched again.
                self.controller
                    .observe(now, name, Observation::OwnedChanged);
            }
            News::Usage(stats) => {
                if known.used(&stats) {
                    self.controller
                        .observe(now, name, Observation::OwnedChanged);
                }
            }
            News::Managed(by) => {
                if known.managed_by.replace(by) != Some(by) {
                    tracing::info!("VM {name}: managed by {by}");
                    let what = format!("managed by {by} from now on");
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

    /// Takes on the VMs that were found, and forgets those that were and run no more.
    fn take_on(&mut self, domains: Domains) {
        let away: BTreeSet<_> = self
            .controller
            .vms()
            .filter(|(_, vm)| vm.state == State::Away)
            .map(|(name, _)| name.clone())
            .collect();
        let ended = |name: &VmName| !domains.contains_key(name) && away.contains(name);
        for name in self.found.extract_if(.., |name| ended(name)) {
            self.controller.remove(&name);
            // With it ends its task.
            self.commands.remove(&name);
            self.known.remove(&name);
            let what = "runs no more: forgotten".into();
            self.log.push(unix_ms(), Some(name.to_string()), what);
            self.stale = true;
        }
        self.refused.retain(|name| domains.contains_key(name));
        for (name, vm) in domains {
            if self.commands.contains_key(&name) || self.refused.contains(&name) {
                continue;
            }
            // Of a controller before this one.
            let kept = self.controller.accounts().get(&name).copied();
            let mark = self.controller.marks().remove(&name);
            self.controller.remove(&name);
            let added = self
                .controller
                .add(name.clone(), limits(&vm), kept, vm.sizes());
            if let Some(reason) = mark {
                self.controller.mark(&name, reason);
            }
            if let Err(refusal) = added {
                self.known.remove(&name);
                self.found.remove(&name);
                let what = format!("found, but not taken on: {refusal}");
                tracing::warn!("VM {name}: {what}");
                self.log.push(unix_ms(), Some(name.to_string()), what);
                self.refused.insert(name);
                continue;
            }
            self.commands
                .insert(name.clone(), self.tasks.start(&name, &vm));
            self.known.insert(name.clone(), Known::new(&vm));
            self.found.insert(name);
            self.stale = true;
        }
    }

    /// Makes a change as far as the disk, and answers.
    async fn make(&mut self, change: Change) {
        let (answer, refusal) = match change {
            Change::SetTiers { vm, tiers, answer } => (answer, self.set_tiers(&vm, tiers).err()),
            Change::Forgive { vm, answer } => (answer, self.forgive(&vm).err()),
            Change::SetPolicy { policy, answer } => {
                self.policy = policy;
                self.policy_chosen = true;
                self.log
                    .push(unix_ms(), None, format!("policy {policy} from now on"));
                self.save().await;
                self.ask_policy();
                (answer, None)
            }
        };
        self.advance().await;
        self.publish();
        let unsaved = || self.unsaved.clone().map(ChangeError::State);
        // Whoever asked may have stopped waiting.
        let _ = answer.send(refusal.or_else(unsaved).map_or(Ok(()), Err));
    }

    fn set_tiers(
        &mut self,
        name: &VmName,
        tiers: PerTier<Option<ByteCount>>,
    ) -> Result<(), ChangeError> {
        let vm = self.controller.vms().find(|(vm, _)| *vm == name);
        let (_, vm) = vm.ok_or_else(|| ChangeError::NoVm(name.clone()))?;
        if self.policy != Policy::Static {
            return Err(ChangeError::Conflict(format!(
                "policy {} decides about sizes; choose policy static first",
                self.policy
            )));
        }
        let wish = TierBytes::from_fn(|tier| tiers.get(tier).unwrap_or(*vm.desired.get(tier)));
        self.controller
            .desire(self.now(), &[(name.clone(), wish)])
            .map_err(|refusal| ChangeError::Conflict(refusal.to_string()))
    }

    fn forgive(&mut self, name: &VmName) -> Result<(), ChangeError> {
        match self.controller.forgive(self.now(), name) {
            Ok(true) => Ok(()),
            Ok(false) => Err(ChangeError::Conflict(format!("VM {name} is not marked"))),
            Err(_) => Err(ChangeError::NoVm(name.clone())),
        }
    }

    /// Wishes what the policy gives.
    fn ask_policy(&mut self) {
        if self.policy == Policy::Static {
            return;
        }
        let pools = TierBytes::from_fn(|tier| self.controller.pool(tier));
        let vms: Vec<_> = self.controller.vms().collect();
        let claims: Vec<_> = vms
            .iter()
            .map(|(name, vm)| claim(vm, &self.known[*name]))
            .collect();
        let wishes: Vec<_> = match provision::allocate(self.policy, pools, &claims, STEP_MIN) {
            Ok(grants) => vms
                .iter()
                .zip(&claims)
                .zip(grants)
                .filter(|((_, claim), _)| !claim.pinned)
                .map(|(((name, _), _), grant)| ((*name).clone(), grant))
                .collect(),
            Err(overbooked) => {
                tracing::warn!("policy {}: {overbooked}", self.policy);
                return;
            }
        };
        if let Err(refusal) = self.controller.desire(self.now(), &wishes) {
            tracing::warn!("policy {}: {refusal}", self.policy);
        }
    }

    /// Does what is due: on disk first, then to the VMs.
    async fn advance(&mut self) {
        let step = self.controller.step(self.now());
        self.stale |= step.accounts_changed || !step.log.is_empty();
        for entry in step.log {
            let vm = entry.vm.map(|vm| vm.to_string());
            tracing::debug!("{}: {}", vm.as_deref().unwrap_or("host"), entry.what);
            self.log.push(unix_ms(), vm, entry.what.to_string());
        }
        if step.accounts_changed || self.unsaved.is_some() {
            self.save().await;
        }
        if self.unsaved.is_none() {
            for command in step.commands {
                // A task that is still busy, or that gave up meanwhile, is asked again when the
                // observation is overdue.
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
            tracing::error!("{why}; no VM is told anything until that is mended");
            self.log.push(unix_ms(), None, why.clone());
        }
        self.unsaved = failed;
    }

    fn publish(&mut self) {
        self.stale = false;
        let vms = self.controller.vms();
        let view = HostView {
            version: env!("CARGO_PKG_VERSION").into(),
            policy: self.policy,
            pool: TierBytes::from_fn(|tier| self.controller.pool(tier)).into(),
            committed: TierBytes::from_fn(|tier| self.controller.committed(tier)).into(),
            violations: self.controller.violations(),
            vms: vms
                .map(|(name, vm)| vm_view(name, vm, &self.known[name]))
                .collect(),
        };
        self.view.send_replace(Arc::new(view));
    }
}

fn limits(vm: &VmConfig) -> Limits {
    let limits = vm.limits();
    Limits {
        guarantee: vm.guarantees(),
        limit: TierBytes::from_fn(|tier| limits.get(tier).unwrap_or(ByteCount(u64::MAX))),
        oom: vm.oom(),
    }
}

/// A VM as the policy sees it.
fn claim(vm: &VmStatus, known: &Known) -> provision::Claim {
    let pinned = vm.state != State::Here;
    provision::Claim {
        share: known.share,
        guarantee: vm.limits.guarantee,
        limit: vm.limits.limit,
        current: match vm.state {
            // It keeps what it has, whatever it was to have.
            State::Hostile(_) => {
                TierBytes::from_fn(|tier| *vm.desired.get(tier).max(vm.committed.get(tier)))
            }
            _ => vm.desired,
        },
        usage: known.usage,
        pinned,
    }
}

fn vm_view(name: &VmName, vm: VmStatus, known: &Known) -> VmView {
    let oom = |tier| match tier {
        Tier::Fast => 0,
        Tier::Slow => vm.limits.oom.0,
    };
    let target = |tier| ByteCount(vm.desired.get(tier).0.saturating_sub(oom(tier)));
    let (state, lie) = match vm.state {
        State::Here => (VmState::Up, None),
        State::Away => (VmState::Down, None),
        State::Hostile(lie) => (VmState::Marked, Some(lie)),
    };
    VmView {
        name: name.to_string(),
        provisioner: known.provisioner,
        managed_by: known.managed_by.map(Into::into),
        state,
        desired: vm.desired.into(),
        target: TierBytes::from_fn(target).into(),
        committed: vm.committed.into(),
        owned: vm.owned.map(Into::into),
        returned_bytes: known.returned.0,
        overruns: known.overruns,
        overrun: known.overrun.into(),
        fast_hit: known.fast_hit,
        relocation: known.relocation,
        working_set_bytes: known.usage.and_then(|usage| Some(usage.working_set?.0)),
        pressure: known.pressure,
        problem: lie.or_else(|| known.trouble.clone()).or(vm.reason),
    }
}

/// Milliseconds since 1970, for people.
fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}
