//! The configuration of one VM.

use std::path::PathBuf;
use std::time::Duration;

use demeter_policy::history::HOT_ONES;
use demeter_policy::provision::ProvisionerKind;
use demeter_policy::{ByteCount, MIB, NodeId, PerTier, Tier, TierBytes};
use serde::{Deserialize, Serialize};

use super::bounds::{MIB_MAX, check_share, check_slowdown, mib, within};
use super::error::{ConfigError, wrong};
use crate::{PoolName, VmName};

/// Linux has 1024 nodes at most (CONFIG_NODES_SHIFT).
const NODE_MAX: u32 = 1023;

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

fn default_share() -> u32 {
    100
}

fn default_oom_mib() -> u64 {
    16
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
