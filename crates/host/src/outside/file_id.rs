//! The identity of a file.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;

/// Identity of a file: device and inode (stat(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    /// st_dev.
    pub device: u64,
    /// st_ino.
    pub inode: u64,
}

impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = (libc::major(self.device), libc::minor(self.device));
        write!(f, "file {} of device {major}:{minor}", self.inode)
    }
}

impl FileId {
    /// The identity of a file with this metadata.
    pub(crate) fn of(meta: &fs::Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
        }
    }
}
