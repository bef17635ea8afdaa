//! Tests of machines with more than two nodes: where memory ends.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use demeter_policy::engine::conformance::WORTH_MUCH;
use demeter_policy::{BLOCK_SIZE, Block};

use super::clock::Times;
use super::conformance::{maps_of, process_of};
use super::*;
use crate::pages::simulated::{SharedPages, SimulatedPages};
use crate::tracker::Drained;

/// Start of each process's array.
const FIRST: u64 = (1 << 40) / BLOCK_SIZE;

/// A node: its size in blocks, its CPU, its memory tier.
type NodeScript = (u64, Option<u32>, u32);

/// A process: the CPU that it runs on, where its blocks lie, and which of them are hot.
struct Program {
    pid: Pid,
    cpu: u32,
    /// The first block of its array.
    first: u64,
    /// Node and number of blocks, in order of address.
    lies: Vec<(u32, u64)>,
    hot: std::ops::Range<u64>,
}

/// Plays samples of all programs' hot blocks in turn, and sometimes of a random block.
struct HotBlocks {
    programs: Vec<(Pid, u64, std::ops::Range<u64>, u64)>,
    drawn: u64,
}

#[derive(Clone)]
struct Shared(Arc<Mutex<HotBlocks>>);

impl Tracker for Shared {
    fn name(&self) -> &'static str {
        "hot blocks"
    }

    fn loads_per_sample(&self) -> Option<u32> {
        WORTH_MUCH.loads_per_sample
    }

    fn set_targets(&mut self, _: &[Pid]) -> Result<(), TrackerError> {
        Ok(())
    }

    fn drain(&mut self, out: &mut Vec<Sample>, _max: usize) -> Result<Drained, TrackerError> {
        let mut script = self.0.lock().unwrap();
        let programs = script.programs.clone();
        for (pid, first, hot, blocks) in &programs {
            for _ in 0..300 {
                script.drawn += 1;
                let mixed = script.drawn.wrapping_mul(0x9E37_79B9_7F4A_7C15);
                // Without a second mix, some blocks are hit a hundred times as often as others.
                let spread = (mixed ^ mixed >> 31).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 20;
                let block = match script.drawn % 20 {
                    0 => spread % blocks,
                    _ => hot.start + spread % (hot.end - hot.start),
                };
                out.push(Sample {
                    pid: *pid,
                    addr: Block(first + block).start(),
                    weight: 1,
                });
            }
        }
        Ok(Drained {
            taken: 300 * programs.len() as u64,
            ..Drained::default()
        })
    }

    fn pause(&mut self) -> Result<(), TrackerError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), TrackerError> {
        Ok(())
    }
}

/// A machine that an agent works on.
struct World {
    root: tempfile::TempDir,
    kernel: SharedPages,
    agent: Agent,
    status: StatusCell,
}

/// Writes the sysfs files of a node.
fn write_node(root: &Path, id: u32, (blocks, cpu, tier): NodeScript, distances: &[u32]) {
    let dir = root.join(format!("sys/devices/system/node/node{id}"));
    fs::create_dir_all(&dir).unwrap();
    let kib = blocks * BLOCK_SIZE / 1024;
    let meminfo = format!("Node {id} MemTotal: {kib} kB\nNode {id} MemFree: {kib} kB\n");
    fs::write(dir.join("meminfo"), meminfo).unwrap();
    let cpus = cpu.map(|cpu| cpu.to_string()).unwrap_or_default();
    fs::write(dir.join("cpulist"), cpus + "\n").unwrap();
    let distances: Vec<String> = distances.iter().map(u32::to_string).collect();
    fs::write(dir.join("distance"), distances.join(" ") + "\n").unwrap();
    let dir = root.join(format!(
        "sys/devices/virtual/memory_tiering/memory_tier{tier}"
    ));
    fs::create_dir_all(&dir).unwrap();
    let before = fs::read_to_string(dir.join("nodelist")).unwrap_or_default();
    let comma = if before.is_empty() { "" } else { "," };
    fs::write(dir.join("nodelist"), format!("{before}{comma}{id}")).unwrap();
}

fn write_process(root: &Path, program: &Program) {
    let Program {
        pid, cpu, first, ..
    } = program;
    let blocks = program.lies.iter().map(|(_, blocks)| blocks).sum();
    process_of(root, *pid, &maps_of(first * BLOCK_SIZE, blocks));
    let task = root.join(format!("proc/{pid}/task/{pid}"));
    let (before, between) = ("0 ".repeat(10), "0 ".repeat(23));
    let stat = format!("{pid} (x) R {before}7 7 {between}{cpu} 0\n");
    fs::write(task.join("stat"), stat).unwrap();
}

impl World {
    /// A machine of nodes with distances and free blocks.
    fn new(nodes: &[NodeScript], distances: &[&[u32]], free: &[u64], programs: &[Program]) -> Self {
        let root = tempfile::tempdir().unwrap();
        let mut kernel = SimulatedPages::default();
        for ((id, &node), free) in (0..).zip(nodes).zip(free) {
            write_node(root.path(), id, node, distances[id as usize]);
            kernel.free.insert(NodeId(id), free * BLOCK_SIZE);
        }
        for program in programs {
            write_process(root.path(), program);
            let mut block = program.first;
            for &(node, blocks) in &program.lies {
                for _ in 0..blocks {
                    kernel.map_block(program.pid, block, true, NodeId(node));
                    block += 1;
                }
            }
        }
        let kernel = SharedPages::new(kernel, Some(root.path().into()));
        let accesses = |program: &Program| {
            let blocks = program.lies.iter().map(|(_, blocks)| blocks).sum();
            (program.pid, program.first, program.hot.clone(), blocks)
        };
        let script = HotBlocks {
            programs: programs.iter().map(accesses).collect(),
            drawn: 0,
        };
        let config = Config {
            pids: programs.iter().map(|program| program.pid.0).collect(),
            ..Config::default()
        };
        let effects = Effects {
            finder: TargetFinder::new(root.path(), config.targets().unwrap()),
            tracker: Box::new(Shared(Arc::new(Mutex::new(script)))),
            pages: Box::new(kernel.clone()),
            measured_ns: nodes
                .iter()
                .zip(0..)
                .map(|(&(_, _, tier), node)| (NodeId(node), 100 + 50 * tier))
                .collect(),
            load: LoadProbe::default(),
            cpus: WORTH_MUCH.cpus,
        };
        let status = StatusCell::default();
        let mut agent = Agent::new(root.path().into(), config, effects, status.clone()).unwrap();
        agent.clock = Clock(Box::new(Times::default));
        Self {
            root,
            kernel,
            agent,
            status,
        }
    }

    fn steps(&mut self, epochs: usize) {
        for _ in 0..epochs {
            self.agent.step().unwrap();
        }
    }

    /// Number of a program's hot blocks on each of the first four nodes.
    fn hot_on(&self, program: &Program) -> [usize; 4] {
        let addresses = program.hot.clone();
        let addresses = addresses.map(|b| Block(program.first + b).start());
        let addresses: Vec<_> = addresses.collect();
        let mut states = vec![];
        let mut kernel = self.kernel.lock();
        kernel.locate(program.pid, &addresses, &mut states).unwrap();
        [0, 1, 2, 3].map(|node| {
            let here = crate::pages::PageState::On(NodeId(node));
            states.iter().filter(|state| **state == here).count()
        })
    }
}

/// Two sockets, each with DRAM (nodes 0 and 1) and CXL memory (nodes 2 and 3).
const DRAM_AND_CXL: [NodeScript; 4] = [
    (100, Some(0), 4),
    (100, Some(1), 4),
    (400, None, 22),
    (400, None, 22),
];
const DISTANCES: [&[u32]; 4] = [
    &[10, 21, 14, 24],
    &[21, 10, 24, 14],
    &[14, 24, 10, 26],
    &[24, 14, 26, 10],
];

fn program(pid: u32, cpu: u32, lies: &[(u32, u64)], hot: std::ops::Range<u64>) -> Program {
    Program {
        pid: Pid(pid),
        cpu,
        first: FIRST,
        lies: lies.to_vec(),
        hot,
    }
}

#[test]
fn each_sockets_program_is_promoted_to_its_own_dram() {
    // The programs have filled all DRAM with cold memory, some of it on the other socket, and their hot memory lies in CXL
    // memory.
    let programs = [
        program(70, 0, &[(1, 20), (0, 70), (2, 100)], 120..160),
        program(71, 1, &[(0, 20), (1, 70), (3, 100)], 120..160),
    ];
    let mut w = World::new(&DRAM_AND_CXL, &DISTANCES, &[1, 1, 200, 200], &programs);
    w.steps(60);
    let (of_0, of_1) = (w.hot_on(&programs[0]), w.hot_on(&programs[1]));
    // One block of either may have taken memory that was free at first.
    assert!(of_0[0] >= 39 && of_0[0] + of_0[1] == 40, "{of_0:?}");
    assert!(of_1[1] >= 39 && of_1[0] + of_1[1] == 40, "{of_1:?}");
    let tiers = w.status.get().tiers;
    let nodes: Vec<_> = tiers.iter().map(|tier| &tier.nodes[..]).collect();
    assert_eq!(nodes, [[0, 1], [2, 3]]);
    // Only memory that lay on the other socket stays there.
    for (program, cxl) in programs.iter().zip([3, 2]) {
        let on = w.kernel.lock().on(program.pid, NodeId(cxl)).0;
        assert!(on <= 20 * BLOCK_SIZE, "{on}");
    }
    drop(w.root);
}

#[test]
fn free_dram_of_the_other_socket_is_used_before_cxl_memory() {
    let nodes = [DRAM_AND_CXL[0], DRAM_AND_CXL[1], DRAM_AND_CXL[2]];
    let distances: [&[u32]; 3] = [&[10, 21, 14], &[21, 10, 24], &[14, 24, 10]];
    // All of it is hot: 90 blocks fill node 0, and 60 lie in CXL memory while node 1 is empty.
    let hot = program(70, 0, &[(0, 90), (2, 60)], 0..150);
    let programs = [hot];
    let mut w = World::new(&nodes, &distances, &[9, 99, 200], &programs);
    w.steps(60);
    let [near, other, cxl, _] = w.hot_on(&programs[0]);
    assert!(
        near >= 90 && near + other == 150 && cxl == 0,
        "{near} {other} {cxl}"
    );
    assert_eq!(w.status.get().demoted_bytes, 0);
}

#[test]
fn three_tiers_hold_hot_warm_and_idle_memory() {
    let nodes = [(60, Some(0), 4), (60, None, 22), (400, None, 70)];
    let distances: [&[u32]; 3] = [&[10, 14, 28], &[14, 10, 30], &[28, 30, 10]];
    // Hot memory lies in the middle and the slowest tier, and fast memory is free.
    let programs = [program(70, 0, &[(0, 10), (1, 50), (2, 100)], 40..90)];
    let mut w = World::new(&nodes, &distances, &[50, 10, 200], &programs);
    assert_eq!(w.agent.machine.tiers().to_string(), "0/1/2");
    w.steps(60);
    let [first, second, third, _] = w.hot_on(&programs[0]);
    assert!(
        first >= 48 && first + second == 50 && third == 0,
        "{first} {second} {third}"
    );
}

#[test]
fn hot_memory_that_does_not_fit_goes_to_the_second_tier() {
    let nodes = [(30, Some(0), 4), (60, None, 22), (400, None, 70)];
    let distances: [&[u32]; 3] = [&[10, 14, 28], &[14, 10, 30], &[28, 30, 10]];
    let programs = [program(70, 0, &[(0, 26), (1, 56), (2, 100)], 120..180)];
    let mut w = World::new(&nodes, &distances, &[4, 4, 200], &programs);
    w.steps(120);
    let [first, second, third, _] = w.hot_on(&programs[0]);
    assert!(
        first >= 24 && first + second >= 58 && third <= 2,
        "{first} {second} {third}"
    );
}

#[test]
fn a_node_that_comes_later_is_used_and_one_that_goes_is_not_refilled() {
    let nodes = [DRAM_AND_CXL[0], DRAM_AND_CXL[2], DRAM_AND_CXL[2]];
    let distances: [&[u32]; 3] = [&[10, 14, 14], &[14, 10, 24], &[14, 24, 10]];
    let programs = [program(70, 0, &[(0, 96), (1, 60)], 96..156)];
    let mut w = World::new(&nodes, &distances, &[0, 0, 200], &programs);
    let root = w.root.path().to_owned();
    let node = |id: u32| root.join(format!("sys/devices/system/node/node{id}"));
    let later = w.root.path().join("later");
    fs::rename(node(2), &later).unwrap();
    w.agent.follow_nodes().unwrap();
    assert_eq!(w.agent.machine.tiers().to_string(), "0/1");
    // All memory is full, so that nothing can be exchanged.
    w.steps(30);
    assert_eq!(w.hot_on(&programs[0])[0], 0);

    // A new node comes online: cold blocks can leave.
    fs::rename(&later, node(2)).unwrap();
    w.agent.follow_nodes().unwrap();
    let tiers = w.status.get().tiers;
    assert_eq!(
        (tiers[1].nodes.len(), tiers[1].bytes),
        (2, 800 * BLOCK_SIZE)
    );
    w.steps(60);
    assert!(
        w.hot_on(&programs[0])[0] >= 55,
        "{:?}",
        w.hot_on(&programs[0])
    );
    let on_it = |w: &World| w.kernel.lock().on(programs[0].pid, NodeId(2)).0;
    assert!(on_it(&w) > 0);

    // The node goes offline: the kernel empties it block by block, and nothing moves back.
    w.kernel.lock().present.insert(NodeId(2), 50000);
    w.kernel.write_zoneinfo();
    w.agent.follow_nodes().unwrap();
    let before = on_it(&w);
    w.agent.make_room(ByteCount(20 * BLOCK_SIZE)).unwrap();
    w.steps(20);
    assert!(on_it(&w) <= before);
    fs::remove_dir_all(node(2)).unwrap();
    w.kernel.lock().free.remove(&NodeId(2));
    w.kernel.write_zoneinfo();
    w.agent.follow_nodes().unwrap();
    assert_eq!(w.agent.machine.tiers().to_string(), "0/1");
    w.steps(5);
}

#[test]
fn memory_at_wide_addresses_is_managed_as_any_other() {
    let nodes = [DRAM_AND_CXL[0], DRAM_AND_CXL[2]];
    let distances: [&[u32]; 2] = [&[10, 14], &[14, 10]];
    // Below the ends of user addresses: x86-64 with 4 levels, arm64 with 48 and 52 bits, x86-64 with 5 levels.
    for bits in [47, 48, 52, 56] {
        let wide = Program {
            first: (1 << bits) / BLOCK_SIZE - 100,
            ..program(70, 0, &[(0, 60), (1, 40)], 60..99)
        };
        let programs = [wide];
        let mut w = World::new(&nodes, &distances, &[0, 100], &programs);
        w.steps(60);
        let [fast, slow, ..] = w.hot_on(&programs[0]);
        assert!(
            fast >= 38 && fast + slow == 39,
            "{bits} bits: {fast} of 39 blocks"
        );
        assert_eq!(w.agent.engine.figures().samples_astray, 0, "{bits} bits");
    }
}

#[test]
fn memory_and_cpus_that_come_later_are_counted() {
    let nodes = [DRAM_AND_CXL[0], DRAM_AND_CXL[2]];
    let distances: [&[u32]; 2] = [&[10, 14], &[14, 10]];
    let programs = [program(70, 0, &[(0, 10), (1, 10)], 0..5)];
    let mut w = World::new(&nodes, &distances, &[90, 90], &programs);
    let dir = w.root.path().join("sys/devices/system/node/node0");
    fs::write(
        dir.join("meminfo"),
        "Node 0 MemTotal: 4096 kB\nNode 0 MemFree: 0 kB\n",
    )
    .unwrap();
    fs::write(dir.join("cpulist"), "0-7\n").unwrap();
    w.agent.follow_nodes().unwrap();
    assert_eq!(w.status.get().tiers[0].bytes, 4096 << 10);
    assert_eq!(w.agent.machine.cpus(), 8);
    // The last slow node goes offline: the agent reports it and continues.
    fs::remove_dir_all(w.root.path().join("sys/devices/system/node/node1")).unwrap();
    w.agent.follow_nodes().unwrap();
    w.steps(3);
    let said = w.status.get().last_error.unwrap();
    assert!(said.contains("1 NUMA node(s) with memory"), "{said}");
}

#[test]
fn another_tier_makes_the_agent_begin_anew() {
    let nodes = [DRAM_AND_CXL[0], DRAM_AND_CXL[2], (400, None, 70)];
    let distances: [&[u32]; 3] = [&[10, 14, 28], &[14, 10, 30], &[28, 30, 10]];
    let programs = [program(70, 0, &[(0, 10), (1, 10)], 0..5)];
    let mut w = World::new(&nodes, &distances, &[90, 90, 200], &programs);
    fs::remove_dir_all(w.root.path().join("sys/devices/system/node/node2")).unwrap();
    assert!(matches!(
        w.agent.follow_nodes(),
        Err(AgentError::OtherTiers)
    ));
}
