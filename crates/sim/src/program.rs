//! Interface between simulated programs and the machine.

use demeter_policy::{ByteCount, GuestVirtAddr, VirtRange};

/// Maximum number of accesses in a [`Batch`].
pub const BATCH: usize = 1024;

/// Bit that marks a store.
const STORE: u64 = 1 << 63;

/// Bits of a guest-virtual address (five-level paging).
const ADDRESS: u64 = (1 << 57) - 1;

/// One access of a simulated program: a load or a store at a byte address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access(u64);

impl Access {
    /// A load. Address bits above 57 are dropped.
    #[inline]
    pub fn load(gva: GuestVirtAddr) -> Self {
        Self(gva.0 & ADDRESS)
    }

    /// A store. Address bits above 57 are dropped.
    #[inline]
    pub fn store(gva: GuestVirtAddr) -> Self {
        Self(gva.0 & ADDRESS | STORE)
    }

    /// The address.
    #[inline]
    pub fn gva(self) -> GuestVirtAddr {
        GuestVirtAddr(self.0 & ADDRESS)
    }

    /// Whether it is a store.
    #[inline]
    pub fn is_store(self) -> bool {
        self.0 & STORE != 0
    }
}

/// The next actions of a thread: up to [`BATCH`] accesses in order, and the number of operations that they complete.
#[derive(Debug, Clone)]
pub struct Batch {
    accesses: [Access; BATCH],
    len: usize,
    /// Operations that end in this batch.
    pub ops: u32,
    /// For each marked end of an operation, the number of accesses before it.
    ends: [u16; BATCH],
    marked: usize,
}

impl Default for Batch {
    fn default() -> Self {
        Self {
            accesses: [Access::default(); BATCH],
            len: 0,
            ops: 0,
            ends: [0; BATCH],
            marked: 0,
        }
    }
}

impl Batch {
    /// Empties it.
    pub fn clear(&mut self) {
        self.len = 0;
        self.ops = 0;
        self.marked = 0;
    }

    /// Appends an access. The caller must check [`Self::room`].
    ///
    /// # Panics
    /// When the batch is full.
    #[inline]
    pub fn push(&mut self, access: Access) {
        self.accesses[self.len] = access;
        self.len += 1;
    }

    /// Marks the end of an operation, to measure its latency. A program marks every operation or none.
    ///
    /// # Panics
    /// When more than [`BATCH`] operations end in a batch.
    #[inline]
    pub fn end_operation(&mut self) {
        self.ops += 1;
        self.ends[self.marked] = self.len as u16;
        self.marked += 1;
    }

    /// For each end marked by [`Self::end_operation`], the number of accesses before it.
    #[inline]
    pub(crate) fn ends(&self) -> &[u16] {
        &self.ends[..self.marked]
    }

    /// Number of accesses that still fit.
    #[inline]
    pub fn room(&self) -> usize {
        BATCH - self.len
    }

    /// The accesses, in order.
    #[inline]
    pub fn accesses(&self) -> &[Access] {
        &self.accesses[..self.len]
    }
}

/// A memory region of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// Its name in reports.
    pub name: String,
    /// Its maximum size; not zero.
    pub bytes: ByteCount,
    /// Bytes that are mapped from the start; the rest is mapped on first touch.
    pub start: ByteCount,
    /// The process that owns it, from 0; in ascending order.
    pub process: u32,
}

/// A simulated program, thread by thread. It is deterministic for a seed, with no I/O and no clock.
pub trait Program {
    /// Its memory regions, in the order of allocation and first touch.
    fn regions(&self) -> Vec<Region>;

    /// Sets the address of each region, in the order of [`Self::regions`]. Called once, before anything else.
    fn place(&mut self, bases: &[GuestVirtAddr]);

    /// Number of threads; at least one, and constant.
    fn threads(&self) -> usize;

    /// The process of a thread, as in [`Region::process`].
    fn process_of(&self, _thread: usize) -> u32 {
        0
    }

    /// Fills an empty batch with the next accesses of initialisation (first touch), one for each page of `page_bytes`.
    /// Returns false once there are no more.
    fn populate(&mut self, page_bytes: u64, out: &mut Batch) -> bool;

    /// Fills an empty batch with at least one access of `thread`. `now_ns` is the time since the timed phase began.
    fn next(&mut self, thread: usize, now_ns: u64, out: &mut Batch);

    /// The current hot set, sorted and disjoint; empty if the program does not know it.
    fn hot(&self, now_ns: u64) -> Vec<VirtRange>;

    /// Picoseconds of computation for each operation of a thread, without its accesses.
    fn compute_ps(&self, thread: usize) -> u64;

    /// Error detected during the run, such as a trace that changed while it was replayed. Called at the end; computed
    /// programs return none.
    fn fault(&self) -> Option<String> {
        None
    }
}
