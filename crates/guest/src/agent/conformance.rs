//! Checks that the agent drives its engine as the plainest driver does.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use demeter_policy::engine::conformance::{EpochScript, PID, Rig, Script, WORTH_MUCH, conforms};
use demeter_policy::{BLOCK_SIZE, ByLevel, GuestVirtAddr, MIB, NodeId, PAGE_SIZE};
use proptest::prelude::*;

use super::clock::Times;
use super::*;
use crate::pages::simulated::{SharedPages, SimulatedPages};
use crate::recording::{Reader, RecordedEvent};
use crate::tracker::Drained;

const FAST: NodeId = NodeId(0);
const SLOW: NodeId = NodeId(1);
const BASE: u64 = 1 << 40;

/// The high watermark in the simulated zoneinfo.
const KEPT: u64 = 20 * PAGE_SIZE;

pub(super) fn node(root: &Path, id: u32, mib: u64, tier: u32) {
    let dir = root.join(format!("sys/devices/system/node/node{id}"));
    fs::create_dir_all(&dir).unwrap();
    let meminfo = format!(
        "Node {id} MemTotal: {0} kB\nNode {id} MemFree: {0} kB\n",
        mib * 1024
    );
    fs::write(dir.join("meminfo"), meminfo).unwrap();
    fs::write(dir.join("cpulist"), if id == 0 { "0\n" } else { "\n" }).unwrap();
    fs::write(dir.join("distance"), "10 20\n").unwrap();
    let dir = root.join(format!(
        "sys/devices/virtual/memory_tiering/memory_tier{tier}"
    ));
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("nodelist"), id.to_string()).unwrap();
}

/// Latencies of nodes 0 and 1 at which moves are worthwhile.
pub(super) fn measured_ns() -> BTreeMap<NodeId, u32> {
    let ByLevel([fast, slow, ..]) = WORTH_MUCH.latency_ns;
    [(FAST, fast), (SLOW, slow)].into()
}

pub(super) fn process_of(root: &Path, pid: Pid, maps: &str) {
    let dir = root.join(format!("proc/{pid}"));
    fs::create_dir_all(dir.join(format!("task/{pid}"))).unwrap();
    fs::write(
        dir.join("stat"),
        format!("{pid} (gups) S {}5 0", "0 ".repeat(18)),
    )
    .unwrap();
    fs::write(dir.join("statm"), "9 9 0 0 0 0 0").unwrap();
    fs::write(dir.join("maps"), maps).unwrap();
}

pub(super) fn maps_of(base: u64, blocks: u64) -> String {
    let end = base + blocks * BLOCK_SIZE;
    format!("{base:x}-{end:x} rw-p 00000000 00:00 0 \n")
}

/// A tracker that plays queued samples.
#[derive(Clone, Default)]
struct Queue(Arc<Mutex<Vec<Sample>>>);

impl Tracker for Queue {
    fn name(&self) -> &'static str {
        "queue"
    }

    fn loads_per_sample(&self) -> Option<u32> {
        WORTH_MUCH.loads_per_sample
    }

    fn set_targets(&mut self, _: &[Pid]) -> Result<(), TrackerError> {
        Ok(())
    }

    fn drain(&mut self, out: &mut Vec<Sample>, _max: usize) -> Result<Drained, TrackerError> {
        let before = out.len();
        out.append(&mut self.0.lock().unwrap());
        Ok(Drained {
            taken: (out.len() - before) as u64,
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

/// An agent on a machine that a script describes, with a recorder.
pub(crate) struct AgentRig {
    root: tempfile::TempDir,
    kernel: SharedPages,
    queue: Queue,
    mapped: u64,
    /// Number of requests read from the recording so far.
    seen: usize,
    pub(crate) agent: Agent,
}

impl AgentRig {
    /// Path of the recording.
    pub(crate) fn recording(&self) -> PathBuf {
        self.root.path().join("agent.rec")
    }

    /// An agent whose recording is limited to `limit_mib`.
    pub(crate) fn with_limit(script: &Script, limit_mib: u64) -> Self {
        Self::configured(script, |config| config.record_max_mib = limit_mib)
    }

    fn configured(script: &Script, change: impl FnOnce(&mut Config)) -> Self {
        let root = tempfile::tempdir().unwrap();
        node(root.path(), 0, script.fast_size().0 / MIB, 4);
        node(root.path(), 1, 1000, 70);
        let huge = root.path().join("sys/kernel/mm/transparent_hugepage");
        std::fs::create_dir_all(&huge).unwrap();
        std::fs::write(huge.join("enabled"), "[always] madvise never\n").unwrap();
        let mapped = script.fast + script.slow;
        process_of(root.path(), PID, &maps_of(BASE, mapped));
        let free = |blocks: u64| blocks * BLOCK_SIZE + KEPT;
        let mut kernel = SimulatedPages::new(free(script.fast_free), free(script.slow_free));
        let first = BASE / BLOCK_SIZE;
        for b in 0..mapped {
            let node = if b < script.fast { FAST } else { SLOW };
            kernel.map_block(PID, first + b, true, node);
        }
        let stuck = script.stuck.iter().map(|b| (PID, BASE + b * BLOCK_SIZE));
        kernel.stuck.extend(stuck);
        let kernel = SharedPages::new(kernel, Some(root.path().into()));
        let queue = Queue::default();
        let mut config = Config {
            pids: vec![PID.0],
            tuning: script.tuning(),
            record: Some(root.path().join("agent.rec")),
            ..Config::default()
        };
        change(&mut config);
        let effects = Effects {
            finder: TargetFinder::new(root.path(), config.targets().unwrap()),
            tracker: Box::new(queue.clone()),
            pages: Box::new(kernel.clone()),
            measured_ns: measured_ns(),
            load: LoadProbe::default(),
            cpus: WORTH_MUCH.cpus,
        };
        let agent = Agent::new(root.path().into(), config, effects, StatusCell::default());
        let mut agent = agent.unwrap();
        agent.clock = Clock(Box::new(Times::default));
        Self {
            root,
            kernel,
            queue,
            mapped,
            seen: 0,
            agent,
        }
    }

    /// Runs one epoch.
    pub(crate) fn run_epoch(&mut self, epoch: &EpochScript) {
        let free = self.kernel.lock().free[&SLOW] / BLOCK_SIZE;
        for _ in 0..epoch.grown.min(free) {
            let mut kernel = self.kernel.lock();
            kernel.map_block(PID, BASE / BLOCK_SIZE + self.mapped, true, SLOW);
            *kernel.free.get_mut(&SLOW).unwrap() -= BLOCK_SIZE;
            self.mapped += 1;
        }
        process_of(self.root.path(), PID, &maps_of(BASE, self.mapped));
        self.kernel.write_zoneinfo();
        let sample = |b: &u64| Sample {
            pid: PID,
            addr: GuestVirtAddr(BASE + b * BLOCK_SIZE),
            weight: 1,
        };
        let samples = epoch.samples.iter().map(sample);
        self.queue.0.lock().unwrap().extend(samples);
        self.agent.step().unwrap();
    }

    /// Ends the recording.
    pub(crate) fn finish(&mut self) {
        self.agent.engine.finish().unwrap();
    }
}

impl Rig for AgentRig {
    fn new(script: &Script) -> Self {
        Self::configured(script, |_| ())
    }

    fn base(&self) -> GuestVirtAddr {
        GuestVirtAddr(BASE)
    }

    fn epoch(&mut self, epoch: &EpochScript) -> Vec<String> {
        self.run_epoch(epoch);
        // The agent made its first request before the recording began.
        let mut asked = vec!["Refresh".to_string()];
        let mut reader = Reader::open(&self.recording()).unwrap();
        while let Some(event) = reader.next_event().unwrap() {
            if let RecordedEvent::Request(request) = event {
                asked.push(format!("{request:?}"));
            }
        }
        let new = asked.split_off(self.seen);
        self.seen += new.len();
        new
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn the_agent_conforms(seed: u64) {
        let conforms = conforms::<AgentRig>(&Script::new(seed));
        prop_assert!(conforms.is_ok(), "{:?}", conforms);
    }
}
