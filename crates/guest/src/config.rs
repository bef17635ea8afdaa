//! The agent's configuration: a TOML file; flags may override its keys.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use demeter_policy::damon::CPU_PERCENT;
use demeter_policy::{ByteCount, MIB, OutOfBounds, Pid, Share, Tuning};
use demeter_toml_file::{FileError, Kind, TomlFile};
use serde::de::value::SeqAccessDeserializer;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::nodes::{NodesError, TierOrder, Tiers, Topology};
use crate::targets::TargetSpec;
use crate::tracker::Choice;

/// The agent's configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Processes to manage, with their descendants. Give one of `pids`, `cgroup` and `all`.
    pub pids: Vec<u32>,
    /// Cgroups (v2) to manage, with the cgroups below them. They divide fast memory by their shares; a process belongs
    /// to the first cgroup that contains it. With `all`, all other processes are one more group, of weight 1. For one
    /// cgroup its directory is enough: `cgroup = "/sys/fs/cgroup/db.slice"`.
    #[serde(deserialize_with = "one_or_several")]
    #[cfg_attr(feature = "schema", schemars(schema_with = "one_or_several_schema"))]
    pub cgroup: Vec<Cgroup>,
    /// Manages all processes of at least `resident_min_mib`.
    pub all: bool,
    /// Smallest resident size of a process under `all`, MiB.
    pub resident_min_mib: u64,

    /// The source of samples.
    pub tracker: Choice,
    /// CPU limit of a tracker without hardware support (damon): % of one CPU per sixteen CPUs.
    pub tracker_cpu_percent: f64,
    /// Nodes of each tier, the fastest first: `"0,1/2,3"` for two tiers of two nodes. For systems that report tiers
    /// wrongly or not at all. Other nodes are left alone.
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub tiers: Option<Tiers>,
    /// Turns DAMON_STAT off while the agent uses DAMON. The kernel starts this statistic by itself, and it keeps others
    /// from using DAMON. DAMON that a person has set up is never turned off.
    pub take_damon: bool,
    /// Leaves memory with a NUMA policy (bound, preferred or interleaved) where its owner wants it. If false, such
    /// memory is moved like any other. Cpusets always count.
    pub respect_policies: bool,

    /// Whether the host may resize the VM with a balloon.
    pub balloon: BalloonMode,

    /// Unix socket for status, metrics, pause and resume.
    pub socket: PathBuf,
    /// TCP address for the same, without authentication. Off by default.
    pub listen: Option<SocketAddr>,

    /// Where to record the engine's inputs and decisions, for `demeter replay`.
    pub record: Option<PathBuf>,
    /// Size limit of a recording with its predecessor, MiB.
    pub record_max_mib: u64,

    /// Parameters of sampling, heat and moves.
    pub tuning: Tuning,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            pids: vec![],
            cgroup: vec![],
            all: false,
            resident_min_mib: 64,
            tracker: Choice::Auto,
            tracker_cpu_percent: CPU_PERCENT,
            tiers: None,
            take_damon: true,
            respect_policies: true,
            balloon: BalloonMode::Auto,
            socket: "/run/demeter/guest.sock".into(),
            listen: None,
            record: None,
            record_max_mib: 64,
            tuning: Tuning::default(),
        }
    }
}

/// A cgroup, and its share of fast memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Cgroup {
    /// The cgroup's directory.
    pub path: PathBuf,
    /// Fast memory that it always gets, but no more than it uses, MiB.
    #[serde(default)]
    pub guarantee_mib: u64,
    /// Its part of the rest, relative to the other groups' weights: 1 to 10000.
    #[serde(default = "weight")]
    pub weight: u32,
}

fn weight() -> u32 {
    1
}

impl Cgroup {
    /// A cgroup without guarantee and with a weight of 1.
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            guarantee_mib: 0,
            weight: weight(),
        }
    }

    fn check(&self) -> Result<(), ConfigError> {
        let is_fine = (1..=Share::WEIGHT_MAX).contains(&self.weight)
            && self.guarantee_mib <= Share::GUARANTEE_MAX_MIB;
        match is_fine {
            true => Ok(()),
            false => Err(ConfigError::Share(self.clone())),
        }
    }
}

/// Maximum number of cgroups.
const CGROUPS_MAX: usize = 64;

/// A directory, or a list of tables.
fn one_or_several<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Cgroup>, D::Error> {
    struct OneOrSeveral;
    impl<'de> Visitor<'de> for OneOrSeveral {
        type Value = Vec<Cgroup>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(
                "the directory of a cgroup, or tables [[cgroup]] with path, guarantee_mib, weight",
            )
        }

        fn visit_str<E: serde::de::Error>(self, path: &str) -> Result<Self::Value, E> {
            Ok(vec![Cgroup::new(path.into())])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
            Vec::deserialize(SeqAccessDeserializer::new(list))
        }
    }
    from.deserialize_any(OneOrSeveral)
}

/// The schema of [`one_or_several`].
#[cfg(feature = "schema")]
fn one_or_several_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    let several = generator.subschema_for::<Vec<Cgroup>>();
    schemars::json_schema!({ "anyOf": [{ "type": "string" }, several] })
}

/// Whether the agent relays between host and balloon driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[derive(strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "lowercase")]
pub enum BalloonMode {
    /// Where the VM has a port to the host.
    Auto,
    /// Never.
    Off,
}

const KIND: Kind = Kind {
    name: "configuration",
    hint: "give --config the path of a TOML file",
    example: "packaging/guest.toml",
    reference: "docs/src/reference/guest.md",
};

/// An error in a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read or parsed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A tuning value is out of bounds.
    #[error("configuration: [tuning] {0}")]
    Tuning(#[from] OutOfBounds),
    /// There is no target, or more than one kind.
    #[error("configuration: give exactly one of pids (--pid), cgroup (--cgroup) and all (--all)")]
    Targets,
    /// A share is out of bounds.
    #[error(
        "configuration: [[cgroup]] {}: weight = {} and guarantee_mib = {}; give a weight of 1 to {} and \
         a guarantee of at most {}",
        .0.path.display(), .0.weight, .0.guarantee_mib, Share::WEIGHT_MAX, Share::GUARANTEE_MAX_MIB
    )]
    Share(Cgroup),
    /// There are too many cgroups.
    #[error("configuration: {0} cgroups are more than {CGROUPS_MAX}; name one above some of them")]
    Cgroups(usize),
    /// The tracker's CPU limit is out of bounds.
    #[error("configuration: tracker_cpu_percent = {0} is out of bounds; give 0.1 to 100")]
    TrackerCpu(f64),
    /// The recording's size is out of bounds.
    #[error("configuration: record_max_mib = {0} is out of bounds; give 4 to 1048576")]
    RecordMax(u64),
}

impl Config {
    /// Reads a file. Values are checked by [`Self::check`], after flags were applied.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Ok(TomlFile::read(&KIND, path)?.parse()?)
    }

    /// Checks values beyond their types.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.tuning.check()?;
        if !(4..=1 << 20).contains(&self.record_max_mib) {
            return Err(ConfigError::RecordMax(self.record_max_mib));
        }
        if !(0.1..=100.0).contains(&self.tracker_cpu_percent) {
            return Err(ConfigError::TrackerCpu(self.tracker_cpu_percent));
        }
        self.cgroup.iter().try_for_each(Cgroup::check)?;
        if self.cgroup.len() > CGROUPS_MAX {
            return Err(ConfigError::Cgroups(self.cgroup.len()));
        }
        self.targets().map(|_| ())
    }

    /// The processes to manage.
    pub fn targets(&self) -> Result<TargetSpec, ConfigError> {
        match (&self.pids[..], &self.cgroup[..], self.all) {
            ([], _, true) => {
                let resident_min = ByteCount(self.resident_min_mib.saturating_mul(MIB));
                Ok(TargetSpec::All { resident_min })
            }
            ([], [_, ..], false) => {
                let paths = self.cgroup.iter().map(|cgroup| cgroup.path.clone());
                Ok(TargetSpec::Cgroups(paths.collect()))
            }
            ([_, ..], [], false) => Ok(TargetSpec::Pids(
                self.pids.iter().copied().map(Pid).collect(),
            )),
            _ => Err(ConfigError::Targets),
        }
    }

    /// Cgroups that divide fast memory, with their shares; empty if there is only one group.
    pub fn shares(&self) -> Vec<(&Path, Share)> {
        if self.cgroup.len() < 2 && !self.all {
            return vec![];
        }
        let cgroups = self.cgroup.iter().zip(0..);
        let share = |(cgroup, group): (&'_ Cgroup, u32)| Share {
            group,
            guarantee: ByteCount(cgroup.guarantee_mib.saturating_mul(MIB)),
            weight: cgroup.weight,
        };
        cgroups
            .map(|cgroup| (cgroup.0.path.as_path(), share(cgroup)))
            .collect()
    }

    /// The tiers to use: configured ones, or those that the system reports.
    pub fn order(&self, topology: &Topology) -> Result<TierOrder, NodesError> {
        match &self.tiers {
            Some(tiers) => topology.order_by_hand(tiers),
            None => topology.order(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn checked(text: &str) -> Result<Config, String> {
        let config: Config = toml::from_str(text).map_err(|e| e.to_string())?;
        config.check().map_err(|e| e.to_string())?;
        Ok(config)
    }

    #[test]
    fn defaults_need_a_target_only() {
        let config = checked("all = true").unwrap();
        assert_eq!(
            config,
            Config {
                all: true,
                ..Config::default()
            }
        );
        assert!(checked("").unwrap_err().contains("exactly one of"));
        assert!(
            checked("all = true\npids = [1]")
                .unwrap_err()
                .contains("exactly one of")
        );
    }

    #[test]
    fn cgroups_have_shares_where_there_is_somebody_to_share_with() {
        let one = checked("cgroup = \"/sys/fs/cgroup/db\"").unwrap();
        assert_eq!(one.cgroup, [Cgroup::new("/sys/fs/cgroup/db".into())]);
        assert_eq!(one.shares(), []);
        let two =
            "[[cgroup]]\npath = \"/a\"\nguarantee_mib = 64\n[[cgroup]]\npath = \"/b\"\nweight = 3";
        let two = checked(two).unwrap();
        let share = |group, guarantee, weight| Share {
            group,
            guarantee: ByteCount(guarantee),
            weight,
        };
        let shares = [
            (Path::new("/a"), share(0, 64 * MIB, 1)),
            (Path::new("/b"), share(1, 0, 3)),
        ];
        assert_eq!(two.shares(), shares);
        let paths = vec!["/a".into(), "/b".into()];
        assert_eq!(two.targets().unwrap(), TargetSpec::Cgroups(paths));
        let beside_others = checked("all = true\ncgroup = \"/a\"").unwrap();
        assert_eq!(beside_others.shares().len(), 1);
    }

    #[test]
    fn the_example_shows_the_defaults() {
        let config = checked(include_str!("../../../packaging/guest.toml")).unwrap();
        assert_eq!(
            config,
            Config {
                all: true,
                ..Config::default()
            }
        );
    }

    #[test]
    fn bad_values_are_named_with_the_hint() {
        for (text, want) in [
            (
                "tuning.epoch_ms = 0",
                "configuration: [tuning] epoch_ms = 0 is out of bounds; give 10 to 60000",
            ),
            (
                "tuning.alpha = nan",
                "[tuning] alpha = NaN is out of bounds",
            ),
            (
                "tracker_cpu_percent = 0.0",
                "tracker_cpu_percent = 0 is out of bounds; give 0.1 to 100",
            ),
            ("tracker_cpu_percent = nan", "tracker_cpu_percent = NaN"),
            ("record_max_mib = 3", "record_max_mib = 3 is out of bounds"),
            ("tiers = \"0,1\"", "1 tier(s) are named; give two to 4"),
            ("tiers = \"0/1,0\"", "node 0 is named twice"),
            ("tiers = \"fast/slow\"", "`fast` is not a node's number"),
            ("fast_node = 1", "unknown field `fast_node`"),
            ("epoch_ms = 500", "unknown field `epoch_ms`"),
            ("tuning.epochms = 5", "unknown field `epochms`"),
            ("tuning.all = true", "unknown field `all`"),
            ("tracker = \"magic\"", "magic"),
            ("cgroup = 3", "the directory of a cgroup, or tables"),
            (
                "cgroup = [{ path = \"/a\", wait = 2 }]",
                "unknown field `wait`",
            ),
            (
                "cgroup = [{ path = \"/a\", weight = 0 }]",
                "[[cgroup]] /a: weight = 0 and guarantee_mib = 0; give a weight of 1 to 10000",
            ),
            ("tuning.epoch_ms = \"500ms\"", "epoch_ms"),
        ] {
            let error = checked(&format!("all = true\n{text}")).unwrap_err();
            assert!(error.contains(want), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "\\PC{0,200}") {
            let _ = checked(&text);
        }
    }
}
