//! Where a program's pages lie.

use std::collections::BTreeMap;
use std::ops::Range;

use demeter_guest::pages::{LivePages, PageState, Pages};
use demeter_policy::{BLOCK_SIZE, GuestVirtAddr, PAGE_SIZE, Pid};

/// States of the pages of a process's memory, by address.
pub fn states(pid: Pid, range: Range<u64>) -> Vec<PageState> {
    let mut states = vec![];
    for part in range.clone().step_by(BLOCK_SIZE as usize) {
        let pages = (part..range.end.min(part + BLOCK_SIZE)).step_by(PAGE_SIZE as usize);
        let pages: Vec<_> = pages.map(GuestVirtAddr).collect();
        LivePages::default()
            .locate(pid, &pages, &mut states)
            .unwrap();
    }
    states
}

/// Pages of a process's memory on each node.
pub fn lies(pid: Pid, range: Range<u64>) -> BTreeMap<u32, u64> {
    let mut lies = BTreeMap::new();
    for state in states(pid, range) {
        if let PageState::On(node) = state {
            *lies.entry(node.0).or_insert(0) += 1;
        }
    }
    lies
}
