//! Orders nodes into tiers by speed.
//!
//! # Approach
//! At first all nodes with memory are one tier. Then each kind of evidence divides the tiers further. Best first, the
//! kinds are the kernel's memory tiers, latencies in ACPI HMAT, distances from the nearest CPUs, nodes without CPUs,
//! and measured latencies. A kind that is missing for any node of a tier does not divide this tier. Figures that are
//! nearly equal ([`ALIKE`]) make one tier, so that the memory of two sockets stays together. Where the firmware tells the
//! latency of all nodes of a tier, a measurement does not divide it: on a busy machine it may err by more.
//!
//! # Properties
//! - Tiers are ordered by their evidence, and nodes within a tier by number.
//! - There are at most [`TIERS_MAX`] tiers: the slowest are merged.
//! - The order in which nodes are listed does not change the tiers.

use std::cmp::Reverse;

use demeter_policy::{Distances, Level, NodeId};

use super::{Node, NodesError, Pair, TIERS_MAX, Tiers, Topology};

/// Figures that differ by less than a fifth count as equal.
const ALIKE: f64 = 1.2;

/// Distance of a node from itself (SLIT).
const OWN_DISTANCE: u32 = 10;

/// The tiers, and how they were determined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierOrder {
    /// The nodes by tier.
    pub tiers: Tiers,
    /// The two representative nodes where only two are managed.
    pub pair: Pair,
    /// The evidence that separates each tier from the next one.
    pub decided_by: Vec<DecidedBy>,
    /// Nodes in no tier, with the reason.
    pub left_alone: Vec<(NodeId, LeftAlone)>,
    /// Evidence that contradicts the order.
    pub contradictions: Vec<Contradiction>,
}

/// A kind of evidence that separates two tiers, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::Display)]
pub enum DecidedBy {
    /// The configuration.
    #[strum(to_string = "by the configuration")]
    Hand,
    /// The kernel's memory tiers.
    #[strum(to_string = "by the kernel's memory tiers")]
    MemoryTier,
    /// Latencies in ACPI HMAT.
    #[strum(to_string = "by their latency in ACPI HMAT")]
    Latency,
    /// Distances from the nearest CPUs.
    #[strum(to_string = "by their distance from the nearest CPUs")]
    Distance,
    /// One node has CPUs, the other none.
    #[strum(to_string = "because the slow one has no CPUs")]
    CpulessNode,
    /// Measured latencies.
    #[strum(to_string = "by their measured latency")]
    Measured,
}

/// Why a node is in no tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
pub enum LeftAlone {
    /// It has no memory.
    #[strum(to_string = "it has no memory")]
    NoMemory,
    /// The configuration names other nodes.
    #[strum(to_string = "the key tiers does not name it")]
    NotNamed,
}

/// A node of a faster tier that is slower than a node of a slower tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "node {fast} is in a faster tier than node {slow}, but slower {by}: {fast_figure} against {slow_figure}; \
     name the tiers with --tiers if they are wrong"
)]
pub struct Contradiction {
    /// The node of the faster tier.
    pub fast: NodeId,
    /// The node of the slower tier.
    pub slow: NodeId,
    /// The evidence.
    pub by: DecidedBy,
    /// The faster tier's figure.
    pub fast_figure: u32,
    /// The slower tier's figure.
    pub slow_figure: u32,
}

/// All evidence, best first.
const EVIDENCE: [DecidedBy; 5] = [
    DecidedBy::MemoryTier,
    DecidedBy::Latency,
    DecidedBy::Distance,
    DecidedBy::CpulessNode,
    DecidedBy::Measured,
];

impl Topology {
    /// Orders the nodes by evidence.
    ///
    /// # Errors
    /// Fewer than two nodes have memory, or none is slower than the others.
    pub fn order(&self) -> Result<TierOrder, NodesError> {
        let nodes: Vec<&Node> = self.with_memory().collect();
        if nodes.len() < 2 {
            return Err(NodesError::OneNode(nodes.len()));
        }
        let mut tiers = vec![nodes];
        let mut decided_by = vec![];
        for by in EVIDENCE {
            let mut divided = vec![];
            let mut between = vec![];
            for (at, tier) in tiers.into_iter().enumerate() {
                between.extend(at.checked_sub(1).map(|before| decided_by[before]));
                let parts = self.divide(tier, by);
                between.extend(vec![by; parts.len() - 1]);
                divided.extend(parts);
            }
            (tiers, decided_by) = (divided, between);
        }
        if tiers.len() < 2 {
            return Err(NodesError::NoSlowerNode(tiers[0][0].id));
        }
        let slowest = tiers.split_off(tiers.len().min(TIERS_MAX));
        if let Some(last) = tiers.last_mut() {
            last.extend(slowest.into_iter().flatten());
        }
        decided_by.truncate(tiers.len() - 1);
        let numbers = |tier: Vec<&Node>| tier.into_iter().map(|node| node.id).collect();
        let tiers = Tiers::new(tiers.into_iter().map(numbers).collect())?;
        Ok(self.told(tiers, decided_by, LeftAlone::NoMemory))
    }

    /// Orders the nodes as configured.
    ///
    /// # Errors
    /// A node does not exist or has no memory.
    pub fn order_by_hand(&self, tiers: &Tiers) -> Result<TierOrder, NodesError> {
        for id in tiers.nodes() {
            match self.nodes.iter().find(|node| node.id == id) {
                None => return Err(NodesError::NoNode(id)),
                Some(node) if node.total.0 == 0 => return Err(NodesError::NoMemory(id)),
                Some(_) => {}
            }
        }
        let decided_by = vec![DecidedBy::Hand; tiers.count() - 1];
        Ok(self.told(tiers.clone(), decided_by, LeftAlone::NotNamed))
    }

    fn told(&self, tiers: Tiers, decided_by: Vec<DecidedBy>, otherwise: LeftAlone) -> TierOrder {
        let alone = self.nodes.iter().filter(|node| tiers.of(node.id).is_none());
        let left_alone = alone.map(|node| match node.total.0 {
            0 => (node.id, LeftAlone::NoMemory),
            _ => (node.id, otherwise),
        });
        let is_slow = |node: &&Node| tiers.of(node.id) > Some(Level::First);
        let slow = self.nodes.iter().filter(is_slow);
        let largest = slow.max_by_key(|node| (node.total, Reverse(node.id)));
        TierOrder {
            pair: Pair {
                fast: tiers.fastest()[0],
                slow: largest.map_or(tiers.fastest()[0], |node| node.id),
            },
            left_alone: left_alone.collect(),
            contradictions: self.contradictions(&tiers),
            tiers,
            decided_by,
        }
    }

    /// Divides a tier by one kind of evidence, the fastest part first.
    fn divide<'a>(&self, mut tier: Vec<&'a Node>, by: DecidedBy) -> Vec<Vec<&'a Node>> {
        let is_told = |by| tier.iter().all(|node| self.figure(node, by).is_some());
        let is_settled = by == DecidedBy::Measured && is_told(DecidedBy::Latency);
        if !is_told(by) || is_settled {
            return vec![tier];
        }
        let figure = |node: &Node| self.figure(node, by).unwrap_or(0);
        tier.sort_by_key(|node| (figure(node), node.id));
        let mut parts: Vec<Vec<&Node>> = vec![];
        for node in tier {
            match parts.last_mut() {
                Some(part) if !is_slower(figure(node), figure(part[0]), by) => part.push(node),
                _ => parts.push(vec![node]),
            }
        }
        for part in &mut parts {
            part.sort_by_key(|node| node.id);
        }
        parts
    }

    /// A node's figure by a kind of evidence; larger is slower.
    fn figure(&self, node: &Node, by: DecidedBy) -> Option<u32> {
        match by {
            DecidedBy::Hand => None,
            DecidedBy::MemoryTier => node.tier,
            DecidedBy::Latency => node.read_latency_ns,
            DecidedBy::Distance => self.distance_from_cpus(node),
            DecidedBy::CpulessNode => Some((!node.has_cpus).into()),
            DecidedBy::Measured => node.measured_ns,
        }
    }

    /// Distance of a node from its nearest CPUs; from its own if it has some.
    fn distance_from_cpus(&self, node: &Node) -> Option<u32> {
        if node.has_cpus {
            return Some(OWN_DISTANCE);
        }
        let with_cpus = self.nodes.iter().filter(|other| other.has_cpus);
        with_cpus
            .filter_map(|other| self.distance(other.id, node.id))
            .min()
    }

    /// Distance (SLIT) between two nodes.
    pub fn distance(&self, from: NodeId, to: NodeId) -> Option<u32> {
        let from = self.nodes.iter().find(|node| node.id == from)?;
        let at = self.nodes.iter().position(|node| node.id == to)?;
        from.distances.get(at).copied()
    }

    /// All known distances between two nodes.
    pub fn distances(&self) -> Distances {
        let from = |node: &Node| {
            let id = node.id;
            let to = self.nodes.iter().zip(node.distances.clone());
            to.map(move |(to, distance)| ((id, to.id), distance))
        };
        self.nodes.iter().flat_map(from).collect()
    }

    /// Pairs of nodes whose latencies contradict the tiers.
    fn contradictions(&self, tiers: &Tiers) -> Vec<Contradiction> {
        let mut found = vec![];
        for by in [DecidedBy::Latency, DecidedBy::Measured] {
            let of_tier = |tier: Level| {
                let nodes = self
                    .nodes
                    .iter()
                    .filter(move |n| tiers.of(n.id) == Some(tier));
                nodes.filter_map(move |node| Some((self.figure(node, by)?, node.id)))
            };
            for tier in Level::First.slower() {
                let slowest = tier.faster().flat_map(of_tier).max();
                let quickest = of_tier(tier).min();
                if let (Some((fast_figure, fast)), Some((slow_figure, slow))) = (slowest, quickest)
                    && is_slower(fast_figure, slow_figure, by)
                {
                    found.push(Contradiction {
                        fast,
                        slow,
                        by,
                        fast_figure,
                        slow_figure,
                    });
                }
            }
        }
        found
    }
}

/// Whether one figure is larger than another by more than noise.
fn is_slower(figure: u32, than: u32, by: DecidedBy) -> bool {
    match by {
        DecidedBy::MemoryTier | DecidedBy::CpulessNode | DecidedBy::Hand => figure > than,
        DecidedBy::Latency | DecidedBy::Distance | DecidedBy::Measured => {
            f64::from(figure) >= f64::from(than) * ALIKE && figure > than
        }
    }
}
