//! The task of one VM, from the first connection to the end of its process.
//!
//! It connects to the hypervisor, finds the VM's memory, carries out the controller's orders and
//! reports what happens. Each VM has its own task, so a VM that does not answer delays no other.

mod placing;

use std::future;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use demeter_policy::provision::ProvisionerKind;
use demeter_policy::{ByteCount, PerTier, Pid, Tier, TierBytes};
use demeter_proto::{BootId, RequestId, Stats};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use crate::VmName;
use crate::agent::{AgentClient, GuestSession, NotHeard};
use crate::config::{Manage, VmConfig};
use crate::controller::{Observation, PATIENCE, VmCommand};
use crate::hard_limit::{HardLimit, HardLimitError};
use crate::history::{HistoryError, HistoryState, HistoryTiering, SharedDamon, VmMemory};
use crate::hypervisor::cloud_hypervisor::{self, CloudHypervisor};
use crate::hypervisor::libvirt::{self, Libvirt};
use crate::hypervisor::qemu::{self, Qemu};
use crate::hypervisor::{
    AgentSocket, Channel, Connection, Event, Events, Hypervisor, HypervisorError,
};
use crate::memory::{HostFiles, LiveBacking, MemoryError, Owned, Places};
use crate::outside::{FileSizes, Outside, SizeWatch, Stuck};
use crate::process::{Opener, PeerProcess, Process};
use crate::provisioner::balloon::Balloon;
use crate::provisioner::virtio_balloon::VirtioBalloon;
use crate::provisioner::virtio_mem::VirtioMem;
use crate::provisioner::{ProvisionError, Provisioner, carry_out};
use placing::Placing;

/// First retry interval for the hypervisor's connection; it doubles up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Time for a hypervisor to exit after its connection has ended.
const EXIT_GRACE: Duration = Duration::from_secs(2);

/// Time for a guest's agent to introduce itself; it does so every second.
const FIRST_WORD: Duration = Duration::from_secs(2);

/// Delay between a change of the VM and the next inspection.
const SETTLE: Duration = Duration::from_millis(100);

/// Interval between checks of a hard limit that is not at its proper value yet.
const LIMIT_EVERY: Duration = Duration::from_millis(500);

/// Time for the kernel to lower a cgroup's limit, which drops cached files first.
const LIMIT_CHANGE_MAX: Duration = Duration::from_secs(30);

/// Time to count where a VM's pages lie before histories manage it.
const COUNT_MAX: Duration = Duration::from_secs(60);

const NO_AGENT: &str = "the guest's agent is not connected yet; run demeter guest in the VM, which \
                        needs a virtserialport named org.demeter.0 (Cloud Hypervisor: a --vsock \
                        device)";

const OVER_LIMIT: &str = "its cgroup uses more than what the VM owns and hard_limit_extra_mib together, \
                          so memory.max is not lowered yet; raise the key if this stays";

/// A report of a VM's task.
#[derive(Debug)]
pub(crate) enum News {
    /// An observation for the controller.
    Observation(Observation),
    /// The VM returned this much memory to the host.
    Returned(ByteCount),
    /// The VM uses this much memory that it does not own.
    Overrun(TierBytes),
    /// How the guest uses its memory, from its histories.
    Usage(Stats),
    /// Where the guest's agent reports how it uses its memory. Not each report is news: a thousand
    /// agents report once a second, and the controller needs the latest once a second.
    Reports(watch::Receiver<Option<Stats>>),
    /// Where its memory lies on the host; `None` if unknown.
    Places(Option<Places>),
    /// The VM is managed by this component from now on.
    Managed(&'static str),
    /// The VM cannot be managed, for this reason; the task retries.
    Trouble(String),
}

/// The state and dependencies of a VM's task.
#[derive(Debug)]
pub(crate) struct VmTask {
    /// The VM.
    pub name: VmName,
    /// Its configuration.
    pub config: VmConfig,
    /// Connection to libvirt, if it runs the VM.
    pub libvirt: Libvirt,
    /// Files that may be a VM's memory.
    pub files: HostFiles,
    /// Access to files of others, which may hang.
    pub outside: Outside,
    /// Watch of all VMs' memory files.
    pub file_sizes: FileSizes,
    /// Reader of access bits, shared by all VMs.
    pub damon: Arc<SharedDamon>,
    /// Orders of the controller.
    pub commands: mpsc::Receiver<VmCommand>,
    /// Where the task reports.
    pub news: mpsc::Sender<(VmName, News)>,
    /// The limit of the VM's cgroup, if configured. It survives lost connections and ends with the
    /// VM's process or with the task.
    pub hard_limit: Option<HardLimit>,
}

/// Reason why a session has ended.
#[derive(Debug)]
enum End {
    /// The controller has dropped its end of a channel.
    Stopped,
    /// The VM cannot be managed now.
    Trouble(Trouble),
}

#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Provision(#[from] ProvisionError),
    #[error(transparent)]
    History(#[from] HistoryError),
    #[error(transparent)]
    HardLimit(#[from] HardLimitError),
    #[error(transparent)]
    Stuck(#[from] Stuck),
    #[error(
        "its process {pid} runs VM {other}, which is managed already; give each VM its own sockets, and name \
         each domain once"
    )]
    Shared { pid: Pid, other: String },
    #[error("cannot watch the hypervisor's process: {0}")]
    Process(#[from] io::Error),
}

impl<T: Into<Trouble>> From<T> for End {
    fn from(trouble: T) -> Self {
        Self::Trouble(trouble.into())
    }
}

/// Reason to stop managing the VM in its present setup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// The connection to the hypervisor has ended.
    Gone,
    /// The VM's setup may have changed and must be inspected again.
    Changed,
    /// The guest's answer contradicts the known setup. Like `Changed`; the guest is judged
    /// afterwards.
    Doubt,
    /// Managing the VM by histories has failed and the failure was reported.
    Failed,
}

/// Listener for unsolicited reports of the hypervisor, the agent and the history thread.
struct Watch<'a> {
    events: &'a mut Events,
    guest: Option<Guest>,
    history: Option<watch::Receiver<HistoryState>>,
    /// Whether the hypervisor has reported a reset that was not handled yet.
    was_reset: bool,
}

/// Listener for reports of the guest's agent.
struct Guest {
    not_heard: watch::Receiver<Option<NotHeard>>,
    peer: watch::Receiver<Option<GuestSession>>,
    /// The guest's boot that was reported last.
    boot: Option<BootId>,
    /// Whether the VM can be managed only while its agent is connected.
    needed: bool,
    /// Whether the host manages the VM while its agent is not connected.
    is_replaced: bool,
}

impl Watch<'_> {
    /// The next report, or the reason to stop. Cancel-safe: a dropped call loses no report.
    async fn next(&mut self) -> Result<News, Cut> {
        let guest = async {
            match &mut self.guest {
                Some(guest) => guest.next().await,
                None => future::pending().await,
            }
        };
        tokio::select! {
            biased;
            event = self.events.next() => match event {
                Some(Event::Reset) => {
                    self.was_reset = true;
                    Ok(News::Observation(Observation::Reset))
                }
                Some(Event::Changed) => Err(Cut::Changed),
                None => Err(Cut::Gone),
            },
            news = guest => news,
            news = reported(&mut self.history) => news,
        }
    }
}

/// The sizes of the VM's files, once they change.
async fn changed(sizes: &mut Option<SizeWatch>) -> TierBytes {
    match sizes {
        Some(sizes) => sizes.changed().await,
        None => future::pending().await,
    }
}

/// The next report of the thread that manages the VM by histories.
async fn reported(history: &mut Option<watch::Receiver<HistoryState>>) -> Result<News, Cut> {
    let Some(reports) = history else {
        return future::pending().await;
    };
    loop {
        reports.changed().await.map_err(|_| Cut::Failed)?;
        let report = reports.borrow_and_update().clone();
        if let Some(why) = report.failed {
            return Ok(News::Trouble(why));
        }
        if let Some(stats) = report.usage {
            return Ok(News::Usage(stats));
        }
    }
}

impl Guest {
    /// Waits up to `limit` for the agent to introduce itself.
    async fn speaks_within(&mut self, limit: Duration) -> bool {
        self.boot = match timeout(limit, self.peer.wait_for(Option::is_some)).await {
            Ok(Ok(peer)) => peer.as_ref().map(|peer| peer.boot_id),
            Ok(Err(_)) | Err(_) => None,
        };
        self.boot.is_some()
    }

    /// Waits up to `limit` for the agent if it is needed. Returns whether the VM can be managed.
    async fn arrives_within(&mut self, limit: Duration) -> bool {
        !self.needed || self.speaks_within(limit).await
    }

    async fn next(&mut self) -> Result<News, Cut> {
        loop {
            tokio::select! {
                biased;
                Ok(()) = self.peer.changed() => {
                    let boot = self.peer.borrow_and_update().as_ref().map(|peer| peer.boot_id);
                    let before = std::mem::replace(&mut self.boot, boot);
                    match (before, boot) {
                        (None, Some(_)) | (Some(_), None) if self.is_replaced => {
                            return Err(Cut::Changed);
                        }
                        _ if !self.needed => {}
                        (_, None) => return Ok(News::Observation(Observation::Lost)),
                        (Some(before), Some(boot)) if before != boot => {
                            return Ok(News::Observation(Observation::Reset));
                        }
                        // The agent arrived or restarted, so everything must be asked again.
                        (_, Some(_)) => return Ok(News::Observation(Observation::Here)),
                    }
                }
                Ok(()) = self.not_heard.changed() => {
                    if let Some(why) = &*self.not_heard.borrow_and_update() {
                        return Ok(News::Trouble(why.to_string()));
                    }
                }
                // The link has ended and will report nothing more.
                else => future::pending().await,
            }
        }
    }
}

impl VmTask {
    /// Works until the controller drops its end of `commands` or `news`.
    pub(crate) async fn run(mut self) {
        let mut pause = PAUSE;
        loop {
            match self.session().await {
                Ok(()) => pause = PAUSE,
                Err(End::Stopped) => return,
                Err(End::Trouble(trouble)) => {
                    if self.tell(News::Trouble(trouble.to_string())).await.is_err() {
                        return;
                    }
                }
            }
            if self.rest(pause).await.is_err() {
                return;
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Serves one connection to the hypervisor, from its beginning to its end.
    async fn session(&mut self) -> Result<(), End> {
        let Some(socket) = &self.config.cloud_hypervisor else {
            let connection = self.connect().await?;
            return self.live(connection).await;
        };
        let (owner, limits) = (self.config.owner_uid, cloud_hypervisor::Limits::default());
        let root = &self.files.root;
        let connected = CloudHypervisor::connect(socket, &self.outside, owner, root, limits).await;
        self.live(connected.map_err(HypervisorError::from)?).await
    }

    async fn live(&mut self, mut connection: Connection<impl Hypervisor>) -> Result<(), End> {
        let process = Process::open(connection.process.pid)?;
        // No other VM may use this process while it is managed here.
        let _own = self.take_process(connection.process)?;
        self.find_hard_limit(connection.process).await?;
        // `manage` releases the memory files before it returns, so a VM that ended keeps no memory.
        let mut doubted = false;
        loop {
            match self.manage(&mut connection, doubted).await? {
                Cut::Gone => break,
                Cut::Failed => return self.tell(News::Observation(Observation::Lost)).await,
                Cut::Doubt => doubted = true,
                Cut::Changed => {
                    doubted = false;
                    // Loading a snapshot fills memory that was empty.
                    self.limit(HardLimit::lift).await?;
                }
            }
            self.tell(News::Observation(Observation::Lost)).await?;
            // Paired events, such as stop and resume, need one inspection only.
            self.rest(SETTLE).await?;
        }
        let ended = process.ends_within(EXIT_GRACE).await;
        let observation = if ended {
            self.hard_limit = None;
            Observation::Gone
        } else {
            Observation::Lost
        };
        self.tell(News::Observation(observation)).await
    }

    /// Claims the VM's process, which no other VM may have.
    fn take_process(&self, process: PeerProcess) -> Result<Option<Owned<PeerProcess>>, Trouble> {
        if cfg!(test) && process.pid.0 == std::process::id() {
            // VMs in tests all run in the test's process.
            return Ok(None);
        }
        let taken = self.files.processes.take(process, self.name.to_string());
        let taken = taken.map_err(|other| Trouble::Shared {
            pid: process.pid,
            other,
        })?;
        Ok(Some(taken))
    }

    async fn connect(&self) -> Result<Connection<Qemu>, HypervisorError> {
        let config = &self.config;
        match (&config.libvirt, &config.qmp) {
            (Some(domain), _) => {
                let (kind, nodes) = (config.provisioner, config.nodes());
                let connected = libvirt::connect(&self.libvirt, &self.outside, domain, kind, nodes);
                Ok(connected.await?)
            }
            (None, Some(socket)) => {
                let limits = qemu::Limits::default();
                Ok(Qemu::connect(socket, &self.outside, config.owner_uid, limits).await?)
            }
            (None, None) => Err(HypervisorError::Failed("it has no socket".into())),
        }
    }

    /// Manages the VM by its provisioner in its present setup, until that changes. `doubted` is
    /// whether this is the second inspection, after the guest's answer contradicted the first.
    async fn manage(
        &mut self,
        connection: &mut Connection<impl Hypervisor>,
        doubted: bool,
    ) -> Result<Cut, End> {
        let nodes = self.config.nodes();
        let deadline = Instant::now() + PATIENCE;
        // Must come before anything that can fail, because a silent VM may hold all its memory.
        let most = self.most(&connection.hypervisor).await?;
        self.tell(News::Observation(Observation::Seen { most }))
            .await?;
        let named = self.config.agent.clone().map(|path| AgentSocket {
            path,
            opener: Opener::only(connection.process),
            channel: Channel::Port,
        });
        let agent = connection.agent.clone().or(named);
        let agent = agent.map(|of| AgentClient::to(of, self.outside.clone(), random_id()));
        if let Some(agent) = &agent {
            self.tell(News::Reports(agent.stats())).await?;
        }
        let needed = self.config.provisioner == ProvisionerKind::DemeterBalloon;
        let mut guest = agent.as_ref().map(|agent| Guest {
            not_heard: agent.not_heard(),
            peer: agent.peer(),
            boot: None,
            needed,
            is_replaced: self.config.manage == Manage::Auto,
        });
        let by_history = match (self.config.manage, &mut guest) {
            (Manage::Agent, _) => false,
            (Manage::Auto, Some(guest)) => !guest.speaks_within(FIRST_WORD).await,
            (Manage::History | Manage::Auto, _) => true,
        };
        if by_history {
            let guest = guest.map(|guest| Guest {
                needed: false,
                ..guest
            });
            return self.manage_by_history(connection, guest).await;
        }
        // Ends with this function.
        let mut placing = JoinSet::new();
        placing.spawn(self.placing(connection).run());
        match (self.config.provisioner, agent) {
            (ProvisionerKind::DemeterBalloon, Some(agent)) => {
                let backing = self.backing(connection).await?;
                let balloon = Balloon::new(agent, backing, nodes, self.config.oom());
                self.serve(balloon, &mut connection.events, guest, doubted)
                    .await
            }
            (ProvisionerKind::DemeterBalloon, None) => {
                let why =
                    "demeter-balloon needs the agent's socket: an org.demeter.0 port, or with \
                           Cloud Hypervisor a --vsock device"
                        .into();
                Err(ProvisionError::Refused(why).into())
            }
            // The agent is optional here; it only reports usage.
            (ProvisionerKind::VirtioMem, _agent) => {
                let memdev = PerTier::from_fn(|tier| self.config.memdev(tier));
                let found =
                    VirtioMem::find(connection.hypervisor.clone(), nodes, &memdev, deadline)
                        .await?;
                self.serve(found, &mut connection.events, guest, doubted)
                    .await
            }
            (ProvisionerKind::VirtioBalloon, _agent) => {
                let backing = self.backing(connection).await?;
                let balloon = VirtioBalloon::new(
                    connection.hypervisor.clone(),
                    backing,
                    self.outside.clone(),
                );
                self.serve(balloon, &mut connection.events, guest, doubted)
                    .await
            }
        }
    }

    fn placing<H: Hypervisor>(&self, connection: &Connection<H>) -> Placing<H> {
        Placing {
            name: self.name.clone(),
            hypervisor: connection.hypervisor.clone(),
            process: connection.process,
            memdev: PerTier::from_fn(|tier| self.config.memdev(tier)),
            files: self.files.clone(),
            news: self.news.clone(),
        }
    }

    /// Manages a VM without an agent, by histories of access bits.
    async fn manage_by_history(
        &mut self,
        connection: &mut Connection<impl Hypervisor>,
        guest: Option<Guest>,
    ) -> Result<Cut, End> {
        let root = self.files.root.clone();
        let memory = VmMemory::find(&root, &self.outside, connection).await?;
        let (damon, name, config) = (self.damon.clone(), self.name.clone(), self.config.clone());
        let starting = self
            .outside
            .ask_within(COUNT_MAX, "counting the VM's pages", move |_| {
                let damon = damon.take(&name).map_err(HistoryError::from)?;
                HistoryTiering::start(&root, &config, memory, damon)
            });
        let (mut tiering, reports) = starting.await??;
        let mut watch = Watch {
            events: &mut connection.events,
            guest,
            history: Some(reports),
            was_reset: false,
        };
        self.tell(News::Managed(tiering.name())).await?;
        self.tell(News::Observation(Observation::Here)).await?;
        let ended = self.carry_out_all(&mut tiering, &mut watch, false).await;
        // Dropping waits for the thread's current operation.
        let ending = self
            .outside
            .ask("ending the VM's thread", |_| drop(tiering));
        ending.await?;
        ended
    }

    /// Total memory of the VM.
    async fn most(&self, hypervisor: &impl Hypervisor) -> Result<TierBytes, HypervisorError> {
        let backends = hypervisor.backends().await?;
        let size_of = |is: &dyn Fn(&str) -> bool| {
            let named = backends
                .iter()
                .filter(|of| of.id.as_deref().is_some_and(is));
            named.fold(0, |sum: u64, of| sum.saturating_add(of.size.0))
        };
        if self.config.manage == Manage::History {
            // All memory counts for each tier, because the kernel may have placed it in either.
            let whole = ByteCount(size_of(&|_| true));
            return Ok(PerTier::from_fn(|_| whole));
        }
        let mut most = TierBytes::from_fn(|tier| {
            let memdev = self.config.memdev(tier);
            ByteCount(size_of(&|id| memdev.as_deref() == Some(id)))
        });
        if self.config.provisioner == ProvisionerKind::VirtioMem {
            let nodes = self.config.nodes();
            for device in hypervisor.memory_devices().await? {
                for tier in Tier::ALL
                    .into_iter()
                    .filter(|tier| *nodes.get(*tier) == device.node)
                {
                    let most = most.get_mut(tier);
                    most.0 = most.0.saturating_add(device.max.0);
                }
            }
        }
        Ok(most)
    }

    async fn backing<H: Hypervisor>(
        &self,
        connection: &Connection<H>,
    ) -> Result<LiveBacking<H>, MemoryError> {
        let memdev = |tier| self.config.memdev(tier).unwrap_or_default();
        let memdev = PerTier::from_fn(memdev);
        let vm = self.name.as_str();
        LiveBacking::find(&self.files, &self.outside, vm, connection, &memdev).await
    }

    /// Waits for the agent if it is needed, then carries out orders until the connection ends.
    async fn serve(
        &mut self,
        mut provisioner: impl Provisioner,
        events: &mut Events,
        mut guest: Option<Guest>,
        doubted: bool,
    ) -> Result<Cut, End> {
        self.tell(News::Managed("agent")).await?;
        tracing::info!("VM {}: sized by {}", self.name, provisioner.name());
        let here = match guest.as_mut() {
            Some(guest) => guest.arrives_within(FIRST_WORD).await,
            None => true,
        };
        self.tell(if here {
            News::Observation(Observation::Here)
        } else {
            News::Trouble(NO_AGENT.into())
        })
        .await?;
        let mut watch = Watch {
            events,
            guest,
            history: None,
            was_reset: false,
        };
        self.carry_out_all(&mut provisioner, &mut watch, doubted)
            .await
    }

    /// Carries out orders and reports events until the connection ends.
    async fn carry_out_all(
        &mut self,
        provisioner: &mut impl Provisioner,
        watch: &mut Watch<'_>,
        doubted: bool,
    ) -> Result<Cut, End> {
        let mut sizes = provisioner
            .read_backed()
            .map(|read| self.file_sizes.watch(self.outside.clone(), read));
        let mut overrun = TierBytes::default();
        let mut is_limited = true;
        let mut limit_due = interval(LIMIT_EVERY);
        limit_due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let command = tokio::select! {
                biased;
                news = watch.next() => match news {
                    Ok(news) => {
                        self.hear(news, watch).await?;
                        continue;
                    }
                    Err(cut) => return Ok(cut),
                },
                command = self.commands.recv() => command.ok_or(End::Stopped)?,
                backed = changed(&mut sizes) => {
                    let before = std::mem::replace(&mut overrun, provisioner.overrun(backed));
                    // Report only an increase: some memory, such as part of a huge page, can never
                    // be reclaimed.
                    if Tier::ALL.into_iter().any(|tier| overrun.get(tier) > before.get(tier)) {
                        self.tell(News::Overrun(overrun)).await?;
                    }
                    continue;
                }
                _ = limit_due.tick(), if self.hard_limit.is_some() => {
                    let was_limited = is_limited;
                    is_limited = self.limit(HardLimit::settle).await?;
                    if was_limited && !is_limited {
                        self.tell(News::Trouble(OVER_LIMIT.into())).await?;
                    }
                    continue;
                }
            };
            let order = command.order;
            self.limit(move |limit| limit.before(order)).await?;
            let mut work = pin!(carry_out(provisioner, &command));
            loop {
                tokio::select! {
                    // Check for a reset first, because it must cancel the current order.
                    biased;
                    news = watch.next() => match news {
                        Ok(news) => {
                            let disturbed = matches!(news, News::Observation(_));
                            self.hear(news, watch).await?;
                            if disturbed {
                                break;
                            }
                        }
                        Err(cut) => return Ok(cut),
                    },
                    (observation, returned) = &mut work => {
                        // Inspect the VM again before judging the guest, because our map may be
                        // stale.
                        if matches!(observation, Observation::Hostile { .. }) && !doubted {
                            return Ok(Cut::Doubt);
                        }
                        // Lower the limit before the controller gives the returned memory to
                        // others.
                        let came = observation.clone();
                        self.limit(move |limit| limit.after(order, &came)).await?;
                        if returned > ByteCount(0) {
                            self.tell(News::Returned(returned)).await?;
                        }
                        self.tell(News::Observation(observation)).await?;
                        break;
                    }
                }
            }
            // The order may have changed what the VM owns.
            if let Some(sizes) = &mut sizes {
                sizes.renew();
            }
        }
    }

    /// Handles a report of the hypervisor or the guest.
    async fn hear(&mut self, news: News, watch: &mut Watch<'_>) -> Result<(), End> {
        // Only the hypervisor's report lifts the limit; a guest could claim a reset at any time.
        if std::mem::take(&mut watch.was_reset) {
            self.limit(HardLimit::lift).await?;
        }
        self.tell(news).await
    }

    /// Sets up the hard limit of the VM's process, if configured.
    async fn find_hard_limit(&mut self, process: PeerProcess) -> Result<(), End> {
        let Some(extra) = self.config.hard_limit_extra() else {
            return Ok(());
        };
        if !self
            .hard_limit
            .as_ref()
            .is_some_and(|limit| limit.is_of(process))
        {
            // Drop the previous process's limit first.
            self.hard_limit = None;
            let root = self.files.root.clone();
            let finding = self.outside.ask("looking for the VM's cgroup", move |_| {
                HardLimit::find(&root, process, extra)
            });
            self.hard_limit = Some(finding.await??);
        }
        Ok(())
    }

    /// Changes the hard limit, if any, and returns whether it has its proper value. Runs on a
    /// thread that may wait, because the kernel drops cached files before it returns.
    async fn limit(
        &mut self,
        change: impl FnOnce(&mut HardLimit) -> Result<bool, HardLimitError> + Send + 'static,
    ) -> Result<bool, End> {
        let Some(mut limit) = self.hard_limit.take() else {
            return Ok(true);
        };
        // If the caller stops waiting, the change still completes and the limit is put back
        // afterwards.
        let changing = self.outside.ask_within(
            LIMIT_CHANGE_MAX,
            "changing the VM's memory.max",
            move |_| {
                let changed = change(&mut limit);
                (limit, changed)
            },
        );
        let (limit, changed) = changing.await?;
        let is_as_wanted = changed?;
        self.hard_limit = Some(limit);
        Ok(is_as_wanted)
    }

    /// Waits, and discards orders that arrive meanwhile.
    async fn rest(&mut self, pause: Duration) -> Result<(), End> {
        let until = Instant::now() + pause;
        loop {
            tokio::select! {
                command = self.commands.recv() => drop(command.ok_or(End::Stopped)?),
                () = sleep_until(until) => return Ok(()),
            }
        }
    }

    async fn tell(&self, news: News) -> Result<(), End> {
        let sent = self.news.send((self.name.clone(), news)).await;
        sent.map_err(|_| End::Stopped)
    }
}

/// Random first request id, so that answers to an earlier controller are not taken for ours.
fn random_id() -> RequestId {
    // The standard library seeds `RandomState` randomly, so the hash of no input is random, too.
    RequestId(RandomState::new().build_hasher().finish())
}
