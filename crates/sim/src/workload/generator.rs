//! What each workload says of itself; [`super::Workload`] adds what all have in common.

use crate::{Batch, Region};

use super::memory::{Extent, ProgramMemory};

/// One kind of program: its memory, and what its threads do with it.
///
/// The stream of a thread depends on the seed, the thread and the times it was asked at; not on
/// what other threads were asked in between.
pub(crate) trait Generator: Send {
    /// Its memory in the order of allocation, no region empty.
    fn regions(&self) -> Vec<Region>;

    /// Threads, at least one.
    fn threads(&self) -> u32;

    /// As [`crate::Program::next`], at addresses in `memory`.
    fn next(&mut self, memory: &ProgramMemory, thread: usize, now_ns: u64, out: &mut Batch);

    /// What is hot now, in the order of regions and offsets.
    fn hot(&self, now_ns: u64) -> Vec<Extent>;

    /// As [`crate::Program::compute_ps`].
    fn compute_ps(&self, thread: usize) -> u64;

    /// As [`crate::Program::fault`].
    fn fault(&self) -> Option<String> {
        None
    }
}
