//! Linux's own tiering: `numa_balancing=2`, and demotion by reclaim.

use std::fs;
use std::path::{Path, PathBuf};

use demeter_policy::{PAGE_SIZE, Pid};
use demeter_scenario::Settings;

use super::{Fault, Rival, Testbed, Totals};
use crate::inside::kernel;

/// The kernel's memory tiers.
const TIERS: &str = "sys/devices/virtual/memory_tiering";

/// Maximum promotion rate, MiB per second.
const PROMOTE_RATE: &str = "proc/sys/kernel/numa_balancing_promote_rate_limit_MBps";

/// Scan settings of hint faults, available in debugfs only (the section "numa_balancing" of
/// Documentation/admin-guide/sysctl/kernel.rst in kernels before 5.13 describes them).
const SCAN: &str = "sys/kernel/debug/sched/numa_balancing";

/// The kernel's tiering, enabled below this root.
#[derive(Debug)]
pub struct Linux(PathBuf);

impl Linux {
    /// Enables the kernel's tiering.
    pub fn start(root: &Path, settings: &Settings) -> Result<Self, Fault> {
        check_tiers(root)?;
        let scan = |file: &str| format!("{SCAN}/{file}");
        for (file, value) in [
            (
                kernel::WATERMARK_SCALE_FACTOR.to_owned(),
                settings.watermark_scale_factor,
            ),
            (PROMOTE_RATE.to_owned(), settings.rate_mib_per_s),
            (scan("scan_size_mb"), settings.scan_size_mib),
            (scan("scan_period_max_ms"), settings.scan_period_max_ms),
            (scan("scan_period_min_ms"), settings.scan_period_min_ms),
        ] {
            if let Some(value) = value {
                kernel::write(root, &file, &value.to_string())?;
            }
        }
        if let Some(on) = settings.multi_gen_lru {
            kernel::write(root, kernel::LRU_GEN, if on { "y" } else { "n" })?;
        }
        kernel::set_tiering(root, true)?;
        Ok(Self(root.into()))
    }
}

/// Linux tiering in the host of guests. It promotes only after the guests have populated their memory. If enabled from
/// boot, a kernel (6.12) marked no page of an emulator's memory in the following minutes. The cause is unknown; its
/// first scans find that memory empty.
#[derive(Debug)]
pub struct HLinux(Linux);

impl HLinux {
    /// Enables demotion.
    pub fn start(root: &Path, settings: &Settings) -> Result<Self, Fault> {
        let linux = Linux::start(root, settings)?;
        kernel::set_balancing(root, false)?;
        Ok(Self(linux))
    }
}

impl Rival for HLinux {
    fn begin(&mut self, bed: &Testbed<'_>, _guest: Pid) -> Result<(), Fault> {
        kernel::set_balancing(&bed.root, true)
    }

    fn moved_bytes(&mut self, totals: &Totals) -> Option<(u64, u64)> {
        self.0.moved_bytes(totals)
    }

    fn stop(self: Box<Self>) -> Result<(), Fault> {
        Box::new(self.0).stop()
    }
}

impl Rival for Linux {
    fn moved_bytes(&mut self, totals: &Totals) -> Option<(u64, u64)> {
        let bytes = |start: &str| {
            let counters = totals
                .vmstat
                .iter()
                .filter(|(name, _)| name.starts_with(start));
            counters.map(|(_, pages)| pages * PAGE_SIZE).sum()
        };
        Some((bytes("pgpromote_success"), bytes("pgdemote_")))
    }

    fn stop(self: Box<Self>) -> Result<(), Fault> {
        kernel::set_tiering(&self.0, false)
    }
}

/// Checks that the nodes are in different tiers, since the kernel migrates only between tiers.
fn check_tiers(root: &Path) -> Result<(), Fault> {
    let dir = root.join(TIERS);
    let mut tiers = 0;
    for entry in fs::read_dir(&dir).map_err(Fault::io("list", &dir))? {
        let entry = entry.map_err(Fault::io("list", &dir))?;
        let nodes = fs::read_to_string(entry.path().join("nodelist")).unwrap_or_default();
        tiers += usize::from(!nodes.trim().is_empty());
    }
    if tiers >= 2 {
        return Ok(());
    }
    Err(Fault::Unsupported {
        what: format!(
            "the kernel put all nodes into one memory tier ({})",
            dir.display()
        ),
        hint: "Linux tiering needs a kernel that reads HMAT into tiers: 6.7 or newer",
    })
}

#[cfg(test)]
mod tests {
    use demeter_scenario::System;

    use super::*;
    use crate::inside::kernel::tests::{machine, tiering};

    fn as_it_is() -> Settings {
        Settings::new(System::Linux, "as it is")
    }

    fn tiered(tiers: &[&str]) -> tempfile::TempDir {
        let root = machine();
        for (i, nodes) in tiers.iter().enumerate() {
            let tier = root.path().join(TIERS).join(format!("memory_tier{i}"));
            fs::create_dir_all(&tier).unwrap();
            fs::write(tier.join("nodelist"), nodes).unwrap();
        }
        root
    }

    #[test]
    fn the_kernels_tiering_is_on_only_while_it_runs() {
        let root = tiered(&["0\n", "1\n"]);
        let linux = Box::new(Linux::start(root.path(), &as_it_is()).unwrap());
        assert_eq!(tiering(root.path()), ("2".into(), "1".into()));
        linux.stop().unwrap();
        assert_eq!(tiering(root.path()), ("0".into(), "0".into()));
    }

    #[test]
    fn a_host_promotes_once_its_guests_have_filled_their_memory() {
        let root = tiered(&["0\n", "1\n"]);
        let mut linux = Box::new(HLinux::start(root.path(), &as_it_is()).unwrap());
        assert_eq!(tiering(root.path()), ("0".into(), "1".into()));
        let bed = Testbed {
            root: root.path().into(),
            ..Testbed::vm()
        };
        linux.begin(&bed, Pid(1)).unwrap();
        assert_eq!(tiering(root.path()), ("2".into(), "1".into()));
        linux.stop().unwrap();
        assert_eq!(tiering(root.path()), ("0".into(), "0".into()));
    }

    #[test]
    fn settings_reach_the_kernel_and_what_they_do_not_name_stays() {
        let root = tiered(&["0\n", "1\n"]);
        let knob = |file: &str| {
            let path = root.path().join(SCAN).join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "as booted").unwrap();
            path
        };
        let (size, period) = (knob("scan_size_mb"), knob("scan_period_min_ms"));
        let settings = Settings {
            scan_size_mib: Some(64),
            watermark_scale_factor: Some(100),
            multi_gen_lru: Some(false),
            ..as_it_is()
        };
        let lru_gen = root.path().join(kernel::LRU_GEN);
        fs::create_dir_all(lru_gen.parent().unwrap()).unwrap();
        Linux::start(root.path(), &settings).unwrap();
        let watermarks = root.path().join(kernel::WATERMARK_SCALE_FACTOR);
        for (path, value) in [
            (size, "64"),
            (watermarks, "100"),
            (lru_gen, "n"),
            (period, "as booted"),
        ] {
            assert_eq!(fs::read_to_string(path).unwrap(), value);
        }
    }

    #[test]
    fn one_tier_is_told_of() {
        let root = tiered(&["0-1\n", "\n"]);
        let said = Linux::start(root.path(), &as_it_is())
            .unwrap_err()
            .to_string();
        assert!(
            said.contains("one memory tier") && said.contains("6.7"),
            "{said}"
        );
    }

    #[test]
    fn the_kernels_pages_become_bytes() {
        let mut totals = Totals::default();
        for (name, pages) in [
            ("pgpromote_success", 3),
            ("pgpromote_candidate", 50),
            ("pgdemote_kswapd", 2),
            ("pgdemote_direct", 5),
        ] {
            totals.vmstat.insert(name.into(), pages);
        }
        let root = tiered(&["0\n", "1\n"]);
        let mut linux = Linux::start(root.path(), &as_it_is()).unwrap();
        assert_eq!(linux.moved_bytes(&totals), Some((3 * 4096, 7 * 4096)));
    }
}
