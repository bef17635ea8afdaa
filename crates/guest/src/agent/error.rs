//! Errors of the agent.

use demeter_linux::base_page::OtherBasePages;
use demeter_policy::engine::Misuse;

use crate::config::ConfigError;
use crate::nodes::NodesError;
use crate::recording::RecorderError;
use crate::targets::TargetsError;
use crate::tracker::TrackerError;

/// An error that keeps the agent from starting or running.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The kernel has pages of another size.
    #[error(transparent)]
    Pages(#[from] OtherBasePages),
    /// The machine has no two tiers.
    #[error(transparent)]
    Nodes(#[from] NodesError),
    /// There are no target processes.
    #[error(transparent)]
    Targets(#[from] TargetsError),
    /// No tracker works, or the tracker failed.
    #[error(transparent)]
    Tracker(#[from] TrackerError),
    /// The recording cannot be written.
    #[error(transparent)]
    Recorder(#[from] RecorderError),
    /// Hot-plug changed the number of tiers: the agent must start again.
    #[error("the machine's tiers have changed since the start")]
    OtherTiers,
    /// A bug of ours.
    #[error("the engine rejects an input: {0}; this is a bug, please report it")]
    Misuse(#[from] Misuse),
}

impl AgentError {
    /// Whether it may pass by itself: another process has the tracker's hardware.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Tracker(error) if error.is_temporary())
    }

    /// Whether another tracker is to take over at once.
    pub fn has_successor(&self) -> bool {
        use TrackerError::{Outdone, Silent};
        matches!(self, Self::Tracker(Outdone { .. } | Silent { .. }))
    }
}
