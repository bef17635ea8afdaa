use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::sync::atomic::Ordering;

use demeter_linux::damon::Aggregations;
use demeter_linux::damon::testing::{FORMAT, record};
use demeter_linux::mapping::Mapping;
use demeter_linux::perf::ring;

use super::super::lab::tests::map;
use super::*;

const ADMIN: &str = "sys/kernel/mm/damon/admin/kdamonds";
const RING: &str = "ring";
const RING_BYTES: usize = 1 << 19;
const MAPPED_BYTES: usize = ring::CONTROL_BYTES + RING_BYTES;

/// Number of regions that the fake kernel has files for.
const REGIONS_MAX: usize = 40;

/// Time within which a pass comes, if any.
const PATIENCE: Duration = Duration::from_millis(700);

/// A fake kernel: DAMON's files and the tracepoint's ring in a root directory. A kdamond reports its regions as soon as
/// a listener exists.
#[derive(Clone)]
pub(crate) struct FakeDamon {
    root: PathBuf,
    kernel: Arc<Mutex<Kernel>>,
    passed: Arc<Condvar>,
}

/// The behaviour of kdamonds.
struct Kernel {
    ring: Mapping,
    /// Number of passes so far.
    passes: u64,
    /// Number of looks in the next pass that find each region accessed.
    accesses: u32,
    /// Also report another region.
    reports_strangers: bool,
    /// Find no process any more.
    is_deaf: bool,
}

impl FakeDamon {
    pub fn new(root: &Path) -> Self {
        let fake = |file: &str, text: &str| {
            let path = root.join(ADMIN).join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        fake("nr_kdamonds", "0\n");
        for kdamond in 0..passes::KDAMONDS {
            fake(&format!("{kdamond}/state"), "off\n");
            fake(&format!("{kdamond}/pid"), "77\n");
            fake(&format!("{kdamond}/contexts/nr_contexts"), "");
            let context = format!("{kdamond}/contexts/0");
            let operations = "vaddr\nfvaddr\npaddr\n";
            fake(&format!("{context}/avail_operations"), operations);
            for file in [
                "operations",
                "targets/nr_targets",
                "targets/0/pid_target",
                "targets/0/regions/nr_regions",
                "monitoring_attrs/intervals/sample_us",
                "monitoring_attrs/intervals/aggr_us",
                "monitoring_attrs/intervals/update_us",
                "monitoring_attrs/nr_regions/min",
                "monitoring_attrs/nr_regions/max",
            ] {
                fake(&format!("{context}/{file}"), "");
            }
            for region in 0..REGIONS_MAX {
                for file in ["start", "end"] {
                    fake(&format!("{context}/targets/0/regions/{region}/{file}"), "");
                }
            }
        }
        File::create(root.join(RING))
            .unwrap()
            .set_len(MAPPED_BYTES as u64)
            .unwrap();
        let ring = Mapping::new(&open_ring(root), MAPPED_BYTES).unwrap();
        Self {
            root: root.into(),
            kernel: Arc::new(Mutex::new(Kernel {
                ring,
                passes: 0,
                accesses: 0,
                reports_strangers: false,
                is_deaf: false,
            })),
            passed: Arc::default(),
        }
    }

    fn set(&self, change: impl FnOnce(&mut Kernel)) {
        change(&mut self.kernel.lock().unwrap());
    }

    /// Waits for more passes. Returns false if they do not come.
    fn wait(&self, passes: u64) -> bool {
        let kernel = self.kernel.lock().unwrap();
        let last = kernel.passes + passes;
        let waited = self
            .passed
            .wait_timeout_while(kernel, PATIENCE * 5, |k| k.passes < last);
        !waited.unwrap().1.timed_out()
    }

    /// Makes the next pass find accesses, and waits until the one after it has begun, if any.
    pub fn access(&self) {
        let mut kernel = self.kernel.lock().unwrap();
        kernel.accesses = 2;
        let last = kernel.passes + 2;
        let waited = self
            .passed
            .wait_timeout_while(kernel, PATIENCE, |k| k.passes < last);
        waited.unwrap().0.accesses = 0;
    }

    /// Runs one pass of a kdamond.
    fn pass(&self) {
        let mut kernel = self.kernel.lock().unwrap();
        kernel.passes += 1;
        let accesses = std::mem::take(&mut kernel.accesses);
        // Each listener has a ring of its own, so earlier reports are gone.
        let head = kernel.ring.u64_at(ring::DATA_HEAD).load(Ordering::Relaxed);
        let tail = kernel.ring.u64_at(ring::DATA_TAIL);
        tail.store(head, Ordering::Relaxed);
        let is_on = |kdamond: &usize| self.text(&format!("{kdamond}/state")) == "on";
        let kdamond = (0..passes::KDAMONDS).find(is_on).unwrap_or(0);
        let regions = format!("{kdamond}/contexts/0/targets/0/regions");
        let number = |file: &str| {
            self.text(&format!("{regions}/{file}"))
                .parse()
                .unwrap_or(0u64)
        };
        if !kernel.is_deaf {
            for region in 0..number("nr_regions") {
                let (start, end) = (format!("{region}/start"), format!("{region}/end"));
                report(&kernel.ring, 0, number(&start), number(&end), accesses);
            }
        }
        if kernel.reports_strangers {
            report(&kernel.ring, 1, 0x20_0000, 0x40_0000, 1);
            report(&kernel.ring, 0, 0x20_1000, 0x40_0000, 1);
        }
        self.passed.notify_all();
    }

    /// A file's first line, which is all that sysfs would take of a write.
    pub fn text(&self, file: &str) -> String {
        let text = fs::read_to_string(self.root.join(ADMIN).join(file)).unwrap();
        text.lines().next().unwrap_or_default().into()
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.root.join(ADMIN).join(file), text).unwrap();
    }
}

/// Writes a region's report as the kernel does at the end of an aggregation.
fn report(mapped: &Mapping, target: u64, start: u64, end: u64, accesses: u32) {
    let raw = record(target, start, end, accesses);
    let mut bytes = demeter_linux::cpu::monotonic_ns().to_ne_bytes().to_vec();
    bytes.extend((raw.len() as u32).to_ne_bytes());
    bytes.extend(raw);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    let header = u64::from(ring::PERF_RECORD_SAMPLE) | (bytes.len() as u64 + 8) << 48;
    bytes.splice(..0, header.to_ne_bytes());
    let head = mapped.u64_at(ring::DATA_HEAD).load(Ordering::Relaxed);
    for (index, word) in bytes.chunks_exact(8).enumerate() {
        let place = (head as usize + index * 8) % RING_BYTES;
        let word = u64::from_ne_bytes(word.try_into().unwrap());
        mapped
            .u64_at(ring::CONTROL_BYTES + place)
            .store(word, Ordering::Relaxed);
    }
    mapped
        .u64_at(ring::DATA_HEAD)
        .store(head + bytes.len() as u64, Ordering::Release);
}

fn open_ring(root: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(root.join(RING))
        .unwrap()
}

/// A tracker on the fake kernel.
pub(in crate::tracker) fn tracker(damon: &FakeDamon) -> Result<DamonTracker, TrackerError> {
    let settings = Settings {
        root: damon.root.clone(),
        // A high CPU limit makes rests short.
        cpu_percent: 1e6,
        ..Settings::default()
    };
    let kdamonds = Kdamond::claim(&damon.root, passes::KDAMONDS, Statistic::TurnOff)?;
    let format = Format::parse(FORMAT).unwrap();
    let damon = damon.clone();
    let listen = move |_kdamond, _regions| {
        let ring = Aggregations::of(open_ring(&damon.root).into(), format, RING_BYTES);
        damon.pass();
        ring
    };
    DamonTracker::with(&settings, kdamonds, Box::new(listen), None)
}

/// A tracker of a process with four blocks, all of which it has observed.
fn watching() -> (tempfile::TempDir, FakeDamon, DamonTracker) {
    let root = tempfile::tempdir().unwrap();
    let damon = FakeDamon::new(root.path());
    map(root.path(), 8, 0x40_0000, 0xc0_0000);
    let mut tracker = tracker(&damon).unwrap();
    tracker.set_targets(&[Pid(8)]).unwrap();
    assert!(damon.wait(2), "it looks at once");
    (root, damon, tracker)
}

fn drain(tracker: &mut DamonTracker) -> Drained {
    tracker.drain(&mut vec![], 1000).unwrap()
}

#[test]
fn each_block_is_a_region_and_what_is_found_is_told_once() {
    let (_root, damon, mut tracker) = watching();
    assert_eq!(damon.text("0/contexts/0/operations"), "fvaddr");
    let regions = "0/contexts/0/targets/0/regions";
    assert_eq!(damon.text(&format!("{regions}/nr_regions")), "4");
    assert_eq!(
        damon.text(&format!("{regions}/3/start")),
        0xa0_0000.to_string()
    );
    assert_eq!(
        damon.text(&format!("{regions}/3/end")),
        0xc0_0000.to_string()
    );
    damon.access();
    let drained = drain(&mut tracker);
    assert!(drained.taken >= 8 && !drained.is_repeat, "{drained:?}");
    let hot: Vec<_> = tracker
        .observed()
        .iter()
        .filter(|seen| seen.events > 0)
        .collect();
    assert_eq!(hot.len(), 4);
    assert!(
        hot.iter()
            .all(|seen| seen.pid == Pid(8) && (2..6).contains(&seen.block.0))
    );
    tracker.pause().unwrap();
    assert!(drain(&mut tracker).is_repeat);
}

#[test]
fn memory_that_nobody_can_read_is_not_looked_at() {
    let root = tempfile::tempdir().unwrap();
    let damon = FakeDamon::new(root.path());
    map(root.path(), 8, 0x40_0000, 0xc0_0000);
    let reserved = "c00000-1000000000 ---p 0 00:00 0\n";
    let maps = root.path().join("proc/8/maps");
    let text = fs::read_to_string(&maps).unwrap() + reserved;
    fs::write(&maps, text).unwrap();
    let mut tracker = tracker(&damon).unwrap();
    tracker.set_targets(&[Pid(8)]).unwrap();
    assert!(damon.wait(2));
    assert_eq!(damon.text("0/contexts/0/targets/0/regions/nr_regions"), "4");
}

#[test]
fn a_gone_process_is_passed_over() {
    let root = tempfile::tempdir().unwrap();
    let damon = FakeDamon::new(root.path());
    map(root.path(), 8, 0x40_0000, 0x80_0000);
    let mut tracker = tracker(&damon).unwrap();
    tracker.set_targets(&[Pid(7), Pid(8)]).unwrap();
    damon.access();
    assert_eq!(damon.text("0/contexts/0/targets/nr_targets"), "1");
    assert_eq!(damon.text("0/contexts/0/targets/0/pid_target"), "8");
    drain(&mut tracker);
    assert!(tracker.observed().iter().all(|seen| seen.pid == Pid(8)));
}

#[test]
fn reports_of_other_regions_are_rejected() {
    let (_root, damon, mut tracker) = watching();
    damon.set(|kernel| kernel.reports_strangers = true);
    damon.wait(3);
    assert!(drain(&mut tracker).rejected >= 2);
    assert!(tracker.observed().iter().all(|seen| seen.pid == Pid(8)));
}

#[test]
fn a_pass_that_reports_nothing_ends_when_it_is_no_longer_wanted() {
    let (_root, damon, mut tracker) = watching();
    damon.set(|kernel| kernel.is_deaf = true);
    assert!(damon.wait(1));
    tracker.pause().unwrap();
    let began = Instant::now();
    drop(tracker);
    assert!(began.elapsed() < Duration::from_secs(2));
    assert_eq!(damon.text("0/state"), "off");
}

#[test]
fn a_kernel_that_refuses_our_regions_is_no_tracker() {
    let root = tempfile::tempdir().unwrap();
    let damon = FakeDamon::new(root.path());
    fs::remove_dir_all(
        root.path()
            .join(ADMIN)
            .join("0/contexts/0/targets/0/regions/0"),
    )
    .unwrap();
    let error = tracker(&damon).err().unwrap();
    assert!(matches!(error, TrackerError::Unavailable { .. }));
    assert!(error.to_string().contains("refuses regions"), "{error}");
    assert_eq!(damon.text("nr_kdamonds"), "0");
}

#[test]
fn other_peoples_kdamonds_are_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let damon = FakeDamon::new(root.path());
    damon.write("nr_kdamonds", "1\n");
    damon.write("0/state", "on\n");
    damon.write("0/contexts/0/operations", "paddr\n");
    let error = tracker(&damon).err().unwrap().to_string();
    assert!(error.contains("another program"), "{error}");
    assert_eq!(
        (damon.text("nr_kdamonds"), damon.text("0/state")),
        ("1".into(), "on".into())
    );
}

#[test]
fn what_a_dead_demeter_left_is_taken_over() {
    let root = tempfile::tempdir().unwrap();
    let damon = FakeDamon::new(root.path());
    let first = tracker(&damon).unwrap();
    let error = tracker(&damon).err().unwrap().to_string();
    assert!(error.contains("another Demeter"), "{error}");

    // The kernel releases a killed process's locks. Forgetting our tracker would keep the lock, so the file is replaced
    // by a copy.
    std::mem::forget(first);
    fs::remove_file(root.path().join(ADMIN).join("nr_kdamonds")).unwrap();
    damon.write("nr_kdamonds", "1\n");
    damon.write("0/state", "on\n");
    let _second = tracker(&damon).unwrap();
    assert_eq!(damon.text("0/state"), "off");
}

#[test]
fn no_damon_says_what_to_use() {
    let root = tempfile::tempdir().unwrap();
    let error = Kdamond::claim(root.path(), 1, Statistic::Leave)
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("CONFIG_DAMON_SYSFS"), "{error}");

    let damon = FakeDamon::new(root.path());
    damon.write("0/contexts/0/avail_operations", "vaddr\npaddr\n");
    let error = tracker(&damon).err().unwrap().to_string();
    assert!(error.contains("Linux 5.19"), "{error}");
    assert_eq!(damon.text("nr_kdamonds"), "0");
}
