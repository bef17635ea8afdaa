//! A lock that gives one Demeter process exclusive use of something: a source of samples, a state file.

use std::fs::{File, TryLockError};

/// A file that we have locked with flock(2).
///
/// Dropping it unlocks the file explicitly. Closing would not suffice: the lock belongs to the open file description.
/// That lives while anything refers to it, such as a child before its exec or a reader of `/proc/PID/fd`. The lock ends
/// with the process at the latest, and leaves nothing behind.
#[derive(Debug)]
pub struct LockedFile(File);

impl LockedFile {
    /// Takes the lock.
    ///
    /// # Errors
    /// It is taken, or the file cannot be locked.
    pub fn try_new(file: File) -> Result<Self, TryLockError> {
        file.try_lock()?;
        Ok(Self(file))
    }

    /// The locked file.
    pub fn file(&self) -> &File {
        &self.0
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        // Unlocking fails only for a closed descriptor, and ours is open.
        let _ = self.0.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || file.reopen().unwrap();
        let first = LockedFile::try_new(open()).unwrap();
        let taken = LockedFile::try_new(open());
        assert!(matches!(taken, Err(TryLockError::WouldBlock)));
        drop(first);
        assert!(LockedFile::try_new(open()).is_ok());
    }

    #[test]
    fn a_lock_ends_though_somebody_keeps_its_file_open() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let first = LockedFile::try_new(file.reopen().unwrap()).unwrap();
        let _same_open_file = first.file().try_clone().unwrap();
        drop(first);
        assert!(LockedFile::try_new(file.reopen().unwrap()).is_ok());
    }
}
