//! KVM's capabilities for dirty logging on this kernel.

use std::fs;
use std::path::Path;

use kvm_bindings::{
    KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES, KVM_CAP_BINARY_STATS_FD, KVM_CAP_DIRTY_LOG_RING,
    KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
};
use kvm_ioctls::Kvm;
use serde::Serialize;

use crate::error::Error;
use crate::settings::{Protect, Settings};

/// How huge pages are split before their parts are write-protected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum EagerSplit {
    /// x86: by the parameter `eager_page_split` of the module kvm, for all VMs.
    Parameter {
        /// Whether it is on.
        on: bool,
    },
    /// Arm: by a chunk size per VM, one of these.
    Chunk {
        /// KiB.
        sizes_kib: Vec<u64>,
    },
    /// Not supported, or unknown.
    Unknown,
}

/// The capabilities of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Offer {
    /// The kernel's release.
    pub kernel: String,
    /// The log can be cleared in parts, separately from reading it.
    pub manual: bool,
    /// The log can start with all pages in it.
    pub initially_set: bool,
    /// Eager splitting of huge pages.
    pub eager_split: EagerSplit,
    /// The CPU itself logs written pages (Intel's PML), so that only splits fault.
    pub pml: Option<bool>,
    /// Each virtual CPU can have a ring of dirty pages.
    pub ring: bool,
    /// KVM's counters can be read.
    pub counters: bool,
    /// Maximum number of virtual CPUs.
    pub vcpus_max: usize,
}

impl Offer {
    /// Reads KVM's capabilities, and the modules' parameters below `root`.
    pub(crate) fn ask(kvm: &Kvm, root: &Path) -> Self {
        let bits = |cap: u32| kvm.check_extension_raw(cap.into()).max(0) as u32;
        let manual = bits(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2);
        let parameter = |path: &str| {
            let text = fs::read_to_string(root.join("sys/module").join(path)).ok()?;
            Some(matches!(text.trim(), "Y" | "1"))
        };
        // KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE returns a VM's present setting, so it is no use here. The list of sizes
        // was added at the same time.
        let sizes = bits(KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES);
        let eager_split = if sizes > 0 {
            let sizes = (0..32).filter(|bit| sizes >> bit & 1 == 1);
            EagerSplit::Chunk {
                sizes_kib: sizes.map(|bit| (1u64 << bit) >> 10).collect(),
            }
        } else {
            match parameter("kvm/parameters/eager_page_split") {
                Some(on) => EagerSplit::Parameter { on },
                None => EagerSplit::Unknown,
            }
        };
        let release = fs::read_to_string(root.join("proc/sys/kernel/osrelease"));
        Self {
            kernel: release.map_or_else(|_| "unknown".into(), |text| text.trim().into()),
            manual: manual & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE != 0,
            initially_set: manual & KVM_DIRTY_LOG_INITIALLY_SET != 0,
            eager_split,
            pml: parameter("kvm_intel/parameters/pml"),
            ring: bits(KVM_CAP_DIRTY_LOG_RING) > 0 || bits(KVM_CAP_DIRTY_LOG_RING_ACQ_REL) > 0,
            counters: bits(KVM_CAP_BINARY_STATS_FD) > 0,
            vcpus_max: kvm.get_max_vcpus(),
        }
    }

    /// The available write protection that costs least when logging is enabled.
    pub fn gentlest(&self) -> Protect {
        match (self.initially_set, self.manual) {
            (true, _) => Protect::InitiallySet,
            (false, true) => Protect::Manual,
            (false, false) => Protect::Get,
        }
    }

    /// Checks that the host supports these settings.
    ///
    /// # Errors
    /// The first missing capability.
    pub fn allows(&self, settings: &Settings) -> Result<(), Error> {
        let absent = |what, hint| Err(Error::Absent { what, hint });
        match settings.protect {
            Protect::Manual if !self.manual => {
                return absent(
                    "manual protection",
                    "take --protect get, or Linux 5.2 or later",
                );
            }
            Protect::InitiallySet if !self.initially_set => {
                return absent(
                    "log that begins with all pages",
                    "take --protect get or manual, or Linux 5.7 or later",
                );
            }
            _ => {}
        }
        if settings.eager_split_kib.is_some()
            && !matches!(self.eager_split, EagerSplit::Chunk { .. })
        {
            return absent(
                "eager splitting by chunks",
                "it needs Arm and Linux 6.5; on x86 set kvm.eager_page_split instead",
            );
        }
        if settings.vcpus as usize > self.vcpus_max {
            return absent("support for so many virtual CPUs", "lower --vcpus");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_lacks_is_told() {
        let mut offer = Offer {
            kernel: "6.12".into(),
            manual: true,
            initially_set: true,
            eager_split: EagerSplit::Parameter { on: true },
            pml: None,
            ring: false,
            counters: true,
            vcpus_max: 2,
        };
        let settings = Settings::default();
        assert!(offer.allows(&settings).is_ok());
        assert_eq!(offer.gentlest(), Protect::InitiallySet);
        let said =
            |offer: &Offer, settings: &Settings| offer.allows(settings).unwrap_err().to_string();
        offer.initially_set = false;
        assert!(said(&offer, &settings).contains("--protect get or manual"));
        let manual = Settings {
            protect: Protect::Manual,
            ..settings
        };
        assert!(offer.allows(&manual).is_ok());
        assert_eq!(offer.gentlest(), Protect::Manual);
        offer.manual = false;
        assert_eq!(offer.gentlest(), Protect::Get);
        assert!(said(&offer, &manual).contains("Linux 5.2"));
        let get = Settings {
            protect: Protect::Get,
            eager_split_kib: Some(2048),
            ..manual
        };
        assert!(said(&offer, &get).contains("kvm.eager_page_split"));
        let many = Settings {
            eager_split_kib: None,
            vcpus: 3,
            ..get
        };
        assert!(said(&offer, &many).contains("lower --vcpus"));
    }
}
