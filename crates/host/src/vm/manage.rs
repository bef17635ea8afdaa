//! Manages a VM in its present setup: by its provisioner, or by histories.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

use demeter_policy::provision::ProvisionerKind;
use demeter_policy::{ByteCount, PerTier, Tier, TierBytes};
use demeter_proto::RequestId;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::end::{Cut, End};
use super::placing::Placing;
use super::reports::{Guest, Watch};
use super::{FIRST_WORD, News, VmTask};
use crate::agent::AgentClient;
use crate::config::Manage;
use crate::controller::{Observation, PATIENCE};
use crate::history::{HistoryError, HistoryTiering, VmMemory};
use crate::hypervisor::{AgentSocket, Channel, Connection, Hypervisor, HypervisorError};
use crate::memory::{Addresses, LiveBacking, MemoryError};
use crate::process::Opener;
use crate::provisioner::balloon::Balloon;
use crate::provisioner::virtio_balloon::VirtioBalloon;
use crate::provisioner::virtio_mem::VirtioMem;
use crate::provisioner::{ProvisionError, Provisioner};

/// Time to count where a VM's pages lie before histories manage it.
const COUNT_MAX: Duration = Duration::from_secs(60);

impl VmTask {
    /// Manages the VM by its provisioner in its present setup, until that changes. `doubted` is
    /// whether this is the second inspection, after the guest's answer contradicted the first.
    pub(super) async fn manage(
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
            self.tell(News::Reports(agent.stats(), agent.peer()))
                .await?;
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
        placing.spawn(self.placing(connection, None).run());
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

    /// `addresses` are those of its memory, if known.
    fn placing<H: Hypervisor>(
        &self,
        connection: &Connection<H>,
        addresses: Option<Addresses>,
    ) -> Placing<H> {
        Placing {
            name: self.name.clone(),
            hypervisor: connection.hypervisor.clone(),
            process: connection.process,
            memdev: PerTier::from_fn(|tier| self.config.memdev(tier)),
            addresses,
            files: self.files.clone(),
            counts: self.counts.clone(),
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
        let addresses = Addresses::whole(&memory.ranges);
        let (damon, name, config) = (self.damon.clone(), self.name.clone(), self.config.clone());
        let nodes = self.nodes.clone();
        let starting = self
            .outside
            .ask_within(COUNT_MAX, "counting the VM's pages", move |_| {
                let damon = damon.take(&name).map_err(HistoryError::from)?;
                HistoryTiering::start(&root, &config, memory, &nodes, damon)
            });
        let (mut tiering, reports) = starting.await??;
        // Ends with this function.
        let mut placing = JoinSet::new();
        placing.spawn(self.placing(connection, Some(addresses)).run());
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
}

/// Random first request id, so that answers to an earlier controller are not taken for ours.
fn random_id() -> RequestId {
    // The standard library seeds `RandomState` randomly, so the hash of no input is random, too.
    RequestId(RandomState::new().build_hasher().finish())
}
