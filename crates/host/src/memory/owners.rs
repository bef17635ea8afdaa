//! Owners of memory files and processes.
//!
//! A hole punched for one VM must not be another's memory, and one process must not be managed as
//! two VMs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::outside::FileId;
use crate::process::PeerProcess;

/// A list of keys with one owner each. Clones share the list.
#[derive(Debug, Clone)]
pub struct Owners<K: Ord>(Arc<Mutex<BTreeMap<K, String>>>);

/// Memory files of this host's VMs.
pub type FileOwners = Owners<FileId>;

/// Processes of this host's VMs.
pub(crate) type ProcessOwners = Owners<PeerProcess>;

impl<K: Ord> Default for Owners<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

/// A key with an owner; released when dropped.
#[derive(Debug)]
pub(crate) struct Owned<K: Ord> {
    owners: Owners<K>,
    key: K,
}

/// A file with an owner.
pub(super) type OwnedFile = Owned<FileId>;

impl<K: Ord + Clone> Owners<K> {
    /// Records `owner` for a key; the error is the present owner.
    pub(crate) fn take(&self, key: K, owner: String) -> Result<Owned<K>, String> {
        let mut owners = self.owners();
        if let Some(other) = owners.get(&key) {
            return Err(other.clone());
        }
        owners.insert(key.clone(), owner);
        Ok(Owned {
            owners: Self(self.0.clone()),
            key,
        })
    }
}

impl<K: Ord> Owners<K> {
    fn owners(&self) -> MutexGuard<'_, BTreeMap<K, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Ord> Drop for Owned<K> {
    fn drop(&mut self) {
        self.owners.owners().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_there_is_once_has_one_owner_at_a_time() {
        let owners = FileOwners::default();
        let file = |inode| FileId { device: 1, inode };
        let first = owners.take(file(7), "VM a".into()).unwrap();
        assert_eq!(owners.take(file(7), "VM b".into()).unwrap_err(), "VM a");
        let _other = owners.take(file(8), "VM b".into()).unwrap();
        drop(first);
        owners.take(file(7), "VM b".into()).unwrap();
    }
}
