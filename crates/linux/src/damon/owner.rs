//! Other users of DAMON.
//!
//! The kernel's own users of DAMON run exclusively. While one runs, no kdamond of sysfs starts, and the other way round;
//! both get EBUSY (`damon_start` in `mm/damon/core.c`). Each of them has a parameter `enabled`.
//! DAMON_STAT only counts, and kernels from 6.17 on may start it at boot. All others were enabled by somebody.

use std::fmt::{self, Display, Formatter};
use std::fs;
use std::path::Path;

/// The parameter of DAMON_STAT.
pub(super) const STATISTIC: &str = "sys/module/damon_stat/parameters/enabled";

/// Modules that somebody enables, with their names in the kernel's documentation.
const MODULES: [(&str, &str); 5] = [
    ("damon_reclaim", "DAMON_RECLAIM"),
    ("damon_lru_sort", "DAMON_LRU_SORT"),
    ("damon_sample_mtier", "the sample module mtier"),
    ("damon_sample_prcl", "the sample module prcl"),
    ("damon_sample_wsse", "the sample module wsse"),
];

/// A user of DAMON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// DAMON_STAT, the statistic that the kernel starts by itself.
    Statistic,
    /// A module that somebody has enabled.
    Module {
        /// Below `/sys/module`.
        module: &'static str,
        /// In the kernel's documentation.
        name: &'static str,
    },
    /// Kdamonds that somebody has set up through sysfs.
    Kdamonds,
    /// The kernel says that somebody has it, and not who.
    Unknown,
}

impl Owner {
    /// The kernel's own user of DAMON that is enabled, if one is.
    pub fn in_kernel(root: &Path) -> Option<Self> {
        let module = MODULES.iter().find(|(module, _)| is_on(root, module));
        module
            .map(|&(module, name)| Self::Module { module, name })
            .or_else(|| is_on(root, "damon_stat").then_some(Self::Statistic))
    }

    /// How to free DAMON.
    pub fn hint(&self) -> String {
        match self {
            Self::Statistic => format!("echo N > /{STATISTIC}"),
            Self::Module { module, .. } => {
                format!("echo N > /sys/module/{module}/parameters/enabled")
            }
            Self::Kdamonds => "stop who set them up, for example by damo stop".into(),
            Self::Unknown => "disable the kernel module that uses DAMON".into(),
        }
    }
}

impl Display for Owner {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Statistic => {
                f.write_str("DAMON_STAT, a statistic that the kernel starts by itself")
            }
            Self::Module { name, .. } => f.write_str(name),
            Self::Kdamonds => {
                f.write_str("somebody else, by kdamonds in /sys/kernel/mm/damon/admin")
            }
            Self::Unknown => f.write_str("a kernel module"),
        }
    }
}

/// Whether a module is enabled, and its kdamond runs as far as it tells. One whose parameters cannot be read is not.
fn is_on(root: &Path, module: &str) -> bool {
    let parameter = |name: &str| {
        let file = root.join(format!("sys/module/{module}/parameters/{name}"));
        fs::read_to_string(file).map(|text| text.trim().to_owned())
    };
    parameter("enabled").is_ok_and(|text| matches!(text.as_str(), "Y" | "1"))
        && parameter("kdamond_pid").map_or(true, |pid| pid != "-1")
}
