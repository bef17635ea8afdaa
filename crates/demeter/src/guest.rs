//! `demeter guest`: the agent, from its flags to its clean end.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};

use anyhow::Context;
use demeter_guest::agent::{self, Agent, Command, Effects, Ended};
use demeter_guest::balloon::link::{BesideAgent, Link};
use demeter_guest::config::{BalloonMode, Config};
use demeter_guest::latency;
use demeter_guest::pages::LivePages;
use demeter_guest::server::Server;
use demeter_guest::status::StatusCell;
use demeter_guest::tracker::{Choice, Settings, choose};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::names::names;

/// Finds the hot memory of processes on this machine and keeps it on the fast node.
///
/// Give the processes by --pid, --cgroup or --all. Where the VM has a virtio-serial port
/// org.demeter.0, the host can take memory back through the agent and give it again. Stop with SIGTERM or Ctrl-C: memory stays as
/// it is, and what the agent set up is removed.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  demeter guest --pid 4711              one process and its descendants
  demeter guest --cgroup /sys/fs/cgroup/db.slice
  demeter guest --all --tracker damon   every process above 64 MiB, watched by DAMON
  demeter guest --pid 4711 --record agent.rec    a recording to look at with demeter replay
  demeter guest --relay-only            the host's balloon alone, whoever manages the tiers

Status and metrics, on the agent's Unix socket:
  curl --unix-socket /run/demeter/guest.sock http://demeter/v1/status
  curl --unix-socket /run/demeter/guest.sock http://demeter/metrics
  curl --unix-socket /run/demeter/guest.sock -X POST http://demeter/v1/pause
`demeter probe` tells what works on this machine.")]
pub struct Args {
    /// Configuration file (TOML); flags override its keys
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A process to look after, with its descendants; may be given several times
    #[arg(long, value_name = "PID")]
    pid: Vec<u32>,
    /// Look after the processes of this cgroup (v2) and of those below it
    #[arg(long, value_name = "PATH", conflicts_with = "pid")]
    cgroup: Option<PathBuf>,
    /// Look after every process above a resident size (resident_min_mib)
    #[arg(long, conflicts_with_all = ["pid", "cgroup"])]
    all: bool,
    /// Where samples come from
    #[arg(long, value_parser = names::<Choice>())]
    tracker: Option<Choice>,
    /// Time between two decisions, milliseconds
    #[arg(long, value_name = "MS")]
    epoch_ms: Option<u64>,
    /// One sample for so many loads
    #[arg(long, value_name = "N")]
    sample_period: Option<u32>,
    /// The most that is promoted, and the most that is demoted, MiB per second
    #[arg(long, value_name = "MIB")]
    rate_limit_mib_s: Option<u64>,
    /// Whether the host may take memory back: where the VM has a port for it, or never
    #[arg(long, value_name = "WHEN", value_parser = names::<BalloonMode>())]
    balloon: Option<BalloonMode>,
    /// Record what the agent sees and decides to this file, for `demeter replay`; what was recorded
    /// before goes to FILE.1
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// The most that a recording takes, both files together, MiB
    #[arg(long, value_name = "MIB")]
    record_max_mib: Option<u64>,
    /// Only relay between the host and the balloon driver; manage no tiers
    #[arg(long, conflicts_with_all = ["pid", "cgroup", "all", "config", "balloon", "tracker",
        "epoch_ms", "sample_period", "rate_limit_mib_s", "socket", "listen", "record",
        "record_max_mib"])]
    relay_only: bool,
    /// Unix socket for status and metrics
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Serve status and metrics on this TCP address as well; nobody is authenticated there
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<SocketAddr>,
}

impl Args {
    /// The file's keys, overridden by the flags.
    fn config(self) -> anyhow::Result<Config> {
        let mut config = self
            .config
            .as_deref()
            .map(Config::load)
            .transpose()?
            .unwrap_or_default();
        if !self.pid.is_empty() || self.cgroup.is_some() || self.all {
            config.pids = self.pid;
            config.cgroup = self.cgroup;
            config.all = self.all;
        }
        config.tracker = self.tracker.unwrap_or(config.tracker);
        config.balloon = self.balloon.unwrap_or(config.balloon);
        config.socket = self.socket.unwrap_or(config.socket);
        config.listen = self.listen.or(config.listen);
        config.record = self.record.or(config.record);
        config.record_max_mib = self.record_max_mib.unwrap_or(config.record_max_mib);
        let tuning = &mut config.tuning;
        tuning.epoch_ms = self.epoch_ms.unwrap_or(tuning.epoch_ms);
        tuning.sample_period = self.sample_period.unwrap_or(tuning.sample_period);
        tuning.rate_limit_mib_s = self.rate_limit_mib_s.unwrap_or(tuning.rate_limit_mib_s);
        Ok(config)
    }
}

/// Runs the agent until it is told to stop, or its processes have ended.
pub fn guest(args: Args) -> anyhow::Result<()> {
    if args.relay_only {
        return relay();
    }
    let config = args.config()?;
    let root = PathBuf::from("/");
    let tiers = agent::check(&root, &config)?;
    let settings = Settings {
        root: root.clone(),
        period: config.tuning.sample_period,
        latency_threshold_ns: config.tuning.latency_threshold_ns,
        epoch: config.tuning.epoch(),
    };
    // Signals first: from here on an end is a clean one.
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot catch signals")?;
    let (commands, received) = mpsc::channel();
    let stop = commands.clone();
    std::thread::spawn(move || {
        for _ in signals.forever() {
            if stop.send(Command::Stop).is_err() {
                break;
            }
        }
    });

    let (tracker, passed_over) = choose(config.tracker, &settings)?;
    for passed in &passed_over {
        tracing::info!("passed over: {}", passed.why);
    }
    tracing::info!("tracker: {}", tracker.name());
    let status = StatusCell::default();
    status.update(|s| s.passed_over = passed_over.iter().map(|p| p.why.to_string()).collect());
    raise_priority();
    let latency_ns = latency::measure(tiers).unwrap_or_else(|error| {
        tracing::info!("latencies are assumed, not measured: {error}");
        latency::ASSUMED_NS
    });
    tracing::info!(
        "a load takes {} ns from fast and {} ns from slow memory",
        latency_ns.fast,
        latency_ns.slow
    );
    let effects = Effects {
        tracker,
        pages: Box::new(LivePages::default()),
        latency_ns,
    };
    let (socket, listen) = (config.socket.clone(), config.listen);
    let balloon = config.balloon;
    let mut agent = Agent::new(root.clone(), config, effects, status.clone())?;
    let _link = match balloon {
        BalloonMode::Auto => link(&root, &status, &commands),
        BalloonMode::Off => None,
    };
    let _server = Server::start(&socket, listen, status.clone(), commands)?;
    let ended = agent.run(&received)?;
    let last = serde_json::to_string(&status.get()).unwrap_or_default();
    tracing::info!("at the end: {last}");
    match ended {
        Ended::Stopped => tracing::info!("stopped; memory stays as it is"),
        Ended::NothingLeft => tracing::info!("all processes to look after have ended"),
    }
    Ok(())
}

/// The relay beside the agent; without one the agent goes on.
fn link(root: &Path, status: &StatusCell, commands: &Sender<Command>) -> Option<Link> {
    let agent = BesideAgent {
        status: status.clone(),
        commands: commands.clone(),
    };
    let started = Link::start(root, Some(agent));
    started
        .inspect_err(|error| tracing::info!("no balloon: {error}"))
        .ok()
}

/// Relays until it is told to stop.
fn relay() -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot catch signals")?;
    let _link = Link::start(Path::new("/"), None)?;
    tracing::info!("relaying between the host and the balloon driver");
    signals.forever().next();
    tracing::info!("stopped; what is held stays held");
    Ok(())
}

/// Nice level of the agent: its bursts are short and bounded by the rate limit, and while hot
/// memory waits to be moved, the workload is slow.
const NICE: libc::c_int = -10;

/// Takes precedence over ordinary processes, where that is permitted.
fn raise_priority() {
    // SAFETY: setpriority takes numbers only.
    let refused = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) } != 0;
    if refused {
        tracing::info!(
            "no precedence over other processes: {}",
            io::Error::last_os_error()
        );
    }
}
