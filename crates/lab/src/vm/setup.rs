//! The host controller's configuration for a run.

use std::path::{Path, PathBuf};

use demeter_host_api::config::Libvirt;
use demeter_host_api::config::{Config, PoolConfig, TierConfig, VmConfig};
use demeter_policy::provision::{Policy, ProvisionerKind};

use super::elastic::{Elastic, agent_socket, qmp_socket};
use super::memory::NodeSizes;
use super::prepared::PreparedVm;
use crate::error::Error;

/// The controller's entry of a VM.
#[derive(Debug, Clone)]
pub struct VmEntry {
    /// Its name.
    pub name: String,
    /// Its folder, which holds its sockets.
    pub folder: PathBuf,
    /// Its libvirt name, if libvirt runs it.
    pub domain: Option<String>,
    /// Its initial size.
    pub size: NodeSizes,
    /// Its maximum size.
    pub limit: NodeSizes,
    /// Fast memory that it keeps under every policy, MiB.
    pub fast_guarantee_mib: u64,
    /// Slow memory that it keeps under every policy, MiB.
    pub slow_guarantee_mib: u64,
    /// Its share under the policy `shares`.
    pub share: u32,
}

impl VmEntry {
    /// A VM that may own all of its memory, without guarantees.
    pub fn unbounded(name: &str, vm: &PreparedVm, elastic: &Elastic) -> Self {
        Self {
            name: name.into(),
            folder: vm.folder().into(),
            domain: vm.domain(),
            size: elastic.target,
            limit: elastic.full(),
            fast_guarantee_mib: 0,
            slow_guarantee_mib: 0,
            share: 1,
        }
    }
}

/// The controller's settings at its start.
#[derive(Debug, Clone)]
pub struct ControllerSetup {
    /// The mechanism that resizes memory.
    pub provisioner: ProvisionerKind,
    /// Memory for all VMs together.
    pub pool: NodeSizes,
    /// The libvirt that runs domains.
    pub libvirt: Libvirt,
    /// The VMs.
    pub vms: Vec<VmEntry>,
}

/// File name of the controller's configuration in its folder.
pub const CONFIG: &str = "host.toml";

/// The controller's socket in its folder.
pub fn socket(folder: &Path) -> PathBuf {
    folder.join("host.sock")
}

impl ControllerSetup {
    /// Writes the controller's configuration to its folder.
    pub fn write(&self, folder: &Path) -> Result<(), Error> {
        let path = folder.join(CONFIG);
        let text = toml::to_string(&self.config(folder)?)
            .expect("a configuration is a table of plain values");
        std::fs::write(&path, text).map_err(Error::io("write", &path))
    }

    /// The controller's configuration, with its socket in this folder.
    pub(super) fn config(&self, folder: &Path) -> Result<Config, Error> {
        let vms = self.vms.iter().map(|vm| {
            let tier = |memdev: &str, size_mib, limit_mib, guarantee_mib| TierConfig {
                // libvirt uses its own names.
                memdev: vm.domain.is_none().then(|| memdev.into()),
                node: None,
                size_mib,
                guarantee_mib,
                limit_mib: Some(limit_mib),
            };
            let (size, limit) = (vm.size, vm.limit);
            let (fast_mib, slow_mib) = (vm.fast_guarantee_mib, vm.slow_guarantee_mib);
            let config = VmConfig {
                manage: Default::default(),
                history: Default::default(),
                qmp: vm.domain.is_none().then(|| qmp_socket(&vm.folder)),
                libvirt: vm.domain.clone(),
                cloud_hypervisor: None,
                agent: vm.domain.is_none().then(|| agent_socket(&vm.folder)),
                pool: None,
                owner_uid: None,
                provisioner: self.provisioner,
                share: vm.share,
                slowdown_max_percent: None,
                oom_mib: 0,
                hard_limit_extra_mib: None,
                fast: tier("node0", size.fast_mib, limit.fast_mib, fast_mib),
                slow: tier("node1", size.slow_mib, limit.slow_mib, slow_mib),
            };
            let name = vm
                .name
                .parse()
                .map_err(|e| Error::Controller(format!("refuses: {e}")))?;
            Ok((name, config))
        });
        Ok(Config {
            socket: socket(folder),
            listen: None,
            token_file: None,
            state: folder.join("host.json"),
            memory_paths: Vec::new(),
            libvirt: self.libvirt.clone(),
            discover: None,
            policy: Policy::Static,
            pool: vec![PoolConfig::of(self.pool.fast_mib, self.pool.slow_mib)],
            defaults: Default::default(),
            vms: vms.collect::<Result<_, Error>>()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_controller_understands_its_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let sizes = |fast_mib, slow_mib| NodeSizes { fast_mib, slow_mib };
        let entry = |name: &str, share| VmEntry {
            name: name.into(),
            folder: dir.path().join(name),
            domain: None,
            size: sizes(100, 400),
            limit: sizes(500, 600),
            fast_guarantee_mib: 50,
            slow_guarantee_mib: 400,
            share,
        };
        let setup = ControllerSetup {
            provisioner: ProvisionerKind::VirtioMem,
            pool: sizes(200, 800),
            libvirt: Libvirt::default(),
            vms: vec![entry("a", 2), entry("b", 1)],
        };
        setup.write(dir.path()).unwrap();
        let config = Config::load(&dir.path().join(CONFIG)).unwrap();
        assert_eq!(config, setup.config(dir.path()).unwrap());
        assert_eq!(config.pool, [PoolConfig::of(200, 800)]);
        let vm = &config.vms[&"a".parse().unwrap()];
        assert_eq!((vm.provisioner, vm.share), (setup.provisioner, 2));
        let tier = |tier: &TierConfig| (tier.size_mib, tier.limit_mib, tier.guarantee_mib);
        assert_eq!(tier(&vm.fast), (100, Some(500), 50));
        assert_eq!(tier(&vm.slow), (400, Some(600), 400));
    }
}
