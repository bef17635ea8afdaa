//! Whose memory each file is: a hole punched for one VM must not be another's memory.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::FileId;

/// The files that VMs of this host have as memory. Clones share the same list.
#[derive(Debug, Clone, Default)]
pub struct Claims(Arc<Mutex<BTreeMap<FileId, String>>>);

/// A file that is somebody's; given back when dropped.
#[derive(Debug)]
pub(super) struct Claim {
    claims: Claims,
    file: FileId,
}

impl Claims {
    /// Claims a file for `owner`; the error is who has it.
    pub(super) fn claim(&self, file: FileId, owner: String) -> Result<Claim, String> {
        let mut owners = self.owners();
        if let Some(other) = owners.get(&file) {
            return Err(other.clone());
        }
        owners.insert(file, owner);
        Ok(Claim {
            claims: self.clone(),
            file,
        })
    }

    fn owners(&self) -> MutexGuard<'_, BTreeMap<FileId, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.claims.owners().remove(&self.file);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_owner_at_a_time() {
        let claims = Claims::default();
        let file = |inode| FileId { device: 1, inode };
        let first = claims.claim(file(7), "VM a".into()).unwrap();
        assert_eq!(claims.claim(file(7), "VM b".into()).unwrap_err(), "VM a");
        let _other = claims.claim(file(8), "VM b".into()).unwrap();
        drop(first);
        claims.claim(file(7), "VM b".into()).unwrap();
    }
}
