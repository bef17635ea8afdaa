//! The memory of a running VM, looked up again for each connection to its hypervisor.

use std::io;
use std::path::PathBuf;

use demeter_policy::{ByteCount, GuestPhysAddr, PerTier, PhysRange, Tier, TierBytes};

use super::error::MemoryError;
use super::files::Files;
use super::host_files::HostFiles;
use super::map::MemoryMap;
use super::pinned::pinned_by;
use super::process;
use super::search::Search;
use crate::backing::{Backing, Extent, NotInTier};
use crate::hypervisor::{Connection, HostVirtAddr, Hypervisor, HypervisorError};
use crate::outside::{MayWait, Outside};
use crate::process::PeerProcess;

/// The memory files of a running VM.
#[derive(Debug)]
pub struct LiveBacking<H> {
    hypervisor: H,
    map: MemoryMap,
    sizes: TierBytes,
    files: PerTier<Files>,
    /// Plugged memory of no tier, in order, and the address of each run in the hypervisor.
    plugged: Vec<PhysRange>,
    plugged_at: Vec<HostVirtAddr>,
    root: PathBuf,
    process: PeerProcess,
}

impl<H: Hypervisor> LiveBacking<H> {
    /// Finds the memory of a VM behind a connection. `memdev` names its backends, `vm` names the VM
    /// in messages.
    pub async fn find(
        host: &HostFiles,
        outside: &Outside,
        vm: &str,
        connection: &Connection<H>,
        memdev: &PerTier<String>,
    ) -> Result<Self, MemoryError> {
        let hypervisor = &connection.hypervisor;
        if let Some(device) = hypervisor.pinning_device().await? {
            let hypervisor = hypervisor.name();
            return Err(MemoryError::Pinned { hypervisor, device });
        }
        let mut search = Search {
            host: host.clone(),
            vm: vm.into(),
            hypervisor: hypervisor.name(),
            pid: connection.process.pid,
            backends: hypervisor.backends().await?,
            memdev: memdev.clone(),
            mapped: PerTier::default(),
        };
        for tier in Tier::ALL {
            let memdev = memdev.get(tier);
            search.shared_size(memdev).map_err(search.error(memdev))?;
            *search.mapped.get_mut(tier) = hypervisor.memory_map(memdev).await?;
        }
        let mut plugged = hypervisor.plugged_memory().await?;
        plugged.sort_unstable_by_key(|mapping| mapping.guest);
        let found = outside.ask("looking for the VM's memory", move |wait| search.run(wait));
        let (map, fast, slow) = found.await??;
        if !connection.process.is_there() {
            // The process may have ended and its number may be in use again.
            let why = format!("{} has ended", hypervisor.name());
            return Err(HypervisorError::Gone(why).into());
        }
        Ok(Self {
            hypervisor: hypervisor.clone(),
            root: host.root.clone(),
            process: connection.process,
            map,
            plugged: plugged.iter().map(|mapping| mapping.guest).collect(),
            plugged_at: plugged.iter().map(|mapping| mapping.host).collect(),
            sizes: TierBytes {
                fast: fast.size,
                slow: slow.size,
            },
            files: PerTier {
                fast: fast.files,
                slow: slow.files,
            },
        })
    }
}

impl<H: Hypervisor> Backing for LiveBacking<H> {
    fn size(&self, tier: Tier) -> ByteCount {
        *self.sizes.get(tier)
    }

    fn resolve(&self, tier: Tier, range: PhysRange) -> Result<Extent, NotInTier> {
        self.map.resolve(tier, range)
    }

    fn punch(&self, extent: Extent, wait: &MayWait) -> io::Result<()> {
        let files = self.files.get(extent.tier);
        files.punch(extent.offset, extent.len, wait)
    }

    fn read(&self, extent: Extent, into: &mut [u8], wait: &MayWait) -> io::Result<()> {
        if into.len() as u64 > extent.len.0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let files = self.files.get(extent.tier);
        files.read(extent.offset, into, wait)
    }

    fn plugged(&self) -> &[PhysRange] {
        &self.plugged
    }

    fn read_plugged(&self, at: GuestPhysAddr, into: &mut [u8], wait: &MayWait) -> io::Result<()> {
        let mut runs = self.plugged.iter().zip(&self.plugged_at);
        let (run, host) = runs
            .find(|(run, _)| (run.start()..run.end()).contains(&at))
            .ok_or(io::ErrorKind::NotFound)?;
        let at = HostVirtAddr(host.0.saturating_add(at.0 - run.start().0));
        process::read(&self.root, self.process.pid, at, into, wait)
    }

    fn pinned_by(&self, wait: &MayWait) -> io::Result<Option<String>> {
        pinned_by(&self.root, self.process.pid, wait)
    }

    fn disturbances(&self) -> u64 {
        self.hypervisor.events_told()
    }

    async fn catch_up(&self) -> Result<(), HypervisorError> {
        self.hypervisor.catch_up().await
    }

    fn backed(&self, tier: Tier, wait: &MayWait) -> io::Result<ByteCount> {
        self.files.get(tier).backed(wait)
    }
}

#[cfg(test)]
mod tests;
