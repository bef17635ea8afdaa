//! The seam to the memory files behind a VM.

use std::io;

use demeter_policy::{ByteCount, GuestPhysAddr, PhysRange, Tier};

use crate::hypervisor::HypervisorError;
use crate::outside::MayWait;

/// Position in a memory file, or in several laid end to end, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileOffset(pub u64);

/// A part of a tier's memory file, found by [`Backing::resolve`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// Tier of the file.
    pub tier: Tier,
    /// Start in the file.
    pub offset: FileOffset,
    /// Length, a multiple of the page size.
    pub len: ByteCount,
}

/// Error: a guest-physical range is not this VM's memory of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{range} is not in the VM's {tier} memory")]
pub struct NotInTier {
    /// The requested range.
    pub range: PhysRange,
    /// The requested tier.
    pub tier: Tier,
}

/// The files behind a VM's memory: one per tier, shared with the hypervisor.
///
/// The hypervisor reports the guest-physical layout; it is never assumed. Functions with a
/// [`MayWait`] may block on storage.
pub trait Backing: Send + Sync + 'static {
    /// Memory of a tier with an empty balloon: the length of its file.
    fn size(&self, tier: Tier) -> ByteCount;

    /// The place of a range in the file of `tier`. The whole range must lie there.
    fn resolve(&self, tier: Tier, range: PhysRange) -> Result<Extent, NotInTier>;

    /// Frees the memory of `extent` (`FALLOC_FL_PUNCH_HOLE`). It reads as zeros, and a write
    /// allocates new memory.
    fn punch(&self, extent: Extent, wait: &MayWait) -> io::Result<()>;

    /// Plugged memory, which belongs to no tier, in order.
    fn plugged(&self) -> &[PhysRange] {
        &[]
    }

    /// Reads plugged memory at an address.
    fn read_plugged(
        &self,
        _at: GuestPhysAddr,
        _into: &mut [u8],
        _wait: &MayWait,
    ) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }

    /// Reads the beginning of `extent`, up to its length.
    fn read(&self, extent: Extent, into: &mut [u8], wait: &MayWait) -> io::Result<()>;

    /// A device that pins guest memory now, if any. It would keep using pages that a hole has
    /// freed.
    fn pinned_by(&self, wait: &MayWait) -> io::Result<Option<String>>;

    /// Number of reported disturbances: resets, stops and changes after which the known memory may
    /// be stale.
    fn disturbances(&self) -> u64 {
        0
    }

    /// Waits until every disturbance that began before this call is counted in
    /// [`disturbances`](Self::disturbances). By default there are none.
    fn catch_up(&self) -> impl Future<Output = Result<(), HypervisorError>> + Send {
        async { Ok(()) }
    }

    /// Memory that the file of `tier` occupies now, by its allocated blocks.
    fn backed(&self, tier: Tier, wait: &MayWait) -> io::Result<ByteCount>;
}
