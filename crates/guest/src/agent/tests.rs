//! Tests of the whole agent on a simulated machine: a root directory, a kernel that moves pages, and a tracker that
//! plays a workload.

use std::fs;
use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use demeter_policy::engine::conformance::WORTH_MUCH;
use demeter_policy::{BLOCK_SIZE, GuestVirtAddr, MIB, NodeId, Tuning};

use super::clock::Times;
use super::conformance::{maps_of, measured_ns, node, process_of};
use super::*;
use crate::nodes::NodeMemory;
use crate::pages::PageState;
use crate::pages::simulated::{SharedPages, SimulatedPages};
use crate::server::Server;
use crate::tracker::Drained;

pub(super) const FAST: NodeId = NodeId(0);
pub(super) const SLOW: NodeId = NodeId(1);
pub(super) const PID: Pid = Pid(70);
/// Start of the process's array.
pub(super) const BASE: u64 = 1 << 40;

/// A workload's accesses: 9 of 10 samples in hot blocks, the rest anywhere in the array.
#[derive(Debug, Default)]
pub(super) struct Script {
    pub samples: u64,
    pub blocks: u64,
    pub hot: std::ops::Range<u64>,
    drawn: u64,
    /// Extra samples of each epoch.
    pub besides: Vec<Sample>,
    /// A process that makes the same samples at the same addresses.
    pub peer: Option<Pid>,
    corrupt_next: bool,
    observing: bool,
    targets: Vec<Pid>,
}

#[derive(Clone)]
struct ScriptedTracker(Arc<Mutex<Script>>);

impl Tracker for ScriptedTracker {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn loads_per_sample(&self) -> Option<u32> {
        WORTH_MUCH.loads_per_sample
    }

    fn set_targets(&mut self, targets: &[Pid]) -> Result<(), TrackerError> {
        self.0.lock().unwrap().targets = targets.to_vec();
        Ok(())
    }

    fn drain(&mut self, out: &mut Vec<Sample>, _max: usize) -> Result<Drained, TrackerError> {
        let mut s = self.0.lock().unwrap();
        if std::mem::take(&mut s.corrupt_next) {
            return Err(TrackerError::Corrupt {
                tracker: "scripted",
                what: "head".into(),
            });
        }
        for _ in 0..s.samples {
            s.drawn += 1;
            let spread = s.drawn.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
            let block = match s.drawn % 10 {
                0 => spread % s.blocks,
                _ => s.hot.start + spread % (s.hot.end - s.hot.start),
            };
            let addr = GuestVirtAddr(BASE + block * BLOCK_SIZE + 64);
            let of_peer = s.peer.filter(|_| s.drawn / 10 % 2 == 1);
            out.push(Sample {
                pid: of_peer.unwrap_or(PID),
                addr,
                weight: 1,
            });
        }
        out.extend(&s.besides);
        Ok(Drained {
            taken: s.samples,
            lost: 0,
            rejected: 0,
            is_repeat: false,
        })
    }

    fn pause(&mut self) -> Result<(), TrackerError> {
        self.0.lock().unwrap().observing = false;
        Ok(())
    }

    fn resume(&mut self) -> Result<(), TrackerError> {
        self.0.lock().unwrap().observing = true;
        Ok(())
    }
}

/// A machine with 100 blocks in fast memory and 300 in slow memory, all of one process.
pub(super) struct World {
    pub root: tempfile::TempDir,
    pub kernel: SharedPages,
    pub script: Arc<Mutex<Script>>,
    pub status: StatusCell,
    pub agent: Agent,
}

fn process(root: &Path, blocks: u64) {
    process_of(root, PID, &maps_of(BASE, blocks));
}

/// An agent on a simulated kernel that plays a script.
pub(super) fn agent_on(
    root: &Path,
    config: Config,
    script: &Arc<Mutex<Script>>,
    kernel: &SharedPages,
    status: &StatusCell,
) -> Result<Agent, AgentError> {
    let effects = Effects {
        finder: TargetFinder::new(root, config.targets()?),
        tracker: Box::new(ScriptedTracker(script.clone())),
        pages: Box::new(kernel.clone()),
        measured_ns: measured_ns(),
        load: LoadProbe::default(),
        cpus: WORTH_MUCH.cpus,
    };
    let mut agent = Agent::new(root.into(), config, effects, status.clone())?;
    agent.clock = Clock(Box::new(Times::default));
    Ok(agent)
}

impl World {
    pub fn new() -> Self {
        Self::tuned(Tuning::default())
    }

    fn tuned(tuning: Tuning) -> Self {
        let script = Script {
            samples: 300,
            blocks: 400,
            hot: 350..400,
            ..Script::default()
        };
        Self::of(script, tuning)
    }

    fn of(script: Script, tuning: Tuning) -> Self {
        let root = tempfile::tempdir().unwrap();
        node(root.path(), 0, 216, 4);
        node(root.path(), 1, 1000, 70);
        process(root.path(), 400);
        let mut kernel = SimulatedPages::new(8 << 20, 200 << 20);
        for b in 0..400 {
            kernel.map_block(
                PID,
                (BASE / BLOCK_SIZE) + b,
                true,
                if b < 100 { FAST } else { SLOW },
            );
        }
        let kernel = SharedPages::new(kernel, Some(root.path().into()));
        let script = Arc::new(Mutex::new(script));
        let status = StatusCell::default();
        let config = Config {
            pids: vec![PID.0],
            tuning,
            ..Config::default()
        };
        let agent = agent_on(root.path(), config, &script, &kernel, &status).unwrap();
        Self {
            root,
            kernel,
            script,
            status,
            agent,
        }
    }

    pub fn steps(&mut self, n: usize) {
        for _ in 0..n {
            self.agent.step().unwrap();
        }
    }

    /// Number of hot blocks in fast memory.
    pub fn hot_in_fast(&self) -> u64 {
        let hot = self.script.lock().unwrap().hot.clone();
        let n = hot.end - hot.start;
        let pages: Vec<_> = hot.map(|b| GuestVirtAddr(BASE + b * BLOCK_SIZE)).collect();
        let mut states = vec![];
        self.kernel.lock().locate(PID, &pages, &mut states).unwrap();
        let fast = states.iter().filter(|s| **s == PageState::On(FAST)).count() as u64;
        assert!(fast <= n);
        fast
    }

    pub fn moved(&self) -> u64 {
        let s = self.status.get();
        s.promoted_bytes + s.demoted_bytes
    }
}

#[test]
fn the_hot_set_comes_into_fast_memory_and_then_nothing_moves() {
    let mut w = World::new();
    w.steps(8);
    assert_eq!(w.hot_in_fast(), 50);
    let moved = w.moved();
    w.steps(60);
    assert_eq!((w.hot_in_fast(), w.moved()), (50, moved));
    let s = w.status.get();
    assert_eq!(s.tried_bytes, moved, "everything tried was moved");
    assert!(s.promoted_bytes <= 60 * BLOCK_SIZE, "{s:?}");
    assert!(
        w.kernel.lock().least_free >= 2 << 20,
        "kswapd was in danger"
    );
    assert_eq!(
        s.targets[0].fast_bytes + s.targets[0].slow_bytes,
        400 * BLOCK_SIZE
    );
}

#[test]
fn a_hot_set_that_jumps_is_followed() {
    let mut w = World::new();
    w.steps(10);
    w.script.lock().unwrap().hot = 150..200;
    w.steps(8);
    assert_eq!(w.hot_in_fast(), 50);
}

#[test]
fn memory_that_was_mapped_before_it_was_filled_is_found() {
    let mut w = World::new();
    // New mappings take a while to fill, and have no samples meanwhile.
    process(w.root.path(), 1000);
    w.steps(20);
    for b in 900..1000 {
        let mut kernel = w.kernel.lock();
        kernel.map_block(PID, (BASE / BLOCK_SIZE) + b, true, SLOW);
    }
    w.script.lock().unwrap().hot = 950..1000;
    w.steps(8);
    assert_eq!(w.hot_in_fast(), 50);
}

#[test]
fn memory_that_appears_is_found() {
    let mut w = World::new();
    w.steps(10);
    process(w.root.path(), 440);
    for b in 400..440 {
        w.kernel
            .lock()
            .map_block(PID, BASE / BLOCK_SIZE + b, false, SLOW);
    }
    *w.script.lock().unwrap() = Script {
        samples: 300,
        blocks: 440,
        hot: 400..440,
        ..Script::default()
    };
    w.steps(10);
    assert_eq!(w.hot_in_fast(), 40);
}

#[test]
fn nothing_accessed_costs_no_call_and_hot_memory_stays() {
    let mut w = World::new();
    w.steps(10);
    w.script.lock().unwrap().samples = 0;
    w.steps(60);
    let (moved, calls) = (w.moved(), w.kernel.lock().locate_calls);
    w.steps(50);
    assert_eq!((w.moved(), w.kernel.lock().locate_calls), (moved, calls));
    assert_eq!(w.hot_in_fast(), 50);
}

#[test]
fn a_stranger_with_a_processs_pid_is_not_moved() {
    // A batch may move before the next refresh.
    let refused = (4..8).filter(|&steps| {
        let mut w = World::new();
        w.steps(steps);
        w.script.lock().unwrap().hot = 150..200;
        let stat = w.root.path().join(format!("proc/{PID}/stat"));
        let text = fs::read_to_string(&stat).unwrap();
        fs::write(&stat, text.replace("5 0", "6 0")).unwrap();
        let moved = w.moved();
        let ends = (0..8).any(|_| w.agent.step().is_err());
        assert!(ends && w.moved() == moved);
        w.agent.engine.processes().count() == 0
    });
    assert!(refused.count() > 0);
}

#[test]
fn a_corrupt_ring_costs_one_epoch_only() {
    let mut w = World::new();
    w.script.lock().unwrap().corrupt_next = true;
    w.steps(1);
    assert!(w.status.get().last_error.unwrap().contains("corrupt ring"));
    w.steps(8);
    assert_eq!(w.hot_in_fast(), 50);
}

#[test]
fn paused_it_neither_observes_nor_moves() {
    let mut w = World::new();
    let (controls, received) = mpsc::channel();
    controls.send(Control::Pause).unwrap();
    controls.send(Control::Stop).unwrap();
    assert_eq!(w.agent.run(&received).unwrap(), Ended::Stopped);
    w.steps(10);
    assert_eq!(
        (w.moved(), w.status.get().samples, w.status.get().paused),
        (0, 0, true)
    );
    assert!(!w.script.lock().unwrap().observing);
    controls.send(Control::Resume).unwrap();
    controls.send(Control::Stop).unwrap();
    w.agent.run(&received).unwrap();
    assert!(w.script.lock().unwrap().observing);
    w.steps(8);
    assert_eq!(w.hot_in_fast(), 50);
}

#[test]
fn who_asks_a_running_agent_is_told_what_is_hot() {
    let mut w = World::new();
    w.steps(8);
    let (controls, received) = mpsc::channel();
    let socket = w.root.path().join("guest.sock");
    let _server = Server::start(&socket, None, w.status.clone(), controls.clone()).unwrap();
    let asks = std::thread::spawn(move || {
        let told = demeter_http::ask(&socket, "GET /v1/heat", "", Duration::from_secs(20));
        controls.send(Control::Stop).unwrap();
        told.unwrap()
    });
    w.agent.run(&received).unwrap();
    let heat: Heat = serde_json::from_str(&asks.join().unwrap()).unwrap();
    let [process] = &heat.processes[..] else {
        panic!("{heat:?}");
    };
    assert_eq!((process.pid, heat.ranges_left_out), (PID.0, 0));
    let hottest = process.ranges[0];
    assert!(hottest.start >= BASE + 340 * BLOCK_SIZE && hottest.end <= BASE + 400 * BLOCK_SIZE);
    assert!(hottest.fast_bytes > 0 && hottest.slow_bytes == 0);
    let bytes: u64 = process.ranges.iter().map(|r| r.end - r.start).sum();
    assert_eq!(bytes, 400 * BLOCK_SIZE, "cold memory is told, too");
}

/// Free fast memory above the watermarks.
fn fast_free(w: &World) -> u64 {
    let fast = NodeMemory::read_all(w.root.path(), [FAST]).unwrap();
    fast[0].usable().0
}

#[test]
fn room_for_the_balloon_is_made_of_the_coldest_blocks() {
    let mut w = World::new();
    w.steps(10);
    let wanted = ByteCount(80 * MIB);
    w.agent.make_room(wanted).unwrap();
    assert!(fast_free(&w) >= wanted.0, "at once");
    assert_eq!(w.hot_in_fast(), 50);
    // While the balloon waits, nothing is promoted.
    w.steps(20);
    assert!(fast_free(&w) >= wanted.0);
    assert_eq!(w.hot_in_fast(), 50);

    // The balloon takes its amount. Free memory beyond the reserve stays in use.
    *w.kernel.lock().free.get_mut(&FAST).unwrap() -= wanted.0;
    w.kernel.write_zoneinfo();
    w.agent.make_room(ByteCount(0)).unwrap();
    let moved = w.moved();
    w.steps(20);
    assert_eq!(w.hot_in_fast(), 50);
    assert!(w.moved() - moved <= 8 * MIB, "it settles at once");
}

fn slow_mover() -> Tuning {
    Tuning {
        rate_limit_mib_s: 32,
        ..Tuning::default()
    }
}

#[test]
fn what_is_more_than_a_batch_is_made_room_for_in_several_epochs() {
    let mut w = World::tuned(slow_mover());
    w.steps(60);
    w.agent.make_room(ByteCount(80 * MIB)).unwrap();
    assert!(fast_free(&w) < 32 * MIB);
    w.steps(5);
    assert!(fast_free(&w) >= 80 * MIB);
}

#[test]
fn room_is_made_in_an_idle_vm_too() {
    let mut w = World::tuned(slow_mover());
    w.steps(10);
    w.script.lock().unwrap().samples = 0;
    w.steps(40);
    w.agent.make_room(ByteCount(80 * MIB)).unwrap();
    w.steps(6);
    assert!(fast_free(&w) >= 80 * MIB);
}

#[test]
fn the_working_set_and_the_hit_share_are_told() {
    let mut w = World::new();
    w.steps(10);
    let s = w.status.get();
    // Random samples make some blocks outside the hot set warm.
    let warm = s.working_set_fast_bytes / BLOCK_SIZE;
    assert!((50..75).contains(&warm), "{warm}");
    assert_eq!(s.working_set_slow_bytes, 0);
    assert!(s.fast_hit_permille.unwrap() > 900, "{s:?}");
    w.script.lock().unwrap().samples = 0;
    w.steps(90);
    assert_eq!(
        w.status.get().working_set_fast_bytes,
        0,
        "nothing is in use"
    );
}

#[test]
fn it_ends_when_the_processes_that_were_named_have_ended() {
    let mut w = World::tuned(Tuning {
        epoch_ms: 10,
        ..Tuning::default()
    });
    // The next epoch refreshes the list of processes.
    w.steps(199);
    fs::remove_dir_all(w.root.path().join(format!("proc/{PID}"))).unwrap();
    w.kernel.lock().kill(PID);
    let (_controls, received) = mpsc::channel();
    assert_eq!(w.agent.run(&received).unwrap(), Ended::NothingLeft);
}

#[test]
fn that_a_process_ends_while_its_pages_move_is_no_failure() {
    let mut w = World::new();
    w.kernel.lock().dying = Some(PID);
    let calls = |w: &World| w.kernel.lock().migrate_calls;
    for _ in 0..10 {
        w.steps(1);
        if calls(&w) > 0 {
            break;
        }
    }
    assert_eq!(calls(&w), 1);
    let status = w.status.get();
    assert!(status.failed_bytes.is_empty(), "{:?}", status.failed_bytes);
    assert_eq!((status.last_error, status.tried_bytes), (None, 0));
    assert_eq!(w.agent.engine.processes().count(), 0);
    w.steps(1);
    assert_eq!(calls(&w), 1, "it is asked for no more");
}

#[test]
fn a_pid_that_is_not_there_is_an_error_at_once() {
    let w = World::new();
    let config = Config {
        pids: vec![71],
        ..Config::default()
    };
    let result = agent_on(w.root.path(), config, &w.script, &w.kernel, &w.status);
    let error = result.err().unwrap().to_string();
    assert!(error.contains("process 71 is not there"), "{error}");
}

/// Number of fast blocks that two processes of equal heat have in the end. At first the second has all 100.
fn divided(cgroups: &str) -> [u64; 2] {
    let peer = Pid(71);
    let root = tempfile::tempdir().unwrap();
    node(root.path(), 0, 216, 4);
    node(root.path(), 1, 1000, 70);
    let mut kernel = SimulatedPages::new(8 << 20, 200 << 20);
    for (pid, name) in [(PID, "a"), (peer, "b")] {
        process_of(root.path(), pid, &maps_of(BASE, 200));
        let dir = root.path().join("sys/fs/cgroup").join(name);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("cgroup.procs"), format!("{pid}\n")).unwrap();
        for b in 0..200 {
            let at = if pid == peer && b < 100 { FAST } else { SLOW };
            kernel.map_block(pid, (BASE / BLOCK_SIZE) + b, true, at);
        }
    }
    let kernel = SharedPages::new(kernel, Some(root.path().into()));
    let script = Script {
        samples: 2000,
        blocks: 200,
        hot: 0..200,
        peer: Some(peer),
        ..Script::default()
    };
    let script = Arc::new(Mutex::new(script));
    let config: Config = toml::from_str(cgroups).unwrap();
    let status = StatusCell::default();
    let mut agent = agent_on(root.path(), config, &script, &kernel, &status).unwrap();
    for _ in 0..40 {
        agent.step().unwrap();
    }
    [PID, peer].map(|pid| {
        let pages: Vec<_> = (0..200)
            .map(|b| GuestVirtAddr(BASE + b * BLOCK_SIZE))
            .collect();
        let mut states = vec![];
        kernel.lock().locate(pid, &pages, &mut states).unwrap();
        states.iter().filter(|s| **s == PageState::On(FAST)).count() as u64
    })
}

#[test]
fn cgroups_of_equal_heat_have_fast_memory_by_weight() {
    let [a, b] = divided(
        "[[cgroup]]\npath = \"/sys/fs/cgroup/a\"\nweight = 3\n[[cgroup]]\npath = \"/sys/fs/cgroup/b\"",
    );
    let ratio = a as f64 / b as f64;
    assert!((2.85..3.15).contains(&ratio), "{a} and {b} blocks");
    // Without shares the second process keeps its memory.
    assert!(divided("pids = [70, 71]")[1] >= 100);
}

#[test]
fn a_guarantee_goes_before_weights() {
    let [a, b] = divided(
        "[[cgroup]]\npath = \"/sys/fs/cgroup/a\"\nweight = 9\n\
         [[cgroup]]\npath = \"/sys/fs/cgroup/b\"\nguarantee_mib = 120",
    );
    assert!(b >= 60 && a >= 35, "{a} and {b} blocks");
}
