//! Tests of the agent with bound memory, on a simulated machine.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use demeter_policy::chance::Chance;
use demeter_policy::{BLOCK_SIZE, GuestVirtAddr, PAGE_SIZE, Sample, Tuning};
use proptest::prelude::*;

use super::super::clock::Times;
use super::super::conformance::{maps_of, node, process_of};
use super::super::tests::{FAST, SLOW, Script, agent_on};
use super::super::{Agent, Clock};
use super::*;
use crate::config::Config;
use crate::pages::simulated::{SharedPages, SimulatedPages};
use crate::status::{Status, StatusCell};

const BASE: u64 = 1 << 40;

/// A machine of 256 MiB of fast memory with processes whose policies can change.
struct Machine {
    root: tempfile::TempDir,
    kernel: SharedPages,
    script: Arc<Mutex<Script>>,
    status: StatusCell,
    now_ms: Arc<AtomicU64>,
    agent: Option<Agent>,
}

impl Machine {
    fn new(fast_free: u64) -> Self {
        let root = tempfile::tempdir().unwrap();
        node(root.path(), 0, 256, 4);
        node(root.path(), 1, 2000, 70);
        fs::create_dir_all(root.path().join("proc")).unwrap();
        let kernel = SimulatedPages::new(fast_free, 1 << 30);
        Self {
            kernel: SharedPages::new(kernel, Some(root.path().into())),
            root,
            script: Arc::default(),
            status: StatusCell::default(),
            now_ms: Arc::default(),
            agent: None,
        }
    }

    fn start(&mut self, pids: &[Pid], change: impl FnOnce(&mut Config)) {
        let mut config = Config {
            pids: pids.iter().map(|pid| pid.0).collect(),
            tuning: Tuning::default(),
            ..Config::default()
        };
        change(&mut config);
        let agent = agent_on(
            self.root.path(),
            config,
            &self.script,
            &self.kernel,
            &self.status,
        );
        let mut agent = agent.unwrap();
        let now_ms = self.now_ms.clone();
        agent.clock = Clock(Box::new(move || {
            let now = Duration::from_millis(now_ms.load(Ordering::Relaxed));
            Times {
                elapsed: now,
                cpu: now,
            }
        }));
        self.agent = Some(agent);
    }

    /// Writes a process's maps and numa_maps.
    fn process(&self, pid: Pid, maps: &str, numa_maps: &str) {
        process_of(self.root.path(), pid, maps);
        self.write(pid, "numa_maps", numa_maps);
    }

    fn write(&self, pid: Pid, file: &str, text: &str) {
        let dir = self.root.path().join(format!("proc/{pid}"));
        fs::write(dir.join(file), text).unwrap();
    }

    /// Sets a thread's policy and cpuset.
    fn thread(&self, pid: Pid, thread: u32, policy: &str, nodes: &str) {
        let dir = self.root.path().join(format!("proc/{pid}/task/{thread}"));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("numa_maps"), format!("1000 {policy}\n")).unwrap();
        fs::write(
            dir.join("status"),
            format!("Name:\tx\nMems_allowed_list:\t{nodes}\n"),
        )
        .unwrap();
    }

    fn map(&self, pid: Pid, first: u64, blocks: u64, at: demeter_policy::NodeId) {
        for b in first..first + blocks {
            self.kernel
                .lock()
                .map_block(pid, BASE / BLOCK_SIZE + b, true, at);
        }
    }

    /// Makes the tracker return samples of these blocks in each epoch from now on.
    fn access(&self, hot: &[(Pid, std::ops::Range<u64>)]) {
        let blocks = hot
            .iter()
            .flat_map(|(pid, blocks)| blocks.clone().map(move |b| (*pid, b)));
        let samples = blocks.flat_map(|(pid, b)| {
            (0..6).map(move |_| Sample {
                pid,
                addr: GuestVirtAddr(BASE + b * BLOCK_SIZE + 64),
                weight: 1,
            })
        });
        self.script.lock().unwrap().besides = samples.collect();
    }

    fn steps(&mut self, steps: usize) {
        for _ in 0..steps {
            self.now_ms.fetch_add(500, Ordering::Relaxed);
            self.agent.as_mut().unwrap().step().unwrap();
        }
    }

    /// Number of a process's blocks in fast memory.
    fn in_fast(&self, pid: Pid) -> u64 {
        self.kernel.lock().on(pid, FAST).0 / BLOCK_SIZE
    }

    /// Whether a process's first blocks all lie in fast memory.
    fn first_in_fast(&self, pid: Pid, blocks: u64) -> bool {
        let kernel = self.kernel.lock();
        let node = |b: u64| kernel.node_of(pid, BASE + b * BLOCK_SIZE);
        (0..blocks).all(|b| node(b) == Some(FAST))
    }

    fn reasons(&self, pid: Pid) -> Vec<(Option<u64>, String)> {
        let Status { targets, .. } = self.status.get();
        let target = targets.iter().find(|t| t.pid == pid.0).unwrap();
        let left = target.left_alone.iter();
        left.map(|it| (it.bytes, it.why.clone())).collect()
    }
}

const OWNER: Pid = Pid(70);
const RIVAL: Pid = Pid(71);

/// A process with 40 blocks of one policy in one node, and a rival with 40 hot blocks in slow memory. Fast memory has
/// 10 free blocks.
fn beside_a_rival(policy: &str, at: demeter_policy::NodeId) -> Machine {
    let m = Machine::new(10 * BLOCK_SIZE + 8 * BLOCK_SIZE);
    let resident = 40 * BLOCK_SIZE / PAGE_SIZE;
    let line = format!("{BASE:x} {policy} anon={resident} N{at}={resident} kernelpagesize_kB=4\n");
    m.process(OWNER, &maps_of(BASE, 40), &line);
    m.thread(OWNER, OWNER.0, "default", "0-1");
    m.process(RIVAL, &maps_of(BASE, 40), &format!("{BASE:x} default\n"));
    m.map(OWNER, 0, 40, at);
    m.map(RIVAL, 0, 40, SLOW);
    m
}

#[test]
fn bound_memory_stays_beside_a_hot_rival_and_the_status_says_so() {
    let mut m = beside_a_rival("bind:0", FAST);
    m.access(&[(RIVAL, 0..40)]);
    m.start(&[OWNER, RIVAL], |_| ());
    m.steps(30);
    assert_eq!(m.in_fast(OWNER), 40);
    assert!(
        (8..=18).contains(&m.in_fast(RIVAL)),
        "what is free: {}",
        m.in_fast(RIVAL)
    );
    let bytes = 40 * BLOCK_SIZE;
    assert_eq!(
        m.reasons(OWNER),
        [(Some(bytes), "bound by its owner".into())]
    );
    assert_eq!(m.reasons(RIVAL), []);
}

#[test]
fn policies_can_be_overruled() {
    let mut m = beside_a_rival("bind:0", FAST);
    m.access(&[(RIVAL, 0..40)]);
    m.start(&[OWNER, RIVAL], |config| config.respect_policies = false);
    m.steps(30);
    assert_eq!(m.in_fast(RIVAL), 40);
}

#[test]
fn each_policy_has_its_rule() {
    for (policy, moves) in [
        ("default", true),
        ("local", true),
        ("bind:0", false),
        ("bind:1", false),
        ("bind:0-1", true),
        ("bind=static:0-1", true),
        ("prefer:0", false),
        ("prefer:1", false),
        ("prefer (many):1", false),
        ("prefer (many):0-1", true),
        ("interleave:0-1", false),
        ("weighted interleave:0-1", false),
        ("newer than this", false),
        ("default huge", false),
    ] {
        let mut m = beside_a_rival(policy, SLOW);
        m.access(&[(OWNER, 0..10)]);
        m.start(&[OWNER, RIVAL], |_| ());
        m.steps(12);
        assert_eq!(m.in_fast(OWNER) > 0, moves, "{policy}");
    }
}

#[test]
fn the_policy_of_any_thread_holds_for_memory_without_its_own() {
    for (thread, own, moves) in [
        ("bind:1", "default", false),
        ("bind:1", "bind:0-1", true),
        ("interleave:0-1", "default", false),
        ("default", "default", true),
    ] {
        let mut m = beside_a_rival(own, SLOW);
        m.thread(OWNER, 99, thread, "0-1");
        m.access(&[(OWNER, 0..10)]);
        m.start(&[OWNER, RIVAL], |_| ());
        m.steps(12);
        assert_eq!(m.in_fast(OWNER) > 0, moves, "{thread}, {own}");
    }
}

#[test]
fn a_cpuset_that_excludes_a_node_concerns_its_process_alone_and_until_it_changes() {
    for excluded in [FAST, SLOW] {
        let mut m = beside_a_rival("default", SLOW);
        let nodes = if excluded == FAST { "1" } else { "0" };
        m.thread(OWNER, OWNER.0, "default", nodes);
        m.kernel.lock().excluded.insert((OWNER, excluded));
        m.access(&[(OWNER, 0..10), (RIVAL, 0..10)]);
        m.start(&[OWNER, RIVAL], |_| ());
        m.steps(20);
        let status = m.status.get();
        assert_eq!((&status.last_error, status.failed_bytes.len()), (&None, 0));
        assert!(m.in_fast(OWNER) == 0 && m.first_in_fast(RIVAL, 10));
        assert!(m.reasons(OWNER)[0].1.contains("cpuset"));
        m.thread(OWNER, OWNER.0, "default", "0-1");
        m.kernel.lock().excluded.clear();
        m.steps(20);
        assert!(m.in_fast(OWNER) > 0);
    }
}

#[test]
fn a_process_that_cannot_be_moved_is_tried_seldom_and_told_once() {
    let mut m = beside_a_rival("default", SLOW);
    m.kernel.lock().excluded.insert((OWNER, FAST));
    m.access(&[(OWNER, 0..20)]);
    m.start(&[OWNER, RIVAL], |_| ());
    m.steps(240);
    let calls = m.kernel.lock().migrate_calls;
    assert!((3..=6).contains(&calls), "in two minutes: {calls}");
    let status = m.status.get();
    let error = "cannot move pages of 70 (gups): EACCES: its cpuset.mems excludes node 0; add the node to move its memory";
    assert_eq!(status.last_error.as_deref(), Some(error));
    assert_eq!(Vec::from_iter(status.failed_bytes.keys()), ["EACCES"]);
    assert!(m.reasons(OWNER)[0].1.starts_with("EACCES"));
    m.access(&[(RIVAL, 0..10)]);
    m.steps(20);
    assert!(m.first_in_fast(RIVAL, 10), "others go on");
}

#[test]
fn a_process_that_is_not_ours_is_left_out_and_comes_back() {
    let mut m = beside_a_rival("default", SLOW);
    m.kernel.lock().denied.insert(OWNER);
    m.access(&[(OWNER, 0..8), (RIVAL, 0..8)]);
    m.start(&[OWNER, RIVAL], |_| ());
    m.steps(12);
    assert!(m.in_fast(OWNER) == 0 && m.first_in_fast(RIVAL, 8));
    assert!(m.reasons(OWNER)[0].1.starts_with("EPERM; run as root"));
    m.kernel.lock().denied.clear();
    m.steps(50);
    assert!(m.in_fast(OWNER) > 0);
}

#[test]
fn memory_of_six_processes_is_one_object() {
    let mut m = Machine::new(48 * BLOCK_SIZE);
    let pids: Vec<Pid> = (70..76).map(Pid).collect();
    let end = BASE + 30 * BLOCK_SIZE;
    for &pid in &pids {
        let maps = format!("{BASE:x}-{end:x} rw-s 00000000 00:01 9 /memfd:shared (deleted)\n");
        m.process(
            pid,
            &maps,
            &format!("{BASE:x} default file=/memfd:shared\n"),
        );
    }
    // Only pages of processes that the engine knows count.
    m.map(pids[0], 0, 30, SLOW);
    for &pid in &pids[1..] {
        m.kernel.lock().map(pid, 1 << 20, PAGE_SIZE, SLOW);
    }
    m.access(&[(pids[5], 0..30)]);
    m.start(&pids, |_| ());
    m.steps(12);
    assert_eq!(m.in_fast(pids[0]), 30, "hot in one, idle in five");
    let Status { targets, .. } = m.status.get();
    let bytes: u64 = targets.iter().map(|t| t.fast_bytes + t.slow_bytes).sum();
    assert_eq!(bytes, 30 * BLOCK_SIZE, "counted once");
    let status = m.status.get();
    assert_eq!(
        (status.promoted_bytes, status.samples_rejected),
        (30 * BLOCK_SIZE, 0)
    );
}

#[test]
fn what_is_left_alone_is_no_news() {
    let mut m = beside_a_rival("bind:0", FAST);
    m.access(&[(OWNER, 0..40), (RIVAL, 0..4)]);
    m.start(&[OWNER, RIVAL], |_| ());
    m.steps(10);
    assert_eq!(m.status.get().samples_rejected, 0);
}

#[test]
fn samples_of_strangers_are_news_once() {
    let mut m = beside_a_rival("default", SLOW);
    m.access(&[(Pid(99), 0..40), (RIVAL, 0..4)]);
    m.start(&[OWNER, RIVAL], |_| ());
    m.steps(10);
    assert_eq!(m.status.get().samples_rejected, 40 * 6, "of one epoch");
}

#[test]
fn readings_after_the_first_stay_within_their_part() {
    let mut budget = ReadingBudget::default();
    let read_ns = 400_000_000;
    let mut readings = 0u64;
    for second in 0..4000 {
        budget.begin(Duration::from_secs(second));
        if budget.allows(false) {
            budget.pay(false, read_ns);
            readings += 1;
        }
    }
    let part = (readings * read_ns) as f64 / 4000e9;
    assert!((0.0008..=0.0012).contains(&part), "{part}");
    budget.begin(Duration::from_secs(4000));
    let firsts = (0..10).filter(|_| {
        let allowed = budget.allows(true);
        budget.pay(true, 40_000_000);
        allowed
    });
    assert_eq!(
        firsts.count(),
        3,
        "a refresh takes no longer for many new processes"
    );
}

/// A mapping of the property test: its pages in eighths of a block, and the epoch when it gets its policy.
#[derive(Debug, Clone)]
struct Mapping {
    gap: u64,
    len: u64,
    policy: usize,
    later: usize,
    at: bool,
}

const POLICIES: [(&str, bool); 8] = [
    ("default", false),
    ("default", false),
    ("local", false),
    ("bind:0-1", false),
    ("bind:0", true),
    ("bind:1", true),
    ("prefer:0", true),
    ("interleave:0-1", true),
];

fn mapping() -> impl Strategy<Value = Mapping> {
    (
        0u64..3,
        1u64..40,
        0..POLICIES.len(),
        0..POLICIES.len(),
        any::<bool>(),
    )
        .prop_map(|(gap, len, policy, later, at)| Mapping {
            gap,
            len,
            policy,
            later,
            at,
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn nothing_moves_against_a_policy_that_is_ten_seconds_old(
        mappings in prop::collection::vec(mapping(), 1..12), change_at in 1usize..30, seed: u64,
    ) {
        const UNIT: u64 = BLOCK_SIZE / 8;
        let mut m = Machine::new(24 * BLOCK_SIZE);
        let mut end = BASE;
        let ranges: Vec<(u64, u64)> = mappings.iter().map(|it| {
            let start = end + it.gap * UNIT;
            end = start + it.len * UNIT;
            (start, end)
        }).collect();
        for (it, &(start, end)) in mappings.iter().zip(&ranges) {
            for page in (start..end).step_by(PAGE_SIZE as usize) {
                m.kernel.lock().map(OWNER, page, PAGE_SIZE, if it.at { FAST } else { SLOW });
            }
        }
        let maps: String = ranges.iter()
            .map(|(start, end)| format!("{start:x}-{end:x} rw-p 0 00:00 0\n")).collect();
        let tell = |m: &Machine, policy: &dyn Fn(&Mapping) -> usize| {
            let line = |(it, (start, _)): (&Mapping, &(u64, u64))| {
                format!("{start:x} {}\n", POLICIES[policy(it)].0)
            };
            let lines: String = mappings.iter().zip(&ranges).map(line).collect();
            m.process(OWNER, &maps, &lines);
        };
        tell(&m, &|it| it.policy);
        m.thread(OWNER, OWNER.0, "default", "0-1");
        m.start(&[OWNER], |_| ());
        let mut chance = Chance::new(seed);
        let mut random = |n: u64| chance.below(n);
        let where_it_lies = |m: &Machine, range: (u64, u64)| -> Vec<_> {
            let pages = (range.0..range.1).step_by(PAGE_SIZE as usize);
            let kernel = m.kernel.lock();
            pages.map(|page| kernel.node_of(OWNER, page)).collect()
        };
        for step in 0..60usize {
            if step == change_at {
                tell(&m, &|it| it.later);
            }
            if step % 6 == 0 {
                let samples = (0..400).map(|_| {
                    let (start, end) = ranges[random(ranges.len() as u64) as usize];
                    let block = random(3) * BLOCK_SIZE;
                    Sample { pid: OWNER, addr: GuestVirtAddr((start + block).min(end - 1)), weight: 1 }
                });
                m.script.lock().unwrap().besides = samples.collect();
            }
            let before: Vec<_> = ranges.iter().map(|&range| where_it_lies(&m, range)).collect();
            m.steps(1);
            for ((it, &range), before) in mappings.iter().zip(&ranges).zip(before) {
                let (policy, since) = match step < change_at || it.policy == it.later {
                    true => (it.policy, 0),
                    false => (it.later, change_at),
                };
                let is_old = since == 0 || step - since >= 20;
                if POLICIES[policy].1 && is_old {
                    prop_assert_eq!(where_it_lies(&m, range), before, "{:?} at {}", it, step);
                }
            }
        }
    }
}
