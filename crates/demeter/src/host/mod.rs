//! `demeter host`: runs the controller of a host's VMs, or queries it.

mod assess;
mod check;
pub mod client;
mod fits;
pub mod status;
mod tiers;
mod vm;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use client::Client;
use demeter_host::api::{PolicyChoice, Tiers};
use demeter_host::config::{Config, KeyChange, Libvirt};
use demeter_host::hypervisor::libvirt::{self, Wanted};
use demeter_host::view::{EventView, HostView, TierView, VmView};
use demeter_policy::provision::{Policy, ProvisionerKind};
use demeter_policy::{ByteCount, MIB, NodeId, PerTier};

use crate::names::names;
use crate::output;

/// Polling interval while waiting for a VM's size.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Polling interval of `watch`.
const WATCH_EVERY: Duration = Duration::from_millis(500);

/// Gives each VM of this machine its share of fast and slow memory.
#[derive(clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    arg_required_else_help = true,
    after_help = "\
Examples:
  demeter host --config /etc/demeter/host.toml   runs the controller
  demeter host status                            what each VM has
  demeter host set db --fast-mib 2048            gives a VM another size
  demeter host forgive db                        manages a marked VM again
  demeter host policy wss                        divides by working sets from now on
  demeter host vm add new.toml                   manages the VMs of a file, too
  demeter host vm set db --fast-guarantee-mib 512  guarantees a VM fast memory
  demeter host vm set db --slowdown-max-percent 10  gives a VM the fast memory that it needs
  demeter host assess                            what less or more fast memory would cost
  demeter host check /etc/demeter/host.toml      what is wrong with it, and what it would change
  demeter host reload                            takes over what the file says now
  demeter host evacuate                          gives all VMs all their memory back
  demeter host xml db                            what a libvirt domain lacks, as a patch

The same over HTTP, on the controller's Unix socket:
  curl --unix-socket /run/demeter/host.sock http://demeter/v1/vms
  curl --unix-socket /run/demeter/host.sock http://demeter/metrics"
)]
pub struct Args {
    #[command(flatten)]
    run: RunArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Args)]
struct RunArgs {
    /// Run the controller with this configuration (TOML)
    #[arg(long, value_name = "FILE", required = true)]
    config: Option<PathBuf>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Run the controller, like `demeter host --config FILE`
    Run(RunArgs),
    /// Show the pool and each VM's memory
    Status {
        #[command(flatten)]
        client: Client,
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
    },
    /// Show how fast VMs would be with less or more fast memory, by their agents' estimates
    Assess(assess::Args),
    /// Resize a VM
    Set(SetArgs),
    /// Manage a marked VM again, whose guest named memory that it does not hold (see `demeter host status`)
    Forgive {
        /// The VM
        vm: String,
        #[command(flatten)]
        client: Client,
    },
    /// Add, change and remove VMs; kept over restarts
    #[command(
        subcommand,
        after_help = "\
What is set takes precedence over the configuration's file; demeter host status lists it."
    )]
    Vm(vm::Command),
    /// Divide memory by another policy from now on
    Policy {
        /// The policy
        #[arg(value_parser = names::<Policy>(), required_unless_present = "reset")]
        policy: Option<Policy>,
        /// Follow the configuration's file again
        #[arg(long, conflicts_with = "policy")]
        reset: bool,
        #[command(flatten)]
        client: Client,
    },
    /// Print a patch for a libvirt domain that cannot be sized yet
    #[command(after_help = "\
To apply it, while the domain does not run:
  virsh dumpxml --inactive db >db.xml
  demeter host xml db | patch db.xml
  virsh define db.xml")]
    Xml(XmlArgs),
    /// Check a configuration, and print what reloading it would change; changes nothing
    Check {
        /// The file
        #[arg(value_name = "FILE")]
        file: PathBuf,
        #[command(flatten)]
        client: Client,
    },
    /// Give all VMs all their memory back, before the controller is removed
    #[command(after_help = "\
Choose a policy to end it: demeter host policy static")]
    Evacuate {
        /// Wait at most this many seconds until all VMs have their memory
        #[arg(long, value_name = "S", default_value_t = 60)]
        wait: u64,
        #[command(flatten)]
        client: Client,
    },
    /// Say whether VMs would find their memory, and how much is missing; changes nothing
    Fits {
        /// A file with sections as in the configuration: [vm.NAME]
        #[arg(value_name = "VM.toml")]
        file: PathBuf,
        /// A managed VM whose programs need as much fast memory, for slowdown_max_percent [default: the
        /// VM of the same name]
        #[arg(long, value_name = "VM")]
        like: Option<String>,
        #[command(flatten)]
        client: Client,
    },
    /// Make the controller reload its configuration file, as SIGHUP does
    Reload {
        #[command(flatten)]
        client: Client,
    },
    /// Print events as they happen
    Watch {
        #[command(flatten)]
        client: Client,
    },
}

#[derive(clap::Args)]
struct XmlArgs {
    /// The domain
    domain: String,
    /// Mechanism that will size it
    #[arg(long, value_parser = names::<ProvisionerKind>(), default_value = "demeter-balloon")]
    provisioner: ProvisionerKind,
    /// Fast memory of a domain without two cells, MiB [default: a quarter of its memory]
    #[arg(long, value_name = "MIB")]
    fast_mib: Option<u64>,
    /// Slow memory of a domain without two cells, MiB [default: the rest of its memory]
    #[arg(long, value_name = "MIB")]
    slow_mib: Option<u64>,
    /// The cell of fast memory, if several cells have CPUs
    #[arg(long, value_name = "CELL", requires = "slow_cell")]
    fast_cell: Option<u32>,
    /// The cell of slow memory
    #[arg(long, value_name = "CELL", requires = "fast_cell")]
    slow_cell: Option<u32>,
    /// The host's node of fast memory, to which the fast cell is bound [default: detected]
    #[arg(long, value_name = "NODE", requires = "slow_node")]
    fast_node: Option<u32>,
    /// The host's node of slow memory
    #[arg(long, value_name = "NODE", requires = "fast_node")]
    slow_node: Option<u32>,
    /// libvirt's Unix socket [default: the system's]
    #[arg(long, value_name = "SOCKET")]
    libvirt: Option<PathBuf>,
    /// libvirt's driver [default: qemu:///system]
    #[arg(long)]
    uri: Option<String>,
    /// User that libvirt's daemon runs as, if neither root nor you
    #[arg(long, value_name = "UID")]
    owner_uid: Option<u32>,
}

#[derive(clap::Args)]
#[group(id = "sizes", required = true, multiple = true, args = ["fast_mib", "slow_mib"])]
struct SetArgs {
    /// The VM
    vm: String,
    /// Its fast memory, MiB
    #[arg(long, value_name = "MIB")]
    fast_mib: Option<u64>,
    /// Its slow memory, MiB
    #[arg(long, value_name = "MIB")]
    slow_mib: Option<u64>,
    /// Wait until the VM has this size, at most this many seconds
    #[arg(long, value_name = "S")]
    wait: Option<u64>,
    #[command(flatten)]
    client: Client,
}

/// Runs the subcommand.
pub fn host(args: Args) -> anyhow::Result<()> {
    match args.command.unwrap_or(Command::Run(args.run)) {
        Command::Run(args) => run(args),
        Command::Status { client, json } => {
            let view: HostView = client.get("/v1/vms")?;
            if json {
                output::print(serde_json::to_string_pretty(&view)? + "\n")
            } else {
                output::print(status::text(&view))
            }
        }
        Command::Assess(args) => assess::assess(&args),
        Command::Set(args) => set(args),
        Command::Vm(command) => vm::vm(command),
        Command::Policy { policy, client, .. } => match policy {
            Some(policy) => client.put("/v1/policy", &PolicyChoice { policy }),
            None => client.delete("/v1/policy"),
        },
        Command::Forgive { vm, client } => client.post(&format!("/v1/vms/{vm}/forgive")),
        Command::Xml(args) => xml(args),
        Command::Check { file, client } => check::check(&file, &client),
        Command::Reload { client } => {
            let changes: Vec<KeyChange> = client.post_for("/v1/reload")?;
            output::print(check::lines(&changes))
        }
        Command::Fits { file, like, client } => fits::fits(&file, like.as_deref(), &client),
        Command::Evacuate { wait, client } => evacuate(&client, wait),
        Command::Watch { client } => watch(&client),
    }
}

fn run(args: RunArgs) -> anyhow::Result<()> {
    let path = args.config.context("give --config FILE")?;
    let config = Config::load(&path)?;
    Ok(demeter_host::run(&config, &path)?)
}

fn set(args: SetArgs) -> anyhow::Result<()> {
    let (client, name) = (&args.client, &args.vm);
    let tiers = Tiers {
        fast_mib: args.fast_mib,
        slow_mib: args.slow_mib,
    };
    client.put(&format!("/v1/vms/{name}/tiers"), &tiers)?;
    let Some(wait_s) = args.wait else {
        return Ok(());
    };
    let deadline = Instant::now() + Duration::from_secs(wait_s);
    loop {
        let view: HostView = client.get("/v1/vms")?;
        let vm = view.vms.into_iter().find(|vm| vm.name == *name);
        let vm = vm.with_context(|| format!("VM {name} is gone"))?;
        if has(&vm, &tiers) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let [fast, slow] = status::owned(vm.owned);
            let why = vm
                .problem
                .unwrap_or("this is as near as it gets, so far".into());
            bail!("VM {name} owns {fast} MiB fast and {slow} MiB slow after {wait_s} s: {why}");
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Asks for the evacuation and waits for its end.
fn evacuate(client: &Client, wait_s: u64) -> anyhow::Result<()> {
    client.post("/v1/evacuate")?;
    let deadline = Instant::now() + Duration::from_secs(wait_s);
    loop {
        let view: HostView = client.get("/v1/vms")?;
        let missing = status::not_evacuated(&view);
        if missing.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            bail!("after {wait_s} s: {}", missing.join("; "));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Whether a VM owns its target in the tiers that were set.
fn has(vm: &VmView, tiers: &Tiers) -> bool {
    let reached = |wanted: Option<u64>, of: fn(TierView) -> u64| {
        wanted.is_none() || vm.owned.map(of) == Some(of(vm.target))
    };
    reached(tiers.fast_mib, |tiers| tiers.fast_bytes)
        && reached(tiers.slow_mib, |tiers| tiers.slow_bytes)
}

fn xml(args: XmlArgs) -> anyhow::Result<()> {
    let libvirt = Libvirt {
        socket: args.libvirt,
        uri: args.uri,
        owner_uid: args.owner_uid,
    };
    let wanted = Wanted {
        provisioner: args.provisioner,
        fast: args.fast_mib.map(|mib| ByteCount(mib.saturating_mul(MIB))),
        slow: args.slow_mib.map(|mib| ByteCount(mib.saturating_mul(MIB))),
        cells: nodes(args.fast_cell, args.slow_cell),
        host: tiers::of_host(nodes(args.fast_node, args.slow_node)),
    };
    let patch = libvirt::lacks(&libvirt, &args.domain, wanted)?;
    for note in &patch.notes {
        eprintln!("note: {note}");
    }
    match patch.diff {
        Some(diff) => output::print(diff),
        None => {
            eprintln!("domain {:?} lacks nothing", args.domain);
            Ok(())
        }
    }
}

fn nodes(fast: Option<u32>, slow: Option<u32>) -> Option<PerTier<NodeId>> {
    Some(PerTier {
        fast: NodeId(fast?),
        slow: NodeId(slow?),
    })
}

fn watch(client: &Client) -> anyhow::Result<()> {
    let mut last = 0;
    loop {
        let events: Vec<EventView> = client.get(&format!("/v1/events?after={last}"))?;
        for event in &events {
            last = event.number;
            output::print(status::event_line(event) + "\n")?;
        }
        std::thread::sleep(WATCH_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_tiers_that_were_set_are_waited_for() {
        let tiers = |fast_bytes, slow_bytes| TierView {
            fast_bytes,
            slow_bytes,
        };
        let vm = VmView {
            // Slow memory is below the target: the guest's kernel may take the rest by itself.
            target: tiers(8, 3),
            owned: Some(tiers(7, 3)),
            ..VmView::default()
        };
        let wish = |fast_mib, slow_mib| Tiers { fast_mib, slow_mib };
        assert!(has(&vm, &wish(None, Some(4))));
        assert!(!has(&vm, &wish(Some(8), None)));
        assert!(!has(&vm, &wish(Some(8), Some(4))));
        let unknown = VmView { owned: None, ..vm };
        assert!(!has(&unknown, &wish(None, Some(4))));
    }
}
