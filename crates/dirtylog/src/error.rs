//! Errors, each with a hint.

use std::io;
use std::path::PathBuf;

use crate::settings::SettingsError;

/// An error that prevents a measurement.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host has no KVM.
    #[error(
        "there is no {}: load kvm_intel or kvm_amd; in a VM, have its host allow nested virtualization",
        .0.display()
    )]
    NoKvm(PathBuf),
    /// KVM may not be opened.
    #[error("{} may not be opened: run as root or as a member of the group kvm", .0.display())]
    Denied(PathBuf),
    /// KVM lacks a capability that a setting needs.
    #[error("KVM of this kernel has no {what}: {hint}")]
    Absent {
        /// The capability.
        what: &'static str,
        /// The alternative.
        hint: &'static str,
    },
    /// The settings contradict each other.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Too few huge pages are reserved.
    #[error(
        "backing {backing} takes {needed} free huge pages of {size_kib} KiB, and there are {free}: \
         echo {} > /sys/kernel/mm/hugepages/hugepages-{size_kib}kB/nr_hugepages, or take another --backing",
        needed + total - free
    )]
    HugePages {
        /// The requested backing.
        backing: crate::Backing,
        /// Size of a huge page, KiB.
        size_kib: u64,
        /// Number of pages needed.
        needed: u64,
        /// Number of free pages.
        free: u64,
        /// Number of reserved pages.
        total: u64,
    },
    /// Neither the kernel nor the CPU has huge pages of this size.
    #[error("this host has no huge pages of {size_kib} KiB: take another --backing")]
    NoHugePages {
        /// Size of a huge page, KiB.
        size_kib: u64,
    },
    /// The host would run out of memory.
    #[error(
        "{needed_mib} MiB of memory are needed, and {available_mib} MiB are available: lower --vcpus or --slice-mib"
    )]
    Memory {
        /// Memory of all slices.
        needed_mib: u64,
        /// Available memory, according to the kernel.
        available_mib: u64,
    },
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    Call {
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// KVM opens, but cannot run the guest's few instructions.
    #[error(
        "KVM cannot run the guest of this measurement: virtual CPU {vcpu} ended with {reason}; \
         run it on a host with hardware virtualization"
    )]
    Exit {
        /// Number of the virtual CPU.
        vcpu: u32,
        /// KVM's reason.
        reason: String,
    },
    /// The virtual CPUs make no progress.
    #[error(
        "after {limit_s} s the virtual CPUs had not swept their slices {doing}: raise --pass-limit-s, or lower --slice-mib"
    )]
    Slow {
        /// The time limit.
        limit_s: f64,
        /// The part of the measurement.
        doing: &'static str,
    },
    /// A virtual CPU does not stop on request.
    #[error("a virtual CPU does not stop within {0} s; it ends with this process")]
    Stuck(u64),
    /// The caller has aborted the measurement.
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// The error of the last system call.
    pub(crate) fn last(what: &'static str) -> Self {
        Self::Call {
            what,
            source: io::Error::last_os_error(),
        }
    }

    /// The error of a KVM call.
    pub(crate) fn kvm(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |error| Self::Call {
            what,
            source: io::Error::from_raw_os_error(error.errno()),
        }
    }
}
