//! A simulated kernel for tests: nodes of limited size, base and huge pages, unmovable pages.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use demeter_policy::{BLOCK_SIZE, Block, ByteCount, GuestVirtAddr, NodeId, PAGE_SIZE, Pid};

use super::{Errno, PageState, Pages, PagesError};
use crate::nodes::FOR_COMPACTION;

/// A machine with nodes of limited size.
#[derive(Debug, Default)]
pub struct SimulatedPages {
    /// Free bytes of each node.
    pub free: BTreeMap<NodeId, u64>,
    /// Node and size of each page, by process and first address.
    pages: BTreeMap<(Pid, u64), (NodeId, u64)>,
    /// Unmovable pages.
    pub stuck: BTreeSet<(Pid, u64)>,
    /// Nodes that a process's cpuset excludes.
    pub excluded: BTreeSet<(Pid, NodeId)>,
    /// Processes that may not be changed.
    pub denied: BTreeSet<Pid>,
    /// A process that ends during the next `migrate` of its pages.
    pub dying: Option<Pid>,
    /// Number of calls of `migrate`.
    pub migrate_calls: usize,
    /// Number of calls of `locate`.
    pub locate_calls: usize,
    /// The least free memory that node 0 ever had.
    pub least_free: u64,
    /// Number of online pages of nodes, for zoneinfo.
    pub present: BTreeMap<NodeId, u64>,
}

impl SimulatedPages {
    /// A machine with this much free memory on its two nodes.
    pub fn new(fast_free: u64, slow_free: u64) -> Self {
        Self {
            free: [(NodeId(0), fast_free), (NodeId(1), slow_free)].into(),
            least_free: fast_free,
            ..Self::default()
        }
    }

    /// Maps one page of `size` bytes on `node`, without taking it from free memory.
    pub fn map(&mut self, pid: Pid, start: u64, size: u64, node: NodeId) {
        self.pages.insert((pid, start), (node, size));
    }

    /// Maps a block of 2 MiB as one huge page or as base pages.
    pub fn map_block(&mut self, pid: Pid, block: u64, huge: bool, node: NodeId) {
        let size = if huge { BLOCK_SIZE } else { PAGE_SIZE };
        for start in (block * BLOCK_SIZE..(block + 1) * BLOCK_SIZE).step_by(size as usize) {
            self.map(pid, start, size, node);
        }
    }

    /// Unmaps the page that starts there.
    pub fn unmap(&mut self, pid: Pid, start: u64) {
        self.pages.remove(&(pid, start));
    }

    /// Ends a process.
    pub fn kill(&mut self, pid: Pid) {
        self.pages.retain(|(p, _), _| *p != pid);
    }

    /// Bytes of `pid` on `node`.
    pub fn on(&self, pid: Pid, node: NodeId) -> ByteCount {
        let here = |((p, _), (n, size)): (&(Pid, u64), &(NodeId, u64))| {
            if *p == pid && *n == node { *size } else { 0 }
        };
        ByteCount(self.pages.iter().map(here).sum())
    }

    /// Number of pages of a block: one if it is a huge page.
    pub fn pages_of(&self, pid: Pid, block: Block) -> u64 {
        let (start, end) = (block.start().0, block.start().0 + BLOCK_SIZE);
        self.pages.range((pid, start)..(pid, end)).count() as u64
    }

    /// The node of an address's page.
    pub fn node_of(&self, pid: Pid, addr: u64) -> Option<NodeId> {
        self.page_at(pid, addr).map(|(_, node, _)| node)
    }

    fn page_at(&self, pid: Pid, addr: u64) -> Option<(u64, NodeId, u64)> {
        let (&(p, start), &(node, size)) = self.pages.range(..=(pid, addr)).next_back()?;
        (p == pid && addr < start + size).then_some((start, node, size))
    }

    fn known(&self, pid: Pid) -> Result<(), PagesError> {
        match self.pages.keys().any(|(p, _)| *p == pid) {
            true if self.denied.contains(&pid) => Err(PagesError::Denied(pid)),
            true => Ok(()),
            false => Err(PagesError::Gone(pid)),
        }
    }
}

impl Pages for SimulatedPages {
    fn locate(
        &mut self,
        pid: Pid,
        pages: &[GuestVirtAddr],
        out: &mut Vec<PageState>,
    ) -> Result<(), PagesError> {
        self.known(pid)?;
        self.locate_calls += 1;
        out.extend(pages.iter().map(|a| match self.page_at(pid, a.0) {
            Some((_, node, _)) => PageState::On(node),
            None => PageState::Absent,
        }));
        Ok(())
    }

    fn migrate(
        &mut self,
        pid: Pid,
        pages: &[GuestVirtAddr],
        to: NodeId,
        out: &mut Vec<PageState>,
    ) -> Result<(), PagesError> {
        self.known(pid)?;
        self.migrate_calls += 1;
        if self.dying == Some(pid) {
            self.kill(pid);
            return Err(PagesError::Gone(pid));
        }
        if self.excluded.contains(&(pid, to)) {
            return Err(PagesError::NodeExcluded { pid, node: to });
        }
        for addr in pages {
            out.push(match self.page_at(pid, addr.0) {
                None => PageState::Absent,
                Some((_, node, _)) if node == to => PageState::On(to),
                Some((start, _, _)) if self.stuck.contains(&(pid, start)) => {
                    PageState::Failed(Errno(libc::EBUSY))
                }
                Some((_, _, size)) if self.free[&to] < size => {
                    PageState::Failed(Errno(libc::ENOMEM))
                }
                Some((start, node, size)) => {
                    *self.free.get_mut(&to).unwrap() -= size;
                    *self.free.get_mut(&node).unwrap() += size;
                    self.pages.insert((pid, start), (to, size));
                    self.least_free = self.least_free.min(self.free[&NodeId(0)]);
                    PageState::On(to)
                }
            });
        }
        Ok(())
    }

    fn collapse(&mut self, pid: Pid, blocks: &[Block]) -> Result<(), PagesError> {
        self.known(pid)?;
        for block in blocks {
            let (start, end) = (block.start().0, block.start().0 + BLOCK_SIZE);
            let pages = || self.pages.range((pid, start)..(pid, end));
            let Some((_, &(node, _))) = pages().next() else {
                continue;
            };
            let small = pages().all(|(_, page)| *page == (node, PAGE_SIZE));
            let holes = BLOCK_SIZE - pages().map(|(_, (_, size))| size).sum::<u64>();
            // The kernel fills all holes.
            if small && holes <= self.free[&node] {
                *self.free.get_mut(&node).unwrap() -= holes;
                self.pages
                    .retain(|&(p, addr), _| p != pid || !(start..end).contains(&addr));
                self.pages.insert((pid, start), (node, BLOCK_SIZE));
            }
        }
        Ok(())
    }
}

/// A simulated kernel shared by a test and the tested code.
#[derive(Debug, Clone)]
pub struct SharedPages {
    pages: Arc<Mutex<SimulatedPages>>,
    /// Root directory whose `proc/zoneinfo` is kept up to date.
    root: Option<PathBuf>,
}

impl SharedPages {
    /// Shares `pages`. [`Self::write_zoneinfo`] writes below `root`.
    pub fn new(pages: SimulatedPages, root: Option<PathBuf>) -> Self {
        let shared = Self {
            pages: Arc::new(Mutex::new(pages)),
            root,
        };
        shared.write_zoneinfo();
        shared
    }

    /// Access to the simulated kernel.
    pub fn lock(&self) -> MutexGuard<'_, SimulatedPages> {
        self.pages.lock().unwrap()
    }

    /// Writes the nodes' present free memory. All have some more for compaction, which nobody gets.
    pub fn write_zoneinfo(&self) {
        let Some(root) = &self.root else { return };
        let kernel = self.lock();
        let zone = |(node, free): (&NodeId, &u64)| {
            let present = kernel.present.get(node).unwrap_or(&99999);
            format!(
                "Node {node}, zone   Normal\n  pages free     {}\n        low      10\n        \
                 high     20\n        present  {present}\n        managed  99999\n",
                (free + FOR_COMPACTION) / PAGE_SIZE
            )
        };
        let zones: String = kernel.free.iter().map(zone).collect();
        drop(kernel);
        std::fs::write(root.join("proc/zoneinfo"), zones).unwrap();
    }
}

impl Pages for SharedPages {
    fn locate(
        &mut self,
        pid: Pid,
        pages: &[GuestVirtAddr],
        out: &mut Vec<PageState>,
    ) -> Result<(), PagesError> {
        self.lock().locate(pid, pages, out)
    }

    fn migrate(
        &mut self,
        pid: Pid,
        pages: &[GuestVirtAddr],
        to: NodeId,
        out: &mut Vec<PageState>,
    ) -> Result<(), PagesError> {
        let result = self.lock().migrate(pid, pages, to, out);
        self.write_zoneinfo();
        result
    }

    fn collapse(&mut self, pid: Pid, blocks: &[Block]) -> Result<(), PagesError> {
        self.lock().collapse(pid, blocks)
    }
}
