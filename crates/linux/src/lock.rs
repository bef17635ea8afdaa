//! One Demeter at a time per source of samples.

use std::fs::File;

/// A file whose lock (flock(2)) is ours.
///
/// The lock ends with this value. Closing the file would not do: the lock is the open file's, and that
/// lives on while anybody refers to it, be it a child before its exec or a reader of
/// `/proc/PID/fd`. It ends with the process at the latest, and leaves nothing behind.
#[derive(Debug)]
pub struct LockedFile(File);

impl LockedFile {
    /// Takes the lock; `None` if somebody else has it, or the file cannot be locked.
    pub fn try_new(file: File) -> Option<Self> {
        // Lazily: a value that was made would unlock the file when it is dropped.
        file.try_lock().is_ok().then(|| Self(file))
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.0
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        // Fails for a descriptor that is not open only, and ours is.
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
        assert!(LockedFile::try_new(open()).is_none());
        drop(first);
        assert!(LockedFile::try_new(open()).is_some());
    }

    #[test]
    fn a_lock_ends_though_somebody_keeps_its_file_open() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let first = LockedFile::try_new(file.reopen().unwrap()).unwrap();
        let _same_open_file = first.file().try_clone().unwrap();
        drop(first);
        assert!(LockedFile::try_new(file.reopen().unwrap()).is_some());
    }
}
