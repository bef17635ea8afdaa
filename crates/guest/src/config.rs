//! The agent's configuration: a TOML file, whose keys flags may override.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use demeter_policy::{ByteCount, MIB, NodeId, OutOfBounds, Pid, Tuning};
use serde::{Deserialize, Serialize};

use crate::nodes::{NodesError, Topology};
use crate::prober::Tiers;
use crate::targets::TargetSpec;
use crate::tracker::{CPU_PERCENT, Choice};

/// The agent's configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Processes to look after, with their descendants. One of `pids`, `cgroup` and `all`.
    pub pids: Vec<u32>,
    /// A cgroup (v2) directory: its processes and those of the cgroups below it.
    pub cgroup: Option<PathBuf>,
    /// All processes of at least `resident_min_mib`.
    pub all: bool,
    /// The least resident size of a process under `all`, MiB.
    pub resident_min_mib: u64,

    /// Where samples come from.
    pub tracker: Choice,
    /// The most of one CPU that a tracker without hardware's help (damon) may take, %.
    pub tracker_cpu_percent: f64,
    /// The fast node, where the system does not tell.
    pub fast_node: Option<u32>,
    /// The slow node, where the system does not tell.
    pub slow_node: Option<u32>,

    /// Whether the host may take memory back and give it again.
    pub balloon: BalloonMode,

    /// Unix socket for status, metrics, pause and resume.
    pub socket: PathBuf,
    /// TCP address for the same, for those who ask for it. Nobody is authenticated there.
    pub listen: Option<SocketAddr>,

    /// Where to record what the policy is told and decides, for `demeter replay`.
    pub record: Option<PathBuf>,
    /// What a recording may take, MiB, with its predecessor.
    pub record_max_mib: u64,

    /// How it samples, classifies and moves.
    pub tuning: Tuning,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            pids: vec![],
            cgroup: None,
            all: false,
            resident_min_mib: 64,
            tracker: Choice::Auto,
            tracker_cpu_percent: CPU_PERCENT,
            fast_node: None,
            slow_node: None,
            balloon: BalloonMode::Auto,
            socket: "/run/demeter/guest.sock".into(),
            listen: None,
            record: None,
            record_max_mib: 64,
            tuning: Tuning::default(),
        }
    }
}

/// Whether the agent relays between host and balloon driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "lowercase")]
pub enum BalloonMode {
    /// Where the VM has a port to the host.
    Auto,
    /// Never.
    Off,
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read configuration {path}: {source}; give --config the path of a TOML file")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not TOML, an unknown key or a wrong type.
    #[error("configuration {path}: {source}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and what.
        source: Box<toml::de::Error>,
    },
    /// A value that makes no sense.
    #[error("configuration: [tuning] {0}")]
    Tuning(#[from] OutOfBounds),
    /// No target, or several kinds of them.
    #[error("configuration: give exactly one of pids (--pid), cgroup (--cgroup) and all (--all)")]
    Targets,
    /// A tracker that may take nothing, or more than a CPU.
    #[error("configuration: tracker_cpu_percent = {0} is out of bounds; give 0.1 to 100")]
    TrackerCpu(f64),
    /// A recording of no size.
    #[error("configuration: record_max_mib = {0} is out of bounds; give 4 to 1048576")]
    RecordMax(u64),
    /// One tier named without the other.
    #[error(
        "configuration: fast_node and slow_node must be two different nodes, or both be left out"
    )]
    Nodes,
}

impl Config {
    /// Reads a file. Values are checked by [`Self::check`], after flags had their say.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.into(),
            source,
        })?;
        toml::from_str(&text).map_err(|source| ConfigError::Parse {
            path: path.into(),
            source: Box::new(source),
        })
    }

    /// Checks what types alone cannot say.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.tuning.check()?;
        if !(4..=1 << 20).contains(&self.record_max_mib) {
            return Err(ConfigError::RecordMax(self.record_max_mib));
        }
        if !(0.1..=100.0).contains(&self.tracker_cpu_percent) {
            return Err(ConfigError::TrackerCpu(self.tracker_cpu_percent));
        }
        match (self.fast_node, self.slow_node) {
            (None, None) => {}
            (Some(fast), Some(slow)) if fast != slow => {}
            _ => return Err(ConfigError::Nodes),
        }
        self.targets().map(|_| ())
    }

    /// The processes to look after.
    pub fn targets(&self) -> Result<TargetSpec, ConfigError> {
        match (&self.pids[..], &self.cgroup, self.all) {
            ([], None, true) => {
                let resident_min = ByteCount(self.resident_min_mib.saturating_mul(MIB));
                Ok(TargetSpec::All { resident_min })
            }
            ([], Some(path), false) => Ok(TargetSpec::Cgroup(path.clone())),
            ([_, ..], None, false) => Ok(TargetSpec::Pids(
                self.pids.iter().copied().map(Pid).collect(),
            )),
            _ => Err(ConfigError::Targets),
        }
    }

    /// The nodes to work with: those named, or what the system tells.
    pub fn tiers(&self, topology: &Topology) -> Result<Tiers, NodesError> {
        if let (Some(fast), Some(slow)) = (self.fast_node, self.slow_node) {
            return Ok(Tiers {
                fast: NodeId(fast),
                slow: NodeId(slow),
            });
        }
        let order = topology.fast_and_slow()?;
        Ok(Tiers {
            fast: order.fast,
            slow: order.slow,
        })
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
    fn bad_values_are_named_with_the_mend() {
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
            ("fast_node = 1", "fast_node and slow_node"),
            ("fast_node = 1\nslow_node = 1", "fast_node and slow_node"),
            ("epoch_ms = 500", "unknown field `epoch_ms`"),
            ("tuning.epochms = 5", "unknown field `epochms`"),
            ("tuning.all = true", "unknown field `all`"),
            ("tracker = \"magic\"", "magic"),
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
