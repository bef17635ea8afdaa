//! The controller's configuration: a TOML file.
//!
//! It gives each VM's first sizes and the first policy. Values set later over the API are kept in
//! the state file and take precedence: [`Settings`].

mod bounds;
mod changes;
mod defaults;
mod error;
mod libvirt;
mod pools;
mod settings;
mod vm;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use demeter_linux::nodes::Topology;
use demeter_policy::provision::Policy;
use demeter_toml_file::{FileError, Kind, TomlFile};
use serde::{Deserialize, Serialize};

pub use changes::KeyChange;
pub use defaults::{Defaults, TierDefaults};
pub use error::{At, ConfigError};
pub use libvirt::Libvirt;
pub use pools::{Pool, PoolConfig};
pub use settings::{Asked, Setting, Settings, VmChange};
pub use vm::{HistoryConfig, Manage, TierConfig, VmConfig};

use crate::{PoolName, VmName};
use error::wrong;

/// Maximum number of VMs on a host.
pub const VMS_MAX: usize = 1024;

/// Configuration of the controller.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Unix socket for the API, accessible to its owner only.
    #[serde(default = "default_socket")]
    pub socket: PathBuf,
    /// TCP address for the API; needs `token_file`.
    pub listen: Option<SocketAddr>,
    /// File with the token that TCP clients must send.
    pub token_file: Option<PathBuf>,
    /// File that keeps desired sizes and the policy across restarts.
    #[serde(default = "default_state")]
    pub state: PathBuf,
    /// Folders on disk whose files may be a VM's memory. Files on tmpfs, including memfds, are
    /// always allowed.
    #[serde(default)]
    pub memory_paths: Vec<PathBuf>,
    /// Connection to the libvirt daemon that runs the VMs with a `libvirt` domain.
    #[serde(default)]
    pub libvirt: Libvirt,
    /// Source of VMs without a section of their own.
    pub discover: Option<Discover>,
    /// How memory is divided between VMs, until the API sets another policy.
    #[serde(default)]
    pub policy: Policy,
    /// Memory that all VMs together may use; `[[pool]]` for several pools.
    #[serde(deserialize_with = "pools::read", serialize_with = "pools::write")]
    #[cfg_attr(feature = "schema", schemars(schema_with = "pools::schema"))]
    pub pool: Vec<PoolConfig>,
    /// Values for VMs that do not set them.
    #[serde(default)]
    pub defaults: Defaults,
    /// The VMs, by name.
    #[serde(rename = "vm", default)]
    pub vms: BTreeMap<VmName, VmConfig>,
}

/// Source of VMs that the configuration does not list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Discover {
    /// libvirt: each running domain that has two NUMA cells and everything its provisioner needs.
    /// Such a VM starts with its current sizes and has no guarantee. With several pools it belongs to
    /// the one that its metadata names, or else to the one to whose nodes its cells are bound.
    Libvirt,
}

fn default_socket() -> PathBuf {
    "/run/demeter/host.sock".into()
}

fn default_state() -> PathBuf {
    "/var/lib/demeter/host.json".into()
}

const KIND: Kind = Kind {
    name: "configuration",
    hint: "give --config the path of a TOML file",
    example: "packaging/host.toml",
    reference: "docs/src/reference/host.md",
};

impl Config {
    /// Reads and checks a configuration file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let file = TomlFile::read(&KIND, path)?;
        let config = Self::parse(&file)?;
        config
            .check()
            .map_err(|error| error.located(path, file.text()))?;
        Ok(config)
    }

    /// Parses a file, and sets defaults in each VM's section.
    fn parse(file: &TomlFile) -> Result<Self, FileError> {
        // The text itself, because errors then have a line.
        let config: Self = file.parse()?;
        if config.defaults == Defaults::default() {
            return Ok(config);
        }
        let mut document = file.parse()?;
        defaults::fill(&mut document, &config.defaults);
        file.parse_table(document)
    }

    /// This configuration with the VMs of another file, and their names.
    pub fn with_vms(&self, path: &Path) -> Result<(Self, Vec<VmName>), ConfigError> {
        /// A file of VMs.
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Vms {
            vm: BTreeMap<VmName, VmConfig>,
        }
        let file = TomlFile::read(&KIND, path)?;
        // The text itself, because errors then have a line.
        file.parse::<Vms>()?;
        let mut document = file.parse()?;
        defaults::fill(&mut document, &self.defaults);
        let more: Vms = file.parse_table(document)?;
        let names = more.vm.keys().cloned().collect();
        let mut with = self.clone();
        with.vms.extend(more.vm);
        with.check_keys()
            .map_err(|error| error.located(path, file.text()))?;
        Ok((with, names))
    }

    /// The pools on a machine; see [`Config::pools`]. Errors name the line in the file.
    pub fn pools_in(
        &self,
        file: &Path,
        root: &Path,
    ) -> Result<BTreeMap<PoolName, Pool>, ConfigError> {
        let topology = Topology::read(root).ok();
        self.pools(topology.as_ref()).map_err(|error| {
            // Without the file the error has no line.
            let text = std::fs::read_to_string(file).unwrap_or_default();
            error.located(file, &text)
        })
    }

    /// Checks the rules that types cannot express.
    pub fn check(&self) -> Result<(), ConfigError> {
        // A file that was cut off must not end the management of all VMs.
        if self.vms.is_empty() && self.discover.is_none() {
            return Err(wrong(
                "0 VMs",
                "describe 1 to 1024 of them, each as [vm.NAME]",
            ));
        }
        self.check_keys()?;
        self.check_sums()
    }

    /// Checks everything but the sums of sizes.
    pub(super) fn check_keys(&self) -> Result<(), ConfigError> {
        if self.listen.is_some() && self.token_file.is_none() {
            return Err(wrong(
                "listen is set without token_file",
                "name a file with a secret of at least 16 characters, readable by its owner only",
            ));
        }
        if self.vms.len() > VMS_MAX {
            return Err(wrong(
                format!("{} VMs", self.vms.len()),
                "a controller has at most 1024 of them",
            ));
        }
        let mut sockets = BTreeSet::new();
        let mut domains = BTreeSet::new();
        for (name, vm) in &self.vms {
            vm.check(name)?;
            if let Some(domain) = &vm.libvirt
                && !domains.insert(domain)
            {
                return Err(wrong(
                    format!("vm.{name}: domain {domain:?} is named twice"),
                    "give every VM a domain of its own",
                ));
            }
            for socket in vm.qmp.iter().chain(&vm.cloud_hypervisor).chain(&vm.agent) {
                if !sockets.insert(socket) {
                    return Err(wrong(
                        format!("vm.{name}: socket {} is used twice", socket.display()),
                        "give every VM sockets of its own, for its hypervisor and for its agent",
                    ));
                }
            }
        }
        self.defaults.check()?;
        self.check_pools()?;
        self.check_texts()
    }

    /// Refuses empty texts: a key is left out, or has a value.
    fn check_texts(&self) -> Result<(), ConfigError> {
        // Plain data, so serialization cannot fail.
        let all = serde_json::to_value(self).unwrap_or_default();
        match empty_text(&all) {
            Some(key) => Err(wrong(
                format!("{key} = \"\" is empty"),
                "give it a value, or remove the key",
            )),
            None => Ok(()),
        }
    }
}

/// Path of the first empty text.
fn empty_text(value: &serde_json::Value) -> Option<String> {
    use serde_json::Value;
    let below = |key: &str, value: &Value| {
        let inner = empty_text(value)?;
        let dot = if inner.is_empty() { "" } else { "." };
        Some(format!("{key}{dot}{inner}"))
    };
    match value {
        Value::String(text) if text.is_empty() => Some(String::new()),
        Value::Object(object) => object.iter().find_map(|(key, value)| below(key, value)),
        Value::Array(list) => {
            let mut items = list.iter().enumerate();
            items.find_map(|(at, value)| below(&at.to_string(), value))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
