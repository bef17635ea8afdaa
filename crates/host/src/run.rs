//! The controller's process: a deciding task, one task for each VM, and the API.
//!
//! The deciding task takes reports of VMs and changes from the API. It saves committed memory and
//! only then sends commands. A controller that was killed at any point restarts from the state file
//! and asks the VMs for the rest.

mod deciding;
mod facts;
mod places;
mod service;

use std::convert::Infallible;
use std::future;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use demeter_http::Peer;
use demeter_linux::open_files;
use demeter_policy::{NodeId, PerTier};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::VmName;
use crate::api::{self, Change, Handle, ListenError, Token};
use crate::config::{Config, ConfigError, Discover, Libvirt, Manage, VMS_MAX, VmConfig};
use crate::controller::{Refusal, VmCommand};
use crate::history::SharedDamon;
use crate::hypervisor::libvirt::discover;
use crate::memory::HostFiles;
use crate::outside::{FileSizes, Outside};
use crate::privileges;
use crate::store::{Ledger, Store, StoreError};
use crate::view::{EventLog, HostView};
use crate::vm::{Counts, News, VmTask};
use deciding::Deciding;

/// Capacity of the queues for VM reports and API changes.
const QUEUE_MAX: usize = 64;

/// Open files for a VM: its sockets, its process, its memory and their inspection.
const DESCRIPTORS_PER_VM: u64 = 8;

/// Open files for everything else: API clients, the state file, the runtime.
const DESCRIPTORS: u64 = 192;

/// Maximum number of blocking threads: three for each VM, for its files, its hypervisor and the
/// count of its pages.
const WAITING_THREADS_MAX: usize = 3 * VMS_MAX + 64;

/// Time limit for work in progress when the controller stops.
const END_MAX: Duration = Duration::from_secs(2);

/// Reason why the controller cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The state file cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A pool does not fit this machine.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The API cannot listen.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The stored state contradicts the configuration.
    #[error("configuration: VM {vm}: {refusal}")]
    Refused {
        /// The VM.
        vm: VmName,
        /// The contradiction.
        refusal: Refusal,
    },
    /// The process may not open enough files.
    #[error(
        "{needed} open files are needed for so many VMs, {most} are allowed; raise LimitNOFILE= in the \
         unit, or ulimit -n"
    )]
    Descriptors {
        /// Files needed for VMs and clients.
        needed: u64,
        /// The hard limit.
        most: u64,
    },
    /// The system refused a resource.
    #[error("cannot {what}: {source}")]
    System {
        /// The failed operation.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// Runs the controller until SIGTERM or SIGINT; VMs then keep their sizes. SIGHUP reloads `source`,
/// the configuration's file.
pub fn run(config: &Config, source: &Path) -> Result<(), RunError> {
    let system = |what| move |source| RunError::System { what, source };
    let by_history = config.vms.values().any(|vm| vm.manage != Manage::Agent);
    privileges::give_up(by_history).map_err(system("give up privileges"))?;
    check_descriptors(config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // Two workers: one may be busy punching while the other serves the rest.
        .worker_threads(2)
        .max_blocking_threads(WAITING_THREADS_MAX)
        .enable_all()
        .build()
        .map_err(system("start"))?;
    let (reload, reloads) = mpsc::channel(1);
    let (end, ended) = oneshot::channel();
    let signals = on_signals(reload, end).map_err(system("catch signals"))?;
    let outcome = runtime.block_on(serve(config, source, Path::new("/"), reloads, async {
        let _ = ended.await;
    }));
    signals.close();
    // Threads that wait for hung storage may never end.
    runtime.shutdown_timeout(END_MAX);
    outcome
}

/// Forwards signals to the runtime. Tokio's own signal handling would open a socket pair in every
/// runtime of this program, including the guest's agent.
fn on_signals(
    reload: mpsc::Sender<()>,
    end: oneshot::Sender<()>,
) -> io::Result<signal_hook::iterator::Handle> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let handle = signals.handle();
    let thread = thread::Builder::new().name("signals".into());
    thread.spawn(move || {
        let mut end = Some(end);
        for signal in signals.forever() {
            if signal == SIGHUP {
                // Signals that arrive during a reload are merged into one.
                let _ = reload.try_send(());
            } else if let Some(end) = end.take() {
                let _ = end.send(());
            }
        }
    })?;
    Ok(handle)
}

/// Checks that the process may open enough files.
fn check_descriptors(config: &Config) -> Result<(), RunError> {
    // Discovery may find any number of VMs.
    let vms = config.discover.map_or(config.vms.len(), |_| VMS_MAX);
    let needed = DESCRIPTORS + DESCRIPTORS_PER_VM * vms as u64;
    let most = open_files::raise(u64::MAX);
    if most < needed {
        return Err(RunError::Descriptors { needed, most });
    }
    Ok(())
}

/// Opens the state file. Retries, because a controller that is stopping may still hold it.
async fn open_state(path: &Path) -> Result<(Store, Ledger), StoreError> {
    let deadline = Instant::now() + END_MAX;
    loop {
        match Store::open(path) {
            Err(StoreError::Taken { .. }) if Instant::now() < deadline => {
                sleep(Duration::from_millis(20)).await;
            }
            opened => return opened,
        }
    }
}

/// Reloads the configuration on request.
async fn reload_upon(
    mut asked: mpsc::Receiver<()>,
    changes: mpsc::Sender<(Peer, Change)>,
) -> Infallible {
    while asked.recv().await.is_some() {
        let (answer, answered) = oneshot::channel();
        let change = (Peer("SIGHUP".into()), Change::Reload { answer });
        if changes.send(change).await.is_ok() {
            // The controller logs the outcome.
            let _ = answered.await;
        }
    }
    future::pending().await
}

/// Runs the controller until `stop`. `source` is the configuration's file, which is read again on
/// `reloads`; `root` is the parent of /proc and /sys.
pub async fn serve(
    config: &Config,
    source: &Path,
    root: &Path,
    reloads: mpsc::Receiver<()>,
    stop: impl Future<Output = ()>,
) -> Result<(), RunError> {
    let token = config.token_file.as_deref().map(Token::load).transpose()?;
    let (listener, _socket) = api::unix(&config.socket)?;
    let tcp = match config.listen {
        Some(address) => Some(api::tcp(address).await?),
        None => None,
    };
    let (store, ledger) = open_state(&config.state).await?;
    let log = EventLog::default();
    let (view_in, view) = watch::channel(Arc::new(HostView::default()));
    let (config_in, config_out) = watch::channel(Arc::new(config.clone()));
    let (news_in, news) = mpsc::channel(QUEUE_MAX);
    let (changes_in, changes) = mpsc::channel(QUEUE_MAX);
    let files = HostFiles {
        root: root.into(),
        memory_paths: config.memory_paths.clone(),
        ..HostFiles::default()
    };
    let damon = Arc::new(SharedDamon::new(root, config));
    let file_sizes = FileSizes::default();
    // Every task started here ends with this function, on any exit path.
    let tasks = Tasks {
        running: JoinSet::new(),
        files,
        damon,
        file_sizes: file_sizes.clone(),
        libvirt: config.libvirt.clone(),
        news: news_in,
    };
    let (found_in, found) = mpsc::channel(1);
    let discovering = async {
        match config.discover {
            Some(Discover::Libvirt) => discover(config.libvirt.clone(), found_in).await,
            None => future::pending().await,
        }
    };
    let deciding = Deciding::new(
        config,
        source,
        store,
        ledger,
        tasks,
        log.clone(),
        (view_in, config_in),
    )?;
    let reloading = reload_upon(reloads, changes_in.clone());
    let handle = Handle {
        view,
        config: config_out,
        log,
        changes: changes_in,
    };
    let (ours, theirs) = (handle.clone(), handle);
    let api = on_own_thread("api", async move {
        let tcp = async {
            match tcp.zip(token) {
                Some((listener, token)) => api::serve_tcp(listener, theirs, token).await,
                None => future::pending().await,
            }
        };
        tokio::select! {
            ended = api::serve_unix(listener, ours) => match ended {},
            ended = tcp => match ended {},
        }
    });
    let _api = api.map_err(|source| RunError::System {
        what: "start the API's thread",
        source,
    })?;
    tokio::select! {
        () = stop => Ok(()),
        ended = deciding.run(news, changes, found) => match ended {},
        // Discovery ends only after the deciding task has dropped its channel.
        () = discovering => Ok(()),
        ended = file_sizes.run() => match ended {},
        ended = reloading => match ended {},
    }
}

/// Runs a future on a thread of its own until the returned sender is dropped.
///
/// The API has such a thread, so its clients do not wait behind the work of a thousand VMs.
fn on_own_thread(
    name: &str,
    work: impl Future<Output = Infallible> + Send + 'static,
) -> io::Result<oneshot::Sender<Infallible>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (ends, ended) = oneshot::channel();
    thread::Builder::new().name(name.into()).spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = ended => {}
                never = work => match never {},
            }
        });
    })?;
    Ok(ends)
}

/// The tasks of all VMs, which are aborted when this is dropped.
struct Tasks {
    running: JoinSet<()>,
    files: HostFiles,
    damon: Arc<SharedDamon>,
    file_sizes: FileSizes,
    libvirt: Libvirt,
    news: mpsc::Sender<(VmName, News)>,
}

impl Tasks {
    /// Starts the task of a VM. It ends when the returned channel is dropped.
    /// `nodes` are the host's nodes of its tiers.
    fn start(
        &mut self,
        name: &VmName,
        config: &VmConfig,
        nodes: PerTier<Vec<NodeId>>,
    ) -> mpsc::Sender<VmCommand> {
        // Reap ended tasks.
        while self.running.try_join_next().is_some() {}
        let (commands, received) = mpsc::channel(1);
        let task = VmTask {
            name: name.clone(),
            config: config.clone(),
            nodes,
            libvirt: self.libvirt.clone(),
            files: self.files.clone(),
            outside: Outside::default(),
            file_sizes: self.file_sizes.clone(),
            counts: Counts::default(),
            damon: self.damon.clone(),
            commands: received,
            news: self.news.clone(),
            hard_limit: None,
        };
        self.running.spawn(task.run());
        commands
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;
