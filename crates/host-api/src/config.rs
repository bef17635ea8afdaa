//! The controller's configuration: a TOML file.
//!
//! It gives each VM's first sizes and the first policy. Values set later over the API are kept in
//! the state file and take precedence: [`Settings`].

mod changes;
mod defaults;
mod error;
mod libvirt;
mod pools;
mod settings;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use demeter_linux::nodes::Topology;
use demeter_policy::history::HOT_ONES;
use demeter_policy::provision::{Policy, ProvisionerKind};
use demeter_policy::{ByteCount, MIB, NodeId, PerTier, Tier, TierBytes};
use demeter_toml_file::{FileError, Kind, TomlFile};
use serde::{Deserialize, Serialize};

pub use changes::KeyChange;
pub use defaults::{Defaults, TierDefaults};
pub use error::{At, ConfigError};
pub use libvirt::Libvirt;
pub use pools::{Pool, PoolConfig};
pub use settings::{Asked, Setting, Settings, VmChange};

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

/// Component that finds a VM's hot memory and moves it between tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Manage {
    /// The agent in the guest.
    #[default]
    Agent,
    /// The host, by histories of access bits. The guest needs no agent.
    History,
    /// The agent while it is connected, else the host.
    Auto,
}

/// How the host itself tells hot memory from cold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct HistoryConfig {
    /// Run time of the VM between two scans of its access bits, milliseconds.
    pub interval_ms: u64,
    /// Hotness threshold, 1 to 32. A block of 2 MiB is hot if at least this many of its last 32
    /// scans found it accessed.
    pub hot_ones: u32,
}

impl Default for HistoryConfig {
    fn default() -> Self {
        Self {
            interval_ms: 100,
            hot_ones: HOT_ONES,
        }
    }
}

impl HistoryConfig {
    /// Run time of the VM between two scans.
    pub fn interval(&self) -> Duration {
        Duration::from_millis(self.interval_ms)
    }
}

/// Configuration of one VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct VmConfig {
    /// QEMU's QMP socket, if libvirt does not run the VM.
    pub qmp: Option<PathBuf>,
    /// Name of the libvirt domain, if libvirt runs the VM.
    pub libvirt: Option<String>,
    /// Cloud Hypervisor's API socket, if Cloud Hypervisor runs the VM.
    pub cloud_hypervisor: Option<PathBuf>,
    /// Socket of the guest agent's port (org.demeter.0). Not needed with libvirt and Cloud
    /// Hypervisor, which report it.
    pub agent: Option<PathBuf>,
    /// The pool that the VM's memory comes from. By default the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolName>,
    /// User that the hypervisor must run as. By default it is root or the controller's own user.
    /// With libvirt, libvirt.owner_uid applies instead.
    pub owner_uid: Option<u32>,
    /// Component that moves the VM's memory between tiers. With `history`, and with `auto` while no
    /// agent is connected, the tiers are the host's nodes, and the VM's fast memory is kept within
    /// its size.
    #[serde(default)]
    pub manage: Manage,
    /// How the host itself tells hot memory from cold.
    #[serde(default)]
    pub history: HistoryConfig,
    /// How the VM's size is changed while an agent manages it.
    #[serde(default)]
    pub provisioner: ProvisionerKind,
    /// Weight of the VM under the policy "shares".
    #[serde(default = "default_share")]
    pub share: u32,
    /// Service level: the largest slowdown against a VM whose memory is all fast, percent, 1 to 1000. The
    /// VM gets the fast memory that its agent's estimate needs for this, at its upper bound. Policy "static"
    /// changes no size. Pool and `limit_mib` may not suffice: `demeter host status` says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowdown_max_percent: Option<u32>,
    /// Out-of-memory allowance, MiB. The guest's kernel may reclaim this much of the balloon by
    /// itself. It counts as owned slow memory and as guaranteed.
    #[serde(default = "default_oom_mib")]
    pub oom_mib: u64,
    /// Extra memory of the VM's hard limit, MiB. If set, `memory.max` of the VM's own cgroup (v2)
    /// is kept at its owned memory plus this value, which is for QEMU itself. Start with 256 MiB
    /// plus 4 MiB for each GiB of the VM's memory.
    pub hard_limit_extra_mib: Option<u64>,
    /// Fast memory.
    pub fast: TierConfig,
    /// Slow memory.
    pub slow: TierConfig,
}

/// Configuration of one tier of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TierConfig {
    /// Id of the tier's QEMU memory backend or Cloud Hypervisor memory zone. Optional under
    /// virtio-mem if the node has only its device, and with libvirt if the backend is the node's
    /// cell.
    pub memdev: Option<String>,
    /// The guest's NUMA node; by default 0 is fast and 1 is slow.
    pub node: Option<u32>,
    /// Initial size of the tier, MiB.
    pub size_mib: u64,
    /// Minimum size of the tier, MiB.
    #[serde(default)]
    pub guarantee_mib: u64,
    /// Maximum size of the tier, MiB. By default it is all the memory that the hypervisor gave it.
    pub limit_mib: Option<u64>,
}

fn default_socket() -> PathBuf {
    "/run/demeter/host.sock".into()
}

fn default_state() -> PathBuf {
    "/var/lib/demeter/host.json".into()
}

fn default_share() -> u32 {
    100
}

fn default_oom_mib() -> u64 {
    16
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

impl VmConfig {
    /// Configuration of one tier.
    pub fn tier(&self, tier: Tier) -> &TierConfig {
        match tier {
            Tier::Fast => &self.fast,
            Tier::Slow => &self.slow,
        }
    }

    /// Initial size of each tier.
    pub fn sizes(&self) -> TierBytes {
        TierBytes::from_fn(|tier| mib(self.tier(tier).size_mib))
    }

    /// Minimum size of each tier. It includes memory that the guest's kernel may reclaim by itself.
    pub fn guarantees(&self) -> TierBytes {
        let configured = |tier| mib(self.tier(tier).guarantee_mib);
        TierBytes {
            fast: configured(Tier::Fast),
            slow: match self.manage {
                // Under histories, all of the VM's memory may end up in the slow tier.
                Manage::History => mib(self.slow.size_mib),
                _ => configured(Tier::Slow).max(self.oom()),
            },
        }
    }

    /// Maximum size of each tier, where the configuration limits it.
    pub fn limits(&self) -> PerTier<Option<ByteCount>> {
        let mut limits = PerTier::from_fn(|tier| self.tier(tier).limit_mib.map(mib));
        if self.manage == Manage::History {
            limits.slow = Some(mib(self.slow.size_mib));
        }
        limits
    }

    /// Slow memory that the guest's kernel may reclaim by itself.
    pub fn oom(&self) -> ByteCount {
        match self.provisioner {
            ProvisionerKind::DemeterBalloon if self.manage != Manage::History => mib(self.oom_mib),
            // Other provisioners reclaim nothing by themselves.
            _ => ByteCount(0),
        }
    }

    /// Whether `other` describes the same VM and differs in sizes, share or service level only.
    pub fn differs_in_sizes_only(&self, other: &Self) -> bool {
        let sizes_of = |of: &TierConfig, from: &TierConfig| TierConfig {
            size_mib: from.size_mib,
            guarantee_mib: from.guarantee_mib,
            limit_mib: from.limit_mib,
            ..of.clone()
        };
        let with = Self {
            share: other.share,
            slowdown_max_percent: other.slowdown_max_percent,
            pool: other.pool.clone(),
            fast: sizes_of(&self.fast, &other.fast),
            slow: sizes_of(&self.slow, &other.slow),
            ..self.clone()
        };
        // The history thread is created with the configured sizes, so a change needs a new task.
        with == *other && self.manage == Manage::Agent
    }

    /// Memory of the VM's process beyond what the VM owns, if limited.
    pub fn hard_limit_extra(&self) -> Option<ByteCount> {
        let extra = mib(self.hard_limit_extra_mib?);
        Some(ByteCount(extra.0.saturating_add(self.oom().0)))
    }

    /// The guest's nodes.
    pub fn nodes(&self) -> PerTier<NodeId> {
        PerTier {
            fast: NodeId(self.fast.node.unwrap_or(0)),
            slow: NodeId(self.slow.node.unwrap_or(1)),
        }
    }

    /// A VM that runs as a libvirt domain and starts with these sizes.
    pub fn of_domain(name: &VmName, provisioner: ProvisionerKind, sizes: TierBytes) -> Self {
        let tier = |tier| TierConfig {
            memdev: None,
            node: None,
            size_mib: sizes.get(tier).0 / MIB,
            guarantee_mib: 0,
            limit_mib: None,
        };
        Self {
            qmp: None,
            libvirt: Some(name.to_string()),
            cloud_hypervisor: None,
            agent: None,
            pool: None,
            owner_uid: None,
            manage: Manage::default(),
            history: HistoryConfig::default(),
            provisioner,
            share: default_share(),
            slowdown_max_percent: None,
            oom_mib: default_oom_mib(),
            hard_limit_extra_mib: None,
            fast: tier(Tier::Fast),
            slow: tier(Tier::Slow),
        }
    }

    /// ID of the memory backend of a tier, if configured.
    pub fn memdev(&self, tier: Tier) -> Option<String> {
        let named = self.tier(tier).memdev.clone();
        // libvirt's name for the memory backend of a cell.
        let of_cell = || Some(format!("ram-node{}", self.nodes().get(tier)));
        named.or_else(|| self.libvirt.as_ref().and_then(|_| of_cell()))
    }

    /// Checks the hypervisor's keys. Returns whether the agent's socket is or will be known.
    fn check_hypervisor(&self, name: &VmName) -> Result<bool, ConfigError> {
        let known_by = match (&self.qmp, &self.libvirt, &self.cloud_hypervisor) {
            (Some(_), None, None) => return Ok(self.agent.is_some()),
            (None, Some(_), None) => "libvirt",
            (None, None, Some(_)) => "cloud_hypervisor",
            _ => {
                return Err(wrong(
                    format!("vm.{name} must have either qmp or libvirt or cloud_hypervisor"),
                    "set qmp to QEMU's QMP socket, or libvirt to the domain's name, or cloud_hypervisor to \
                     its API socket",
                ));
            }
        };
        if self.agent.is_some() {
            return Err(wrong(
                format!("vm.{name}: agent is set beside {known_by}"),
                "leave it out: libvirt knows the socket of channel org.demeter.0, and Cloud Hypervisor that \
                 of its --vsock",
            ));
        }
        if self.cloud_hypervisor.is_some() && self.provisioner == ProvisionerKind::VirtioMem {
            return Err(wrong(
                format!("vm.{name}: provisioner = \"virtio-mem\" beside cloud_hypervisor"),
                "take demeter-balloon: Cloud Hypervisor does not report the plugged size of a zone's \
                 virtio-mem",
            ));
        }
        Ok(true)
    }

    /// Checks the rules of one VM.
    pub fn check(&self, name: &VmName) -> Result<(), ConfigError> {
        let agent_known = self.check_hypervisor(name)?;
        let HistoryConfig {
            interval_ms,
            hot_ones,
        } = self.history;
        if !(10..=60_000).contains(&interval_ms) || !(1..=32).contains(&hot_ones) {
            return Err(wrong(
                format!(
                    "vm.{name}.history = {{ interval_ms = {interval_ms}, hot_ones = {hot_ones} }}"
                ),
                "interval_ms is 10 to 60000, hot_ones is 1 to 32",
            ));
        }
        if self.manage == Manage::Auto && !agent_known {
            return Err(wrong(
                format!("vm.{name} has manage = \"auto\" and no agent socket"),
                "set agent, or manage = \"history\"",
            ));
        }
        let by_agent = self.manage != Manage::History;
        if by_agent && self.provisioner == ProvisionerKind::DemeterBalloon && !agent_known {
            return Err(wrong(
                format!("vm.{name} has no agent socket, which demeter-balloon needs"),
                "set agent, or provisioner = \"virtio-mem\"",
            ));
        }
        let nodes = self.nodes();
        for tier in Tier::ALL {
            let node = nodes.get(tier).0;
            if node > NODE_MAX {
                return Err(wrong(
                    format!("vm.{name}.{tier}.node = {node} is no node"),
                    "give a NUMA node of the guest, 0 to 1023",
                ));
            }
        }
        if nodes.fast == nodes.slow {
            return Err(wrong(
                format!("vm.{name}: both tiers are node {}", nodes.fast),
                "set fast.node and slow.node to two different nodes of the guest",
            ));
        }
        let memdevs = (&self.fast.memdev, &self.slow.memdev);
        if memdevs.0.is_some() && memdevs.0 == memdevs.1 {
            return Err(wrong(
                format!("vm.{name}: both tiers have the same memdev"),
                "set fast.memdev and slow.memdev to two different -object memory-backend-*",
            ));
        }
        check_share(&format!("vm.{name}"), self.share)?;
        check_slowdown(&format!("vm.{name}"), self.slowdown_max_percent)?;
        within(&format!("vm.{name}.oom_mib"), self.oom_mib)?;
        if let Some(extra_mib) = self.hard_limit_extra_mib {
            within(&format!("vm.{name}.hard_limit_extra_mib"), extra_mib)?;
            if self.manage != Manage::Agent {
                return Err(wrong(
                    format!("vm.{name} has hard_limit_extra_mib, and not manage = \"agent\""),
                    "remove one of them: a VM that the host manages returns no memory",
                ));
            }
        }
        Tier::ALL
            .into_iter()
            .try_for_each(|tier| self.check_tier(name, tier))
    }

    fn check_tier(&self, name: &VmName, tier: Tier) -> Result<(), ConfigError> {
        let config = self.tier(tier);
        let key = format!("vm.{name}.{tier}");
        let by_agent = self.manage != Manage::History;
        let needed = by_agent && self.provisioner != ProvisionerKind::VirtioMem;
        if self.memdev(tier).is_none() && needed {
            return Err(wrong(
                format!("{key}.memdev is missing"),
                "give the id of its -object memory-backend-*, or of its --memory-zone",
            ));
        }
        let limit_mib = config.limit_mib.unwrap_or(MIB_MAX);
        within(&format!("{key}.limit_mib"), limit_mib)?;
        let least_mib = self.guarantees().get(tier).0 / MIB;
        if config.guarantee_mib > limit_mib {
            return Err(wrong(
                format!(
                    "{key}.guarantee_mib = {} is over its limit_mib = {limit_mib}",
                    config.guarantee_mib
                ),
                "change one of them",
            ));
        }
        if config.size_mib < least_mib {
            return Err(wrong(
                format!(
                    "{key}.size_mib = {} is under its guarantee of {least_mib}",
                    config.size_mib
                ),
                "raise it; slow memory includes oom_mib",
            ));
        }
        if config.size_mib > limit_mib {
            return Err(wrong(
                format!(
                    "{key}.size_mib = {} is over its limit_mib = {limit_mib}",
                    config.size_mib
                ),
                "change one of them",
            ));
        }
        Ok(())
    }
}

/// Maximum of `slowdown_max_percent`. Slow memory of more than eleven times the latency is no memory tier.
const SLOWDOWN_PERCENT_MAX: u32 = 1000;

/// Linux has 1024 nodes at most (CONFIG_NODES_SHIFT).
const NODE_MAX: u32 = 1023;

/// 8 PiB. As much for each of [`VMS_MAX`] VMs still adds up to bytes in 64 bits.
const MIB_MAX: u64 = 1 << 33;

fn mib(count: u64) -> ByteCount {
    ByteCount(count.saturating_mul(MIB))
}

fn check_share(table: &str, share: u32) -> Result<(), ConfigError> {
    match share {
        0 => Err(wrong(format!("{table}.share = 0"), "set 1 or more")),
        _ => Ok(()),
    }
}

fn check_slowdown(table: &str, percent: Option<u32>) -> Result<(), ConfigError> {
    match percent.filter(|percent| !(1..=SLOWDOWN_PERCENT_MAX).contains(percent)) {
        Some(percent) => Err(wrong(
            format!("{table}.slowdown_max_percent = {percent}"),
            "give 1 to 1000: at most so many percent slower than with fast memory alone",
        )),
        None => Ok(()),
    }
}

fn within(key: &str, value_mib: u64) -> Result<(), ConfigError> {
    if value_mib <= MIB_MAX {
        return Ok(());
    }
    let what = format!("{key} = {value_mib} is more than any machine has");
    Err(wrong(what, "give MiB"))
}

#[cfg(test)]
mod tests;
