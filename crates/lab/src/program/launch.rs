//! A program as it is started: every name resolved, every file in its place.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use demeter_guest::config::Cgroup;
use demeter_scenario::{Figure, Ready};
use serde::{Deserialize, Serialize};

/// What to start and what to expect of it.
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
    /// When it is ready; without it it is started when the timed phase begins.
    pub ready: Option<Ready>,
    /// How long it may take to be ready.
    pub ready_within: Duration,
    /// How fast it is. A command that prints it has its first word resolved.
    pub figure: Figure,
    /// Its own cgroup, which is made for it, with its share of fast memory.
    #[serde(default)]
    pub cgroup: Option<Cgroup>,
}
