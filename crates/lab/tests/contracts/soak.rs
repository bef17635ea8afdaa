//! The owner of memory keeps changing its policy, while other memory becomes hot. Nothing moves against a policy that is
//! older than ten seconds. On slow CPUs, where the agent may read policies more seldom, it must be older than that.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use demeter_guest::pages::PageState;
use demeter_guest::policies::read_policies;
use demeter_guest::status::StatusCell;
use demeter_policy::{MIB, Pid};

use super::SOAK_VARIABLE;
use super::in_vm::{HotMemory, agent, map};
use super::inside::{THP, end, fill_fast, hear, run, say, touch_on};
use super::places::states;

/// Mappings whose policies change, and the size of each.
const MAPPINGS: usize = 12;
const BYTES: u64 = 8 * MIB;

/// Mappings that are hot at a time.
const HOT: usize = 4;

/// Fast memory that is free at first, or lies in the mappings.
const FREE: u64 = 20 * MIB;

/// Age from which a policy must be kept.
const OLD: Duration = Duration::from_secs(10);

/// The agent spends a thousandth of one CPU on reading policies. It may so read again after this many times the CPU time that a
/// reading takes, which an emulated CPU makes long. The other half is for threads and for what it does with the answer.
const AGAIN_FACTOR: u32 = 2 * 1000;

/// Length of an epoch.
const EPOCH: Duration = Duration::from_millis(500);

/// Epochs after which a policy changes, others are hot, and pages are looked up.
const POLICY_EPOCHS: usize = 20;
const HOT_EPOCHS: usize = 30;
const LOOK_EPOCHS: usize = 6;

/// Policies: mode, nodes as bits, and whether memory must stay where it is.
const POLICIES: [(i32, u64, bool); 8] = [
    (libc::MPOL_DEFAULT, 0, false),
    (libc::MPOL_LOCAL, 0, false),
    (libc::MPOL_BIND, 0b11, false),
    (libc::MPOL_BIND, 0b01, true),
    (libc::MPOL_BIND, 0b10, true),
    (libc::MPOL_PREFERRED, 0b01, true),
    (libc::MPOL_PREFERRED, 0b10, true),
    (libc::MPOL_INTERLEAVE, 0b11, true),
];
const DEFAULT: usize = 0;
const BIND_FAST: usize = 3;

/// Runs the soak.
pub fn watch() {
    // The kernel's own thread makes huge pages of small ones, whichever nodes those are on.
    fs::write(format!("{THP}/enabled"), "always").unwrap();
    fs::write(
        format!("{THP}/khugepaged/scan_sleep_millisecs"),
        "4000000000",
    )
    .unwrap();
    end(run(""));
}

/// The program: maps memory, half of it in each node, and sets policies on request.
pub fn use_memory() -> ! {
    let starts: Vec<u64> = (0..MAPPINGS)
        .map(|_| map(BYTES, libc::MAP_PRIVATE))
        .collect();
    for (i, &start) in starts.iter().enumerate() {
        touch_on(i as u32 % 2, start, BYTES);
    }
    let (filler, bytes) = fill_fast(FREE);
    bind(filler, bytes, POLICIES[BIND_FAST]);
    let starts: Vec<String> = starts.iter().map(u64::to_string).collect();
    let pid = std::process::id();
    say(&format!("{pid} {filler} {bytes} {}", starts.join(" ")));
    loop {
        let asked = hear();
        let [start, policy] = asked[..] else {
            panic!("{asked:?}")
        };
        bind(start, BYTES, POLICIES[policy as usize]);
        say("0");
    }
}

fn bind(start: u64, bytes: u64, (mode, nodes, _): (i32, u64, bool)) {
    let mask = if nodes == 0 {
        std::ptr::null()
    } else {
        &raw const nodes
    };
    // SAFETY: sets the policy of a mapping of ours; the kernel reads one word of nodes.
    let failed = unsafe { libc::syscall(libc::SYS_mbind, start, bytes, mode, mask, 64usize, 0) };
    assert_eq!(failed, 0, "{}", io::Error::last_os_error());
}

/// Memory with a policy, as the agent's side knows it.
struct Mapping {
    range: Range<u64>,
    policy: usize,
    since: Instant,
    /// Where it lay when the policy had become old.
    lay: Option<Vec<PageState>>,
}

impl Mapping {
    fn new(start: u64, bytes: u64, policy: usize) -> Self {
        Self {
            range: start..start + bytes,
            policy,
            since: Instant::now(),
            lay: None,
        }
    }

    /// Checks that nothing has moved against an old policy. Returns the pages that were compared.
    fn check(&mut self, pid: Pid, old: Duration) -> u64 {
        if !POLICIES[self.policy].2 || self.since.elapsed() < old {
            return 0;
        }
        let lie = states(pid, self.range.clone());
        let Some(lay) = &self.lay else {
            self.lay = Some(lie);
            return 0;
        };
        let moved = lay.iter().zip(&lie).filter(|(lay, lies)| lay != lies);
        let (moved, age) = (moved.count(), self.since.elapsed());
        assert_eq!(
            moved, 0,
            "pages of {:x?} moved against policy {} of {age:?}",
            self.range, self.policy
        );
        lie.len() as u64
    }
}

/// The agent, which also asks the program for other policies.
pub fn manage() {
    let said = hear();
    let [pid, filler, bytes, starts @ ..] = &said[..] else {
        panic!("{said:?}")
    };
    let pid = Pid(*pid as u32);
    let of = |&start: &u64| Mapping::new(start, BYTES, DEFAULT);
    let mut mappings: Vec<Mapping> = starts.iter().map(of).collect();
    mappings.push(Mapping::new(*filler, *bytes, BIND_FAST));
    let hot = HotMemory::of(vec![]);
    let samples = hot.0.clone();
    let status = StatusCell::default();
    let mut agent = agent(&[pid], hot, 0..2, |node| node == 1, &status);
    let (end, mut compared, mut old) = (Instant::now() + soak(), 0, OLD);
    for epoch in 0.. {
        if Instant::now() > end {
            break;
        }
        if epoch % HOT_EPOCHS == 0 {
            // Neighbours begin in different nodes.
            let first = epoch / HOT_EPOCHS * 5;
            let range = |i: usize| mappings[(first + i) % MAPPINGS].range.clone();
            *samples.lock().unwrap() = (0..HOT).map(|i| (pid, range(i))).collect();
        }
        if epoch % POLICY_EPOCHS == 0 {
            // In time each mapping gets each policy.
            let turn = epoch / POLICY_EPOCHS;
            let which = turn % MAPPINGS;
            let policy = (turn / MAPPINGS + turn * 3) % POLICIES.len();
            let start = mappings[which].range.start;
            say(&format!("{start} {policy}"));
            hear();
            mappings[which] = Mapping::new(start, BYTES, policy);
        }
        // Epochs last as long as the agent's own.
        std::thread::sleep(EPOCH);
        agent.step().unwrap();
        if epoch % LOOK_EPOCHS == 0 {
            old = old.max(reading(pid) * AGAIN_FACTOR);
            compared += mappings
                .iter_mut()
                .map(|it| it.check(pid, old))
                .sum::<u64>();
        }
    }
    let told = status.get();
    eprintln!(
        "{} s, {} epochs: compared {compared} pages with policies of at least {old:?}; promoted {} MiB, demoted {} MiB, failed {:?}",
        soak().as_secs(),
        told.epochs,
        told.promoted_bytes / MIB,
        told.demoted_bytes / MIB,
        told.failed_bytes
    );
    assert!(compared > 0);
    assert!(told.promoted_bytes.min(told.demoted_bytes) >= BYTES);
}

/// CPU time to read the program's policies.
fn reading(pid: Pid) -> Duration {
    let began = cpu_time();
    read_policies(Path::new("/"), pid, OLD, |_| ()).unwrap();
    cpu_time() - began
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes the time, which outlives the call.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(failed, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Length of the soak.
fn soak() -> Duration {
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap();
    let mut words = cmdline.split_whitespace();
    let value = words.find_map(|word| word.strip_prefix(SOAK_VARIABLE)?.strip_prefix('='));
    Duration::from_secs(value.unwrap().parse().unwrap())
}
