//! A program's start parameters, with every name resolved and every file in place.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use demeter_guest::config::Cgroup;
use demeter_scenario::{Figure, Ready};
use serde::{Deserialize, Serialize};

/// Start parameters and expectations of a program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Launch {
    /// Its name in results and messages.
    pub name: String,
    /// The program's file.
    pub file: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Its whole environment.
    pub env: BTreeMap<String, String>,
    /// Its working folder, which exists and belongs to it.
    pub folder: PathBuf,
    /// Condition of readiness; without it, the program starts with the timed phase.
    pub ready: Option<Ready>,
    /// Time limit to become ready.
    pub ready_within: Duration,
    /// Its figure of speed. If a command prints it, the command's first word is resolved.
    pub figure: Figure,
    /// Its own cgroup, created for it, with its share of fast memory.
    #[serde(default)]
    pub cgroup: Option<Cgroup>,
}
