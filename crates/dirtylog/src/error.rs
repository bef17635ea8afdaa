//! Errors, each with a hint.

use std::io;
use std::path::PathBuf;

use crate::settings::SettingsError;

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host has no KVM.
    #[error(
        "there is no {}: load kvm_intel or kvm_amd; in a VM, have its host allow nested virtualization",
        .0.display()
    )]
    NoKvm(PathBuf),
    /// We may not use it.
    #[error("{} may not be opened: run as root or as a member of the group kvm", .0.display())]
    Denied(PathBuf),
    /// The kernel lacks what a setting needs.
    #[error("KVM of this kernel has no {what}: {hint}")]
    Absent {
        /// The capability.
        what: &'static str,
        /// What to do instead.
        hint: &'static str,
    },
    /// What was asked for contradicts itself.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Too few huge pages are set aside.
    #[error(
        "backing {backing} takes {needed} free huge pages of {size_kib} KiB, and there are {free}: \
         echo {} > /sys/kernel/mm/hugepages/hugepages-{size_kib}kB/nr_hugepages, or take another --backing",
        needed + total - free
    )]
    HugePages {
        /// The backing that was asked for.
        backing: crate::Backing,
        /// Size of each.
        size_kib: u64,
        /// How many it takes.
        needed: u64,
        /// How many nobody uses.
        free: u64,
        /// How many are set aside in all.
        total: u64,
    },
    /// Neither the kernel nor the CPU has huge pages of this size.
    #[error("this host has no huge pages of {size_kib} KiB: take another --backing")]
    NoHugePages {
        /// Size of each.
        size_kib: u64,
    },
    /// The host would run out of memory.
    #[error(
        "{needed_mib} MiB of memory are needed, and {available_mib} MiB are available: lower --vcpus or --slice-mib"
    )]
    Memory {
        /// What all slices take.
        needed_mib: u64,
        /// What the kernel holds for available.
        available_mib: u64,
    },
    /// A call failed that should not.
    #[error("cannot {what}: {source}")]
    Call {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// KVM opens, but it cannot run even our few instructions.
    #[error(
        "KVM cannot run the guest of this measurement: virtual CPU {vcpu} ended with {reason}; \
         run it on a host with hardware virtualization"
    )]
    Exit {
        /// Which one.
        vcpu: u32,
        /// KVM's reason.
        reason: String,
    },
    /// The virtual CPUs do not come on.
    #[error(
        "after {limit_s} s the virtual CPUs had not swept their slices {doing}: raise --pass-limit-s, or lower --slice-mib"
    )]
    Slow {
        /// The bound.
        limit_s: f64,
        /// In what part of the measurement.
        doing: &'static str,
    },
    /// A virtual CPU does not end though its guest was told to.
    #[error("a virtual CPU does not stop within {0} s; it ends with this process")]
    Stuck(u64),
    /// Whoever started us wants no more of it.
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// What a call of the system said last.
    pub(crate) fn last(what: &'static str) -> Self {
        Self::Call {
            what,
            source: io::Error::last_os_error(),
        }
    }

    /// What a call of KVM said.
    pub(crate) fn kvm(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |error| Self::Call {
            what,
            source: io::Error::from_raw_os_error(error.errno()),
        }
    }
}
