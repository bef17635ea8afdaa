//! Notes in /run of changes to DAMON, for the clean-up after a kill.
//!
//! A file is created before the change, and removed after it was reverted. A boot clears both /run and DAMON.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::DamonError;
use super::file::io_error;

/// Directory of the notes: that of the agent's socket.
const DIR: &str = "run/demeter";

/// A change of DAMON that must be reverted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// Kdamonds are set up.
    Kdamonds,
    /// DAMON_STAT was turned off.
    Statistic,
}

impl Change {
    fn file(self, root: &Path) -> PathBuf {
        root.join(DIR).join(match self {
            Self::Kdamonds => "damon-kdamonds",
            Self::Statistic => "damon-stat-off",
        })
    }

    /// Whether the change was made and not reverted.
    pub(super) fn is_noted(self, root: &Path) -> bool {
        self.file(root).exists()
    }

    /// Notes that the change is about to be made.
    ///
    /// # Errors
    /// The file cannot be written. After a kill the change would stay.
    pub(super) fn note(self, root: &Path) -> Result<(), DamonError> {
        let file = self.file(root);
        fs::create_dir_all(root.join(DIR))
            .and_then(|()| fs::write(&file, ""))
            .map_err(|source| io_error("create", &file, source))
    }

    /// Notes that the change was reverted.
    ///
    /// # Errors
    /// The file cannot be removed.
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
