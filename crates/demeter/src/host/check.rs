//! `demeter host check`: checks a configuration, and shows what it would change.

use std::path::Path;

use anyhow::bail;
use demeter_host::config::{Config, KeyChange};
use demeter_host::probe;
use demeter_host::view::HostView;
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
        Ok(running) => {
            let view: HostView = client.get("/v1/vms")?;
            lines(&against_settings(running.changes(&config), &view))
        }
        Err(_) => format!(
            "no controller answers at {}, so there is nothing to compare\n",
            client.socket.display()
        ),
    };
    output::print(text)?;
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    output::print(format!("{}: nothing is wrong\n", file.display()))?;
    Ok(())
}

/// Marks changes that have no effect because a person set another value. VMs that were added by
/// command are in no file.
fn against_settings(mut changes: Vec<KeyChange>, view: &HostView) -> Vec<KeyChange> {
    let keys = |added: bool| {
        let of = view.settings.iter();
        let of = of.filter(move |of| (of.file.is_none() && of.value == "added") == added);
        of.map(|of| of.key.as_str())
    };
    changes.retain(|change| !change.is_within(keys(true)));
    for change in &mut changes {
        change.is_overridden = change.is_within(keys(false));
    }
    changes
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

#[cfg(test)]
mod tests {
    use demeter_host::view::SettingView;

    use super::*;

    #[test]
    fn what_a_person_set_is_not_changed_by_a_file() {
        let changes = ["vm.db.share", "vm.db.oom_mib", "vm.new.share"].map(|key| KeyChange {
            key: key.into(),
            from: Some("300".into()),
            to: Some("200".into()),
            ..KeyChange::default()
        });
        let setting = |key: &str, file: Option<&str>, value: &str| SettingView {
            key: key.into(),
            file: file.map(Into::into),
            value: value.into(),
            problem: None,
        };
        let view = HostView {
            settings: vec![
                setting("vm.db.share", Some("100"), "300"),
                setting("vm.new", None, "added"),
            ],
            ..HostView::default()
        };
        assert_eq!(
            lines(&against_settings(changes.to_vec(), &view)),
            "vm.db.share: 300 -> 200 (no effect while another value is set)\n\
             vm.db.oom_mib: 300 -> 200\n"
        );
    }
}
