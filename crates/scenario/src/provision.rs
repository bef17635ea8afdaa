//! Who gives the VMs their memory, and how much of it, while they run.

use demeter_policy::provision::{Policy, ProvisionerKind};
use serde::{Deserialize, Serialize};
use strum::VariantNames;

use crate::{Gups, Phase};

/// How memory is provisioned. `machine` then says what each VM shall own. Each node of a VM boots with the
/// sum of both tiers, and is sized from outside before the workload starts.
///
/// There is one run for each provisioner, policy and way to the VMs.
///
/// Where `machine` is a host, `vms` are its guests, and they share `machine`'s fast tier. With `static` each boots
/// with all its memory. Fast memory goes by the policy under `h-history`, and by shares where guests have a node of each
/// tier. With `demeter-balloon` a host controller divides it by the policy between guests with agents;
/// until the timed phase they have it by their shares. There is one run for each system.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provision {
    /// Mechanisms to compare.
    pub provisioners: Vec<Provisioner>,
    /// What decides how much each VM gets.
    #[serde(default = "policies")]
    pub policies: Vec<Policy>,
    /// Ways to the VMs, to compare.
    #[serde(default = "ways")]
    pub through: Vec<Through>,
    /// Resizing while the workload runs.
    #[serde(default)]
    pub resize_cycle: Option<ResizeCycle>,
    /// Fast memory that a policy leaves to every VM, MiB.
    #[serde(default = "default_guarantee_mib")]
    pub fast_guarantee_mib: u64,
    /// Crashes to survive, instead of a timed phase.
    #[serde(default)]
    pub crashes: Option<Crashes>,
    /// Resizing without end, to see whether anything grows, instead of a timed phase.
    #[serde(default)]
    pub soak: Option<Soak>,
    /// VMs that run side by side; empty for a single one that runs the scenario's workload.
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

/// How a run's VMs get their memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[serde(try_from = "String", rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Provisioner {
    /// They are booted with what they are to own.
    Static,
    /// They are sized from outside.
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
    /// What sizes them, if anything.
    pub fn kind(self) -> Option<ProvisionerKind> {
        match self {
            Self::Static => None,
            Self::Sized(kind) => Some(kind),
        }
    }

    /// Whether it can give and take memory of one tier.
    pub(crate) fn knows_tiers(self) -> bool {
        self.kind()
            .is_some_and(|kind| kind != ProvisionerKind::VirtioBalloon)
    }
}

/// Who runs the VMs in the lab, and thus how the host controller reaches them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Through {
    /// The lab starts the emulators; the controller has a QMP socket and an agent's socket of each.
    Qmp,
    /// A libvirtd that the lab starts for itself runs them as domains; the controller knows their names.
    Libvirt,
}

/// Fast memory that comes and goes during the timed phase: at `from_s` it grows by `fast_mib`,
/// `every_s` later it shrinks back, and so on to the end. It ends as it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeCycle {
    /// How much, MiB.
    pub fast_mib: u64,
    /// The first growth, seconds into the timed phase.
    pub from_s: u64,
    /// Seconds from each change to the next.
    pub every_s: u64,
}

/// A VM that runs the workload again and again, each time for `duration_s`, while its sizes change. At
/// random points its agent, its host controller or the VM is killed. Or it is reset, stopped for a while, taken back to a
/// snapshot, migrated without arriving, or gets or loses a DIMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Crashes {
    /// How many of these, one after the other.
    pub cycles: u32,
    /// Seconds until all has to be as it should be again.
    pub recovery_s: u64,
}

/// VMs that run the workload again and again, each time for `round_s`, and are resized all the while,
/// until `duration_s` is over. Memory, descriptors and threads of controller, agents and kernels must not grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Soak {
    /// Length of a round, seconds.
    pub round_s: u64,
    /// Seconds from each change of a VM's size to the next.
    pub resize_s: u64,
}

impl Provision {
    /// Whether VMs run their workload again and again, beside an agent that looks after all processes.
    pub fn runs_rounds(&self) -> bool {
        self.crashes.is_some() || self.soak.is_some()
    }
}

/// One of several VMs. It runs the scenario's gups with a hot set of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vm {
    /// Short name, also in results.
    pub name: String,
    /// Its share of the pools under the policy `shares`.
    #[serde(default = "one_share")]
    pub share: u32,
    /// Size of its hot set, MiB.
    pub hot_mib: u64,
    /// How its hot set changes.
    #[serde(default)]
    pub phases: Vec<Phase>,
}

impl Vm {
    /// What it runs: the scenario's gups with its own hot set.
    pub(crate) fn workload(&self, gups: &Gups) -> Gups {
        Gups {
            hot_mib: self.hot_mib,
            phases: self.phases.clone(),
            ..gups.clone()
        }
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
    /// What decides.
    pub policy: Policy,
    /// How its VMs are reached.
    pub through: Through,
}

impl Provision {
    /// All runs, with their names in results: those of the mechanisms where several are compared,
    /// else those of the policies; then those of the ways, where these are compared.
    pub fn variants(&self) -> Vec<(String, Variant)> {
        let pairs = self.provisioners.iter().flat_map(|&provisioner| {
            let policies = self.policies.iter();
            policies.map(move |&policy| (provisioner, policy))
        });
        let variants = pairs.flat_map(|(provisioner, policy)| {
            self.through.iter().map(move |&through| Variant {
                provisioner,
                policy,
                through,
            })
        });
        let name = |variant: &Variant| {
            let name = match (self.provisioners.len(), self.policies.len()) {
                (_, 1) => variant.provisioner.to_string(),
                (1, _) => variant.policy.to_string(),
                _ => format!("{} {}", variant.provisioner, variant.policy),
            };
            match self.through.len() {
                1 => name,
                _ => format!("{name} {}", variant.through),
            }
        };
        variants.map(|variant| (name(&variant), variant)).collect()
    }
}
