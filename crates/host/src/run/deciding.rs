//! The deciding task: the controller, the policy and the state file.

mod audit;
mod domains;
mod evacuation;
mod reload;
mod requests;
mod settings;
mod shown;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use demeter_http::Peer;
use demeter_policy::provision::{self, Policy};
use demeter_policy::{ByteCount, MIB, NodeId, PerTier, Tier, TierBytes};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use domains::found_before;

use super::facts::{VmFacts, limits};
use super::service::Service;
use super::{QUEUE_MAX, RunError, Tasks};
use crate::api::Change;
use crate::config::{Config, Pool, Settings, VmConfig};
use crate::controller::{Millis, Observation, Pools, State, VmCommand, VmStatus};
use crate::hypervisor::libvirt::{Domains, LeftDomain};
use crate::outside::Outside;
use crate::store::{Ledger, Store};
use crate::view::{EventLog, HostView};
use crate::vm::News;
use crate::{PoolName, VmName};

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
    /// Pools that the policy cannot divide, with the reason.
    undivided: BTreeMap<PoolName, String>,
    /// Whether the policy was chosen over the API.
    policy_chosen: bool,
    store: Store,
    /// Access to the state file's disk, which may hang.
    outside: Outside,
    tasks: Tasks,
    commands: BTreeMap<VmName, mpsc::Sender<VmCommand>>,
    /// Discovered VMs, which are not in the configuration, without their settings.
    found: BTreeMap<VmName, VmConfig>,
    /// Domains that are not managed, by name.
    left: BTreeMap<String, LeftDomain>,
    /// The configuration in use: the file's with the settings.
    config: Config,
    /// The configuration of the file, and the file.
    file: Config,
    source: PathBuf,
    /// Settings made over the API, and those that cannot be used with the file, with the reason.
    settings: Settings,
    unused: BTreeMap<VmName, String>,
    facts: BTreeMap<VmName, VmFacts>,
    log: EventLog,
    view: watch::Sender<Arc<HostView>>,
    config_out: watch::Sender<Arc<Config>>,
    started: Instant,
    /// Reason why committed memory is not saved. No command is sent until it is.
    unsaved: Option<String>,
    /// Whether the view may be out of date, other than in statistics.
    stale: bool,
    /// Whether the controllers' next step is due.
    is_due: bool,
}

impl Deciding {
    /// Adds the configured VMs with their stored state.
    pub(super) fn new(
        file: &Config,
        source: &Path,
        store: Store,
        ledger: Ledger,
        mut tasks: Tasks,
        log: EventLog,
        (view, config_out): (watch::Sender<Arc<HostView>>, watch::Sender<Arc<Config>>),
    ) -> Result<Self, RunError> {
        let pools = file.pools_in(source, &tasks.files.root)?;
        let (config, unused) = ledger.settings.apply(file);
        let mut controller = Pools::default();
        controller.set(&sizes(&pools));
        let mut vms = config.vms.clone();
        let mut found = BTreeMap::new();
        for (name, vm, used) in found_before(&config, &ledger) {
            vms.insert(name.clone(), used);
            found.insert(name, vm);
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
        let known = |(name, vm): (&VmName, &VmConfig)| (name.clone(), VmFacts::new(vm));
        config_out.send_replace(Arc::new(config.clone()));
        let mut deciding = Self {
            controller,
            evacuates: false,
            policy: ledger.policy.unwrap_or(config.policy),
            undivided: BTreeMap::new(),
            policy_chosen: ledger.policy.is_some(),
            store,
            outside: Outside::default(),
            commands: config
                .vms
                .iter()
                .map(|(name, vm)| {
                    let nodes = nodes_of(&config, &pools, vm);
                    (name.clone(), tasks.start(name, vm, nodes))
                })
                .collect(),
            tasks,
            pools,
            found,
            left: BTreeMap::new(),
            config,
            file: file.clone(),
            source: source.into(),
            settings: ledger.settings,
            unused,
            facts: vms.iter().map(known).collect(),
            log,
            view,
            config_out,
            started: Instant::now(),
            unsaved: None,
            stale: false,
            is_due: true,
        };
        deciding.tell_unused(&deciding.unused);
        // The API may be asked before the first decision.
        deciding.publish();
        Ok(deciding)
    }

    /// Decides until cancelled.
    pub(super) async fn run(
        mut self,
        mut news: mpsc::Receiver<(VmName, News)>,
        mut changes: mpsc::Receiver<(Peer, Change)>,
        mut found: mpsc::Receiver<Domains>,
    ) -> Infallible {
        let mut policy_due = interval(POLICY_EVERY);
        policy_due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut view_due = interval(VIEW_EVERY);
        view_due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut batch = Vec::with_capacity(QUEUE_MAX);
        let mut due = FAR;
        loop {
            // A step costs time for each VM, and most reports are statistics.
            if std::mem::take(&mut self.is_due) {
                self.advance().await;
                let at = self.controller.wake_at();
                due = at.map_or(FAR, |at| Duration::from_millis(at.0));
            }
            // The first two channels stay open as long as this task; the third only while VMs are
            // discovered.
            tokio::select! {
                _ = news.recv_many(&mut batch, QUEUE_MAX) => self.take_in_all(&mut batch),
                Some((peer, change)) = changes.recv() => {
                    self.make(&peer, change).await;
                    self.is_due = true;
                }
                Some(domains) = found.recv() => {
                    self.take_on(domains);
                    self.audit("libvirt");
                    self.is_due = true;
                }
                _ = policy_due.tick() => {
                    self.read_reports();
                    self.ask_policy();
                    self.is_due = true;
                    // Show new statistics.
                    self.stale = true;
                }
                _ = view_due.tick(), if self.stale => self.publish(),
                () = sleep_until(self.started + due) => self.is_due = true,
            }
        }
    }

    fn now(&self) -> Millis {
        Millis(self.started.elapsed().as_millis() as u64)
    }

    fn observe(&mut self, name: &VmName, observation: Observation) {
        self.is_due = true;
        let now = self.now();
        if let Some(pool) = self.controller.of_mut(name) {
            pool.observe(now, name, observation);
        }
    }

    fn take_in_all(&mut self, batch: &mut Vec<(VmName, News)>) {
        let is_here =
            |(_, news): &(VmName, News)| matches!(news, News::Observation(Observation::Here));
        let asks = batch.iter().any(is_here);
        for (name, news) in batch.drain(..) {
            self.take_in(&name, news);
        }
        // Ask the policy before the first order, because until now the VM kept its initial size.
        if asks {
            self.ask_policy();
        }
    }

    fn take_in(&mut self, name: &VmName, news: News) {
        let Some(known) = self.facts.get_mut(name) else {
            return;
        };
        self.stale |= !matches!(news, News::Usage(_) | News::Reports(..) | News::Places(_));
        match news {
            News::Observation(observation) => {
                known.observe(&observation);
                self.observe(name, observation);
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
            News::Reports(reports, session) => known.reported_at(reports, session),
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

    /// Takes in the reports of guests since the last call.
    fn read_reports(&mut self) {
        let mut changed = vec![];
        for (name, known) in &mut self.facts {
            if known.read_report() {
                changed.push(name.clone());
            }
        }
        for name in changed {
            self.observe(&name, Observation::OwnedChanged);
        }
    }

    /// Sets the sizes that the policy wants.
    fn ask_policy(&mut self) {
        let before = std::mem::take(&mut self.undivided);
        if self.policy == Policy::Static {
            return;
        }
        let (policy, now) = (self.policy, self.now());
        for (pool, controller) in self.controller.iter_mut() {
            let sizes = TierBytes::from_fn(|tier| controller.pool(tier));
            let vms: Vec<_> = controller.vms().collect();
            let claims: Vec<_> = vms
                .iter()
                .map(|(name, vm)| claim(vm, &self.facts[*name]))
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
                    let why = overbooked.to_string();
                    if before.get(pool) != Some(&why) {
                        tracing::warn!("policy {policy}: {}{why}", of_pool(pool));
                    }
                    self.undivided.insert(pool.clone(), why);
                    continue;
                }
            };
            if let Err(refusal) = controller.desire(now, &wishes) {
                tracing::warn!("policy {policy}: {}{refusal}", of_pool(pool));
            }
        }
        self.stale |= self.undivided != before;
        self.audit(&format!("policy {policy}"));
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
                audit::tell(&self.log, pool, entry, None);
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
            settings: self.settings.clone(),
            pools: self.pools_of_found(),
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

/// The host's nodes of a VM's pool; empty if unknown.
fn nodes_of(
    config: &Config,
    pools: &BTreeMap<PoolName, Pool>,
    vm: &VmConfig,
) -> PerTier<Vec<NodeId>> {
    let pool = config.pool_of(vm).and_then(|pool| pools.get(pool));
    pool.map(|pool| pool.nodes.clone()).unwrap_or_default()
}

/// The beginning of a line about a pool, if it has a name.
fn of_pool(pool: &PoolName) -> String {
    match pool.0.as_str() {
        "" => String::new(),
        name => format!("pool {name}: "),
    }
}

/// A VM's claim, as the policy sees it.
fn claim(vm: &VmStatus, known: &VmFacts) -> provision::Claim {
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
        service: known.service.as_ref().and_then(Service::needs),
    }
}

/// Milliseconds since 1970, for people.
fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}
