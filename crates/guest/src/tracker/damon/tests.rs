use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::sync::atomic::Ordering;

use demeter_linux::damon::testing::{FORMAT, record};
use demeter_linux::mapping::Mapping;
use demeter_linux::perf::ring;
use demeter_policy::GuestVirtAddr;

use super::super::lab::tests::map;
use super::*;

const ADMIN: &str = "sys/kernel/mm/damon/admin/kdamonds";
const RING: &str = "ring";
const MAPPED_BYTES: usize = ring::CONTROL_BYTES + RING_BYTES;

/// The kernel's side in a fake root: DAMON's files and the ring of the tracepoint.
pub(in crate::tracker) struct FakeDamon {
    root: PathBuf,
    ring: Mapping,
}

impl FakeDamon {
    pub fn new(root: &Path) -> Self {
        let fake = |file: &str, text: &str| {
            let path = root.join(ADMIN).join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        fake("nr_kdamonds", "0\n");
        fake("0/state", "off\n");
        fake("0/pid", "77\n");
        fake("0/contexts/nr_contexts", "");
        let context = "0/contexts/0";
        fake(
            &format!("{context}/avail_operations"),
            "vaddr\nfvaddr\npaddr\n",
        );
        for file in ["operations", "targets/nr_targets", "targets/0/pid_target"] {
            fake(&format!("{context}/{file}"), "");
        }
        for file in ["nr_regions", "0/start", "0/end"] {
            fake(&format!("{context}/targets/0/regions/{file}"), "");
        }
        for file in [
            "intervals/sample_us",
            "intervals/aggr_us",
            "intervals/update_us",
        ] {
            fake(&format!("{context}/monitoring_attrs/{file}"), "");
        }
        for file in ["nr_regions/min", "nr_regions/max"] {
            fake(&format!("{context}/monitoring_attrs/{file}"), "");
        }
        File::create(root.join(RING))
            .unwrap()
            .set_len(MAPPED_BYTES as u64)
            .unwrap();
        let ring = Mapping::new(&open_ring(root), MAPPED_BYTES).unwrap();
        Self {
            root: root.into(),
            ring,
        }
    }

    pub fn text(&self, file: &str) -> String {
        fs::read_to_string(self.root.join(ADMIN).join(file))
            .unwrap()
            .trim()
            .into()
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.root.join(ADMIN).join(file), text).unwrap();
    }

    /// Reports a region of a target, as the kernel does at the end of an aggregation.
    pub fn report(&self, target: u64, start: u64, end: u64, accesses: u32) {
        // A kdamond that is off reports nothing.
        if self.text("0/state") == "off" {
            return;
        }
        let raw = record(target, start, end, accesses);
        let mut bytes = super::cpu::monotonic_ns().to_ne_bytes().to_vec();
        bytes.extend((raw.len() as u32).to_ne_bytes());
        bytes.extend(raw);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        let header = u64::from(ring::PERF_RECORD_SAMPLE) | (bytes.len() as u64 + 8) << 48;
        bytes.splice(..0, header.to_ne_bytes());
        let head = self.ring.u64_at(ring::DATA_HEAD).load(Ordering::Relaxed);
        for (index, word) in bytes.chunks_exact(8).enumerate() {
            let place = (head as usize + index * 8) % (256 << 10);
            let word = u64::from_ne_bytes(word.try_into().unwrap());
            self.ring
                .u64_at(ring::CONTROL_BYTES + place)
                .store(word, Ordering::Relaxed);
        }
        self.ring
            .u64_at(ring::DATA_HEAD)
            .store(head + bytes.len() as u64, Ordering::Release);
    }
}

fn open_ring(root: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(root.join(RING))
        .unwrap()
}

/// A tracker on the fake kernel.
pub(in crate::tracker) fn tracker(root: &Path) -> Result<DamonTracker, TrackerError> {
    let settings = Settings {
        root: root.into(),
        // Nothing is topped up while a test runs.
        epoch: Duration::from_secs(3600),
        ..Settings::default()
    };
    let kdamond = Kdamond::claim(root, 1)?.remove(0);
    let format = Format::parse(FORMAT).unwrap();
    let root = root.to_owned();
    let listen =
        move |_kdamond, _regions| Aggregations::of(open_ring(&root).into(), format, RING_BYTES);
    Ok(DamonTracker::with(&settings, kdamond, Box::new(listen)))
}

/// A tracker whose first pass over a process's memory has begun.
fn watching() -> (tempfile::TempDir, FakeDamon, DamonTracker) {
    let root = tempfile::tempdir().unwrap();
    let damon = FakeDamon::new(root.path());
    map(root.path(), 8, 0x1000, 0x2000);
    let mut tracker = tracker(root.path()).unwrap();
    tracker.set_targets(&[Pid(8)]).unwrap();
    (root, damon, tracker)
}

#[test]
fn a_gone_process_is_passed_over_and_numbers_stay_right() {
    let root = tempfile::tempdir().unwrap();
    let damon = FakeDamon::new(root.path());
    map(root.path(), 8, 0x1000, 0x2000);
    let mut tracker = tracker(root.path()).unwrap();
    tracker.set_targets(&[Pid(7), Pid(8)]).unwrap();
    assert_eq!(damon.text("0/contexts/0/targets/nr_targets"), "1");
    assert_eq!(damon.text("0/contexts/0/targets/0/pid_target"), "8");
    damon.report(0, 0x20_0000, 0x120_0000, 50);
    damon.report(1, 0x20_0000, 0x120_0000, 50);
    let mut out = Vec::new();
    let drained = tracker.drain(&mut out, 1000).unwrap();
    assert_eq!(drained.rejected, 1);
    assert!(drained.taken > 0 && out.iter().all(|sample| sample.pid == Pid(8)));
    assert!(
        out.iter()
            .all(|sample| sample.addr >= GuestVirtAddr(0x20_0000))
    );
    assert!(!drained.is_repeat);
    out.clear();
    tracker.sightings(1000, &mut out);
    assert!(!out.is_empty() && out.iter().all(|sighting| sighting.pid == Pid(8)));
    // Nobody has looked since.
    assert!(tracker.drain(&mut out, 1000).unwrap().is_repeat);
}

#[test]
fn nothing_is_looked_at_while_pages_move() {
    let (_root, damon, mut tracker) = watching();
    damon.report(0, 0x20_0000, 0x120_0000, 50);
    tracker.drain(&mut Vec::new(), 1000).unwrap();
    // The caller decides and moves now.
    assert_eq!(damon.text("0/state"), "off");
    tracker.epoch_ended(false).unwrap();
    assert_eq!(damon.text("0/state"), "on");
    tracker.pause().unwrap();
    tracker.epoch_ended(false).unwrap();
    assert_eq!(damon.text("0/state"), "off");
}

#[test]
fn a_shorter_pass_is_told_what_to_look_at() {
    let (_root, damon, mut tracker) = watching();
    assert_eq!(damon.text("0/contexts/0/operations"), "vaddr");
    // Always found accessed: how hot it is a shorter pass has to tell.
    damon.report(0, 0x20_0000, 0x40_0000, PASSES[0].looks);
    damon.report(0, 0x40_0000, 0x60_0000, 1);
    damon.report(0, 0x60_0000, 0x80_0000, 1);
    tracker.drain(&mut Vec::new(), 1000).unwrap();
    assert_eq!(damon.text("0/contexts/0/operations"), "fvaddr");
    let regions = "0/contexts/0/targets/0/regions";
    assert_eq!(damon.text(&format!("{regions}/nr_regions")), "1");
    let end = 0x40_0000.to_string();
    assert_eq!(damon.text(&format!("{regions}/0/end")), end);
}

#[test]
fn a_calm_agent_waits_for_a_slow_kdamond() {
    let (_root, damon, mut tracker) = watching();
    damon.report(0, 0x20_0000, 0x120_0000, 50);
    tracker.drain(&mut Vec::new(), 1000).unwrap();
    tracker.epoch_ended(true).unwrap();
    let drained = std::thread::scope(|scope| {
        scope.spawn(move || {
            let began = Instant::now();
            while damon.text("0/state") == "off" && began.elapsed() < Duration::from_secs(60) {
                std::thread::yield_now();
            }
            // Twice as long as it should take, and more than the least patience.
            std::thread::sleep(PASSES[0].length() + LOOK_PATIENCE_MIN);
            damon.report(0, 0x20_0000, 0x120_0000, 50);
        });
        tracker.drain(&mut Vec::new(), 1000).unwrap()
    });
    assert!(!drained.is_repeat);
}

#[test]
fn a_busy_agent_waits_for_a_pass_that_is_late() {
    let (_root, damon, mut tracker) = watching();
    // It has just begun: nobody waits.
    let drained = tracker.drain(&mut Vec::new(), 1000).unwrap();
    assert!(drained.is_repeat && damon.text("0/state") == "on");
    std::thread::sleep(PASSES[0].length());
    let (drained, damon) = std::thread::scope(|scope| {
        let kernel = scope.spawn(move || {
            std::thread::sleep(PASSES[0].length() / 4);
            damon.report(0, 0x20_0000, 0x120_0000, 50);
            damon
        });
        let drained = tracker.drain(&mut Vec::new(), 1000).unwrap();
        (drained, kernel.join().unwrap())
    });
    assert!(!drained.is_repeat);
    assert_eq!(damon.text("0/state"), "off");
}

#[test]
fn other_peoples_kdamonds_are_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let damon = FakeDamon::new(root.path());
    damon.write("nr_kdamonds", "1\n");
    damon.write("0/state", "on\n");
    damon.write("0/contexts/0/operations", "paddr\n");
    let error = tracker(root.path()).err().unwrap().to_string();
    assert!(error.contains("somebody else"), "{error}");
    assert_eq!(
        (damon.text("nr_kdamonds"), damon.text("0/state")),
        ("1".into(), "on".into())
    );
}

#[test]
fn what_a_dead_demeter_left_is_taken_over() {
    let root = tempfile::tempdir().unwrap();
    let damon = FakeDamon::new(root.path());
    map(root.path(), 8, 0x1000, 0x2000);
    let mut first = tracker(root.path()).unwrap();
    first.set_targets(&[Pid(8)]).unwrap();
    assert_eq!(
        (damon.text("nr_kdamonds"), damon.text("0/state")),
        ("1".into(), "on".into())
    );

    let error = tracker(root.path()).err().unwrap().to_string();
    assert!(error.contains("another Demeter"), "{error}");

    // A killed process runs no destructors but loses its locks. Forgetting ours would keep the
    // lock, so the file is put aside and one with the same text takes its place.
    std::mem::forget(first);
    fs::remove_file(root.path().join(ADMIN).join("nr_kdamonds")).unwrap();
    damon.write("nr_kdamonds", "1\n");
    let _second = tracker(root.path()).unwrap();
    assert_eq!(damon.text("0/state"), "off");
}

#[test]
fn no_damon_says_what_to_use() {
    let root = tempfile::tempdir().unwrap();
    let error = tracker(root.path()).err().unwrap().to_string();
    assert!(error.contains("CONFIG_DAMON_SYSFS"), "{error}");

    let damon = FakeDamon::new(root.path());
    damon.write("0/contexts/0/avail_operations", "paddr\n");
    let error = tracker(root.path()).err().unwrap().to_string();
    assert!(error.contains("CONFIG_DAMON_VADDR"), "{error}");
    assert_eq!(damon.text("nr_kdamonds"), "0");
}
