//! `demeter guest`: the agent, from its flags to its clean end.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::Context;
use demeter_guest::agent::{self, Agent, Command, Effects, Ended};
use demeter_guest::balloon::link::{BesideAgent, Link};
use demeter_guest::config::{BalloonMode, Cgroup, Config};
use demeter_guest::latency;
use demeter_guest::pages::LivePages;
use demeter_guest::probe;
use demeter_guest::prober::Tiers;
use demeter_guest::server::Server;
use demeter_guest::status::StatusCell;
use demeter_guest::targets::TargetFinder;
use demeter_guest::tracker::{Choice, PassedOver, Settings, choose};
use demeter_policy::PerTier;
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
    /// Only remove what an agent that was killed has left behind: its kdamond
    #[arg(long, conflicts_with_all = ["pid", "cgroup", "all", "config", "balloon", "tracker",
        "epoch_ms", "sample_period", "rate_limit_mib_s", "socket", "listen", "record",
        "record_max_mib", "relay_only"])]
    clean_up: bool,
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
            config.cgroup = self.cgroup.into_iter().map(Cgroup::new).collect();
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
    if args.clean_up {
        clean_up(Path::new("/"));
        return Ok(());
    }
    let config = args.config()?;
    let root = PathBuf::from("/");
    let tiers = agent::check(&root, &config)?;
    let settings = Settings {
        root: root.clone(),
        period: config.tuning.sample_period,
        latency_threshold_ns: config.tuning.latency_threshold_ns,
        epoch: config.tuning.epoch(),
        cpu_percent: config.tracker_cpu_percent,
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

    let status = StatusCell::default();
    let latency_ns = latency::measure(tiers).unwrap_or_else(|error| {
        tracing::info!("latencies are assumed, not measured: {error}");
        latency::ASSUMED_NS
    });
    tracing::info!(
        "a load takes {} ns from fast and {} ns from slow memory",
        latency_ns.fast,
        latency_ns.slow
    );
    let start = || start(&root, &config, &settings, latency_ns, &status);
    introduce(&root, &config, tiers)?;
    let mut agent = start()?;
    let link = match config.balloon {
        BalloonMode::Auto => link(&root, &status, &commands),
        BalloonMode::Off => None,
    };
    let _server = Server::start(&config.socket, config.listen, status.clone(), commands)?;
    // The relay outlives the agent: an error or the end of a process must not take the balloon's link
    // to the host along.
    loop {
        let ended = agent.run(&received);
        drop(agent);
        let last = serde_json::to_string(&status.get()).unwrap_or_default();
        tracing::info!("at the end: {last}");
        let again_in = match ended {
            Ok(Ended::Stopped) => {
                tracing::info!("stopped; memory stays as it is");
                return Ok(());
            }
            Ok(Ended::NothingLeft) => {
                tracing::info!("all processes to look after have ended");
                None
            }
            Err(error) if link.is_none() => return Err(error.into()),
            Err(error) => {
                tracing::error!("{error}");
                status.update(|s| s.last_error = Some(error.to_string()));
                Some(AGAIN)
            }
        };
        if link.is_none() {
            return Ok(());
        }
        agent = match await_next(&received, again_in, start) {
            Some(agent) => agent,
            None => return Ok(()),
        };
    }
}

/// How long after an error the agent is started again, beside a relay that goes on.
const AGAIN: Duration = Duration::from_secs(5);

/// Relays only, until an agent can be started again (never, without a pause to try it after) or until
/// the end, which is `None`.
fn await_next<A>(
    received: &Receiver<Command>,
    again_in: Option<Duration>,
    mut start: impl FnMut() -> anyhow::Result<A>,
) -> Option<A> {
    tracing::info!("relaying between the host and the balloon driver");
    let due_again = || again_in.map(|pause| Instant::now() + pause);
    let mut due = due_again();
    loop {
        let heard = match due {
            Some(due) => received.recv_timeout(due.saturating_duration_since(Instant::now())),
            None => received.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match heard {
            Ok(Command::Stop) | Err(RecvTimeoutError::Disconnected) => {
                tracing::info!("stopped; what is held stays held");
                return None;
            }
            // There is no agent to do it; the relay lets the kernel reclaim.
            Ok(Command::Pause | Command::Resume | Command::MakeRoom(_)) => {}
            Err(RecvTimeoutError::Timeout) => match start() {
                Ok(agent) => return Some(agent),
                Err(error) => {
                    tracing::warn!("{error:#}");
                    due = due_again();
                }
            },
        }
    }
}

/// An agent with the best tracker that there is now.
fn start(
    root: &Path,
    config: &Config,
    settings: &Settings,
    latency_ns: PerTier<u32>,
    status: &StatusCell,
) -> anyhow::Result<Agent> {
    let (tracker, passed_over) = choose(config.tracker, settings)?;
    name_tracker(config, tracker.name(), &passed_over);
    status.update(|s| s.passed_over = passed_over.iter().map(|p| p.why.to_string()).collect());
    raise_priority();
    let effects = Effects {
        tracker,
        pages: Box::new(LivePages::default()),
        latency_ns,
        cpus: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
    };
    let (root, config) = (root.to_owned(), config.clone());
    Ok(Agent::new(root, config, effects, status.clone())?)
}

/// Says which tracker it is, why better ones were passed over, and what it may take, however little is
/// logged.
fn name_tracker(config: &Config, tracker: &str, passed_over: &[PassedOver]) {
    let bound = match tracker {
        "damon" => format!(
            " (accessed bits, looked at by the kernel's DAMON, for at most {} % of a CPU)",
            config.tracker_cpu_percent
        ),
        _ => String::new(),
    };
    eprintln!("tracker: {tracker}{bound}");
    for passed in passed_over {
        eprintln!("  not {}: {}", passed.tracker, passed.why);
    }
}

/// Says at the start what the agent works with and what is in its way, however little is logged.
fn introduce(root: &Path, config: &Config, tiers: Tiers) -> anyhow::Result<()> {
    /// Targets that are named.
    const NAMED: usize = 8;
    eprintln!(
        "memory: node {} is fast, node {} is slow",
        tiers.fast, tiers.slow
    );
    let targets = TargetFinder::new(root, config.targets()?).find()?;
    let names = targets.iter().take(NAMED);
    let names: Vec<_> = names.map(|t| format!("{} ({})", t.pid, t.comm)).collect();
    match targets.len() {
        0 => eprintln!("looking after: nothing yet"),
        count if count > NAMED => eprintln!(
            "looking after: {} and {} more",
            names.join(", "),
            count - NAMED
        ),
        _ => eprintln!("looking after: {}", names.join(", ")),
    }
    if probe::numa_balancing(root).is_some_and(|mode| mode != 0) {
        let (what, mend) = probe::BALANCING_ADVICE;
        eprintln!("warning: {what}; {mend}");
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

/// Takes over the kdamond of an agent that was killed, and ends it. Where somebody else has DAMON, or
/// nobody can, there is nothing to do.
fn clean_up(root: &Path) {
    let settings = Settings {
        root: root.into(),
        ..Settings::default()
    };
    match choose(Choice::Damon, &settings) {
        Ok(tracker) => drop(tracker),
        Err(error) => tracing::info!("nothing to clean up: {error}"),
    }
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

#[cfg(test)]
mod tests {
    use demeter_policy::ByteCount;

    use super::*;

    /// DAMON's files with a kdamond that runs; its intervals tell whose it is.
    fn kdamond(update_us: &str) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let admin = root.path().join("sys/kernel/mm/damon/admin/kdamonds");
        for (file, text) in [
            ("nr_kdamonds", "1\n"),
            ("0/state", "on\n"),
            ("0/contexts/nr_contexts", "1\n"),
            ("0/contexts/0/avail_operations", "vaddr\npaddr\n"),
            ("0/contexts/0/operations", "vaddr\n"),
            (
                "0/contexts/0/monitoring_attrs/intervals/update_us",
                update_us,
            ),
        ] {
            let path = admin.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (root, admin)
    }

    #[test]
    fn cleaning_up_ends_our_kdamond_and_nobody_elses() {
        // Our own figure, and DAMON's default.
        for (update_us, want) in [("1000003\n", ["0", "off"]), ("60000000\n", ["1", "on"])] {
            let (root, admin) = kdamond(update_us);
            clean_up(root.path());
            let found = ["nr_kdamonds", "0/state"]
                .map(|file| std::fs::read_to_string(admin.join(file)).unwrap());
            assert_eq!(found.each_ref().map(|text| text.trim()), want);
        }
        // Where there is no DAMON there is nothing to do.
        clean_up(tempfile::tempdir().unwrap().path());
    }

    #[test]
    fn the_relay_goes_on_until_it_is_stopped_or_an_agent_runs_again() {
        let (commands, received) = mpsc::channel();
        let pause = Some(Duration::from_millis(1));
        let mut tries = 0;
        let agent = await_next(&received, pause, || {
            tries += 1;
            match tries {
                1 | 2 => anyhow::bail!("no tracker"),
                _ => Ok("agent"),
            }
        });
        assert_eq!((agent, tries), (Some("agent"), 3));

        for command in [
            Command::MakeRoom(ByteCount(1)),
            Command::Pause,
            Command::Stop,
            Command::Resume,
        ] {
            commands.send(command).unwrap();
        }
        assert_eq!(await_next(&received, None, || Ok(())), None);
        assert_eq!(
            received.try_recv(),
            Ok(Command::Resume),
            "it stopped at Stop"
        );
        drop(commands);
        assert_eq!(await_next(&received, None, || Ok(())), None);
    }
}
