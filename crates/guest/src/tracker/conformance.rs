//! Conformance suite of all trackers.

use std::io::{Read, Write};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};

use demeter_policy::damon::Prospect;
use demeter_policy::{Pid, Sample};

use super::damon::tests::FakeDamon;
use super::lab::LabTracker;
use super::lab::tests::{FakeDevice, map};
use super::perf::tests::{Untouched, page_faults};
use super::{Settings, Tracker};

/// A pid that cannot exist: above the kernel's largest `pid_max`.
const GONE: Pid = Pid(1 << 30);

/// A tracker's environment, controlled by the test.
trait World {
    /// The process that [`Self::access`] acts as.
    fn target(&self) -> Pid;
    /// Makes several accesses that a tracker of the target must see.
    fn access(&mut self);
    /// Leftovers of a dropped tracker.
    fn left_behind(&self) -> Option<String>;
}

fn conforms(mut tracker: Box<dyn Tracker>, world: &mut impl World) {
    let name = tracker.name();
    let target = world.target();
    let drain = |tracker: &mut Box<dyn Tracker>, max| {
        let mut out: Vec<Sample> = Vec::new();
        let drained = tracker.drain(&mut out, max).unwrap();
        let seen = tracker.observed();
        assert_eq!(
            drained.taken,
            (out.len() + seen.len()) as u64,
            "{name}: taken is what was appended"
        );
        assert!(
            drained.taken <= max as u64,
            "{name}: never more than asked for"
        );
        let (samples, seen) = (out.iter().map(|s| s.pid), seen.iter());
        let accessed = seen.filter(|seen| seen.events > 0).map(|seen| seen.pid);
        let accessed: Vec<Pid> = samples.chain(accessed).collect();
        assert!(
            accessed.iter().all(|&pid| pid == target),
            "{name}: only targets"
        );
        tracker.epoch_ended(Prospect::OPEN).unwrap();
        (accessed.len(), drained)
    };

    // Without targets there are no samples.
    tracker.set_targets(&[]).unwrap();
    world.access();
    assert_eq!(drain(&mut tracker, 1000).0, 0, "{name}: no targets");

    // A process that has ended is skipped, and hides no other.
    tracker.set_targets(&[GONE, target]).unwrap();
    drain(&mut tracker, 1000);
    world.access();
    let (all, _) = drain(&mut tracker, 100_000);
    assert!(all > 3, "{name}: {all} samples");

    // Samples above the limit are lost, and counted.
    world.access();
    let (_, drained) = drain(&mut tracker, 2);
    assert!(drained.taken > 0 && drained.lost > 0, "{name}: {drained:?}");
    assert_eq!(
        drain(&mut tracker, 1000).0,
        0,
        "{name}: what was lost does not come back"
    );

    tracker.pause().unwrap();
    world.access();
    assert_eq!(drain(&mut tracker, 1000).0, 0, "{name}: paused");
    tracker.pause().unwrap();
    tracker.resume().unwrap();
    assert_eq!(
        drain(&mut tracker, 1000).0,
        0,
        "{name}: what happened meanwhile is dropped"
    );
    tracker.resume().unwrap();
    world.access();
    let (some, drained) = drain(&mut tracker, 1000);
    assert!(some > 0, "{name}: resumed: {drained:?}");

    // Targets may change during a pause.
    tracker.pause().unwrap();
    tracker.set_targets(&[GONE]).unwrap();
    tracker.resume().unwrap();
    world.access();
    assert_eq!(drain(&mut tracker, 1000).0, 0, "{name}: no longer a target");

    drop(tracker);
    assert_eq!(world.left_behind(), None, "{name}");
}

struct LabWorld(FakeDevice);

impl World for LabWorld {
    fn target(&self) -> Pid {
        Pid(7)
    }
    fn access(&mut self) {
        // The emulator does not sample while the period is zero.
        if self.0.period() > 0 {
            (0..8).for_each(|line| self.0.push(line % 2, 0x10000 + u64::from(line) * 64, 0));
        }
    }
    fn left_behind(&self) -> Option<String> {
        (self.0.period() != 0).then(|| "the emulator still samples".into())
    }
}

#[test]
fn lab_conforms() {
    let root = tempfile::tempdir().unwrap();
    let mut world = LabWorld(FakeDevice::new(root.path(), 2));
    map(root.path(), 7, 0x10000, 0x20000);
    let settings = Settings {
        root: root.path().into(),
        ..Settings::default()
    };
    conforms(Box::new(LabTracker::new(&settings).unwrap()), &mut world);
}

struct DamonWorld(FakeDamon);

impl World for DamonWorld {
    fn target(&self) -> Pid {
        Pid(7)
    }
    fn access(&mut self) {
        self.0.access();
    }
    fn left_behind(&self) -> Option<String> {
        (self.0.text("nr_kdamonds") != "0").then(|| "a kdamond".into())
    }
}

#[test]
fn damon_conforms() {
    let root = tempfile::tempdir().unwrap();
    let mut world = DamonWorld(FakeDamon::new(root.path()));
    map(root.path(), 7, 0x40_0000, 0x440_0000);
    let tracker = super::damon::tests::tracker(&world.0).unwrap();
    conforms(Box::new(tracker), &mut world);
}

/// A child that takes page faults on request. Other tests make this process fault, too.
struct PerfWorld {
    child: Child,
    requests: ChildStdin,
    answers: ChildStderr,
}

impl PerfWorld {
    fn new() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--ignored",
                "--exact",
                "tracker::conformance::fault_on_request",
            ])
            .arg("--nocapture")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (requests, answers) = (child.stdin.take().unwrap(), child.stderr.take().unwrap());
        let mut world = Self {
            child,
            requests,
            answers,
        };
        // The first request also faults code pages in.
        world.access();
        world
    }
}

impl World for PerfWorld {
    fn target(&self) -> Pid {
        Pid(self.child.id())
    }
    fn access(&mut self) {
        self.requests.write_all(b"x").unwrap();
        self.answers.read_exact(&mut [0]).unwrap();
    }
    fn left_behind(&self) -> Option<String> {
        // The events are descriptors, which only the tracker holds.
        None
    }
}

impl Drop for PerfWorld {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "the child of perf_conforms"]
fn fault_on_request() {
    const PAGES_PER_REQUEST: usize = 4096;
    const REQUESTS: usize = 16;
    let mut memory = Untouched::new(PAGES_PER_REQUEST * REQUESTS);
    for _ in 0..REQUESTS {
        if std::io::stdin().read_exact(&mut [0]).is_err() {
            break;
        }
        memory.touch(PAGES_PER_REQUEST);
        std::io::stderr().write_all(b"x").unwrap();
    }
}

#[test]
fn perf_conforms_on_page_faults() {
    if let Some(tracker) = page_faults() {
        conforms(Box::new(tracker), &mut PerfWorld::new());
    }
}
