//! The memory that stands behind a VM, as far as giving it back needs it.

use std::io;

use demeter_policy::{ByteCount, GuestPhysAddr, PhysRange, Tier};

use crate::hypervisor::HypervisorError;
use crate::outside::MayWait;

/// A position in a memory file, or in several one after the other, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileOffset(pub u64);

/// A part of the file that backs one tier of one VM, found by [`Backing::resolve`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// Whose file.
    pub tier: Tier,
    /// Where it begins in the file.
    pub offset: FileOffset,
    /// Length, a multiple of the page size.
    pub len: ByteCount,
}

/// Why a guest-physical range is not this VM's memory of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{range} is not in the VM's {tier} memory")]
pub struct NotInTier {
    /// What was asked for.
    pub range: PhysRange,
    /// In which tier.
    pub tier: Tier,
}

/// The files behind a VM's memory: one per tier, shared with the hypervisor.
///
/// The hypervisor says where memory lies in guest-physical space; it is never assumed. Functions with
/// a [`MayWait`] may wait for the storage behind it.
pub trait Backing: Send + Sync + 'static {
    /// What the VM has of a tier with an empty balloon: the length of its file.
    fn size(&self, tier: Tier) -> ByteCount;

    /// Where in the file of `tier` the range lies. It must lie there whole.
    fn resolve(&self, tier: Tier, range: PhysRange) -> Result<Extent, NotInTier>;

    /// Gives the memory of `extent` back to the host (`FALLOC_FL_PUNCH_HOLE`). Reads as zeros
    /// afterwards, and is allocated anew where it is written.
    fn punch(&self, extent: Extent, wait: &MayWait) -> io::Result<()>;

    /// What the VM has besides, in order: memory that was plugged in, and is of no tier.
    fn plugged(&self) -> &[PhysRange] {
        &[]
    }

    /// Reads what is at an address of such memory.
    fn read_plugged(
        &self,
        _at: GuestPhysAddr,
        _into: &mut [u8],
        _wait: &MayWait,
    ) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }

    /// Reads the beginning of `extent`, no more than it has.
    fn read(&self, extent: Extent, into: &mut [u8], wait: &MayWait) -> io::Result<()>;

    /// What keeps guest memory pinned right now, if anything does: it would go on with the pages that
    /// a hole takes away.
    fn pinned_by(&self, wait: &MayWait) -> io::Result<Option<String>>;

    /// How often the VM was reset, stopped, or changed so that what was known of its memory may hold no
    /// more, as far as that was told.
    fn disturbances(&self) -> u64 {
        0
    }

    /// Waits until all [`disturbances`](Self::disturbances) are counted that were over, or had begun, when
    /// this was called. A memory that nobody disturbs has none.
    fn catch_up(&self) -> impl Future<Output = Result<(), HypervisorError>> + Send {
        async { Ok(()) }
    }

    /// What the file of `tier` occupies now: its allocated blocks.
    fn backed(&self, tier: Tier, wait: &MayWait) -> io::Result<ByteCount>;
}
