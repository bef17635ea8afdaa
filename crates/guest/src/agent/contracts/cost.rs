//! Measures the CPU time that the policies of a real process take to find, with 10,000 mappings in 64 GiB of addresses.

use std::io::{Read, Write};

use demeter_linux::cpu;
use demeter_linux::maps::read_movable;
use demeter_policy::NodeId;

use super::super::Clock;
use super::super::clock::Times;
use super::live::start_child;
use super::*;

/// Marks the child process.
const CHILD: &str = "DEMETER_TEST_MAPPINGS";

/// The child's mappings, and the bytes from one's start to the next one's.
const MAPPINGS: u64 = 10_000;
const APART: u64 = ((64 << 30) / MAPPINGS).next_multiple_of(4096);

/// Time that passes, and the time between two refreshes.
const PASSES: Duration = Duration::from_secs(600);
const REFRESH: Duration = Duration::from_secs(2);

/// The most CPU time, as a part of the time that passes: 0.2 %.
const MOST: f64 = 0.002;

/// The child: maps memory with a page in each mapping, and waits for its end.
fn map_and_wait() {
    for i in 0..MAPPINGS {
        // Neighbours of equal protection would be one mapping.
        let more = if i % 2 == 0 { 0 } else { libc::PROT_EXEC };
        let protection = libc::PROT_READ | libc::PROT_WRITE | more;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses; its first page is written.
        unsafe {
            let start = libc::mmap(
                std::ptr::null_mut(),
                APART as usize,
                protection,
                flags,
                -1,
                0,
            );
            assert_ne!(start, libc::MAP_FAILED);
            libc::madvise(start, APART as usize, libc::MADV_NOHUGEPAGE);
            start.cast::<u8>().write_volatile(1);
        }
    }
    println!("\nmapped");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn policies_of_many_mappings_take_little_time_to_find() {
    if std::env::var_os(CHILD).is_some() {
        return map_and_wait();
    }
    let name = "agent::contracts::cost::policies_of_many_mappings_take_little_time_to_find";
    let (mut child, mut said) = start_child(name, CHILD);
    assert!(said.any(|line| line == "mapped"));
    let (pid, root) = (Pid(child.id()), Path::new("/"));
    let rules = Rules {
        managed: [NodeId(0), NodeId(1)].into_iter().collect(),
        respect_policies: true,
    };
    let mut seen = vec![];
    read_movable(root, pid, |vma| {
        seen.push(vma.range);
        true
    })
    .unwrap();
    assert!(seen.len() as u64 >= MAPPINGS);
    let (mut contracts, mut budget) = (Contracts::default(), ReadingBudget::default());
    let (mut took, mut readings, mut now) = (Duration::ZERO, 0u32, Duration::ZERO);
    while now < PASSES {
        let clock = Clock(Box::new(move || Times {
            elapsed: now,
            cpu: cpu::of_this_thread(),
        }));
        let began = cpu::of_this_thread();
        budget.begin(now);
        if contracts.are_due(root, pid, &seen, now) {
            let read = contracts.read(root, pid, &seen, &rules, &mut budget, &clock);
            readings += u32::from(read.unwrap());
        }
        took += cpu::of_this_thread() - began;
        now += REFRESH;
    }
    drop(child.stdin.take());
    child.wait().unwrap();
    let part = took.as_secs_f64() / PASSES.as_secs_f64();
    println!(
        "{MAPPINGS} mappings in {} GiB: {readings} readings in {} s, {:.3} % of one CPU",
        (MAPPINGS * APART) >> 30,
        PASSES.as_secs(),
        part * 100.0
    );
    assert!(contracts.has_none || readings >= 2, "{readings}");
    assert!(part <= MOST, "{part}");
}
