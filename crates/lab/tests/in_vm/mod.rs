//! Pieces of programs that tests run as the first process of a VM.

use std::ffi::CString;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::ptr;
use std::sync::{Arc, Mutex};

use demeter_guest::agent::{Agent, Effects};
use demeter_guest::config::Config;
use demeter_guest::latency::LoadProbe;
use demeter_guest::pages::LivePages;
use demeter_guest::status::StatusCell;
use demeter_guest::targets::TargetFinder;
use demeter_guest::tracker::{Drained, Tracker, TrackerError};
use demeter_policy::{BLOCK_SIZE, GuestVirtAddr, NodeId, PAGE_SIZE, Pid, Sample};

/// Mounts what a program needs to inspect the kernel, and `more` file systems by kind and folder. The kernel's own balancing
/// is off from then on: it would move hot memory without an agent.
pub fn mount_all(more: &[(&str, &str)]) -> io::Result<()> {
    let usual = [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")];
    for &(kind, target) in usual.iter().chain(more) {
        let (kind, target) = (CString::new(kind)?, CString::new(target)?);
        let (kind, target) = (kind.as_ptr(), target.as_ptr());
        // SAFETY: C strings that outlive the call; no data is passed.
        if unsafe { libc::mount(kind, target, kind, 0, ptr::null()) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    fs::write("/proc/sys/kernel/numa_balancing", "0")
}

/// Takes memory of a node from now on, or as the kernel likes.
pub fn prefer(node: Option<u32>) {
    let mask = node.map(|node| 1u64 << node);
    let (mode, mask, bits) = match &mask {
        Some(mask) => (libc::MPOL_PREFERRED, ptr::from_ref(mask), 64),
        None => (libc::MPOL_DEFAULT, ptr::null(), 0),
    };
    // SAFETY: the mask has that many bits, and outlives the call.
    let failed = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask, bits) };
    assert_eq!(failed, 0, "{}", io::Error::last_os_error());
}

/// Maps memory that begins at a block's border, shared with later children or not.
pub fn map(bytes: u64, sharing: i32) -> u64 {
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        sharing | libc::MAP_ANONYMOUS,
    );
    let len = (bytes + BLOCK_SIZE) as usize;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let start = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED, "{}", io::Error::last_os_error());
    (start as u64).next_multiple_of(BLOCK_SIZE)
}

/// An agent that manages processes by samples. `is_slow` tells nodes whose memory is much slower than that of others.
pub fn agent(
    pids: &[Pid],
    tracker: impl Tracker + 'static,
    nodes: Range<u32>,
    is_slow: impl Fn(u32) -> bool,
    status: &StatusCell,
) -> Agent {
    let config = Config {
        pids: pids.iter().map(|pid| pid.0).collect(),
        ..Config::default()
    };
    let latency = |node| (NodeId(node), if is_slow(node) { 1 << 20 } else { 100 });
    let effects = Effects {
        finder: TargetFinder::new(Path::new("/"), config.targets().unwrap()),
        tracker: Box::new(tracker),
        pages: Box::new(LivePages::default()),
        measured_ns: nodes.map(latency).collect(),
        load: LoadProbe::default(),
        cpus: 1 << 20,
    };
    Agent::new("/".into(), config, effects, status.clone()).unwrap()
}

/// Writes to each page of a mapping that nobody else has.
pub fn touch(start: u64, bytes: u64) {
    for addr in (start..start + bytes).step_by(PAGE_SIZE as usize) {
        // SAFETY: within the mapping, which nobody else has.
        unsafe { ptr::with_exposed_provenance_mut::<u8>(addr as usize).write_volatile(1) };
    }
}

/// Memory that is hot.
pub type Hot = Vec<(Pid, Range<u64>)>;

/// Samples of hot memory, as a sampling unit would take them.
pub struct HotMemory(pub Arc<Mutex<Hot>>);

impl HotMemory {
    /// Samples of this memory.
    pub fn of(hot: Hot) -> Self {
        Self(Arc::new(Mutex::new(hot)))
    }
}

impl Tracker for HotMemory {
    fn name(&self) -> &'static str {
        "hot memory"
    }

    fn loads_per_sample(&self) -> Option<u32> {
        Some(1 << 10)
    }

    fn set_targets(&mut self, _: &[Pid]) -> Result<(), TrackerError> {
        Ok(())
    }

    fn drain(&mut self, out: &mut Vec<Sample>, _max: usize) -> Result<Drained, TrackerError> {
        for (pid, hot) in self.0.lock().unwrap().iter() {
            let sample = |addr| Sample {
                pid: *pid,
                addr: GuestVirtAddr(addr),
                weight: 1,
            };
            out.extend(hot.clone().step_by(BLOCK_SIZE as usize / 16).map(sample));
        }
        Ok(Drained {
            taken: out.len() as u64,
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
