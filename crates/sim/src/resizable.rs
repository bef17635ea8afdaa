//! Resizable VMs: which are modelled, and the sizes of their memory.

use demeter_policy::provision::ProvisionerKind;
use demeter_policy::{BLOCK_SIZE, ByteCount, MIB};
use demeter_scenario::{Scenario, Through};

use crate::error::SimError;

/// Refuses scenarios that are not modelled.
pub(crate) fn check(scenario: &Scenario) -> Result<(), SimError> {
    let Some(provision) = &scenario.provision else {
        return Ok(());
    };
    let is_sized = provision.provisioners.iter().any(|p| p.kind().is_some());
    let refused = if provision.runs_rounds() {
        "crashes and soaks"
    } else if provision.through.contains(&Through::Libvirt) {
        "libvirt"
    } else if provision.resize_cycle.is_some() && !provision.vms.is_empty() {
        "resize cycles of several VMs"
    } else if is_sized && scenario.systems.iter().any(|system| !system.has_agent()) {
        "provisioning for a system without Demeter's agent"
    } else if scenario.sim.translation.is_some() {
        "provisioning of memory that is reserved (sim.translation)"
    } else {
        return Ok(());
    };
    Err(SimError::NoModelOf(refused))
}

/// Memory sizes of a resizable VM, by tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Sizes of the guest's nodes. Only machines of two nodes are resizable.
    pub(crate) nodes: Vec<ByteCount>,
    /// Fast memory that it owns initially.
    pub(crate) owned_fast: ByteCount,
    /// Host memory behind the VM, by node.
    pub(crate) host: Vec<ByteCount>,
}

impl Sizes {
    /// Sizes of a VM that owns these nodes, with `usable_fast` of the fast node for programs.
    pub(crate) fn new(scenario: &Scenario, nodes: Vec<ByteCount>, usable_fast: ByteCount) -> Self {
        let plain = Self {
            owned_fast: nodes[0],
            host: nodes.clone(),
            nodes,
        };
        let (Some(provision), &[fast, slow]) = (&scenario.provision, &plain.nodes[..]) else {
            return plain;
        };
        let more = provision
            .resize_cycle
            .map_or(0, |cycle| cycle.fast_mib * MIB);
        let more = more.next_multiple_of(BLOCK_SIZE);
        let count = provision.vms.len() as u64;
        match provision.provisioners.first().and_then(|p| p.kind()) {
            None => plain,
            // Each VM may temporarily own the memory of all.
            Some(_) if count > 0 => Self {
                nodes: vec![ByteCount(count * fast.0), slow],
                ..plain
            },
            Some(ProvisionerKind::VirtioBalloon) => {
                let slow = ByteCount(fast.0 + slow.0 + more);
                Self {
                    nodes: vec![fast, slow],
                    owned_fast: ByteCount(fast.0 - usable_fast.0.min(fast.0)),
                    host: vec![fast, slow],
                }
            }
            Some(_) => {
                let most = ByteCount(fast.0 + more);
                Self {
                    nodes: vec![most, slow],
                    owned_fast: fast,
                    host: vec![most, slow],
                }
            }
        }
    }
}
