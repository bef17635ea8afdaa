//! Pieces of programs that tests run as the first process of a VM.

use std::ffi::CString;
use std::io;
use std::ops::Range;
use std::ptr;

use demeter_guest::tracker::{Drained, Tracker, TrackerError};
use demeter_policy::{BLOCK_SIZE, GuestVirtAddr, PAGE_SIZE, Pid, Sample};

/// Mounts what a program needs to inspect the kernel, and `more` file systems by kind and folder.
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
    Ok(())
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

/// Writes to each page of a mapping that nobody else has.
pub fn touch(start: u64, bytes: u64) {
    for addr in (start..start + bytes).step_by(PAGE_SIZE as usize) {
        // SAFETY: within the mapping, which nobody else has.
        unsafe { ptr::with_exposed_provenance_mut::<u8>(addr as usize).write_volatile(1) };
    }
}

/// Samples of hot memory, as a sampling unit would take them.
pub struct HotMemory(pub Vec<(Pid, Range<u64>)>);

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
        for (pid, hot) in &self.0 {
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
