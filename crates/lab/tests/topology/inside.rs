//! The part in the VM.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::panic::catch_unwind;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use demeter_guest::nodes::Topology;
use demeter_guest::status::StatusCell;
use demeter_policy::{MIB, PAGE_SIZE, Pid};

use super::in_vm::{self, HotMemory, map, mount_all, prefer, touch};
use super::places::lies;
use super::{SHAPES, Shape, verdict};

/// The first argument of a child that uses memory.
const USE: &str = "use-memory";

/// The first argument of a child that is the agent: it is no parent of the programs, since it leaves those alone.
const AGENT: &str = "be-the-agent";

/// Memory of each program, and hot memory at the end of it.
const BYTES: u64 = 96 * MIB;
const HOT: u64 = 48 * MIB;

/// Epochs after which hot memory lies where it belongs.
const EPOCHS: usize = 40;

/// The task of a program.
pub struct Wish {
    cpu: u32,
    /// Where its memory lies at first.
    node: u32,
}

impl Wish {
    /// The task of this process, if it is a program.
    pub fn of_args() -> Option<Self> {
        let args: Vec<String> = std::env::args().collect();
        let [_, what, cpu, node] = &args[..] else {
            return None;
        };
        let wish = || {
            Some(Self {
                cpu: cpu.parse().ok()?,
                node: node.parse().ok()?,
            })
        };
        (what == USE).then(wish).flatten()
    }
}

/// Starts the programs and the agent, and turns the VM off once that has ended.
pub fn first_process() -> ! {
    let _ = catch_unwind(|| {
        mount_all(&[]).unwrap();
        let shape = this_shape();
        // A program on each socket.
        let sockets = shape.nodes.iter().filter_map(|node| node.cpu);
        let started: Vec<_> = sockets.map(|cpu| Program::start(shape, cpu)).collect();
        let mut agent = Command::new("/proc/self/exe");
        agent.arg(AGENT);
        for (Program { cpu, pid, start }, _) in &started {
            agent.arg(format!("{cpu} {pid} {start}"));
        }
        agent.status().unwrap();
        for (_, mut child) in started {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    });
    // SAFETY: the first process of a VM owns the whole machine.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
    unreachable!("the machine is off");
}

/// Manages the programs' memory, if this process was started for that, and says what came of it.
pub fn agent() {
    let mut args = std::env::args().skip(1);
    if args.next().as_deref() != Some(AGENT) {
        return;
    }
    let shape = this_shape();
    manage(
        shape,
        &args.map(|arg| Program::parse(&arg)).collect::<Vec<_>>(),
    );
    println!("{}", verdict(shape));
    std::process::exit(0);
}

fn this_shape() -> &'static Shape {
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap();
    let is_named = |shape: &&Shape| cmdline.contains(&format!("shape={}", shape.name));
    SHAPES.iter().find(is_named).unwrap()
}

fn manage(shape: &Shape, programs: &[Program]) {
    let order = Topology::read(Path::new("/")).unwrap().order().unwrap();
    println!("{}: {order:?}", shape.name);
    assert_eq!(order.tiers.to_string(), shape.tiers);
    assert_eq!(order.contradictions, []);
    let pids: Vec<Pid> = programs.iter().map(|program| program.pid).collect();
    let status = StatusCell::default();
    let tracker = HotMemory::of(programs.iter().map(Program::hot).collect());
    let nodes = 0..shape.nodes.len() as u32;
    let is_slow = |node: u32| shape.nodes[node as usize].cpu.is_none();
    let mut agent = in_vm::agent(&pids, tracker, nodes, is_slow, &status);
    for epoch in 0..EPOCHS {
        agent.step().unwrap();
        if epoch % 10 == 9 {
            for program in programs {
                println!(
                    "epoch {}: cpu {} {:?}",
                    epoch + 1,
                    program.cpu,
                    program.lies()
                );
            }
        }
    }
    let told = status.get();
    println!(
        "promoted {} MiB, failed {:?}",
        told.promoted_bytes / MIB,
        told.failed_bytes
    );
    for program in programs {
        let lies = program.lies();
        let here = lies.get(&program.cpu).copied().unwrap_or(0);
        let all = HOT / PAGE_SIZE;
        assert!(
            here * 100 >= all * 95,
            "{here} of {all} pages on node {}: {lies:?}",
            program.cpu
        );
    }
}

/// A program that uses memory of its own.
struct Program {
    cpu: u32,
    pid: Pid,
    start: u64,
}

impl Program {
    fn parse(text: &str) -> Self {
        let numbers = text.split(' ').map(|number| number.parse().unwrap());
        let [cpu, pid, start] = numbers.collect::<Vec<u64>>()[..] else {
            panic!("{text}")
        };
        Self {
            cpu: cpu as u32,
            pid: Pid(pid as u32),
            start,
        }
    }

    /// Starts a program on a CPU, with memory in the slowest node that is attached there, or at all. The socket's node has
    /// the CPU's number.
    fn start(shape: &Shape, cpu: u32) -> (Self, Child) {
        let far = (0u32..)
            .zip(shape.nodes)
            .filter(|(_, node)| node.cpu.is_none());
        let far = far.max_by_key(|(id, node)| (node.initiator == cpu, node.latency_ns, *id));
        let node = far.unwrap().0;
        let mut child = Command::new("/proc/self/exe")
            .args([USE, &cpu.to_string(), &node.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let said = child.stdout.take().unwrap();
        BufReader::new(said).read_line(&mut line).unwrap();
        let program = Self {
            cpu,
            pid: Pid(child.id()),
            start: line.trim().parse().unwrap(),
        };
        let lies = program.lies();
        println!("cpu {cpu}: hot memory lies as {lies:?} at first");
        assert!(lies[&node] * PAGE_SIZE >= HOT / 10 * 9, "{lies:?}");
        (program, child)
    }

    /// Its hot memory.
    fn hot(&self) -> (Pid, std::ops::Range<u64>) {
        let end = self.start + BYTES;
        (self.pid, end - HOT..end)
    }

    /// Pages of its hot memory on each node.
    fn lies(&self) -> BTreeMap<u32, u64> {
        let (pid, hot) = self.hot();
        lies(pid, hot)
    }
}

/// Runs on a CPU, takes memory of a node, says where it is, and uses it for ever.
pub fn use_memory(wish: &Wish) -> ! {
    let mut cpus = [0u8; 128];
    cpus[0] = 1 << wish.cpu;
    // SAFETY: the kernel reads the mask, which has that length.
    let failed = unsafe { libc::sched_setaffinity(0, cpus.len(), cpus.as_ptr().cast()) };
    assert_eq!(failed, 0, "{}", io::Error::last_os_error());
    let start = map(BYTES, libc::MAP_PRIVATE);
    prefer(Some(wish.node));
    touch(start, BYTES);
    prefer(None);
    println!("{start}");
    io::stdout().flush().unwrap();
    loop {
        touch(start + BYTES - HOT, HOT);
    }
}
