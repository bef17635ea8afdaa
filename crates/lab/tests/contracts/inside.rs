//! The frame of all tests in the VM: the first process watches, and its children are programs and the agent. The agent is no
//! parent of a program, since it leaves those alone.

use std::fs;
use std::io::{self, Write};
use std::panic::catch_unwind;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use demeter_guest::nodes::NodeMemory;
use demeter_policy::{BLOCK_SIZE, NodeId};

use super::in_vm::{map, mount_all, prefer, touch};
use super::{CASES, Case, hugetlb, verdict};

/// First arguments of children: the program of a test, and the agent.
const USE: &str = "use-memory";
const AGENT: &str = "be-the-agent";

/// The kernel's rule for huge pages.
pub const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// Runs the VM's test, prints the verdict on the console and powers the VM off.
pub fn first_process() -> ! {
    let passed = catch_unwind(|| {
        fs::create_dir(hugetlb::FOLDER).unwrap();
        mount_all(&[("hugetlbfs", hugetlb::FOLDER)]).unwrap();
        let case = this_case();
        (case.watch)();
        println!("{}", verdict(case));
    });
    if passed.is_err() {
        println!("the test failed");
    }
    // SAFETY: the first process of a VM owns the whole machine.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
    unreachable!("the machine is off");
}

/// Does the task of a child, if this process is one.
pub fn be_a_child() {
    match std::env::args().nth(1).as_deref() {
        Some(USE) => (this_case().use_memory)(),
        Some(AGENT) => {
            (this_case().manage)();
            std::process::exit(0);
        }
        _ => {}
    }
}

fn this_case() -> &'static Case {
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap();
    let is_named = |case: &&Case| cmdline.contains(&format!("case={}", case.name));
    CASES.iter().find(is_named).unwrap()
}

/// Starts the test's program, and an agent that talks with it by standard input and output. Returns the program once the
/// agent has ended well.
pub fn run(argument: &str) -> Child {
    let mut program = Command::new("/proc/self/exe")
        .args([USE, argument])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let agent = Command::new("/proc/self/exe")
        .arg(AGENT)
        .stdin(program.stdout.take().unwrap())
        .stdout(program.stdin.take().unwrap())
        .status();
    assert!(agent.unwrap().success(), "the agent's part failed");
    program
}

/// Ends a program.
pub fn end(mut program: Child) {
    program.kill().unwrap();
    program.wait().unwrap();
}

/// Says a line to the other side.
pub fn say(line: &str) {
    println!("{line}");
    io::stdout().flush().unwrap();
}

/// The numbers of the other side's next line. This process ends if the other side has ended.
pub fn hear() -> Vec<u64> {
    let mut line = String::new();
    if io::stdin().read_line(&mut line).unwrap() == 0 {
        std::process::exit(1);
    }
    let numbers = line
        .split_whitespace()
        .map(|number| number.parse().unwrap());
    numbers.collect()
}

/// Maps memory whose pages come from a node.
pub fn map_on(node: u32, bytes: u64) -> u64 {
    let start = map(bytes, libc::MAP_PRIVATE);
    touch_on(node, start, bytes);
    start
}

/// Touches memory whose pages come from a node.
pub fn touch_on(node: u32, start: u64, bytes: u64) {
    prefer(Some(node));
    touch(start, bytes);
    prefer(None);
}

/// Fills the fast node, but for some memory. Returns the start and the length of what fills it.
pub fn fill_fast(but: u64) -> (u64, u64) {
    let node = NodeMemory::read_all(Path::new("/"), [NodeId(0)]).unwrap();
    let bytes = (node[0].usable().0 - but) / BLOCK_SIZE * BLOCK_SIZE;
    (map_on(0, bytes), bytes)
}
