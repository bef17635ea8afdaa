//! Parses the memory setup in a domain's XML (libvirt's docs/formatdomain).

use std::path::PathBuf;

use demeter_linux::nodes::parse_list;
use demeter_policy::provision::ProvisionerKind;
use demeter_policy::{ByteCount, NodeId, PerTier, Tier};
use demeter_proto::shown;
use roxmltree::Node;

use super::xml::{cells_of, child, parse, size};
use super::{PORT, metadata};
use crate::config::VmChange;

/// The memory setup of a domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    pub running: bool,
    /// How its memory is encrypted, if it is a confidential VM: `sev`, `sev-snp`, `tdx`.
    pub confidential: Option<String>,
    /// Values that its owner sets in it, or why they cannot be read.
    pub own: Result<VmChange, String>,
    /// All its memory, if the XML states it.
    pub memory: Option<ByteCount>,
    pub cells: Vec<Cell>,
    /// Nodes with a virtio-mem device.
    pub elastic: Vec<NodeId>,
    /// Whether it has a port for the agent.
    pub has_port: bool,
    /// The agent's socket; libvirt creates it at the start.
    pub agent: Option<PathBuf>,
}

/// A NUMA cell of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cell {
    pub node: NodeId,
    pub size: ByteCount,
    /// The host's nodes that its memory is bound to; empty if it may lie anywhere.
    pub bound: Vec<NodeId>,
    /// Whether other processes may map its memory.
    pub shared: bool,
    /// Whether it has CPUs.
    pub has_cpus: bool,
}

/// Reason why a domain cannot be managed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Lack {
    #[error(
        "it is a confidential VM ({0}): the host can neither take its memory back nor see what it accesses; \
         run demeter guest in it, without a section here"
    )]
    Confidential(String),
    #[error("it has no NUMA cell {0}, which should be its {1} memory")]
    Cell(NodeId, Tier),
    #[error("its cell {0} has private memory, which cannot be returned")]
    Private(NodeId),
    #[error("it has no channel {PORT} for the guest's agent")]
    Port,
    #[error("its cell {0} has no virtio-mem device")]
    Elastic(NodeId),
}

impl Facts {
    /// The fast and the slow cell, if there are two and at most one has CPUs. The error is the
    /// reason why they are unknown.
    pub(crate) fn tiers(&self) -> Result<PerTier<NodeId>, String> {
        let with_cpus = self.cells.iter().filter(|cell| cell.has_cpus).count();
        match &self.cells[..] {
            [a, b] if with_cpus <= 1 => Ok(match b.has_cpus {
                true => PerTier {
                    fast: b.node,
                    slow: a.node,
                },
                false => PerTier {
                    fast: a.node,
                    slow: b.node,
                },
            }),
            _ => Err(format!(
                "it has {} NUMA cells, {with_cpus} of them with CPUs, so its fast and slow cells are \
                 unknown",
                self.cells.len()
            )),
        }
    }

    pub(crate) fn read(xml: &str) -> Result<Self, String> {
        let document = parse(xml)?;
        let domain = document.root_element();
        if !domain.has_tag_name("domain") {
            return Err("libvirt's XML describes no domain".into());
        }
        let shared_all = child(domain, &["memoryBacking", "access"])
            .is_some_and(|access| access.attribute("mode") == Some("shared"));
        let devices = || domain.children().filter(|of| of.has_tag_name("devices"));
        let channels = devices()
            .flat_map(|of| of.children())
            .filter(|of| of.has_tag_name("channel"));
        let port = channels
            .filter(|of| of.attribute("type") == Some("unix"))
            .find(|of| {
                child(*of, &["target"]).and_then(|target| target.attribute("name")) == Some(PORT)
            });
        let elastic = devices()
            .flat_map(|of| of.children())
            .filter(|of| of.has_tag_name("memory") && of.attribute("model") == Some("virtio-mem"))
            .filter_map(|of| child(of, &["target", "node"])?.text()?.trim().parse().ok())
            .map(NodeId);
        let mut cells = vec![];
        for (place, cell) in cells_of(domain).enumerate() {
            let wrong = || format!("its NUMA cell {place} has no size that can be read");
            let node = match cell.attribute("id") {
                Some(id) => id.parse().map_err(|_| wrong())?,
                None => u32::try_from(place).unwrap_or(u32::MAX),
            };
            cells.push(Cell {
                node: NodeId(node),
                bound: bound(domain, node),
                size: size(cell.attribute("memory"), cell.attribute("unit")).ok_or_else(wrong)?,
                shared: match cell.attribute("memAccess") {
                    Some(access) => access == "shared",
                    None => shared_all,
                },
                has_cpus: cell.attribute("cpus").is_some(),
            });
        }
        Ok(Self {
            running: domain.attribute("id").is_some(),
            confidential: child(domain, &["launchSecurity"])
                .map(|of| shown(of.attribute("type").unwrap_or("of unknown type"))),
            own: metadata::read(domain),
            memory: child(domain, &["memory"]).and_then(|of| size(of.text(), of.attribute("unit"))),
            cells,
            elastic: elastic.collect(),
            has_port: port.is_some(),
            agent: port
                .and_then(|port| child(port, &["source"])?.attribute("path"))
                .map(PathBuf::from),
        })
    }

    /// Checks that the domain supports a provisioner.
    pub(crate) fn check(
        &self,
        provisioner: ProvisionerKind,
        nodes: PerTier<NodeId>,
    ) -> Result<(), Lack> {
        if let Some(kind) = &self.confidential {
            return Err(Lack::Confidential(kind.clone()));
        }
        for tier in Tier::ALL {
            let node = *nodes.get(tier);
            let cell = self.cells.iter().find(|cell| cell.node == node);
            let cell = cell.ok_or(Lack::Cell(node, tier))?;
            match provisioner {
                ProvisionerKind::VirtioMem if !self.elastic.contains(&node) => {
                    return Err(Lack::Elastic(node));
                }
                ProvisionerKind::VirtioMem => {}
                _ if !cell.shared => return Err(Lack::Private(node)),
                _ => {}
            }
        }
        if provisioner == ProvisionerKind::DemeterBalloon && !self.has_port {
            return Err(Lack::Port);
        }
        Ok(())
    }
}

/// The host's nodes that a cell's memory is bound to: its own `<memnode>`, or else the domain's `<memory>`. A preferred
/// node binds nothing.
fn bound(domain: Node, cell: u32) -> Vec<NodeId> {
    let tune = child(domain, &["numatune"]);
    let is_of_cell = |of: &Node| {
        let of_cell = of.attribute("cellid").and_then(|id| id.parse().ok());
        of.has_tag_name("memnode") && of_cell == Some(cell)
    };
    let own = tune.and_then(|tune| tune.children().find(is_of_cell));
    let of_domain = || child(tune?, &["memory"]);
    let Some(by) = own.or_else(of_domain) else {
        return vec![];
    };
    let nodes = by.attribute("nodeset").unwrap_or_default();
    // libvirt writes the nodes of a running domain without exclusions (`^`).
    if by.attribute("mode") == Some("preferred") || nodes.contains('^') {
        return vec![];
    }
    parse_list(nodes).into_iter().map(NodeId).collect()
}
