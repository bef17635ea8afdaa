//! The checks before anything is set up.

use std::collections::BTreeMap;
use std::path::Path;

use demeter_linux::base_page::check_base_pages;
use demeter_policy::NodeId;

use super::AgentError;
use crate::config::Config;
use crate::nodes::{NodesError, TierOrder, Topology};
use crate::targets::TargetFinder;

/// The findings of [`check`].
pub struct Checked {
    /// Finds the processes to manage.
    pub finder: TargetFinder,
    /// The tiers.
    pub order: TierOrder,
    /// Measured latency of a load from each node, nanoseconds.
    pub measured_ns: BTreeMap<NodeId, u32>,
}

/// Checks the configuration, the kernel, the targets and the tiers before anything is set up, in this order.
pub fn check(
    root: &Path,
    config: &Config,
    measure: impl FnOnce(&Topology) -> BTreeMap<NodeId, u32>,
) -> Result<Checked, AgentError> {
    config.check()?;
    check_base_pages(root)?;
    let finder = TargetFinder::new(root, config.targets()?);
    finder.check()?;
    let (order, measured_ns) = find_tiers(root, config, measure)?;
    Ok(Checked {
        finder,
        order,
        measured_ns,
    })
}

/// Finds the tiers of a machine; `measure` returns each node's latency in nanoseconds.
pub fn find_tiers(
    root: &Path,
    config: &Config,
    measure: impl FnOnce(&Topology) -> BTreeMap<NodeId, u32>,
) -> Result<(TierOrder, BTreeMap<NodeId, u32>), NodesError> {
    let mut topology = Topology::read(root)?;
    let measured_ns = measure(&topology);
    topology.set_measured(&measured_ns);
    Ok((config.order(&topology)?, measured_ns))
}
