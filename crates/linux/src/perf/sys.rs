//! The system calls of perf events.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use demeter_policy::Pid;

/// The first 96 bytes of `struct perf_event_attr` (PERF_ATTR_SIZE_VER3, linux/perf_event.h); the kernel assumes zeros
/// for the rest.
#[repr(C)]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attr {
    /// `type`.
    pub kind: u32,
    /// Size of this structure.
    pub size: u32,
    /// The event within its type.
    pub config: u64,
    /// Events per sample.
    pub sample_period: u64,
    /// Fields of a sample, from [`sample`].
    pub sample_type: u64,
    /// Format of read(2).
    pub read_format: u64,
    /// Bits of [`flag`].
    pub flags: u64,
    /// Samples per wake-up.
    pub wakeup_events: u32,
    /// For breakpoints.
    pub bp_type: u32,
    /// Second part of the event.
    pub config1: u64,
    /// Third part of the event.
    pub config2: u64,
    /// Sampled branches.
    pub branch_sample_type: u64,
    /// Sampled user registers.
    pub sample_regs_user: u64,
    /// Size of the sampled user stack.
    pub sample_stack_user: u32,
    /// The clock of sample times, with [`flag::USE_CLOCKID`].
    pub clockid: i32,
}

/// Bits of [`Attr::flags`].
pub mod flag {
    /// The event starts disabled.
    pub const DISABLED: u64 = 1 << 0;
    /// Exclude the kernel.
    pub const EXCLUDE_KERNEL: u64 = 1 << 5;
    /// Exclude hypervisors.
    pub const EXCLUDE_HV: u64 = 1 << 6;
    /// Use the clock in [`Attr::clockid`](super::Attr::clockid).
    pub const USE_CLOCKID: u64 = 1 << 25;
    /// Position of the two bits of `precise_ip`.
    pub const PRECISE_IP_SHIFT: u32 = 15;
}

/// Bits of [`Attr::sample_type`].
pub mod sample {
    /// Process and thread.
    pub const TID: u64 = 1 << 1;
    /// Time of the sample.
    pub const TIME: u64 = 1 << 2;
    /// Address of the access.
    pub const ADDR: u64 = 1 << 3;
    /// The tracepoint's record.
    pub const RAW: u64 = 1 << 10;
}

const IOC_ENABLE: libc::Ioctl = 0x2400;
const IOC_DISABLE: libc::Ioctl = 0x2401;
const IOC_PERIOD: libc::Ioctl = 0x4008_2404_u32 as libc::Ioctl;
const IOC_FLAG_GROUP: libc::c_int = 1;
const FLAG_FD_CLOEXEC: libc::c_ulong = 1 << 3;

/// The threads that an event counts.
#[derive(Debug, Clone, Copy)]
pub enum Scope {
    /// All processes on this CPU.
    Cpu(u32),
    /// This thread on every CPU.
    Thread(Pid),
}

/// Opens an event.
pub fn open(attr: &Attr, scope: Scope, group: Option<&OwnedFd>) -> io::Result<OwnedFd> {
    const ANY: libc::c_int = -1;
    let number = |number| libc::c_int::try_from(number).map_err(io::Error::other);
    let (thread, cpu) = match scope {
        Scope::Cpu(cpu) => (ANY, number(cpu)?),
        Scope::Thread(Pid(thread)) => (number(thread)?, ANY),
    };
    let group = group.map_or(-1, |fd| fd.as_raw_fd());
    // SAFETY: `attr` is a valid perf_event_attr whose `size` is its own; the kernel only reads it.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            std::ptr::from_ref(attr),
            thread,
            cpu,
            group,
            FLAG_FD_CLOEXEC,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call returned a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Sets the events per sample from now on (PERF_EVENT_IOC_PERIOD in linux/perf_event.h).
pub fn set_period(event: &OwnedFd, period: u64) -> io::Result<()> {
    // SAFETY: the request reads a u64 that outlives the call.
    match unsafe { libc::ioctl(event.as_raw_fd(), IOC_PERIOD, &raw const period) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Switches an event and its group on or off.
pub fn enable(event: &OwnedFd, on: bool) -> io::Result<()> {
    let request = if on { IOC_ENABLE } else { IOC_DISABLE };
    // SAFETY: these requests take a flag by value and access no memory of ours.
    match unsafe { libc::ioctl(event.as_raw_fd(), request, IOC_FLAG_GROUP) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn attributes_have_the_kernels_size() {
        assert_eq!(size_of::<super::Attr>(), 96);
    }
}
