//! The seam between simulated programs and the machine that runs them.

use demeter_policy::{ByteCount, GuestVirtAddr, VirtRange};

/// The most accesses in a [`Batch`].
pub const BATCH: usize = 1024;

/// Marks a store.
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

    /// Where.
    #[inline]
    pub fn gva(self) -> GuestVirtAddr {
        GuestVirtAddr(self.0 & ADDRESS)
    }

    /// Whether it writes.
    #[inline]
    pub fn is_store(self) -> bool {
        self.0 & STORE != 0
    }
}

/// What a thread does next: up to [`BATCH`] accesses in order, and how many operations of the
/// program they complete.
#[derive(Debug, Clone)]
pub struct Batch {
    accesses: [Access; BATCH],
    len: usize,
    /// Operations that end in this batch.
    pub ops: u32,
    /// Accesses before each end that is marked.
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

    /// Appends an access. The caller sees to it that there is [`Self::room`].
    ///
    /// # Panics
    /// When it is full.
    #[inline]
    pub fn push(&mut self, access: Access) {
        self.accesses[self.len] = access;
        self.len += 1;
    }

    /// An operation ends here, and how long it took shall be told: every operation of the
    /// program ends so, or none.
    ///
    /// # Panics
    /// When more than [`BATCH`] end in a batch.
    #[inline]
    pub fn end_operation(&mut self) {
        self.ops += 1;
        self.ends[self.marked] = self.len as u16;
        self.marked += 1;
    }

    /// Accesses before each end that [`Self::end_operation`] has marked.
    #[inline]
    pub(crate) fn ends(&self) -> &[u16] {
        &self.ends[..self.marked]
    }

    /// Accesses that still fit.
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

/// Memory that a program asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// For people.
    pub name: String,
    /// Its size, when it has grown; not zero.
    pub bytes: ByteCount,
    /// Of it, what is mapped from the start; the rest is mapped as it is touched.
    pub start: ByteCount,
    /// The process that has it, from 0 on; those of a process follow one another.
    pub process: u32,
}

/// What a program does, thread by thread. Deterministic from its seed; no I/O, no clock.
pub trait Program {
    /// Its memory, in the order in which it is allocated and first touched.
    fn regions(&self) -> Vec<Region>;

    /// Tells where each region begins, in the order of [`Self::regions`]. Called once, first.
    fn place(&mut self, bases: &[GuestVirtAddr]);

    /// Threads; at least one, the same throughout.
    fn threads(&self) -> usize;

    /// The next accesses of initialisation (first touch), one for each page of `page_bytes`, into
    /// an empty batch; false once there are no more.
    fn populate(&mut self, page_bytes: u64, out: &mut Batch) -> bool;

    /// The next accesses of `thread` into an empty batch, at least one. `now_ns` is the time
    /// since the timed phase began.
    fn next(&mut self, thread: usize, now_ns: u64, out: &mut Batch);

    /// What is hot now, if the program knows: sorted, disjoint. Empty if it does not.
    fn hot(&self, now_ns: u64) -> Vec<VirtRange>;

    /// Picoseconds of computation for each operation of a thread, beyond its accesses.
    fn compute_ps(&self, thread: usize) -> u64;

    /// Why what it did was not what it should have done: a trace may change while it is replayed.
    /// Asked at the end; computed programs are always right.
    fn fault(&self) -> Option<String> {
        None
    }
}
