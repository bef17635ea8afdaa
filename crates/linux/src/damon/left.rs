//! Notes in /run of changes that a killed Demeter has not undone.
//!
//! A file is there before the change is made, and goes after it was undone. /run is empty after a boot, and so is DAMON.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::DamonError;
use super::admin::io_error;

/// Where they lie: the folder of the agent's socket.
const DIR: &str = "run/demeter";

/// Something that we change in DAMON and undo at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// Kdamonds are set up.
    Kdamonds,
    /// DAMON_STAT was on, and is turned off.
    Statistic,
}

impl Change {
    fn file(self, root: &Path) -> PathBuf {
        root.join(DIR).join(match self {
            Self::Kdamonds => "damon-kdamonds",
            Self::Statistic => "damon-stat-off",
        })
    }

    /// Whether it was made, and not undone.
    pub(super) fn is_noted(self, root: &Path) -> bool {
        self.file(root).exists()
    }

    /// Notes that it is made now.
    ///
    /// # Errors
    /// When the file cannot be written: nobody would undo the change after a kill.
    pub(super) fn note(self, root: &Path) -> Result<(), DamonError> {
        let file = self.file(root);
        fs::create_dir_all(root.join(DIR))
            .and_then(|()| fs::write(&file, ""))
            .map_err(|source| io_error("create", &file, source))
    }

    /// Notes that it was undone.
    ///
    /// # Errors
    /// When the file cannot be removed.
    pub(super) fn forget(self, root: &Path) -> Result<(), DamonError> {
        let file = self.file(root);
        match fs::remove_file(&file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(io_error("remove", &file, error))
            }
            _ => Ok(()),
        }
    }
}
