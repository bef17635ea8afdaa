//! The files of this host that may be a VM's memory.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::Semaphore;

use super::file::MemoryFile;
use super::owners::{FileOwners, ProcessOwners};
use crate::outside::{self, MayWait};

/// Files of this host that may be a VM's memory. Clones share the list of owners.
#[derive(Debug, Clone)]
pub struct HostFiles {
    /// Parent of /proc.
    pub root: PathBuf,
    /// Folders on disk whose files may be memory.
    pub memory_paths: Vec<PathBuf>,
    /// Owner of each file in use.
    pub owners: FileOwners,
    /// VM of each process.
    pub(crate) processes: ProcessOwners,
    /// The turn to count a VM's pages: one VM at a time.
    pub(crate) counting: Arc<Semaphore>,
}

impl HostFiles {
    /// Whether a file lies in one of the folders. Checks the path and the file that we find there,
    /// because a process can have other mounts than ours.
    pub(super) fn allows(&self, file: &MemoryFile, wait: &MayWait) -> io::Result<bool> {
        let path = file.path(wait)?;
        let named = self
            .memory_paths
            .iter()
            .any(|folder| path.starts_with(folder));
        let here =
            outside::file_at(&path, wait).is_ok_and(|found| Some(found) == file.id(wait).ok());
        Ok(named && here)
    }
}

impl Default for HostFiles {
    fn default() -> Self {
        Self {
            root: "/".into(),
            memory_paths: vec![],
            owners: FileOwners::default(),
            processes: ProcessOwners::default(),
            counting: Arc::new(Semaphore::new(1)),
        }
    }
}
