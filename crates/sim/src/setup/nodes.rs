//! The nodes of a scenario's machine, as the simulator models them.

use demeter_policy::{BLOCK_SIZE, ByteCount, Level, NodeId, Placer, Socket};
use demeter_scenario::{Machine, MachineNode, Scenario};

use crate::error::SimError;
use crate::guest::Watermarks;
use crate::machine::cost::PS_PER_NS;
use crate::machine::memory::{NodeIndex, NodeModel};
use crate::machine::tier::{LINE_BYTES, TierModel};
use crate::vm::plug::Plug;

/// Refuses machines of nodes that are not modelled.
pub(super) fn check(scenario: &Scenario, vms: u32) -> Result<(), SimError> {
    let machine = &scenario.machine;
    let refused = if machine.node.is_empty() {
        return Ok(());
    } else if vms > 1 || scenario.sim.cores.is_some() {
        "several VMs or shared cores on a machine of nodes ([[machine.node]])"
    } else if scenario.sim.translation.is_some() {
        "reserved memory (sim.translation) on a machine of nodes ([[machine.node]])"
    } else {
        return Ok(());
    };
    Err(SimError::NoModelOf(refused))
}

/// The model of a node, under a clock that runs slower by `dilation`. The keys `fast_*` of `[sim]` hold for the first
/// tier, and `slow_*` for all others.
pub(super) fn model(scenario: &Scenario, node: &MachineNode, dilation: u64) -> NodeModel {
    let sim = &scenario.sim;
    let level = level_of(node);
    let gbps = 1_000_000_000 / dilation;
    let (write_gbps, granule, curve, others) = match level {
        Level::First => (None, LINE_BYTES, sim.fast_curve, sim.fast_others_gbps),
        _ => (
            sim.slow_write_gbps,
            sim.slow_granule_bytes,
            sim.slow_curve,
            sim.slow_others_gbps,
        ),
    };
    let figures = node.latency_ns.iter().zip(&node.bandwidth_gbps);
    let from = |(latency_ns, bandwidth_gbps): (&u64, &u64)| TierModel {
        latency_ps: latency_ns * dilation * PS_PER_NS,
        read_bytes_per_s: bandwidth_gbps * gbps,
        write_bytes_per_s: write_gbps.unwrap_or(*bandwidth_gbps) * gbps,
        granule_lines: granule / LINE_BYTES,
        curve,
        loaded_percent: sim.cost_percent.loaded_latency,
        others_bytes_per_s: others * gbps,
    };
    NodeModel {
        level,
        socket: Socket::new(node.socket as usize),
        from: figures.map(from).collect(),
    }
}

/// The tier of a node; a scenario's check allows no others.
pub(super) fn level_of(node: &MachineNode) -> Level {
    Level::new(node.tier.saturating_sub(1) as usize).unwrap_or(Level::Fourth)
}

/// Sizes of nodes that leave these sizes to programs. The slowest tier has no watermarks.
pub(super) fn sizes(nodes: &[NodeModel], usable: &[ByteCount]) -> Vec<ByteCount> {
    let slowest = nodes.iter().map(|node| node.level).max();
    let size = |(node, &usable): (&NodeModel, &ByteCount)| {
        let size = match Some(node.level) == slowest {
            true => usable,
            false => Watermarks::LINUX.around(usable),
        };
        ByteCount(size.0.next_multiple_of(BLOCK_SIZE))
    };
    nodes.iter().zip(usable).map(size).collect()
}

/// The nodes with memory by their distance from each socket, as in Linux's zone lists.
pub(super) fn orders(scenario: &Scenario) -> Vec<Vec<NodeIndex>> {
    let machine = &scenario.machine;
    let (nodes, distances) = (machine.nodes(), machine.distances());
    let order = |socket: u32| {
        let with_memory = (0..nodes.len()).filter(|&node| nodes[node].usable_mib > 0);
        let mut order: Vec<NodeIndex> = with_memory.map(NodeIndex).collect();
        order.sort_by_key(|node| distances[socket as usize][node.0]);
        order
    };
    (0..machine.sockets()).map(order).collect()
}

/// The nodes that come or go.
pub(super) fn plugs(nodes: &[MachineNode]) -> Vec<Plug> {
    let plugged = nodes
        .iter()
        .enumerate()
        .filter(|(_, node)| node.is_plugged());
    let plug = |(node, listed): (usize, &MachineNode)| Plug {
        node: NodeIndex(node),
        comes_at_s: listed.comes_at_s,
        goes_at_s: listed.goes_at_s,
    };
    plugged.map(plug).collect()
}

/// Which node of a tier memory moves to.
pub(super) fn placer(scenario: &Scenario) -> Placer {
    let machine = &scenario.machine;
    let nodes = machine.nodes();
    let numbered = || (0..).map(NodeId).zip(&nodes);
    let tier = |level: Level| -> Vec<NodeId> {
        let of_tier = numbered().filter(|(_, node)| level_of(node) == level && node.usable_mib > 0);
        of_tier.map(|(id, _)| id).collect()
    };
    let row = |(from, row): (u32, Vec<u64>)| {
        let to = (0..).map(NodeId).zip(row);
        // A distance is at most 254.
        to.map(move |(to, distance)| ((NodeId(from), to), distance as u32))
            .collect::<Vec<_>>()
    };
    let distances = (0..).zip(machine.distances()).flat_map(row);
    Placer::new(Level::ALL.map(tier).into(), distances.collect())
}

/// A tier's latency as an agent measures it: the mean of its nodes, each from its own socket; 0 without nodes.
pub(super) fn latency_ns(machine: &Machine, level: Level, dilation: u64) -> u32 {
    let nodes = machine.nodes().into_iter();
    let of_tier = nodes.filter(|node| level_of(node) == level && node.usable_mib > 0);
    let ns: Vec<u64> = of_tier
        .map(|node| node.latency_from_ns(node.socket) * dilation)
        .collect();
    let mean = ns.iter().sum::<u64>().checked_div(ns.len() as u64);
    u32::try_from(mean.unwrap_or(0)).unwrap_or(u32::MAX)
}
