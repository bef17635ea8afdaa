//! What the host controller is told of a run: its configuration.

use std::path::{Path, PathBuf};

use demeter_scenario::Provisioner;

use crate::vm::{NodeSizes, agent_socket, qmp_socket};

/// What the controller has to know of a VM.
#[derive(Debug, Clone)]
pub struct VmEntry {
    /// Its name.
    pub name: String,
    /// Its folder, with its sockets.
    pub folder: PathBuf,
    /// What it is to own to begin with.
    pub size: NodeSizes,
    /// What it may own at most.
    pub limit: NodeSizes,
    /// Fast memory that it keeps whatever the policy says, MiB.
    pub fast_guarantee_mib: u64,
    /// The same of slow memory.
    pub slow_guarantee_mib: u64,
    /// Its share under the policy `shares`.
    pub share: u32,
}

/// What the controller is told when it starts.
#[derive(Debug, Clone)]
pub struct Setup {
    /// How memory is changed.
    pub provisioner: Provisioner,
    /// What there is for all VMs together.
    pub pool: NodeSizes,
    /// The VMs.
    pub vms: Vec<VmEntry>,
}

/// The controller's socket in its folder.
pub fn socket(folder: &Path) -> PathBuf {
    folder.join("host.sock")
}

impl Setup {
    /// The controller's configuration.
    pub fn toml(&self, folder: &Path) -> String {
        let text = |path: PathBuf| toml::Value::String(path.display().to_string());
        let number = |value: u64| toml::Value::Integer(value as i64);
        let mut root = toml::Table::new();
        root.insert("socket".into(), text(socket(folder)));
        root.insert("state".into(), text(folder.join("host.json")));
        root.insert(
            "pool".into(),
            toml::Table::from_iter([
                ("fast_mib".into(), number(self.pool.fast_mib)),
                ("slow_mib".into(), number(self.pool.slow_mib)),
            ])
            .into(),
        );
        let mut vms = toml::Table::new();
        for vm in &self.vms {
            let tier = |memdev: &str, size_mib, limit_mib, guarantee_mib| {
                toml::Table::from_iter([
                    ("memdev".into(), memdev.into()),
                    ("size_mib".into(), number(size_mib)),
                    ("limit_mib".into(), number(limit_mib)),
                    ("guarantee_mib".into(), number(guarantee_mib)),
                ])
                .into()
            };
            let (size, limit) = (vm.size, vm.limit);
            let entry = toml::Table::from_iter([
                ("qmp".into(), text(qmp_socket(&vm.folder))),
                ("agent".into(), text(agent_socket(&vm.folder))),
                ("provisioner".into(), self.provisioner.to_string().into()),
                ("share".into(), number(vm.share.into())),
                ("oom_mib".into(), number(0)),
                (
                    "fast".into(),
                    tier(
                        "node0",
                        size.fast_mib,
                        limit.fast_mib,
                        vm.fast_guarantee_mib,
                    ),
                ),
                (
                    "slow".into(),
                    tier(
                        "node1",
                        size.slow_mib,
                        limit.slow_mib,
                        vm.slow_guarantee_mib,
                    ),
                ),
            ]);
            vms.insert(vm.name.clone(), entry.into());
        }
        root.insert("vm".into(), vms.into());
        root.to_string()
    }
}

#[cfg(test)]
mod tests {
    use demeter_host::config::{Config, ProvisionerKind};

    use super::*;

    #[test]
    fn the_controller_understands_its_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let sizes = |fast_mib, slow_mib| NodeSizes { fast_mib, slow_mib };
        let entry = |name: &str, share| VmEntry {
            name: name.into(),
            folder: dir.path().join(name),
            size: sizes(100, 400),
            limit: sizes(500, 600),
            fast_guarantee_mib: 50,
            slow_guarantee_mib: 400,
            share,
        };
        for (provisioner, kind) in [
            (Provisioner::DemeterBalloon, ProvisionerKind::DemeterBalloon),
            (Provisioner::VirtioMem, ProvisionerKind::VirtioMem),
            (Provisioner::VirtioBalloon, ProvisionerKind::VirtioBalloon),
        ] {
            let setup = Setup {
                provisioner,
                pool: sizes(200, 800),
                vms: vec![entry("a", 2), entry("b", 1)],
            };
            let path = dir.path().join("host.toml");
            std::fs::write(&path, setup.toml(dir.path())).unwrap();
            let config = Config::load(&path).unwrap();
            assert_eq!(config.socket, socket(dir.path()));
            assert_eq!(config.pool.fast_mib, 200);
            let vm = &config.vms[&"a".parse().unwrap()];
            assert_eq!((vm.provisioner, vm.share), (kind, 2));
            assert_eq!(vm.slow.size_mib, 400);
            assert_eq!(vm.fast.guarantee_mib, 50);
            assert_eq!(vm.fast.limit_mib, Some(500));
        }
    }
}
