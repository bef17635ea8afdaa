//! The machine that an agent manages: its tiers, their free memory, and target nodes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use demeter_policy::engine::{Direction, NodeFacts};
use demeter_policy::{
    Block, ByLevel, ByteCount, LEVELS, Level, NodeId, Pid, Placer, Relocation, Rooms, Socket,
    room_of_one, rooms_by_socket,
};

use crate::config::Config;
use crate::latency::{self, LoadProbe};
use crate::mover::Mover;
use crate::nodes::{NodeMemory, NodesError, TierOrder, Tiers, Topology};
use crate::pages::{Pages, PagesError};
use crate::prober::Prober;
use crate::status::TierStatus;

/// The managed machine. See the module's text.
#[derive(Debug)]
pub(super) struct Machine {
    root: PathBuf,
    /// Measured latency of each node, nanoseconds.
    measured_ns: BTreeMap<NodeId, u32>,
    load: LoadProbe,
    topology: Topology,
    sockets: BTreeMap<NodeId, Socket>,
    order: TierOrder,
    placer: Placer,
    /// CPUs that programs run on.
    cpus: u32,
    /// Online memory of each node at the last check.
    present: BTreeMap<NodeId, ByteCount>,
    /// Nodes with memory that went offline lately, and until when nothing moves to them.
    draining: BTreeMap<NodeId, Instant>,
    /// Memory that the present plan has demoted from each node, and that no promotion has taken yet.
    vacated: BTreeMap<NodeId, ByteCount>,
}

/// A change of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// Nothing.
    None,
    /// Sizes of tiers, or the number of CPUs.
    Amounts,
    /// Which nodes a tier has.
    Nodes,
    /// How many tiers there are.
    Tiers,
}

/// Time after memory went offline during which nothing moves to its node: the rest is likely to follow.
const DRAINS: Duration = Duration::from_secs(30);

impl Machine {
    /// Reads the machine below `root`, with tiers from the configuration or the system.
    pub fn read(
        root: &Path,
        config: &Config,
        (measured_ns, load): (BTreeMap<NodeId, u32>, LoadProbe),
        cpus: u32,
    ) -> Result<Self, NodesError> {
        let mut topology = Topology::read(root)?;
        topology.set_measured(&measured_ns);
        let order = config.order(&topology)?;
        let mut machine = Self {
            root: root.into(),
            measured_ns,
            load,
            placer: placer(&order.tiers, &topology),
            sockets: topology.sockets(),
            topology,
            order,
            cpus,
            present: BTreeMap::new(),
            draining: BTreeMap::new(),
            vacated: BTreeMap::new(),
        };
        machine.look_what_drains();
        Ok(machine)
    }

    /// Checks which nodes and CPUs came or went.
    ///
    /// # Errors
    /// The remaining nodes make no tiers. The former tiers are kept then.
    pub fn follow(&mut self, config: &Config) -> Result<Change, NodesError> {
        self.look_what_drains();
        let mut topology = Topology::read(&self.root)?;
        topology.set_measured(&self.measured_ns);
        let order = config.order(&topology)?;
        let cpus = |topology: &Topology| topology.nodes.iter().map(|node| node.cpus.len()).sum();
        let (cpus_before, cpus_now): (usize, usize) = (cpus(&self.topology), cpus(&topology));
        let sizes_before = self.sizes();
        let change = if order.tiers.count() != self.tiers().count() {
            return Ok(Change::Tiers);
        } else if order.tiers != self.order.tiers {
            Change::Nodes
        } else {
            Change::None
        };
        if cpus_before != cpus_now {
            self.cpus = u32::try_from(cpus_now).unwrap_or(u32::MAX).max(1);
        }
        self.placer = placer(&order.tiers, &topology);
        self.sockets = topology.sockets();
        (self.topology, self.order) = (topology, order);
        let has_more = self.sizes() != sizes_before || cpus_before != cpus_now;
        Ok(match change {
            Change::None if has_more => Change::Amounts,
            change => change,
        })
    }

    /// Notes nodes whose memory went offline. Unreadable zones change nothing.
    fn look_what_drains(&mut self) {
        let now = Instant::now();
        self.draining.retain(|_, until| *until > now);
        let nodes: Vec<NodeId> = self.tiers().nodes().collect();
        let memory = NodeMemory::read_all(&self.root, nodes.iter().copied());
        for (node, memory) in nodes.into_iter().zip(memory.unwrap_or_default()) {
            let before = self.present.insert(node, memory.present);
            if before.is_some_and(|before| memory.present < before) {
                tracing::info!("memory of node {node} goes offline: it takes none for a while");
                self.draining.insert(node, now + DRAINS);
            }
        }
    }

    /// CPUs that programs run on.
    pub fn cpus(&self) -> u32 {
        self.cpus
    }

    pub fn tiers(&self) -> &Tiers {
        &self.order.tiers
    }

    /// Whether the target node depends on the process.
    pub fn has_choice(&self) -> bool {
        self.placer.has_choice()
    }

    pub fn latency_ns(&self) -> ByLevel<u32> {
        latency::of_tiers(
            self.tiers(),
            &self.measured_ns,
            &self.topology.firmware_ns(),
        )
    }

    /// Tiers with sizes and latencies, and nodes outside of all tiers, for people.
    pub fn describe(&self) -> (Vec<TierStatus>, Vec<String>) {
        let latency_ns = self.latency_ns();
        let sizes = self.sizes();
        let tier = |(level, nodes): (Level, &[NodeId])| TierStatus {
            nodes: nodes.iter().map(|node| node.0).collect(),
            bytes: sizes.get(level).0,
            latency_ns: *latency_ns.get(level),
        };
        let alone = self.order.left_alone.iter();
        let alone = alone.map(|(node, why)| format!("node {node}: {why}"));
        (
            Level::ALL
                .into_iter()
                .zip(self.tiers().iter())
                .map(tier)
                .collect(),
            alone.collect(),
        )
    }

    /// The size of each tier.
    pub fn sizes(&self) -> ByLevel<ByteCount> {
        let mut sizes = ByLevel::<ByteCount>::default();
        for node in &self.topology.nodes {
            if let Some(level) = self.tiers().of(node.id) {
                sizes.get_mut(level).0 += node.total.0;
            }
        }
        sizes
    }

    /// Current free memory of each tier.
    pub fn facts(&self) -> Result<ByLevel<NodeFacts>, NodesError> {
        let memory = NodeMemory::read_all(&self.root, self.tiers().nodes())?;
        let mut sum = ByLevel::<NodeFacts>::default();
        let mut missing = ByLevel([u64::MAX; LEVELS]);
        for (node, memory) in self.tiers().nodes().zip(memory) {
            if let Some(level) = self.tiers().of(node)
                && !self.draining.contains_key(&node)
            {
                // Summed by node: one node's reserve cannot be used on another.
                let room = room_of_one(memory.for_moves(), self.tiers().at(level).len());
                sum.get_mut(level).free.0 += room.0;
                let least = missing.get_mut(level);
                *least = memory.missing_for_moves().0.min(*least);
            }
        }
        // A tier without room lacks as much as the node that lacks least.
        for (tier, missing) in sum.0.iter_mut().zip(missing.0) {
            let is_full = tier.free.0 == 0 && missing < u64::MAX;
            tier.kept.0 = if is_full { missing } else { 0 };
        }
        Ok(sum)
    }

    /// Current free memory of each tier near each socket, if programs run on several.
    pub fn rooms_by_socket(&self) -> BTreeMap<(Level, Socket), ByteCount> {
        if !self.has_choice() {
            return BTreeMap::new();
        }
        let rooms = self.rooms().into_iter();
        rooms_by_socket(rooms.filter_map(|(node, free)| {
            let level = self.tiers().of(node)?;
            Some((level, self.socket_of(node), free))
        }))
    }

    /// Current free memory of each tier, and its latency under load now, for a new plan.
    pub fn facts_under_load(&mut self) -> Result<ByLevel<NodeFacts>, NodesError> {
        self.vacated.clear();
        let mut facts = self.facts()?;
        let latency_ns = self.load.of_tiers(&self.order.tiers);
        for (facts, latency_ns) in facts.0.iter_mut().zip(latency_ns.0) {
            facts.latency_ns = latency_ns;
        }
        Ok(facts)
    }

    /// The node of a CPU.
    pub fn node_of_cpu(&self, cpu: u32) -> Option<NodeId> {
        self.topology.node_of_cpu(cpu)
    }

    /// The socket of a node, or of a process that runs near it.
    pub fn socket_of(&self, node: NodeId) -> Socket {
        self.sockets.get(&node).copied().unwrap_or_default()
    }

    /// A prober of its nodes.
    pub fn prober(&self) -> Prober {
        Prober::new(self.tiers().clone()).with_sockets(self.sockets.clone())
    }

    /// A mover between its nodes.
    pub fn mover(&self) -> Mover {
        Mover::new(self.tiers().clone(), false).with_sockets(self.sockets.clone())
    }

    /// The target node of each block of a process whose threads run near `near`.
    pub fn targets(
        &mut self,
        pages: &mut dyn Pages,
        prober: &mut Prober,
        (level, direction): (Level, Direction),
        pid: Pid,
        near: Option<NodeId>,
        batch: &[Relocation],
    ) -> Result<Vec<NodeId>, PagesError> {
        let first = match direction {
            Direction::Promotion => self.tiers().at(level).first().copied(),
            Direction::Demotion => self
                .tiers()
                .nodes()
                .find(|&node| self.tiers().of(node) > Some(level)),
        };
        let first = first.unwrap_or(NodeId(0));
        if !self.has_choice() {
            return Ok(vec![first; batch.len()]);
        }
        let mut rooms = self.rooms();
        if direction == Direction::Promotion {
            let near = near.unwrap_or(first);
            let to = |r: &Relocation| {
                let to = self.placer.promote(level, near, r.bytes, &mut rooms);
                let vacated = self.vacated.entry(to).or_default();
                vacated.0 = vacated.0.saturating_sub(r.bytes.0);
                to
            };
            return Ok(batch.iter().map(to).collect());
        }
        let blocks: Vec<Block> = batch.iter().map(|r| r.block).collect();
        let leaves = |node: NodeId| self.tiers().of(node) == Some(level);
        let from = prober.main_nodes(pages, pid, &blocks, leaves)?;
        let to = |(r, from): (&Relocation, Option<NodeId>)| {
            let from = from.or(near).unwrap_or(first);
            let vacated = self.vacated.entry(from).or_default();
            vacated.0 = vacated.0.saturating_add(r.bytes.0);
            self.placer.demote(level, from, r.bytes, &mut rooms)
        };
        Ok(batch.iter().zip(from).map(to).collect())
    }

    /// Free memory of each node that moves may use; empty where zones cannot be read.
    fn rooms(&self) -> Rooms {
        let memory = NodeMemory::read_all(&self.root, self.tiers().nodes());
        let rooms = self.tiers().nodes().zip(memory.unwrap_or_default());
        rooms
            .filter(|(node, _)| !self.draining.contains_key(node))
            .map(|(node, memory)| {
                // Pages that a demotion has freed may wait on a CPU's list.
                let vacated = self.vacated.get(&node).copied().unwrap_or_default();
                let on_lists = vacated.0.min(memory.held_by_cpus.0);
                let room = memory.for_moves().0.saturating_add(on_lists);
                (node, ByteCount(room))
            })
            .collect()
    }
}

fn placer(tiers: &Tiers, topology: &Topology) -> Placer {
    let tiers = tiers.iter().map(<[NodeId]>::to_vec).collect();
    Placer::new(tiers, topology.distances())
}
