//! `demeter guest`: runs an agent, or queries a running one.

mod assess;
pub mod client;
pub mod heat;
mod status;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use demeter_guest::agent::Control;
use demeter_guest::config::{BalloonMode, Cgroup, Config};
use demeter_guest::nodes::Tiers;
use demeter_guest::status::Status;
use demeter_guest::supervisor;
use demeter_guest::tracker::Choice;

use crate::names::names;
use crate::output;
use crate::signals;
use client::Client;

/// Finds the hot memory of processes on this machine and keeps it on the fast node.
///
/// Give the processes by --pid, --cgroup or --all. If the VM has a virtio-serial port org.demeter.0, the host can
/// resize it through the agent. Stop the agent with SIGTERM or Ctrl-C: memory stays where it is, and the agent removes
/// everything that it set up.
#[derive(clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  demeter guest --pid 4711              one process and its descendants
  demeter guest --cgroup /sys/fs/cgroup/db.slice
  demeter guest --all --tracker damon   every process above 64 MiB, watched by DAMON
  demeter guest --pid 4711 --record agent.rec    a recording to look at with demeter replay
  demeter guest --relay-only            the host's balloon alone, beside another manager

Of an agent that runs:
  demeter guest status                  what it looks after, what it moved, and what that saved
  demeter guest heat                    the heat of memory
  demeter guest assess                  how much fast memory it has use for
  demeter guest pause                   it neither observes nor moves, until resume
  curl --unix-socket /run/demeter/guest.sock http://demeter/metrics
`demeter probe` says what works on this machine."
)]
pub struct Args {
    #[command(flatten)]
    run: RunArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Print which processes a running agent manages, its moves, and their benefit
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        client: Client,
    },
    /// Pause a running agent: it neither observes nor moves memory, which stays where it is
    Pause {
        #[command(flatten)]
        client: Client,
    },
    /// Resume a paused agent
    Resume {
        #[command(flatten)]
        client: Client,
    },
    /// Draw the heat of each process's addresses over time
    Heat(heat::Args),
    /// Show the share of accesses that fast memory of each size would serve
    Assess(assess::Args),
}

impl Command {
    fn run(&self) -> anyhow::Result<()> {
        match self {
            Self::Status { json, client } => {
                let status: Status = client.get("/v1/status")?;
                output::print(match json {
                    true => serde_json::to_string_pretty(&status)? + "\n",
                    false => status::text(&status),
                })
            }
            Self::Pause { client } => client.post("/v1/pause"),
            Self::Resume { client } => client.post("/v1/resume"),
            Self::Heat(args) => heat::heat(args),
            Self::Assess(args) => assess::assess(args),
        }
    }
}

#[derive(clap::Args)]
struct RunArgs {
    /// Configuration file (TOML); flags override its keys
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Manage this process and its descendants; may be repeated
    #[arg(long, value_name = "PID")]
    pid: Vec<u32>,
    /// Manage the processes of this cgroup (v2) and of the cgroups below it
    #[arg(long, value_name = "PATH", conflicts_with = "pid")]
    cgroup: Option<PathBuf>,
    /// Manage every process above a resident size (resident_min_mib, 64 MiB)
    #[arg(long, conflicts_with_all = ["pid", "cgroup"])]
    all: bool,
    /// Nodes by tier, the fastest first, if the system reports them wrongly: 0,1/2,3
    #[arg(long, value_name = "NODES")]
    tiers: Option<Tiers>,
    /// Source of samples
    #[arg(long, value_parser = names::<Choice>())]
    tracker: Option<Choice>,
    /// Time between two decisions, milliseconds
    #[arg(long, value_name = "MS")]
    epoch_ms: Option<u64>,
    /// Take one sample of N slow loads
    #[arg(long, value_name = "N")]
    sample_period: Option<u32>,
    /// Limit of promotions and limit of demotions, MiB per second
    #[arg(long, value_name = "MIB")]
    rate_limit_mib_s: Option<u64>,
    /// Only observe, without moves: for `demeter guest assess`
    #[arg(long, conflicts_with = "rate_limit_mib_s")]
    observe_only: bool,
    /// Let the host size this VM: auto, if the VM has a port for it, or off
    #[arg(long, value_name = "WHEN", value_parser = names::<BalloonMode>())]
    balloon: Option<BalloonMode>,
    /// Record what the agent sees and decides, for `demeter replay`; a full or older file becomes
    /// FILE.1
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Maximum size of the recording, both files together, MiB
    #[arg(long, value_name = "MIB")]
    record_max_mib: Option<u64>,
    /// Only relay between the host and the balloon driver; manage no tiers
    #[arg(long, conflicts_with_all = ["pid", "cgroup", "all", "config", "balloon", "tracker",
        "tiers", "epoch_ms", "sample_period", "rate_limit_mib_s", "observe_only", "socket", "listen", "record",
        "record_max_mib"])]
    relay_only: bool,
    /// Only clean up after an agent that was killed: remove its kdamond, and turn DAMON_STAT on again
    #[arg(long, conflicts_with_all = ["pid", "cgroup", "all", "config", "balloon", "tracker",
        "tiers", "epoch_ms", "sample_period", "rate_limit_mib_s", "observe_only", "socket", "listen", "record",
        "record_max_mib", "relay_only"])]
    clean_up: bool,
    /// Unix socket for status, metrics, pause and resume
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Serve status and metrics on this TCP address as well, without authentication
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<SocketAddr>,
}

impl RunArgs {
    /// The file's keys, overridden by flags.
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
        config.tiers = self.tiers.or(config.tiers);
        config.tracker = self.tracker.unwrap_or(config.tracker);
        config.balloon = self.balloon.unwrap_or(config.balloon);
        config.socket = self.socket.unwrap_or(config.socket);
        config.listen = self.listen.or(config.listen);
        config.record = self.record.or(config.record);
        config.record_max_mib = self.record_max_mib.unwrap_or(config.record_max_mib);
        let tuning = &mut config.tuning;
        tuning.epoch_ms = self.epoch_ms.unwrap_or(tuning.epoch_ms);
        tuning.sample_period = self.sample_period.or(tuning.sample_period);
        let limit = self.rate_limit_mib_s.unwrap_or(tuning.rate_limit_mib_s);
        tuning.rate_limit_mib_s = if self.observe_only { 0 } else { limit };
        Ok(config)
    }
}

/// Runs the agent until a signal, or until its processes have ended.
pub fn guest(args: Args) -> anyhow::Result<()> {
    if let Some(command) = &args.command {
        return command.run();
    }
    let args = args.run;
    let root = Path::new("/");
    if args.clean_up {
        supervisor::clean_up(root, &|line| output::say(line));
        return Ok(());
    }
    let config = if args.relay_only {
        None
    } else {
        Some(args.config()?)
    };
    let (controls, received) = mpsc::channel();
    let stop = controls.clone();
    signals::on_end(move || {
        // The agent may have ended by itself.
        let _ = stop.send(Control::Stop);
    })?;
    match config {
        None => supervisor::relay(root, &received)?,
        Some(config) => supervisor::run(root, &config, controls, &received, &|line| {
            output::say(line);
        })?,
    }
    Ok(())
}
