//! DAMON as a rival: `migrate_hot` and `migrate_cold` on physical memory.
//!
//! There is one kdamond per node, as DAMON's authors recommend for tiering. The slow node's kdamond promotes its hot
//! regions; the fast node's demotes its cold ones. The interface is in Documentation/admin-guide/mm/damon/usage.rst of
//! the kernel; `migrate_*` exists since 6.11.
//!
//! A kernel that can tune DAMON (intervals since 6.15, quotas by node usage since 6.16) does so, with the parameters of
//! damo's `scripts/mem_tier.sh`. An older kernel, such as Debian's 6.12, gets fixed parameters.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use demeter_policy::MIB;
use demeter_scenario::Settings;

use super::{Fault, Rival, Totals};
use crate::inside::kernel;
use crate::inside::zones::node_range;

const ADMIN: &str = "sys/kernel/mm/damon/admin/kdamonds";

/// Microseconds in a millisecond.
const US_PER_MS: u64 = 1000;

/// Samples per aggregation: DAMON's default, and the maximum access count of a region.
const LOOKS: u64 = 20;

/// Fixed sampling interval, milliseconds: four times DAMON's default. A sample walks the reverse map, which is far
/// slower on an emulated CPU than on hardware. At the default, kdamond takes most of the CPU from the workload.
const SAMPLE_MS: u32 = 20;

/// Aggregations between two updates of regions.
const VERDICTS_PER_UPDATE: u64 = 10;

/// Fixed minimum and maximum number of regions per node. The minimum resolves a hot set of a tenth of memory from the
/// start. The maximum keeps a round of samples within a few milliseconds.
const REGIONS: (u64, u64) = (50, 300);

/// Fixed quota of each scheme, MiB per second. It moves a hot set of 100 MiB within a few seconds; hotter (colder)
/// regions take precedence.
const RATE_MIB_PER_S: u32 = 64;

/// Weights of the criteria that rank regions under a quota: all equal, as in damo. The kernel's default is zero, which
/// ranks regions by address.
const WEIGHT: u32 = 1;

/// Fixed thresholds. Hot: accessed in at least a tenth of the samples. Cold: in at most a twentieth, for two seconds. A
/// sample observes one page of a region for one interval. Even memory with most of the traffic therefore rarely shows
/// in every sample.
const HOT_ACCESSES_MIN: u64 = LOOKS / 10;
const COLD_ACCESSES_MAX: u64 = LOOKS / 20;
const COLD_US: u64 = 2_000_000;

/// damo's parameters for a kernel that tunes itself. Samples should find 4 % of the possible accesses, over three
/// aggregations, at intervals of 5 ms to 10 s. Quotas are 200 MB a second, less for a scheme that is closer to its
/// goal.
const GOAL: [(&str, u64); 4] = [
    ("access_bp", 400),
    ("aggrs", 3),
    ("min_sample_us", 5_000),
    ("max_sample_us", 10_000_000),
];
const TUNED_RATE_MIB_PER_S: u32 = 200;
const TUNED_REGIONS: (u64, u64) = (10, 1000);
const APPLY_US: u64 = 1_000_000;

/// The action of one kdamond on its node.
struct Scheme {
    node: u32,
    action: &'static str,
    target_node: u32,
    /// Fixed thresholds of accesses, out of [`LOOKS`].
    accesses: (u64, u64),
    /// Fixed minimum age of a region, microseconds.
    age_min_us: u64,
    /// damo's thresholds of accesses, in percent of the maximum, for any age.
    tuned_percent: (u64, u64),
    /// Target usage of the fast node, in ten-thousandths, if the kernel supports it.
    goal: (&'static str, u64),
    /// Whether to move accessed pages or idle ones. Each page is checked again before it moves, as a region's access
    /// count comes from one page.
    moves_young: bool,
}

const SCHEMES: [Scheme; 2] = [
    Scheme {
        node: 1,
        action: "migrate_hot",
        target_node: 0,
        accesses: (HOT_ACCESSES_MIN, u64::MAX),
        age_min_us: 0,
        tuned_percent: (5, 100),
        goal: ("node_mem_used_bp", 9970),
        moves_young: true,
    },
    Scheme {
        node: 0,
        action: "migrate_cold",
        target_node: 1,
        accesses: (0, COLD_ACCESSES_MAX),
        age_min_us: COLD_US,
        tuned_percent: (0, 0),
        goal: ("node_mem_free_bp", 50),
        moves_young: false,
    },
];

/// Running kdamonds.
#[derive(Debug)]
pub struct Damon {
    admin: PathBuf,
}

impl Damon {
    /// Starts both kdamonds.
    pub fn start(root: &Path, settings: &Settings) -> Result<Self, Fault> {
        if let Some(factor) = settings.watermark_scale_factor {
            kernel::write(root, kernel::WATERMARK_SCALE_FACTOR, &factor.to_string())?;
        }
        let damon = Self {
            admin: root.join(ADMIN),
        };
        damon.write("nr_kdamonds", SCHEMES.len())?;
        for (i, scheme) in SCHEMES.iter().enumerate() {
            let node = node_range(root, scheme.node)?;
            damon.write(format!("{i}/contexts/nr_contexts"), 1)?;
            let context = Context {
                damon: &damon,
                folder: format!("{i}/contexts/0"),
            };
            context.set_up(scheme, settings, node)?;
        }
        for i in 0..SCHEMES.len() {
            damon.write(format!("{i}/state"), "on")?;
        }
        Ok(damon)
    }

    fn write(&self, file: impl AsRef<Path>, value: impl ToString) -> Result<(), Fault> {
        let path = self.admin.join(file);
        fs::write(&path, value.to_string()).map_err(|source| match source.kind() {
            ErrorKind::NotFound | ErrorKind::InvalidInput => Fault::Unsupported {
                what: format!("cannot write {}: {source}", path.display()),
                hint: "DAMON needs a kernel with CONFIG_DAMON_SYSFS and migrate_hot: 6.11 or newer",
            },
            _ => Fault::io("write", &path)(source),
        })
    }
}

/// The context of one kdamond, a folder in sysfs.
struct Context<'a> {
    damon: &'a Damon,
    folder: String,
}

impl Context<'_> {
    fn write(&self, file: &str, value: impl ToString) -> Result<(), Fault> {
        self.damon.write(format!("{}/{file}", self.folder), value)
    }

    fn set_up(&self, scheme: &Scheme, settings: &Settings, node: (u64, u64)) -> Result<(), Fault> {
        let intervals = "monitoring_attrs/intervals";
        let goal = format!("{intervals}/intervals_goal");
        let can_tune = self.damon.admin.join(&self.folder).join(&goal).exists();
        let is_tuned = can_tune && settings.sample_ms.is_none();
        let sample_us = u64::from(settings.sample_ms.unwrap_or(SAMPLE_MS)) * US_PER_MS;
        let verdict_us = sample_us * LOOKS;
        self.write("operations", "paddr")?;
        self.write(&format!("{intervals}/sample_us"), sample_us)?;
        self.write(&format!("{intervals}/aggr_us"), verdict_us)?;
        let update_us = verdict_us * VERDICTS_PER_UPDATE;
        self.write(&format!("{intervals}/update_us"), update_us)?;
        for (file, value) in GOAL.iter().filter(|_| is_tuned) {
            self.write(&format!("{goal}/{file}"), value)?;
        }
        let (regions_min, regions_max) = if is_tuned { TUNED_REGIONS } else { REGIONS };
        self.write("monitoring_attrs/nr_regions/max", regions_max)?;
        self.write("monitoring_attrs/nr_regions/min", regions_min)?;
        self.write("targets/nr_targets", 1)?;
        self.write("targets/0/regions/nr_regions", 1)?;
        self.write("targets/0/regions/0/start", node.0)?;
        self.write("targets/0/regions/0/end", node.1)?;

        self.write("schemes/nr_schemes", 1)?;
        let of_scheme = |file: &str, value: &dyn ToString| {
            self.write(&format!("schemes/0/{file}"), value.to_string())
        };
        of_scheme("action", &scheme.action)?;
        of_scheme("target_nid", &scheme.target_node)?;
        of_scheme("access_pattern/sz/min", &0)?;
        of_scheme("access_pattern/sz/max", &u64::MAX)?;
        let (accesses, age_min, rate) = if is_tuned {
            let (least, most) = scheme.tuned_percent;
            let accesses = (LOOKS * least / 100, LOOKS * most / 100);
            (accesses, 0, TUNED_RATE_MIB_PER_S)
        } else {
            let age_min = scheme.age_min_us.div_ceil(verdict_us);
            (scheme.accesses, age_min, RATE_MIB_PER_S)
        };
        of_scheme("access_pattern/nr_accesses/min", &accesses.0)?;
        of_scheme("access_pattern/nr_accesses/max", &accesses.1)?;
        of_scheme("access_pattern/age/min", &age_min)?;
        of_scheme("access_pattern/age/max", &u64::MAX)?;
        let rate = u64::from(settings.rate_mib_per_s.unwrap_or(rate)) * MIB;
        of_scheme("quotas/bytes", &rate)?;
        of_scheme("quotas/reset_interval_ms", &1000)?;
        for what in ["sz", "nr_accesses", "age"] {
            of_scheme(&format!("quotas/weights/{what}_permil"), &WEIGHT)?;
        }
        if is_tuned {
            of_scheme("apply_interval_us", &APPLY_US)?;
            self.set_goal(scheme)?;
        }
        of_scheme("filters/nr_filters", &1)?;
        of_scheme("filters/0/type", &"young")?;
        // Pages that match a filter are excluded.
        let left_out = if scheme.moves_young { "N" } else { "Y" };
        of_scheme("filters/0/matching", &left_out)
    }

    /// Sets the target usage of the fast node, if the kernel supports it. If not, only the quota applies.
    fn set_goal(&self, scheme: &Scheme) -> Result<(), Fault> {
        let goals = "schemes/0/quotas/goals";
        let (metric, value) = scheme.goal;
        self.write(&format!("{goals}/nr_goals"), 1)?;
        match self.write(&format!("{goals}/0/target_metric"), metric) {
            Err(Fault::Unsupported { .. }) => return self.write(&format!("{goals}/nr_goals"), 0),
            written => written?,
        }
        self.write(&format!("{goals}/0/target_value"), value)?;
        self.write(&format!("{goals}/0/nid"), 0)
    }
}

impl Rival for Damon {
    /// Unknown: DAMON's counter, sz_applied, includes pages that should be promoted but stayed in the slow node.
    fn moved_bytes(&mut self, _totals: &Totals) -> Option<(u64, u64)> {
        None
    }

    /// Stops both kdamonds.
    fn stop(self: Box<Self>) -> Result<(), Fault> {
        (0..SCHEMES.len()).try_for_each(|i| self.write(format!("{i}/state"), "off"))
    }
}

#[cfg(test)]
mod tests {
    use demeter_scenario::System;

    use super::*;

    #[test]
    fn a_kernel_without_damon_is_told_of() {
        let root = tempfile::tempdir().unwrap();
        let settings = Settings::new(System::Damon, "");
        let said = Damon::start(root.path(), &settings)
            .unwrap_err()
            .to_string();
        assert!(
            said.contains("nr_kdamonds") && said.contains("6.11"),
            "{said}"
        );
    }

    /// A context in which all files exist; returns the values written.
    fn set_up(settings: &Settings, can_tune: bool) -> impl Fn(&str) -> String {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("0");
        for inner in [
            "monitoring_attrs/intervals",
            "monitoring_attrs/nr_regions",
            "targets/0/regions/0",
            "schemes/0/access_pattern/sz",
            "schemes/0/access_pattern/nr_accesses",
            "schemes/0/access_pattern/age",
            "schemes/0/quotas/goals/0",
            "schemes/0/quotas/weights",
            "schemes/0/filters/0",
        ] {
            fs::create_dir_all(folder.join(inner)).unwrap();
        }
        if can_tune {
            fs::create_dir(folder.join("monitoring_attrs/intervals/intervals_goal")).unwrap();
        }
        let admin = root.path().into();
        let context = Context {
            damon: &Damon { admin },
            folder: "0".into(),
        };
        context.set_up(&SCHEMES[0], settings, (0, 4096)).unwrap();
        move |file| {
            let _kept = &root;
            fs::read_to_string(folder.join(file)).unwrap_or_default()
        }
    }

    #[test]
    fn a_kernel_that_tunes_itself_is_asked_to() {
        let (goal, metric) = (
            "monitoring_attrs/intervals/intervals_goal/access_bp",
            "schemes/0/quotas/goals/0/target_metric",
        );
        let as_it_is = Settings::new(System::Damon, "");
        let written = set_up(&as_it_is, true);
        assert_eq!(
            (written(goal), written(metric)),
            ("400".into(), "node_mem_used_bp".into())
        );
        assert_eq!(written("schemes/0/access_pattern/nr_accesses/min"), "1");

        let written = set_up(&as_it_is, false);
        assert_eq!((written(goal), written(metric)), Default::default());
        assert_eq!(written("schemes/0/access_pattern/nr_accesses/min"), "2");
        assert_eq!(written("schemes/0/quotas/weights/age_permil"), "1");
    }

    #[test]
    fn intervals_that_are_set_are_not_tuned() {
        let settings = Settings {
            sample_ms: Some(7),
            rate_mib_per_s: Some(3),
            ..Settings::new(System::Damon, "often")
        };
        let written = set_up(&settings, true);
        let intervals = "monitoring_attrs/intervals";
        assert_eq!(
            written(&format!("{intervals}/intervals_goal/access_bp")),
            ""
        );
        assert_eq!(written(&format!("{intervals}/sample_us")), "7000");
        assert_eq!(written(&format!("{intervals}/aggr_us")), "140000");
        assert_eq!(written("schemes/0/quotas/bytes"), (3 << 20).to_string());
    }
}
