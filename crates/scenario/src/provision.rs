//! Provisioning: how VMs get their memory while they run.

use demeter_policy::provision::{Policy, ProvisionerKind};
use serde::{Deserialize, Serialize};
use strum::VariantNames;

use crate::{Phase, Workload};

/// How memory is provisioned. `machine` then says what each VM shall own. Each node of a VM boots with the sum of both
/// tiers, and is sized from outside before the workload starts.
///
/// There is one run for each provisioner, policy and connection to the VMs.
///
/// If `machine` is a host, `vms` are its guests, and they share `machine`'s fast tier. With `static` each boots with
/// all its memory. Under `h-history` the policy divides fast memory; if guests have a node of each tier, it is divided
/// by shares. With `demeter-balloon` a host controller divides it by the policy between guests with agents; before the
/// timed phase they have it by their shares. There is one run for each system.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Provision {
    /// Mechanisms to compare.
    pub provisioners: Vec<Provisioner>,
    /// Policies to compare, which divide the memory.
    #[serde(default = "policies")]
    pub policies: Vec<Policy>,
    /// Published policies to compare with them, on the simulator only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rivals: Vec<RivalPolicy>,
    /// Connections to the VMs, to compare.
    #[serde(default = "ways")]
    pub through: Vec<Through>,
    /// Resizing while the workload runs.
    #[serde(default)]
    pub resize_cycle: Option<ResizeCycle>,
    /// Fast memory that a policy leaves to every VM, MiB.
    #[serde(default = "default_guarantee_mib")]
    pub fast_guarantee_mib: u64,
    /// A crash test, instead of a timed phase.
    #[serde(default)]
    pub crashes: Option<Crashes>,
    /// A soak test, instead of a timed phase: resizes for hours, to find leaks.
    #[serde(default)]
    pub soak: Option<Soak>,
    /// VMs that run side by side; empty for one VM that runs the scenario's workload.
    #[serde(default)]
    pub vms: Vec<Vm>,
}

fn policies() -> Vec<Policy> {
    vec![Policy::default()]
}

fn ways() -> Vec<Through> {
    vec![Through::Qmp]
}

fn default_guarantee_mib() -> u64 {
    16
}

/// A published policy that divides fast memory between VMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, strum::Display)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum RivalPolicy {
    /// Memstrata (OSDI 2024): VMs that lose more than 5 % get memory of the others.
    Memstrata,
}

/// The mechanism that gives VMs their memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[serde(try_from = "String", rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Provisioner {
    /// They boot with the memory that they own.
    Static,
    /// They are resized from outside.
    #[serde(untagged)]
    #[strum(transparent)]
    Sized(ProvisionerKind),
}

impl TryFrom<String> for Provisioner {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        if name == "static" {
            return Ok(Self::Static);
        }
        name.parse().map(Self::Sized).map_err(|_| {
            let kinds = ProvisionerKind::VARIANTS.join(", ");
            format!("there is no provisioner \"{name}\": use static, {kinds}")
        })
    }
}

impl Provisioner {
    /// The mechanism that resizes them, if any.
    pub fn kind(self) -> Option<ProvisionerKind> {
        match self {
            Self::Static => None,
            Self::Sized(kind) => Some(kind),
        }
    }

    /// Whether it can resize one tier alone.
    pub(crate) fn knows_tiers(self) -> bool {
        self.kind()
            .is_some_and(|kind| kind != ProvisionerKind::VirtioBalloon)
    }
}

/// How the lab's VMs run, and how the host controller connects to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Through {
    /// The lab starts QEMU; the controller has its QMP socket and the agent's socket.
    Qmp,
    /// A libvirtd of the lab runs them as domains; the controller has their names.
    Libvirt,
}

/// Fast memory that grows and shrinks during the timed phase. At `from_s` it grows by `fast_mib`, `every_s` later it
/// shrinks back, and so on. It ends with its initial size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ResizeCycle {
    /// Size of a change, MiB.
    pub fast_mib: u64,
    /// Time of the first growth, seconds into the timed phase.
    pub from_s: u64,
    /// Time between two changes, seconds.
    pub every_s: u64,
}

/// A crash test: a VM runs the workload repeatedly, each time for `duration_s`, while its sizes change. At random times
/// its agent, its host controller or the VM is killed. Or the VM is reset, stopped for a while, reverted to a snapshot,
/// put through a failed migration, or gets or loses a DIMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Crashes {
    /// Number of these events, one after the other.
    pub cycles: u32,
    /// Time limit for recovery after an event, seconds.
    pub recovery_s: u64,
}

/// A soak test: VMs run the workload repeatedly, each time for `round_s`, and are resized until `duration_s` is over.
/// Memory, descriptors and threads of controller, agents and kernels must not grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Soak {
    /// Length of a round, seconds.
    pub round_s: u64,
    /// Time between two resizes of a VM, seconds.
    pub resize_s: u64,
}

impl Provision {
    /// Whether VMs run their workload repeatedly, with an agent that manages all processes.
    pub fn runs_rounds(&self) -> bool {
        self.crashes.is_some() || self.soak.is_some()
    }
}

/// One of several VMs. It runs the scenario's workload, if that is gups with its own hot set, or a workload of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Vm {
    /// Short name, also in results.
    pub name: String,
    /// Its share of the pools under the policy `shares`.
    #[serde(default = "one_share")]
    pub share: u32,
    /// Size of its hot set, MiB; by default the scenario's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hot_mib: Option<u64>,
    /// How its hot set changes.
    #[serde(default)]
    pub phases: Vec<Phase>,
    /// Its own workload instead of the scenario's, for neighbours that differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<Workload>,
}

impl Vm {
    /// Its workload in a scenario with this one.
    pub(crate) fn workload(&self, common: &Workload) -> Workload {
        let mut workload = self.workload.as_ref().unwrap_or(common).clone();
        if let Workload::Gups(gups) = &mut workload
            && self.workload.is_none()
        {
            gups.hot_mib = self.hot_mib.unwrap_or(gups.hot_mib);
            gups.phases.clone_from(&self.phases);
        }
        workload
    }

    /// Whether it has a hot set of its own.
    pub(crate) fn has_hot_set(&self) -> bool {
        self.hot_mib.is_some() || !self.phases.is_empty()
    }
}

fn one_share() -> u32 {
    1
}

/// One run of a scenario with [`Provision`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// The mechanism.
    pub provisioner: Provisioner,
    /// The policy.
    pub policy: Policy,
    /// A published policy instead.
    pub rival: Option<RivalPolicy>,
    /// The connection to its VMs.
    pub through: Through,
}

impl Provision {
    /// All runs, with their names in results.
    ///
    /// The name is that of the mechanism if several are compared, otherwise of the policy; then that of the connection,
    /// if several are compared.
    pub fn variants(&self) -> Vec<(String, Variant)> {
        let pairs = self.provisioners.iter().flat_map(|&provisioner| {
            let policies = self.policies.iter().map(|&policy| (policy, None));
            let rivals = self
                .rivals
                .iter()
                .map(|&rival| (Policy::Static, Some(rival)));
            policies
                .chain(rivals)
                .map(move |divides| (provisioner, divides))
        });
        let variants = pairs.flat_map(|(provisioner, (policy, rival))| {
            self.through.iter().map(move |&through| Variant {
                provisioner,
                policy,
                rival,
                through,
            })
        });
        let name = |variant: &Variant| {
            let policy = match variant.rival {
                Some(rival) => rival.to_string(),
                None => variant.policy.to_string(),
            };
            let policies = self.policies.len() + self.rivals.len();
            let name = match (self.provisioners.len(), policies) {
                (_, 1) => variant.provisioner.to_string(),
                (1, _) => policy,
                _ => format!("{} {policy}", variant.provisioner),
            };
            match self.through.len() {
                1 => name,
                _ => format!("{name} {}", variant.through),
            }
        };
        variants.map(|variant| (name(&variant), variant)).collect()
    }
}
