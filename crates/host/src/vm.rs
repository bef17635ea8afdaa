//! The task of one VM, from the first connection to the end of its process.
//!
//! It connects to the hypervisor, finds the VM's memory, carries out the controller's orders and
//! reports what happens. Each VM has its own task, so a VM that does not answer delays no other.

mod end;
mod limit;
mod manage;
mod placing;
mod reports;

use std::future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use demeter_policy::{ByteCount, NodeId, PerTier, Tier, TierBytes};
use demeter_proto::Stats;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use crate::VmName;
use crate::agent::GuestSession;
use crate::config::{Libvirt, VmConfig};
use crate::controller::{Observation, VmCommand};
use crate::hard_limit::HardLimit;
use crate::history::SharedDamon;
use crate::hypervisor::cloud_hypervisor::{self, CloudHypervisor};
use crate::hypervisor::libvirt;
use crate::hypervisor::qemu::{self, Qemu};
use crate::hypervisor::{Connection, Events, Hypervisor, HypervisorError};
use crate::memory::{HostFiles, Owned, Places};
use crate::outside::{FileSizes, Outside, SizeWatch};
use crate::process::{PeerProcess, Process};
use crate::provisioner::{Provisioner, carry_out};
use end::{Cut, End, Trouble};
pub(crate) use placing::Counts;
use reports::{Guest, Watch};

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
    /// agents report once a second, and the controller needs the latest once a second. Then its
    /// session.
    Reports(
        watch::Receiver<Option<Stats>>,
        watch::Receiver<Option<GuestSession>>,
    ),
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
    /// The host's nodes of its tiers.
    pub nodes: PerTier<Vec<NodeId>>,
    /// Connection to libvirt, if it runs the VM.
    pub libvirt: Libvirt,
    /// Files that may be a VM's memory.
    pub files: HostFiles,
    /// Access to files of others, which may hang.
    pub outside: Outside,
    /// Watch of all VMs' memory files.
    pub file_sizes: FileSizes,
    /// Limits of counting where its memory lies.
    pub counts: Counts,
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

/// The sizes of the VM's files, once they change.
async fn changed(sizes: &mut Option<SizeWatch>) -> TierBytes {
    match sizes {
        Some(sizes) => sizes.changed().await,
        None => future::pending().await,
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
        let (owner, limits) = (self.config.owner_uid, cloud_hypervisor::Timeouts::default());
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
                let limits = qemu::Timeouts::default();
                Ok(Qemu::connect(socket, &self.outside, config.owner_uid, limits).await?)
            }
            (None, None) => Err(HypervisorError::Failed("it has no socket".into())),
        }
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
