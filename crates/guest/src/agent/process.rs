//! One process that the agent looks after.

use std::path::Path;

use demeter_policy::Share;

use crate::maps::{MapsError, Movable, read_movable};
use crate::targets::Target;

/// A process. What it maps, the engine knows.
#[derive(Debug)]
pub(super) struct Process {
    pub target: Target,
    /// Ranges of memory that were too many to be looked after.
    pub ranges_left_out: u64,
    /// Its share of fast memory, as the engine was told.
    pub share: Option<Share>,
}

impl Process {
    pub fn new(target: Target) -> Self {
        Self {
            target,
            ranges_left_out: 0,
            share: None,
        }
    }

    /// Reads what the process maps now. One that has gone, or that may not be looked at, has no
    /// memory to move; that the system had no descriptor or memory to spare says nothing of it.
    pub fn read_space(&mut self, root: &Path) -> Result<Movable, MapsError> {
        let space = match read_movable(root, self.target.pid) {
            Err(MapsError::Gone(_)) => Movable::default(),
            Err(MapsError::Io { source, .. })
                if source.kind() == std::io::ErrorKind::PermissionDenied =>
            {
                Movable::default()
            }
            space => space?,
        };
        self.ranges_left_out = space.left_out;
        Ok(space)
    }
}
