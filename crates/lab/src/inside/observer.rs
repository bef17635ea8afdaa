//! Placement of a memory range, sampled through the kernel.

use std::io;

use demeter_guest::pages::{LivePages, PageState, Pages};
use demeter_policy::{GuestVirtAddr, NodeId, PAGE_SIZE, Pid, VirtRange};

use crate::fault::Fault;

/// Maximum addresses per query, so that it takes a few milliseconds for any size of range. One system call takes as
/// many.
const SAMPLES_MAX: u64 = 1600;

/// Observes one range: a hot set, or a guest's memory.
#[derive(Debug)]
pub struct Observer {
    pid: Pid,
    fast: Vec<NodeId>,
    kernel: LivePages,
    pages: Vec<GuestVirtAddr>,
    states: Vec<PageState>,
}

impl Observer {
    /// Observes `range` of process `pid`; `fast` are the nodes that count as fast.
    pub fn new(pid: Pid, range: VirtRange, fast: &[NodeId]) -> Self {
        let pages: Vec<_> = sampled_pages(range).map(GuestVirtAddr).collect();
        Self {
            pid,
            fast: fast.to_vec(),
            kernel: LivePages::default(),
            states: Vec::with_capacity(pages.len()),
            pages,
        }
    }

    /// Share of the range in fast memory, 0 to 1. Unmapped pages count as not fast.
    pub fn in_fast(&mut self) -> Result<f64, Fault> {
        self.states.clear();
        let asked = self.kernel.locate(self.pid, &self.pages, &mut self.states);
        asked.map_err(|error| Fault::Io {
            what: format!("see where memory of process {} lies", self.pid),
            source: io::Error::other(error),
        })?;
        let in_fast =
            |state: &&PageState| matches!(state, PageState::On(node) if self.fast.contains(node));
        let fast = self.states.iter().filter(in_fast).count();
        Ok(fast as f64 / self.pages.len() as f64)
    }
}

/// Page addresses spread evenly over `range`, at most [`SAMPLES_MAX`].
fn sampled_pages(range: VirtRange) -> impl Iterator<Item = u64> {
    let first = range.start().0 / PAGE_SIZE;
    let pages = (range.end().0.div_ceil(PAGE_SIZE)) - first;
    let stride = pages.div_ceil(SAMPLES_MAX);
    (0..pages.div_ceil(stride)).map(move |i| (first + i * stride) * PAGE_SIZE)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(start: u64, bytes: u64) -> VirtRange {
        VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(start + bytes)).unwrap()
    }

    proptest! {
        /// Samples are bounded, distinct pages of the range, and no gap exceeds the stride.
        #[test]
        fn samples_spread_over_the_range(start in 0u64..1 << 46, bytes in 1u64..1 << 40) {
            let hot = range(start, bytes);
            let sampled: Vec<u64> = sampled_pages(hot).collect();
            prop_assert!(!sampled.is_empty() && sampled.len() as u64 <= SAMPLES_MAX);
            prop_assert!(sampled.windows(2).all(|w| w[0] < w[1]));
            prop_assert!(sampled[0] <= start && *sampled.last().unwrap() < hot.end().0);
            let widest = (bytes / PAGE_SIZE + 2).div_ceil(SAMPLES_MAX) * PAGE_SIZE;
            prop_assert!(hot.end().0 - sampled.last().unwrap() <= widest);
        }
    }

    #[test]
    fn our_own_touched_memory_is_seen_and_untouched_memory_is_not() {
        let touched = vec![1u8; 1 << 20];
        let mut observer = Observer::new(
            Pid(std::process::id()),
            range(touched.as_ptr() as u64, touched.len() as u64 - PAGE_SIZE),
            &[NodeId(0)],
        );
        // A machine with several nodes may run this test on any of them.
        match observer.in_fast() {
            Ok(share) => assert!((0.0..=1.0).contains(&share)),
            Err(fault) => assert!(fault.to_string().contains("lies")),
        }
        let never_mapped = range(PAGE_SIZE, PAGE_SIZE);
        if let Ok(share) =
            Observer::new(Pid(std::process::id()), never_mapped, &[NodeId(0)]).in_fast()
        {
            assert_eq!(share, 0.0);
        }
    }
}
