//! The search for a VM's memory: the file behind each range of its backends.

use demeter_policy::{ByteCount, PerTier, Pid, Tier};

use super::error::{BackendError, MemoryError, RUNS_MAX, TIER_MAX};
use super::file::{Kind, MemoryFile};
use super::files::Files;
use super::host_files::HostFiles;
use super::map::{MemoryMap, Piece};
use super::owners::OwnedFile;
use super::process::{self, Maps};
use crate::backing::FileOffset;
use crate::hypervisor::{Mapping, MemoryBackend};
use crate::outside::{FileId, MayWait};

/// The result of the search for one tier.
pub(super) struct Found {
    pub(super) size: ByteCount,
    pub(super) pieces: Vec<Piece>,
    pub(super) files: Files,
}

/// A search for a VM's memory, on a thread that may wait.
pub(super) struct Search {
    pub(super) host: HostFiles,
    pub(super) vm: String,
    /// Name for messages.
    pub(super) hypervisor: String,
    pub(super) pid: Pid,
    pub(super) backends: Vec<MemoryBackend>,
    pub(super) memdev: PerTier<String>,
    /// Addresses of each backend, as the hypervisor reports them.
    pub(super) mapped: PerTier<Vec<Mapping>>,
}

impl Search {
    pub(super) fn run(self, wait: &MayWait) -> Result<(MemoryMap, Found, Found), MemoryError> {
        let maps = Maps::read(&self.host.root, self.pid, wait);
        let maps = maps.map_err(|source| self.error(&self.memdev.fast)(source.into()))?;
        let fast = self.tier(Tier::Fast, &maps, wait)?;
        let slow = self.tier(Tier::Slow, &maps, wait)?;
        let pieces = [&fast.pieces[..], &slow.pieces].concat();
        let map = MemoryMap::new(pieces).map_err(|source| MemoryError::Overlap {
            hypervisor: self.hypervisor,
            source,
        })?;
        Ok((map, fast, slow))
    }

    pub(super) fn error(&self, memdev: &str) -> impl Fn(BackendError) -> MemoryError + use<> {
        let (hypervisor, memdev) = (self.hypervisor.clone(), memdev.to_owned());
        move |why| MemoryError::Backend {
            hypervisor: hypervisor.clone(),
            memdev: memdev.clone(),
            why,
        }
    }

    fn tier(&self, tier: Tier, maps: &Maps, wait: &MayWait) -> Result<Found, MemoryError> {
        let memdev = self.memdev.get(tier);
        let error = self.error(memdev);
        let size = self.shared_size(memdev).map_err(&error)?;
        let runs = self.mapped.get(tier);
        if runs.len() > RUNS_MAX {
            return Err(error(BackendError::Runs));
        }
        let mut pieces = vec![];
        let mut files = Files::default();
        for &Mapping { guest, host } in runs {
            let mapped = maps.find(host, guest.len());
            let mapped = mapped.map_err(|source| error(source.into()))?;
            let base = match files.base(mapped.file) {
                Some(base) => base,
                None => {
                    let opened = self.open(tier, maps, mapped.file, wait);
                    let (file, owned) = opened.map_err(&error)?;
                    let added = files.add(mapped.file, file, owned, wait);
                    let added = added.map_err(|source| error(source.into()))?;
                    added.ok_or_else(|| error(BackendError::InParts))?
                }
            };
            pieces.push(Piece {
                range: guest,
                tier,
                offset: FileOffset(base.0.saturating_add(mapped.offset.0)),
            });
        }
        if pieces.is_empty() {
            return Err(error(BackendError::NotInGuest));
        }
        Ok(Found {
            size,
            pieces,
            files,
        })
    }

    /// The size of a backend; an error if it is missing or private.
    pub(super) fn shared_size(&self, memdev: &str) -> Result<ByteCount, BackendError> {
        let named = |backend: &&MemoryBackend| backend.id.as_deref() == Some(memdev);
        match self.backends.iter().find(named) {
            Some(backend) if backend.size > TIER_MAX => Err(BackendError::TooLarge(backend.size)),
            Some(backend) if backend.shared => Ok(backend.size),
            Some(_) => Err(BackendError::Private),
            None => {
                let ids = self.backends.iter().filter_map(|b| b.id.as_deref());
                Err(BackendError::Missing(ids.collect::<Vec<_>>().join(", ")))
            }
        }
    }

    fn open(
        &self,
        tier: Tier,
        maps: &Maps,
        id: FileId,
        wait: &MayWait,
    ) -> Result<(MemoryFile, OwnedFile), BackendError> {
        let owner = format!("{tier} memory of VM {}", self.vm);
        let owned = self
            .host
            .owners
            .take(id, owner)
            .map_err(|other| BackendError::Shared { file: id, other })?;
        let file = MemoryFile::new(process::take(&self.host.root, maps, id, wait)?, wait)?;
        match file.kind() {
            Kind::Memory => {}
            Kind::Hugetlb => return Err(BackendError::Hugetlb),
            Kind::Disk if self.host.allows(&file, wait)? => {}
            Kind::Disk => return Err(BackendError::OnDisk(file.path(wait)?)),
        }
        Ok((file, owned))
    }
}
