//! A recorded program.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Parameters;
use crate::fault::refuse_if;

/// Parameters of a trace.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// The trace file, as `demeter trace` writes it; relative to the current folder.
    pub file: PathBuf,
}

impl Parameters for Trace {
    fn size_mib(&self) -> u64 {
        0
    }

    fn check(&self, _duration_s: u64) -> Result<(), String> {
        refuse_if(self.file.as_os_str().is_empty(), || {
            "workload.file: name a trace, as `demeter trace record` writes it".into()
        })
    }
}
