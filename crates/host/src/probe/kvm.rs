//! How KVM works on this host.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;

use serde::Serialize;

/// `KVM_CHECK_EXTENSION` and `KVM_CAP_GUEST_MEMFD` (linux/kvm.h).
const KVM_CHECK_EXTENSION: libc::Ioctl = 0xAE03;
const KVM_CAP_GUEST_MEMFD: libc::c_int = 234;

/// Facts about KVM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct KvmReport {
    /// Whether /dev/kvm can be opened.
    pub device: bool,
    /// The CPU's extension: `vmx` or `svm`.
    pub extension: Option<&'static str>,
    /// Whether it has two-dimensional page tables (EPT, NPT).
    pub two_dimensions: Option<bool>,
    /// Whether these have access and dirty bits. Without them, KVM unmaps pages to detect accesses.
    pub access_bits: Option<bool>,
    /// Whether VMs may run VMs.
    pub nested: Option<bool>,
    /// Whether guests may have private memory, which cannot be moved.
    pub guest_memfd: Option<bool>,
    /// Whether KVM's counters in debugfs can be read.
    pub counters: bool,
}

impl KvmReport {
    pub(super) fn read(root: &Path) -> Self {
        let cpuinfo = fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
        let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
        let has = |flag| flags.is_some_and(|flags| flags.split_whitespace().any(|f| f == flag));
        let extension = ["vmx", "svm"].into_iter().find(|&flag| has(flag));
        let parameter = |module: &str, name: &str| {
            let path = root.join(format!("sys/module/{module}/parameters/{name}"));
            let text = fs::read_to_string(path).ok()?;
            Some(matches!(text.trim(), "Y" | "1"))
        };
        let (two_dimensions, access_bits, nested) = match extension {
            Some("vmx") => (
                parameter("kvm_intel", "ept"),
                parameter("kvm_intel", "eptad"),
                parameter("kvm_intel", "nested"),
            ),
            // AMD's nested page tables have the format of ordinary ones, with access bits.
            Some(_) => (
                parameter("kvm_amd", "npt"),
                parameter("kvm_amd", "npt"),
                parameter("kvm_amd", "nested"),
            ),
            None => (None, None, None),
        };
        let kvm = root.join("dev/kvm");
        let device = File::options().read(true).write(true).open(kvm).ok();
        let guest_memfd = device.as_ref().map(|kvm| {
            // SAFETY: the call takes a number by value and touches no memory of ours.
            let has =
                unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_CHECK_EXTENSION, KVM_CAP_GUEST_MEMFD) };
            has > 0
        });
        Self {
            device: device.is_some(),
            extension,
            two_dimensions,
            access_bits,
            nested,
            guest_memfd,
            counters: fs::read_dir(root.join("sys/kernel/debug/kvm")).is_ok(),
        }
    }
}
