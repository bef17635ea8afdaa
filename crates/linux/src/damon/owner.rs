//! Finds other users of DAMON.
//!
//! The kernel's own users of DAMON run exclusively. While one of them runs, no kdamond of sysfs starts, and vice versa:
//! both get EBUSY (`damon_start` in `mm/damon/core.c`). Each of them has a parameter `enabled`. DAMON_STAT only counts,
//! and kernels since 6.17 may start it at boot. A person has enabled the others.

use std::fmt::{self, Display, Formatter};
use std::fs;
use std::path::Path;

/// DAMON_STAT's parameter.
pub(super) const STATISTIC: &str = "sys/module/damon_stat/parameters/enabled";

/// Other modules that use DAMON, with their names in the kernel's documentation.
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
    /// DAMON_STAT, a statistic that the kernel starts by itself.
    Statistic,
    /// A kernel module that was enabled.
    Module {
        /// Its directory in `/sys/module`.
        module: &'static str,
        /// Its name in the kernel's documentation.
        name: &'static str,
    },
    /// Kdamonds that were set up through sysfs.
    Kdamonds,
    /// The kernel reports a user without its name.
    Unknown,
}

impl Owner {
    /// The enabled kernel module that uses DAMON, if any.
    pub fn in_kernel(root: &Path) -> Option<Self> {
        let module = MODULES.iter().find(|(module, _)| is_on(root, module));
        module
            .map(|&(module, name)| Self::Module { module, name })
            .or_else(|| is_on(root, "damon_stat").then_some(Self::Statistic))
    }

    /// The way to free DAMON.
    pub fn hint(&self) -> String {
        match self {
            Self::Statistic => format!("echo N > /{STATISTIC}"),
            Self::Module { module, .. } => {
                format!("echo N > /sys/module/{module}/parameters/enabled")
            }
            Self::Kdamonds => {
                "stop the program that set them up, for example with damo stop".into()
            }
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
                f.write_str("another program, with kdamonds in /sys/kernel/mm/damon/admin")
            }
            Self::Unknown => f.write_str("a kernel module"),
        }
    }
}

/// Whether a module is enabled and its kdamond runs, if it reports that. Unreadable parameters mean no.
fn is_on(root: &Path, module: &str) -> bool {
    let parameter = |name: &str| {
        let file = root.join(format!("sys/module/{module}/parameters/{name}"));
        fs::read_to_string(file).map(|text| text.trim().to_owned())
    };
    parameter("enabled").is_ok_and(|text| matches!(text.as_str(), "Y" | "1"))
        && parameter("kdamond_pid").map_or(true, |pid| pid != "-1")
}
