//! Machines of more than two nodes with a real kernel: this program boots VMs in which it is itself the first process. There
//! it starts a program on each socket, has an agent manage them, and looks on which nodes their memory ends.

#[path = "../console/mod.rs"]
mod console;
#[path = "../in_vm/mod.rs"]
mod in_vm;
mod inside;
#[path = "../in_vm/places.rs"]
mod places;

use std::process::ExitCode;
use std::time::Duration;

use demeter_lab::Lab;

/// How long a VM may take on a slow machine.
const LIMIT: Duration = Duration::from_secs(300);

/// A machine. Nodes are numbered in their order.
pub struct Shape {
    /// Its name.
    pub name: &'static str,
    /// Its nodes.
    pub nodes: &'static [Node],
    /// Distances between them.
    pub distances: &'static [&'static [u32]],
    /// The tiers that an agent should find.
    pub tiers: &'static str,
}

/// A node of a machine.
pub struct Node {
    /// Its memory.
    pub mib: u64,
    /// Its CPU, if it has one.
    pub cpu: Option<u32>,
    /// The node of the CPU that it is attached to.
    pub initiator: u32,
    /// Its latency as the firmware tells it, nanoseconds.
    pub latency_ns: u64,
}

const fn dram(cpu: u32) -> Node {
    Node {
        mib: 384,
        cpu: Some(cpu),
        initiator: cpu,
        latency_ns: 80,
    }
}

const fn far(initiator: u32, latency_ns: u64) -> Node {
    Node {
        mib: 256,
        cpu: None,
        initiator,
        latency_ns,
    }
}

/// The machines.
pub const SHAPES: [Shape; 3] = [
    Shape {
        name: "two-sockets-with-cxl",
        nodes: &[dram(0), dram(1), far(0, 250), far(1, 250)],
        distances: &[
            &[10, 21, 14, 24],
            &[21, 10, 24, 14],
            &[14, 24, 10, 26],
            &[24, 14, 26, 10],
        ],
        tiers: "0,1/2,3",
    },
    Shape {
        name: "two-sockets-one-cxl",
        nodes: &[dram(0), dram(1), far(0, 250)],
        distances: &[&[10, 21, 14], &[21, 10, 24], &[14, 24, 10]],
        tiers: "0,1/2",
    },
    Shape {
        name: "three-tiers",
        nodes: &[dram(0), far(0, 250), far(0, 700)],
        distances: &[&[10, 14, 28], &[14, 10, 30], &[28, 30, 10]],
        tiers: "0/1/2",
    },
];

fn main() -> ExitCode {
    if std::process::id() == 1 {
        inside::first_process();
    }
    inside::agent();
    if let Some(wish) = inside::Wish::of_args() {
        inside::use_memory(&wish);
    }
    // cargo's runner asks what there is.
    if std::env::args().any(|arg| arg == "--list") {
        println!("topology: test");
        return ExitCode::SUCCESS;
    }
    for shape in &SHAPES {
        let console = boot(shape);
        if !console.lines().any(|line| line.trim() == verdict(shape)) {
            println!("{console}\ntest {} ... FAILED", shape.name);
            return ExitCode::FAILURE;
        }
        println!("test {} ... ok", shape.name);
    }
    ExitCode::SUCCESS
}

/// The line that a VM prints when everything holds.
pub fn verdict(shape: &Shape) -> String {
    format!("topology: {}: everything holds", shape.name)
}

/// Boots such a machine and returns the output of its console.
fn boot(shape: &Shape) -> String {
    let lab = Lab::from_env().unwrap();
    let append = format!("shape={}", shape.name);
    console::boot(&lab, &options(shape), &[], &append, LIMIT)
}

/// The emulator's options that make such a machine.
fn options(shape: &Shape) -> Vec<String> {
    let mib: u64 = shape.nodes.iter().map(|node| node.mib).sum();
    let cpus = shape.nodes.iter().filter(|node| node.cpu.is_some()).count();
    let sockets = format!("{cpus},sockets={cpus},cores=1,threads=1");
    let mut options: Vec<String> = ["-machine", "pc,hmat=on", "-smp"].map(Into::into).into();
    options.extend([sockets, "-m".into(), format!("{mib}M")]);
    let mut numa = vec![];
    for (id, node) in shape.nodes.iter().enumerate() {
        let memory = format!("memory-backend-memfd,id=m{id},size={}M,share=on", node.mib);
        options.extend(["-object".into(), memory]);
        let cpu = node.cpu.map_or(String::new(), |cpu| format!(",cpus={cpu}"));
        let initiator = node.initiator;
        numa.push(format!(
            "node,nodeid={id},memdev=m{id},initiator={initiator}{cpu}"
        ));
    }
    for (from, row) in shape.distances.iter().enumerate() {
        for (to, distance) in row.iter().enumerate() {
            numa.push(format!("dist,src={from},dst={to},val={distance}"));
        }
    }
    let initiators = (0..)
        .zip(shape.nodes)
        .filter(|(_, node)| node.cpu.is_some());
    for (initiator, _) in initiators {
        for (target, node) in (0u32..).zip(shape.nodes) {
            let is_near = node.initiator == initiator;
            let latency_ns = node.latency_ns + if is_near { 0 } else { 60 };
            let lb = format!("hmat-lb,initiator={initiator},target={target},hierarchy=memory");
            numa.push(format!(
                "{lb},data-type=access-latency,latency={latency_ns}"
            ));
            numa.push(format!("{lb},data-type=access-bandwidth,bandwidth=10G"));
        }
    }
    options.extend(numa.into_iter().flat_map(|value| ["-numa".into(), value]));
    options
}
