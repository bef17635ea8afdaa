//! DAMON as a rival: `migrate_hot` and `migrate_cold` over physical memory.
//!
//! One kdamond for each node, as DAMON's authors lay tiering out: the slow node's promotes its
//! hot regions, the fast node's demotes its cold ones. Interface: Documentation/admin-guide/mm/
//! damon/usage.rst of the kernel; `migrate_*` exists since 6.11.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Fault, Rival, Totals};
use crate::inside::zones::node_range;

const ADMIN: &str = "sys/kernel/mm/damon/admin/kdamonds";

/// Between two looks at a region's accessed bit, and between two verdicts, microseconds: four
/// times DAMON's defaults. A look walks the reverse map, which costs an emulated CPU many times
/// what it costs hardware; at the defaults kdamond takes most of the CPU from the workload.
const SAMPLE_US: u64 = 20_000;
const AGGREGATION_US: u64 = 400_000;
const UPDATE_US: u64 = 4_000_000;

/// Looks that make one verdict: the most accesses that a region can show.
const ACCESSES_MAX: u64 = AGGREGATION_US / SAMPLE_US;

/// Regions for each node: from the start small enough to tell a hot set of a tenth of memory, and
/// at most so many that a round of looks stays a few milliseconds.
const REGIONS_MIN: u64 = 50;
const REGIONS_MAX: u64 = 300;

/// Bytes that either scheme may move a second. Enough to bring a hot set of 100 MiB over in a
/// few seconds; hotter (colder) regions go first.
const QUOTA_BYTES_PER_S: u64 = 64 << 20;

/// Hot: accessed in at least a tenth of the looks. Cold: in at most a twentieth, for two seconds.
/// A look sees one page of a region for one sampling interval, so that even memory which takes
/// most of the traffic seldom shows in every look.
const HOT_ACCESSES_MIN: u64 = ACCESSES_MAX / 10;
const COLD_ACCESSES_MAX: u64 = ACCESSES_MAX / 20;
const COLD_AGE_MIN: u64 = 2_000_000 / AGGREGATION_US;

/// One kdamond: what it does to which node.
struct Scheme {
    node: u32,
    action: &'static str,
    target_node: u32,
    accesses: (u64, u64),
    age_min: u64,
    /// Look at each page once more before it moves, because a region's verdict comes from one
    /// page: promote only pages accessed since, demote only others.
    moves_young: bool,
}

const SCHEMES: [Scheme; 2] = [
    Scheme {
        node: 1,
        action: "migrate_hot",
        target_node: 0,
        accesses: (HOT_ACCESSES_MIN, u64::MAX),
        age_min: 0,
        moves_young: true,
    },
    Scheme {
        node: 0,
        action: "migrate_cold",
        target_node: 1,
        accesses: (0, COLD_ACCESSES_MAX),
        age_min: COLD_AGE_MIN,
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
    pub fn start(root: &Path) -> Result<Self, Fault> {
        let damon = Self {
            admin: root.join(ADMIN),
        };
        damon.write("nr_kdamonds", SCHEMES.len())?;
        for (i, scheme) in SCHEMES.iter().enumerate() {
            damon.set_up(i, scheme, node_range(root, scheme.node)?)?;
        }
        for i in 0..SCHEMES.len() {
            damon.write(format!("{i}/state"), "on")?;
        }
        Ok(damon)
    }

    fn set_up(&self, i: usize, scheme: &Scheme, range: (u64, u64)) -> Result<(), Fault> {
        self.write(format!("{i}/contexts/nr_contexts"), 1)?;
        let context = |file: &str| format!("{i}/contexts/0/{file}");
        self.write(context("operations"), "paddr")?;
        self.write(context("monitoring_attrs/intervals/sample_us"), SAMPLE_US)?;
        self.write(
            context("monitoring_attrs/intervals/aggr_us"),
            AGGREGATION_US,
        )?;
        self.write(context("monitoring_attrs/intervals/update_us"), UPDATE_US)?;
        self.write(context("monitoring_attrs/nr_regions/max"), REGIONS_MAX)?;
        self.write(context("monitoring_attrs/nr_regions/min"), REGIONS_MIN)?;
        self.write(context("targets/nr_targets"), 1)?;
        self.write(context("targets/0/regions/nr_regions"), 1)?;
        self.write(context("targets/0/regions/0/start"), range.0)?;
        self.write(context("targets/0/regions/0/end"), range.1)?;
        self.write(context("schemes/nr_schemes"), 1)?;
        let of_scheme = |file: &str| context(&format!("schemes/0/{file}"));
        self.write(of_scheme("action"), scheme.action)?;
        self.write(of_scheme("target_nid"), scheme.target_node)?;
        self.write(of_scheme("access_pattern/sz/min"), 0)?;
        self.write(of_scheme("access_pattern/sz/max"), u64::MAX)?;
        self.write(
            of_scheme("access_pattern/nr_accesses/min"),
            scheme.accesses.0,
        )?;
        self.write(
            of_scheme("access_pattern/nr_accesses/max"),
            scheme.accesses.1,
        )?;
        self.write(of_scheme("access_pattern/age/min"), scheme.age_min)?;
        self.write(of_scheme("access_pattern/age/max"), u64::MAX)?;
        self.write(of_scheme("quotas/bytes"), QUOTA_BYTES_PER_S)?;
        self.write(of_scheme("quotas/reset_interval_ms"), 1000)?;
        self.write(of_scheme("filters/nr_filters"), 1)?;
        self.write(of_scheme("filters/0/type"), "young")?;
        // What a filter of 6.12 matches is left out.
        let left_out = if scheme.moves_young { "N" } else { "Y" };
        self.write(of_scheme("filters/0/matching"), left_out)
    }

    fn write(&self, file: impl AsRef<Path>, value: impl ToString) -> Result<(), Fault> {
        let path = self.admin.join(file);
        fs::write(&path, value.to_string()).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::InvalidInput => Fault::Unsupported {
                what: format!("cannot write {}: {source}", path.display()),
                mend: "DAMON needs a kernel with CONFIG_DAMON_SYSFS and migrate_hot: 6.11 or newer",
            },
            _ => Fault::io("write", &path)(source),
        })
    }
}

impl Rival for Damon {
    /// Nobody counts them: its own counter, sz_applied, also counts pages that were meant to be
    /// promoted and landed in the slow node again.
    fn moved_bytes(&mut self, _totals: &Totals) -> Option<(u64, u64)> {
        None
    }

    /// Switches both kdamonds off.
    fn stop(self: Box<Self>) -> Result<(), Fault> {
        (0..SCHEMES.len()).try_for_each(|i| self.write(format!("{i}/state"), "off"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_damon_is_told_of() {
        let root = tempfile::tempdir().unwrap();
        let said = Damon::start(root.path()).unwrap_err().to_string();
        assert!(
            said.contains("nr_kdamonds") && said.contains("6.11"),
            "{said}"
        );
    }
}
