//! `demeter host vm`: adds, changes and removes VMs while the controller runs.

use std::path::PathBuf;

use anyhow::bail;
use demeter_host::PoolName;
use demeter_host::config::{Config, TierDefaults, VmChange};

use super::client::Client;
use crate::output;

/// An action on a VM.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Manage the VMs of a file, too
    Add {
        /// A file with sections as in the configuration: [vm.NAME]
        #[arg(value_name = "VM.toml")]
        file: PathBuf,
        #[command(flatten)]
        client: Client,
    },
    /// Change a VM's guarantees, limits, share, service level or pool
    Set(Box<SetArgs>),
    /// Manage a VM no longer; it keeps the memory that it has
    Remove {
        /// The VM
        vm: String,
        /// Remove it while it runs: its memory no longer counts against the pool
        #[arg(long)]
        running: bool,
        #[command(flatten)]
        client: Client,
    },
    /// Make a VM follow the configuration's file again
    Reset {
        /// The VM
        vm: String,
        #[command(flatten)]
        client: Client,
    },
}

/// Values of a VM; those that are left out stay.
#[derive(clap::Args)]
#[group(id = "values", required = true, multiple = true, args = [
    "share", "slowdown_max_percent", "pool", "fast_guarantee_mib", "fast_limit_mib", "slow_guarantee_mib", "slow_limit_mib",
])]
pub struct SetArgs {
    /// The VM
    vm: String,
    /// Its weight under the policy "shares"
    #[arg(long, value_name = "N")]
    share: Option<u32>,
    /// Its largest slowdown against a VM whose memory is all fast, percent
    #[arg(long, value_name = "P")]
    slowdown_max_percent: Option<u32>,
    /// Its pool
    #[arg(long, value_name = "NAME")]
    pool: Option<String>,
    /// Its least fast memory, MiB
    #[arg(long, value_name = "MIB")]
    fast_guarantee_mib: Option<u64>,
    /// Its most fast memory, MiB
    #[arg(long, value_name = "MIB")]
    fast_limit_mib: Option<u64>,
    /// Its least slow memory, MiB
    #[arg(long, value_name = "MIB")]
    slow_guarantee_mib: Option<u64>,
    /// Its most slow memory, MiB
    #[arg(long, value_name = "MIB")]
    slow_limit_mib: Option<u64>,
    #[command(flatten)]
    client: Client,
}

/// Runs the subcommand.
pub fn vm(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Add { file, client } => {
            let (config, names) = client.get::<Config>("/v1/config")?.with_vms(&file)?;
            if names.is_empty() {
                bail!("{}: there is no section [vm.NAME]", file.display());
            }
            for name in names {
                client.put(&format!("/v1/vms/{name}"), &config.vms[&name])?;
                output::print(format!("added {name}\n"))?;
            }
            Ok(())
        }
        Command::Set(args) => {
            let path = format!("/v1/vms/{}/settings", args.vm);
            args.client.put(&path, &args.change())
        }
        Command::Remove {
            vm,
            running,
            client,
        } => client.delete(&format!("/v1/vms/{vm}?running={running}")),
        Command::Reset { vm, client } => client.delete(&format!("/v1/vms/{vm}/settings")),
    }
}

impl SetArgs {
    fn change(&self) -> VmChange {
        VmChange {
            pool: self.pool.clone().map(PoolName),
            share: self.share,
            slowdown_max_percent: self.slowdown_max_percent,
            fast: TierDefaults {
                guarantee_mib: self.fast_guarantee_mib,
                limit_mib: self.fast_limit_mib,
            },
            slow: TierDefaults {
                guarantee_mib: self.slow_guarantee_mib,
                limit_mib: self.slow_limit_mib,
            },
        }
    }
}
