//! The memory of a running VM, looked up again for each connection to its hypervisor.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use demeter_policy::{ByteCount, GuestPhysAddr, PerTier, PhysRange, Pid, Tier, TierBytes};
use tokio::sync::Semaphore;

use super::file::{FileId, Kind, MemoryFile};
use super::files::{FILES_MAX, Files};
use super::map::{MemoryMap, Overlap, Piece};
use super::owners::{FileOwners, OwnedFile, ProcessOwners};
use super::process::{self, Maps, ProcessError};
use crate::backing::{Backing, Extent, FileOffset, NotInTier};
use crate::hypervisor::{
    Connection, HostVirtAddr, Hypervisor, HypervisorError, Mapping, MemoryBackend,
};
use crate::outside::{self, MayWait, Outside, Stuck};
use crate::process::PeerProcess;

/// Reason why a VM's memory cannot be managed.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The hypervisor did not answer or refused.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    /// A memory backend cannot be used.
    #[error("memory backend {memdev:?} of {hypervisor}: {why}")]
    Backend {
        /// The hypervisor.
        hypervisor: String,
        /// The backend's id.
        memdev: String,
        /// The backend's fault.
        why: BackendError,
    },
    /// A device pins memory that would be punched.
    #[error(
        "device {device:?} of {hypervisor} keeps guest memory pinned; a VM with such a device cannot be ballooned"
    )]
    Pinned {
        /// The hypervisor.
        hypervisor: String,
        /// The device.
        device: String,
    },
    /// The hypervisor's and the kernel's data contradict each other.
    #[error("the memory map of {hypervisor} contradicts itself: {source}")]
    Overlap {
        /// The hypervisor.
        hypervisor: String,
        /// The overlap.
        source: Overlap,
    },
    /// The search takes too long.
    #[error(transparent)]
    Stuck(#[from] Stuck),
}

/// Reason why a memory backend cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// There is no backend of this name.
    #[error("there is none; there are: {0}; set memdev in the VM's configuration to one of them")]
    Missing(String),
    /// The memory is private to the hypervisor.
    #[error(
        "it is private; give its -object memory-backend-* the option share=on (Cloud Hypervisor: its \
         --memory-zone shared=on)"
    )]
    Private,
    /// The backend is larger than the bound. Our bookkeeping grows with the size that a hypervisor
    /// claims.
    #[error("it has {0}, and a tier may have {TIER_MAX} at the most")]
    TooLarge(ByteCount),
    /// The guest does not map it.
    #[error("the guest does not map it; assign it to a node: -numa node,memdev=..")]
    NotInGuest,
    /// It is mapped in more runs than any real machine has.
    #[error("the guest has it in more than {RUNS_MAX} runs of addresses")]
    Runs,
    /// The tier has too many files.
    #[error("it has more than {FILES_MAX} files")]
    InParts,
    /// The process behind the socket does not map this memory.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The memory lies on hugetlbfs. Parts of a huge page cannot be freed, and freed ones may be
    /// lost for good.
    #[error(
        "it lies on hugetlbfs, where a hole loses the huge page's reservation, so the VM could die of \
         SIGBUS when it uses the memory again; use memory-backend-memfd without hugetlb, with \
         transparent huge pages (/sys/kernel/mm/transparent_hugepage/shmem_enabled)"
    )]
    Hugetlb,
    /// The file lies on a disk and may hold data that must persist.
    #[error(
        "it is {0}, which does not lie on tmpfs; use memory-backend-memfd, or name \
         its folder in memory_paths"
    )]
    OnDisk(PathBuf),
    /// The file cannot be read or does not answer.
    #[error("{0}")]
    File(#[from] io::Error),
    /// Two VMs, or two tiers of one VM, share a file.
    #[error("it is {file}, which is {other} already; give every memory backend a file of its own")]
    Shared {
        /// The file.
        file: FileId,
        /// The other VM and tier.
        other: String,
    },
}

/// Maximum memory of a VM's tier. Its bitmap takes 32 MiB.
pub const TIER_MAX: ByteCount = ByteCount(1 << 40);

/// Maximum number of address runs of a backend.
const RUNS_MAX: usize = 1 << 16;

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
    fn allows(&self, file: &MemoryFile, wait: &MayWait) -> io::Result<bool> {
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

/// The result of the search for one tier.
struct Found {
    size: ByteCount,
    pieces: Vec<Piece>,
    files: Files,
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
        process::pinned_by(&self.root, self.process.pid, wait)
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

/// A search for a VM's memory, on a thread that may wait.
struct Search {
    host: HostFiles,
    vm: String,
    /// Name for messages.
    hypervisor: String,
    pid: Pid,
    backends: Vec<MemoryBackend>,
    memdev: PerTier<String>,
    /// Addresses of each backend, as the hypervisor reports them.
    mapped: PerTier<Vec<Mapping>>,
}

impl Search {
    fn run(self, wait: &MayWait) -> Result<(MemoryMap, Found, Found), MemoryError> {
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

    fn error(&self, memdev: &str) -> impl Fn(BackendError) -> MemoryError + use<> {
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
    fn shared_size(&self, memdev: &str) -> Result<ByteCount, BackendError> {
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use demeter_policy::MIB;

    use super::*;
    use crate::hypervisor::qemu::Qemu;
    use crate::testing::FakeVm;

    const SIZE: TierBytes = TierBytes {
        fast: ByteCount(4 * MIB),
        slow: ByteCount(8 * MIB),
    };

    fn vm() -> FakeVm {
        FakeVm::new(SIZE)
    }

    async fn find(
        vm: &FakeVm,
        name: &str,
        memdev: &PerTier<String>,
        host: &HostFiles,
    ) -> Result<LiveBacking<Qemu>, String> {
        let connection = vm.connect().await;
        let found = LiveBacking::find(host, &Outside::default(), name, &connection, memdev).await;
        found.map_err(|error| error.to_string())
    }

    fn range(start: u64, bytes: u64) -> PhysRange {
        PhysRange::new(GuestPhysAddr(start), ByteCount(bytes)).unwrap()
    }

    #[tokio::test]
    async fn what_the_guest_names_is_what_is_punched() {
        let vm = vm();
        let host = HostFiles::default();
        let wait = MayWait::in_a_test();
        let backing = find(&vm, "a", &FakeVm::memdev(), &host).await.unwrap();
        assert_eq!(backing.size(Tier::Slow), ByteCount(8 * MIB));
        // The second half of slow memory lies above a hole.
        let high = range((4 << 30) + MIB, MIB);
        let extent = backing.resolve(Tier::Slow, high).unwrap();
        assert_eq!(extent.offset.0, 5 * MIB);
        backing.punch(extent, &wait).unwrap();
        assert_eq!(
            backing.backed(Tier::Slow, &wait).unwrap(),
            ByteCount(7 * MIB)
        );
        assert_eq!(
            backing.backed(Tier::Fast, &wait).unwrap(),
            ByteCount(4 * MIB)
        );
        let mut read = vec![0; 8 * MIB as usize];
        vm.file(Tier::Slow).read_exact_at(&mut read, 0).unwrap();
        let hole = 5 * MIB as usize..6 * MIB as usize;
        let zero = |at: usize| hole.contains(&at);
        assert!((0..read.len()).all(|at| (read[at] == 0) == zero(at)));

        for (tier, range) in [
            (Tier::Fast, high),
            (Tier::Slow, range(0, MIB)),
            (Tier::Slow, range(7 * MIB, 2 * MIB)),
            (Tier::Slow, range(8 * MIB, MIB)),
            (Tier::Fast, range(3 * MIB, 2 * MIB)),
            (Tier::Slow, range(u64::MAX - MIB, MIB)),
        ] {
            assert!(backing.resolve(tier, range).is_err(), "{tier} {range}");
        }
    }

    #[tokio::test]
    async fn what_was_plugged_in_is_known_and_of_no_tier() {
        let vm = vm();
        let dimm = range(1 << 33, 2 * MIB);
        vm.state().dimm = Some(dimm);
        let host = HostFiles::default();
        let backing = find(&vm, "a", &FakeVm::memdev(), &host).await.unwrap();
        assert!(backing.plugged().contains(&dimm));
        assert!(backing.resolve(Tier::Fast, dimm).is_err());
        let wait = MayWait::in_a_test();
        // This double maps the fast tier's memory there.
        vm.file(Tier::Fast).write_all_at(b"proof", MIB).unwrap();
        let mut read = [0; 5];
        let at = GuestPhysAddr(dimm.start().0 + MIB);
        backing.read_plugged(at, &mut read, &wait).unwrap();
        assert_eq!(&read, b"proof");
        assert!(backing.read_plugged(dimm.end(), &mut read, &wait).is_err());
    }

    #[tokio::test]
    async fn no_file_is_two_vms_memory() {
        let vm = vm();
        let host = HostFiles::default();
        let connection = vm.connect().await;
        let memdev = FakeVm::memdev();
        let outside = Outside::default();
        let find = |name| LiveBacking::find(&host, &outside, name, &connection, &memdev);
        let first = find("a").await.unwrap();
        let said = find("b").await.unwrap_err().to_string();
        assert!(said.contains("fast memory of VM a already"), "{said}");
        drop(first);
        find("b").await.unwrap();
    }

    #[tokio::test]
    async fn memory_that_will_not_do_is_named_with_the_hint() {
        let host = HostFiles::default();
        let memdev = |fast: &str| PerTier {
            fast: fast.into(),
            slow: "node1".into(),
        };
        let said = find(&vm(), "a", &memdev("m9"), &host).await.unwrap_err();
        assert!(
            said.contains("\"m9\"") && said.contains("there are: node0, node1"),
            "{said}"
        );
        let said = find(&vm(), "a", &memdev("node1"), &host).await.unwrap_err();
        assert!(
            said.contains("slow memory of VM a") || said.contains("fast memory of VM a"),
            "{said}"
        );
        let private = vm();
        private.state().private = true;
        let said = find(&private, "a", &FakeVm::memdev(), &host)
            .await
            .unwrap_err();
        assert!(said.contains("share=on"), "{said}");
        let read_only = vm();
        read_only.state().protect(Tier::Fast);
        let said = find(&read_only, "a", &FakeVm::memdev(), &host)
            .await
            .unwrap_err();
        assert!(said.contains("may only read it"), "{said}");
        let pinned = vm();
        pinned.state().pinned = true;
        let said = find(&pinned, "a", &FakeVm::memdev(), &host)
            .await
            .unwrap_err();
        assert!(said.contains("\"gpu0\""), "{said}");
    }

    #[tokio::test]
    async fn huge_pages_that_are_set_aside_are_refused() {
        // An empty file needs no huge page.
        let huge = match rustix::fs::memfd_create("huge", rustix::fs::MemfdFlags::HUGETLB) {
            Ok(file) => fs::File::from(file),
            Err(error) => return eprintln!("skipped: no hugetlb memfd here: {error}"),
        };
        let vm = vm();
        vm.state().back_by(Tier::Fast, huge);
        let host = HostFiles::default();
        let said = find(&vm, "a", &FakeVm::memdev(), &host).await.unwrap_err();
        assert!(said.contains("hugetlbfs"), "{said}");
    }

    #[tokio::test]
    async fn a_file_on_disk_is_memory_only_where_the_operator_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let on_disk = FakeVm::new(SIZE);
        let path = folder.path().join("memory");
        on_disk.state().replace_file(Tier::Fast, &path);
        let find_with = async |paths: &[&Path]| {
            let host = HostFiles {
                memory_paths: paths.iter().map(|path| path.to_path_buf()).collect(),
                ..HostFiles::default()
            };
            find(&on_disk, "a", &FakeVm::memdev(), &host).await
        };
        if fstatfs_is_memory(folder.path()) {
            eprintln!("skipped: {} lies in memory", folder.path().display());
            return;
        }
        for wrong in [
            &[][..],
            &[Path::new("/nonexistent")],
            &[&path.with_extension("x")],
        ] {
            let said = find_with(wrong).await.unwrap_err();
            assert!(said.contains("memory_paths"), "{said}");
        }
        find_with(&[folder.path()]).await.unwrap();
        // A deleted file has no path, so it lies in no folder.
        fs::remove_file(&path).unwrap();
        assert!(find_with(&[folder.path()]).await.is_err());
    }

    fn fstatfs_is_memory(path: &Path) -> bool {
        MemoryFile::new(fs::File::open(path).unwrap(), &MayWait::in_a_test())
            .unwrap()
            .kind()
            == Kind::Memory
    }

    #[tokio::test]
    async fn a_memory_beyond_all_bounds_is_refused() {
        let host = HostFiles::default();
        let vm = vm();
        vm.state().claims = Some(ByteCount(u64::MAX));
        let said = find(&vm, "a", &FakeVm::memdev(), &host).await.unwrap_err();
        assert!(said.contains("at the most"), "{said}");
    }
}
