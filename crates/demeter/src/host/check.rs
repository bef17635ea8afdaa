//! `demeter host check`: checks a configuration, and shows what it would change.

use std::path::Path;

use anyhow::bail;
use demeter_host::config::{Config, KeyChange};
use demeter_host::probe;
use demeter_policy::{MIB, Tier};

use super::client::Client;
use crate::output;

/// Checks a file against this machine, and asks a running controller for its present configuration.
pub fn check(file: &Path, client: &Client) -> anyhow::Result<()> {
    let config = Config::load(file)?;
    let mut wrong = wrong(&config);
    if let Err(error) = config.pools_in(file, Path::new("/")) {
        wrong.push(error.to_string());
    }
    let text = match client.get::<Config>("/v1/config") {
        Ok(running) => lines(&running.changes(&config)),
        Err(_) => format!("no controller answers at {}\n", client.socket.display()),
    };
    output::print(text)?;
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    Ok(())
}

/// Changes, one per line.
pub fn lines(changes: &[KeyChange]) -> String {
    match changes {
        [] => "nothing changes\n".into(),
        changes => changes.iter().map(|change| format!("{change}\n")).collect(),
    }
}

/// Lines about missing parts of this machine.
fn wrong(config: &Config) -> Vec<String> {
    let mut wrong = vec![];
    for (name, vm) in &config.vms {
        for (key, socket) in [
            ("qmp", &vm.qmp),
            ("agent", &vm.agent),
            ("cloud_hypervisor", &vm.cloud_hypervisor),
        ] {
            let folder = socket.as_ref().and_then(|socket| socket.parent());
            if let Some(folder) = folder.filter(|of| !of.as_os_str().is_empty() && !of.is_dir()) {
                wrong.push(format!(
                    "vm.{name}.{key}: there is no folder {}; start the VM with its socket there, or name \
                     another one",
                    folder.display()
                ));
            }
        }
    }
    let host = probe::probe(Path::new("/"));
    let has_mib: u64 = host.nodes.iter().map(|node| node.total_bytes / MIB).sum();
    let sizes = config
        .pool
        .iter()
        .flat_map(|pool| Tier::ALL.map(|tier| pool.size_mib(tier)));
    let pool_mib = sizes.flatten().fold(0, u64::saturating_add);
    if has_mib > 0 && pool_mib > has_mib {
        wrong.push(format!(
            "pool: fast_mib and slow_mib are {pool_mib} MiB together, and this machine has {has_mib} MiB; \
             give less, and leave some to the host"
        ));
    }
    wrong
}
