//! Memory that one process or 64 processes map, hot in one: its hot part becomes fast, and is moved and counted once.

use std::fs;

use demeter_guest::status::StatusCell;
use demeter_policy::{MIB, PAGE_SIZE, Pid};

use super::in_vm::{HotMemory, agent, map, touch};
use super::inside::{THP, end, fill_fast, hear, run, say, touch_on};
use super::places::lies;

/// Numbers of processes that map the memory: the last one is the most that an agent manages.
const MAPPERS: [u64; 2] = [1, 64];

/// Shared memory: a cold part and a hot one, both in slow memory at first.
const COLD: u64 = 32 * MIB;
const HOT: u64 = 40 * MIB;

/// Free fast memory: too little for what is hot.
const FREE: u64 = 16 * MIB;

/// Epochs of the agent once it sees the memory, and the most before. Epochs follow without a pause.
const EPOCHS: usize = 60;
const EPOCHS_UNREAD_MAX: usize = 2000;

/// Runs the programs one after the other.
pub fn watch() {
    // The kernel counts moved huge pages in several ways.
    fs::write(format!("{THP}/enabled"), "never").unwrap();
    for mappers in MAPPERS {
        println!("{mappers} processes");
        end(run(&mappers.to_string()));
    }
}

/// The program: processes that map the memory. They end with the first one.
pub fn use_memory() -> ! {
    let mappers: u64 = std::env::args().nth(2).unwrap().parse().unwrap();
    let start = map(COLD + HOT, libc::MAP_SHARED);
    touch_on(1, start, COLD + HOT);
    let mut pids = vec![std::process::id().to_string()];
    let (mut done, mut said) = std::io::pipe().unwrap();
    for _ in 1..mappers {
        // SAFETY: this process has one thread.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: takes numbers only.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                touch(start, COLD + HOT);
                std::io::Write::write_all(&mut said, b".").unwrap();
                loop {
                    std::thread::park();
                }
            }
            pid => {
                assert!(pid > 0, "{}", std::io::Error::last_os_error());
                pids.push(pid.to_string());
            }
        }
    }
    let mut dots = vec![0; mappers as usize - 1];
    std::io::Read::read_exact(&mut done, &mut dots).unwrap();
    let (_, filler) = fill_fast(FREE);
    say(&format!("{start} {filler} {}", pids.join(" ")));
    loop {
        std::thread::park();
    }
}

/// The agent: one process uses the hot part.
pub fn manage() {
    let said = hear();
    let [start, filler, pids @ ..] = &said[..] else {
        panic!("{said:?}")
    };
    let pids: Vec<Pid> = pids.iter().map(|pid| Pid(*pid as u32)).collect();
    let user = *pids.last().unwrap();
    let hot = start + COLD..start + COLD + HOT;
    let tracker = HotMemory::of(vec![(user, hot.clone())]);
    let status = StatusCell::default();
    let mut agent = agent(&pids, tracker, 0..2, |node| node == 1, &status);
    let before = moved_by_kernel();
    // It moves nothing before it has read the policies of all processes, a few at a time.
    let mut epochs = 0;
    while status.get().targets.is_empty() && epochs < EPOCHS_UNREAD_MAX {
        agent.step().unwrap();
        epochs += 1;
    }
    for _ in 0..EPOCHS {
        agent.step().unwrap();
    }
    let kernels = moved_by_kernel() - before;
    let told = status.get();
    let all = told.targets.iter();
    let seen: u64 = all.map(|it| it.fast_bytes + it.slow_bytes).sum();
    let fast = lies(user, hot).get(&0).copied().unwrap_or(0) * PAGE_SIZE;
    eprintln!(
        "{} targets after {epochs} epochs, {} MiB of theirs; hot and fast {} MiB; promoted {} MiB, demoted {} MiB; the kernel moved {} MiB; {:?}",
        told.targets.len(),
        seen / MIB,
        fast / MIB,
        told.promoted_bytes / MIB,
        told.demoted_bytes / MIB,
        kernels / MIB,
        told.failed_bytes
    );
    assert_eq!(told.targets.len(), pids.len());
    assert!(fast * 100 >= HOT * 95, "{fast} of {HOT} bytes");
    let moved = told.promoted_bytes + told.demoted_bytes;
    assert!(
        moved.abs_diff(kernels) <= moved / 20,
        "{moved} of {kernels}"
    );
    let mapped = COLD + HOT + filler;
    assert!(
        seen.abs_diff(mapped) <= mapped / 20,
        "{seen} bytes are seen of {mapped}"
    );
}

/// Bytes that the kernel has moved between nodes or within them since its boot.
fn moved_by_kernel() -> u64 {
    let counters = fs::read_to_string("/proc/vmstat").unwrap();
    let mut lines = counters.lines();
    let pages = lines.find_map(|line| line.strip_prefix("pgmigrate_success "));
    pages.unwrap().parse::<u64>().unwrap() * PAGE_SIZE
}
