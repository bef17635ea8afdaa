//! Whose memory each file is: a hole punched for one VM must not be another's memory.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::FileId;

/// The files that VMs of this host have as memory. Clones share the same list.
#[derive(Debug, Clone, Default)]
pub struct FileOwners(Arc<Mutex<BTreeMap<FileId, String>>>);

/// A file that is somebody's; given back when dropped.
#[derive(Debug)]
pub(super) struct OwnedFile {
    owners: FileOwners,
    file: FileId,
}

impl FileOwners {
    /// Notes a file as that of `owner`; the error is who has it.
    pub(super) fn take(&self, file: FileId, owner: String) -> Result<OwnedFile, String> {
        let mut owners = self.owners();
        if let Some(other) = owners.get(&file) {
            return Err(other.clone());
        }
        owners.insert(file, owner);
        Ok(OwnedFile {
            owners: self.clone(),
            file,
        })
    }

    fn owners(&self) -> MutexGuard<'_, BTreeMap<FileId, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OwnedFile {
    fn drop(&mut self) {
        self.owners.owners().remove(&self.file);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_owner_at_a_time() {
        let owners = FileOwners::default();
        let file = |inode| FileId { device: 1, inode };
        let first = owners.take(file(7), "VM a".into()).unwrap();
        assert_eq!(owners.take(file(7), "VM b".into()).unwrap_err(), "VM a");
        let _other = owners.take(file(8), "VM b".into()).unwrap();
        drop(first);
        owners.take(file(7), "VM b".into()).unwrap();
    }
}
