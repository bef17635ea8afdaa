use std::fs::File;

use demeter_policy::GuestVirtAddr;

use super::*;

const RECORDS: u64 = 64;

/// The emulator's side: a fake PCI device in a fake root.
pub(crate) struct FakeDevice {
    memory: Mapping,
    layout: Layout,
}

impl FakeDevice {
    pub fn new(root: &Path, vcpus: u32) -> Self {
        let dir = root.join("sys/bus/pci/devices/0000:00:05.0");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("vendor"), "0x1af4\n").unwrap();
        fs::write(dir.join("device"), "0x1110\n").unwrap();
        let layout = Layout {
            vcpus,
            ring_records: RECORDS as u32,
        };
        let file = File::create_new(dir.join("resource2")).unwrap();
        file.set_len(1 << 20).unwrap();
        drop(file);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(dir.join("resource2"))
            .unwrap();
        let memory = Mapping::new(&file, layout.bytes()).unwrap();
        for (index, field) in [ring::MAGIC, ring::VERSION, vcpus, RECORDS as u32]
            .into_iter()
            .enumerate()
        {
            memory.u32_at(index * 4).store(field, Ordering::Relaxed);
        }
        Self { memory, layout }
    }

    pub fn period(&self) -> u32 {
        self.memory
            .u32_at(ring::control::PERIOD)
            .load(Ordering::Relaxed)
    }

    pub fn set(&self, vcpu: u32, field: usize, value: u64) {
        self.memory
            .u64_at(self.layout.ring(vcpu) + field)
            .store(value, Ordering::Release);
    }

    /// Writes a record like the plugin: dropped if the ring is full.
    pub fn push(&self, vcpu: u32, gva: u64, gpa: u64) {
        let start = self.layout.ring(vcpu);
        let word = |field: usize| self.memory.u64_at(start + field);
        let head = word(ring::header::HEAD).load(Ordering::Relaxed);
        if head - word(ring::header::TAIL).load(Ordering::Acquire) == RECORDS {
            word(ring::header::DROPPED).fetch_add(1, Ordering::Relaxed);
            return;
        }
        let record = ring::RING_HEADER_BYTES + (head % RECORDS) as usize * ring::RECORD_BYTES;
        word(record).store(gva, Ordering::Relaxed);
        word(record + 8).store(gpa, Ordering::Relaxed);
        self.set(vcpu, ring::header::HEAD, head + 1);
    }
}

/// Gives a process of the fake root one mapping.
pub(in crate::tracker) fn map(root: &Path, pid: u32, start: u64, end: u64) {
    let dir = root.join(format!("proc/{pid}"));
    fs::create_dir_all(&dir).unwrap();
    fs::write(
        dir.join("maps"),
        format!("{start:x}-{end:x} rw-p 0 00:00 0\n"),
    )
    .unwrap();
}

struct Lab {
    device: FakeDevice,
    tracker: LabTracker,
    root: tempfile::TempDir,
}

/// A tracker of process 7, which maps 0x10000-0x20000.
fn lab(vcpus: u32) -> Lab {
    let root = tempfile::tempdir().unwrap();
    let device = FakeDevice::new(root.path(), vcpus);
    map(root.path(), 7, 0x10000, 0x20000);
    let settings = Settings {
        root: root.path().into(),
        ..Settings::default()
    };
    let mut tracker = LabTracker::new(&settings).unwrap();
    tracker.set_targets(&[Pid(7)]).unwrap();
    Lab {
        device,
        tracker,
        root,
    }
}

impl Lab {
    fn drain(&mut self, max: usize) -> (Vec<u64>, Drained) {
        let mut out = Vec::new();
        let drained = self.tracker.drain(&mut out, max).unwrap();
        (out.iter().map(|sample| sample.addr.0).collect(), drained)
    }
}

#[test]
fn settings_reach_the_emulator_and_leave_with_the_tracker() {
    let lab = lab(1);
    let threshold = lab.device.memory.u32_at(ring::control::THRESHOLD_NS);
    assert_eq!(lab.device.period(), 4093);
    assert_eq!(threshold.load(Ordering::Relaxed), 64);
    drop(lab.tracker);
    assert_eq!(lab.device.period(), 0);
}

#[test]
fn a_ring_that_wraps_is_read_in_order() {
    let mut lab = lab(1);
    for round in 0..3 {
        let addrs: Vec<u64> = (0..50).map(|i| 0x10000 + round * 0x1000 + i * 8).collect();
        addrs
            .iter()
            .for_each(|&addr| lab.device.push(0, addr, addr));
        let (found, drained) = lab.drain(1000);
        assert_eq!(found, addrs);
        assert_eq!(
            drained,
            Drained {
                taken: 50,
                ..Drained::default()
            }
        );
    }
}

#[test]
fn what_the_emulator_dropped_is_lost_once() {
    let mut lab = lab(1);
    (0..RECORDS + 5).for_each(|i| lab.device.push(0, 0x10000 + i, 0));
    assert_eq!(
        lab.drain(1000).1,
        Drained {
            taken: RECORDS,
            lost: 5,
            rejected: 0,
            is_repeat: false,
        }
    );
    assert_eq!(lab.drain(1000).1, Drained::default());
}

#[test]
fn a_small_quota_is_shared_between_vcpus() {
    let mut lab = lab(2);
    for vcpu in 0..2 {
        (0..10).for_each(|i| {
            lab.device
                .push(vcpu, 0x10000 + u64::from(vcpu) * 0x1000 + i, 0)
        });
    }
    let (found, drained) = lab.drain(8);
    assert_eq!(found.iter().filter(|&&addr| addr < 0x11000).count(), 4);
    assert_eq!(
        drained,
        Drained {
            taken: 8,
            lost: 12,
            rejected: 0,
            is_repeat: false,
        }
    );
}

#[test]
fn strangers_and_kernel_addresses_are_rejected() {
    let mut lab = lab(1);
    lab.device.push(0, 0x9_0000, 0);
    lab.device.push(0, 0xffff_8880_0000_0000, 0);
    lab.device.push(0, 0x10008, 0);
    assert_eq!(
        lab.drain(10),
        (
            vec![0x10008],
            Drained {
                taken: 1,
                lost: 0,
                rejected: 2,
                is_repeat: false,
            }
        )
    );
}

#[test]
fn new_mappings_are_found_when_many_addresses_match_nobody() {
    let mut lab = lab(1);
    lab.drain(10);
    map(lab.root.path(), 7, 0x50000, 0x60000);
    lab.device.push(0, 0x50000, 0);
    assert_eq!(lab.drain(10).0, [0x50000]);
}

#[test]
fn a_lying_head_is_corrupt_once_and_then_in_step() {
    let mut lab = lab(2);
    for head in [RECORDS + 1, u64::MAX, 1 << 63] {
        lab.device.push(1, 0x10000, 0);
        lab.device.set(0, ring::header::HEAD, head);
        let mut out = Vec::new();
        let error = lab.tracker.drain(&mut out, 10).unwrap_err();
        assert!(matches!(error, TrackerError::Corrupt { .. }), "{error}");
        // The intact ring's records are not lost.
        assert_eq!(out.len(), 1);
        lab.device.set(0, ring::header::HEAD, head.wrapping_add(1));
        assert_eq!(lab.drain(10).1.rejected, 1);
        lab.device.set(0, ring::header::HEAD, 0);
        lab.device.set(0, ring::header::TAIL, 0);
    }
}

#[test]
fn a_drop_counter_that_runs_backwards_loses_nothing() {
    let mut lab = lab(1);
    lab.device.set(0, ring::header::DROPPED, 100);
    assert_eq!(lab.drain(1).1.lost, 100);
    lab.device.set(0, ring::header::DROPPED, 3);
    assert_eq!(lab.drain(1).1.lost, 0);
}

#[test]
fn a_corrupt_control_page_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let device = FakeDevice::new(root.path(), 1);
    device.memory.u32_at(8).store(u32::MAX, Ordering::Relaxed);
    let settings = Settings {
        root: root.path().into(),
        ..Settings::default()
    };
    let error = LabTracker::new(&settings).err().unwrap();
    assert!(matches!(error, TrackerError::Corrupt { .. }), "{error}");
}

#[test]
fn only_one_demeter_reads_the_samples() {
    let lab = lab(1);
    let settings = Settings {
        root: lab.root.path().into(),
        ..Settings::default()
    };
    let error = LabTracker::new(&settings).err().unwrap().to_string();
    assert!(error.contains("another Demeter"), "{error}");
    assert_eq!(lab.device.period(), 4093);
}

#[test]
fn no_device_says_how_to_get_one() {
    let root = tempfile::tempdir().unwrap();
    let settings = Settings {
        root: root.path().into(),
        ..Settings::default()
    };
    let error = LabTracker::new(&settings).err().unwrap().to_string();
    assert!(
        error.contains("ivshmem") && error.contains("--on lab"),
        "{error}"
    );
}

#[test]
fn samples_keep_their_process() {
    let mut lab = lab(1);
    map(lab.root.path(), 8, 0x30000, 0x40000);
    lab.tracker.set_targets(&[Pid(7), Pid(8), Pid(9)]).unwrap();
    lab.device.push(0, 0x30000, 0);
    let mut out = Vec::new();
    lab.tracker.drain(&mut out, 10).unwrap();
    let expected = Sample {
        pid: Pid(8),
        addr: GuestVirtAddr(0x30000),
        weight: 1,
    };
    assert_eq!(out, [expected]);
}
