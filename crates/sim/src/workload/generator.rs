//! Interface of a workload; [`super::Workload`] adds the common part.

use crate::{Batch, Region};

use super::memory::{Extent, ProgramMemory};

/// A program: its memory, and the accesses of its threads.
///
/// The accesses of a thread depend only on the seed, the thread, and the times of its own calls, not on calls for other
/// threads.
pub(crate) trait Generator: Send {
    /// Its memory regions in allocation order; none is empty.
    fn regions(&self) -> Vec<Region>;

    /// Number of threads, at least one.
    fn threads(&self) -> u32;

    /// As [`crate::Program::process_of`].
    fn process_of(&self, _thread: usize) -> u32 {
        0
    }

    /// As [`crate::Program::next`], with addresses in `memory`.
    fn next(&mut self, memory: &ProgramMemory, thread: usize, now_ns: u64, out: &mut Batch);

    /// The current hot set, in the order of regions and offsets.
    fn hot(&self, now_ns: u64) -> Vec<Extent>;

    /// As [`crate::Program::compute_ps`].
    fn compute_ps(&self, thread: usize) -> u64;

    /// As [`crate::Program::fault`].
    fn fault(&self) -> Option<String> {
        None
    }
}
