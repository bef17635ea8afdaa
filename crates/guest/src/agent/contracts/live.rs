//! Tests the agent with memory that a real process has bound.
//!
//! Policies come from this kernel; a simulated kernel moves pages.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use demeter_policy::{BLOCK_SIZE, Block, GuestVirtAddr, MIB, PAGE_SIZE, Pid, Sample};

use super::super::conformance::node;
use super::super::tests::{FAST, SLOW, Script, agent_on};
use crate::config::Config;
use crate::pages::simulated::{SharedPages, SimulatedPages};
use crate::status::StatusCell;

/// Marks the child process.
const CHILD: &str = "DEMETER_TEST_BIND";

/// Sizes: memory bound at the start, bound later, and without a policy.
const BOUND: u64 = 80 * MIB;
const LATER: u64 = 16 * MIB;
const PLAIN: u64 = 60 * MIB;

/// Starts the test `name` in a child process, marked by a variable. Returns the child, and the lines that it says.
pub(super) fn start_child(name: &str, mark: &str) -> (Child, impl Iterator<Item = String> + use<>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(mark, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(child.stdout.take().unwrap());
    (child, said.lines().map_while(Result::ok))
}

/// Maps resident memory at a block's border.
fn mapped(bytes: u64) -> u64 {
    // SAFETY: a new mapping; its pages are written within its bounds.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let (read_write, len) = (
            libc::PROT_READ | libc::PROT_WRITE,
            (bytes + BLOCK_SIZE) as usize,
        );
        let start = libc::mmap(std::ptr::null_mut(), len, read_write, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        let start = (start as u64).next_multiple_of(BLOCK_SIZE);
        for page in (start..start + bytes).step_by(PAGE_SIZE as usize) {
            (page as *mut u8).write_volatile(1);
        }
        start
    }
}

/// Binds memory to node 0.
fn bind(start: u64, bytes: u64) {
    const MPOL_BIND: libc::c_int = 2;
    let nodes: libc::c_ulong = 1;
    // SAFETY: sets the policy of a mapping of ours; the kernel reads one word of nodes.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start,
            bytes,
            MPOL_BIND,
            &raw const nodes,
            64usize,
            0,
        )
    };
    assert_eq!(result, 0);
}

/// The child: maps memory, prints its addresses, binds more on request, waits for its end.
fn bind_and_wait() {
    let [bound, later, plain] = [BOUND, LATER, PLAIN].map(mapped);
    bind(bound, BOUND);
    let mut out = std::io::stdout();
    writeln!(out, "\nmapped {bound} {later} {plain}").unwrap();
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    bind(later, LATER);
    writeln!(out, "\nbound").unwrap();
    std::io::stdin().read_line(&mut line).unwrap();
}

#[test]
#[expect(
    clippy::too_many_lines,
    reason = "one life of a process, from start to end"
)]
fn bound_memory_of_a_real_process_stays() {
    if std::env::var_os(CHILD).is_some() {
        return bind_and_wait();
    }
    let name = "agent::contracts::live::bound_memory_of_a_real_process_stays";
    let (mut child, mut said) = start_child(name, CHILD);
    let mut say = child.stdin.take().unwrap();
    let places = said
        .find_map(|line| line.strip_prefix("mapped ").map(str::to_string))
        .unwrap();
    let places: Vec<u64> = places
        .split(' ')
        .map(|place| place.parse().unwrap())
        .collect();
    let [bound, later, plain] = places[..] else {
        panic!("{places:?}");
    };

    // A machine of two nodes that runs this process.
    let (pid, root) = (Pid(child.id()), tempfile::tempdir().unwrap());
    node(root.path(), 0, 256, 4);
    node(root.path(), 1, 2000, 70);
    let (proc, real) = (
        root.path().join(format!("proc/{pid}")),
        format!("/proc/{pid}"),
    );
    let task = proc.join(format!("task/{pid}"));
    fs::create_dir_all(&task).unwrap();
    for file in ["maps", "numa_maps", "stat", "statm"] {
        symlink(format!("{real}/{file}"), proc.join(file)).unwrap();
    }
    symlink(
        format!("{real}/task/{pid}/numa_maps"),
        task.join("numa_maps"),
    )
    .unwrap();
    fs::write(task.join("status"), "Mems_allowed_list:\t0-1\n").unwrap();
    let mut kernel = SimulatedPages::new(100 * MIB, 1 << 30);
    for (start, bytes) in [(bound, BOUND), (later, LATER), (plain, PLAIN)] {
        for block in start / BLOCK_SIZE..(start + bytes) / BLOCK_SIZE {
            kernel.map_block(pid, block, true, SLOW);
        }
    }
    let kernel = SharedPages::new(kernel, Some(root.path().into()));
    let script: Arc<std::sync::Mutex<Script>> = Arc::default();
    let status = StatusCell::default();
    let config = Config {
        pids: vec![pid.0],
        ..Config::default()
    };
    let access = |places: &[(u64, u64)]| {
        let blocks = places
            .iter()
            .flat_map(|&(start, bytes)| (start..start + bytes).step_by(BLOCK_SIZE as usize));
        let sample = |start| Sample {
            pid,
            addr: GuestVirtAddr(start + PAGE_SIZE),
            weight: 4,
        };
        script.lock().unwrap().besides = blocks.map(sample).collect();
    };
    let in_fast = |start: u64, bytes: u64| {
        let kernel = kernel.lock();
        let blocks = (start..start + bytes).step_by(BLOCK_SIZE as usize);
        let is_fast = |start: &u64| {
            kernel.node_of(pid, Block::of(GuestVirtAddr(*start)).start().0) == Some(FAST)
        };
        blocks.filter(is_fast).count() as u64 * BLOCK_SIZE
    };
    let mut agent = agent_on(root.path(), config, &script, &kernel, &status).unwrap();
    let mut steps = |steps| {
        for _ in 0..steps {
            agent.step().unwrap();
        }
    };
    steps(2);
    // Binding a part splits the mapping in two; the next refresh sees both.
    writeln!(say, "bind some more").unwrap();
    assert!(said.any(|line| line == "bound"));
    steps(4);
    access(&[(bound, BOUND), (later, LATER), (plain, PLAIN)]);
    steps(12);
    drop(say);
    child.wait().unwrap();
    assert_eq!((in_fast(bound, BOUND), in_fast(later, LATER)), (0, 0));
    assert_eq!(in_fast(plain, PLAIN), PLAIN);
    let status = status.get();
    let [left] = &status.targets[0].left_alone[..] else {
        panic!("{status:?}");
    };
    assert_eq!(
        (left.bytes, left.why.as_str()),
        (Some(BOUND + LATER), "bound by its owner")
    );
}
