//! A simulated balloon for tests and fuzz targets.
//!
//! A node is a run of pages; pages that are not held are spare.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use demeter_policy::{ByteCount, GuestPhysAddr, NodeId, PAGE_SIZE};
use demeter_proto::{GpaRange, Nonce};

use super::relay::Opener;
use super::{Balloon, BalloonError, Cursor, Deflated, Inflated, Listed, NodeBalloon, Stop, join};

/// Ranges and pages per call, small, so that tests need many calls.
const RANGES_MAX: usize = 64;
const CALL_PAGES_MAX: usize = 1024;

/// Distance between pages that are in use and interrupt ranges.
const IN_USE_EVERY: u64 = 700;

/// A simulated driver with two adjacent nodes.
#[derive(Debug)]
pub struct SimulatedBalloon {
    nodes: [Node; 2],
    event: bool,
}

#[derive(Debug)]
struct Node {
    spare: BTreeSet<u64>,
    held: BTreeSet<u64>,
    /// Pages that only reclaim can take.
    reclaimable: BTreeSet<u64>,
    oom_returned: u64,
    oom_allowance: u64,
    /// The page for the nonce, which is never held.
    own_page: u64,
    nonce: Option<Nonce>,
}

impl SimulatedBalloon {
    /// A driver with two nodes of `pages` each.
    pub fn new(pages: u64) -> Self {
        let node = |first: u64| Node {
            spare: (first..first + pages)
                .filter(|page| !page.is_multiple_of(IN_USE_EVERY))
                .collect(),
            held: BTreeSet::new(),
            reclaimable: BTreeSet::new(),
            oom_returned: 0,
            oom_allowance: 0,
            own_page: first + pages,
            nonce: None,
        };
        Self {
            nodes: [node(256), node(257 + pages)],
            event: false,
        }
    }

    /// Leaves the node `pages` spare pages; programs use the others.
    pub fn use_all_but(&mut self, node: NodeId, pages: usize) {
        let node = &mut self.nodes[node.0 as usize];
        let keep = node.spare.iter().nth(pages).copied().unwrap_or(u64::MAX);
        node.reclaimable.append(&mut node.spare.split_off(&keep));
    }

    /// Spare pages of a node.
    pub fn spare(&self, node: NodeId) -> usize {
        self.nodes[node.0 as usize].spare.len()
    }

    /// The page and nonce of the last [`Balloon::prove`].
    pub fn shown(&self, node: NodeId) -> Option<(GuestPhysAddr, Nonce)> {
        let node = &self.nodes[node.0 as usize];
        Some((GuestPhysAddr(node.own_page * PAGE_SIZE), node.nonce?))
    }

    /// Programs free `pages` pages.
    pub fn free(&mut self, node: NodeId, pages: usize) {
        let node = &mut self.nodes[node.0 as usize];
        for _ in 0..pages {
            node.spare.extend(node.reclaimable.pop_last());
        }
    }

    /// Simulates a lack of memory. Returns the pages that the driver returns.
    pub fn run_out_of_memory(&mut self) -> Vec<u64> {
        let mut given = vec![];
        for node in &mut self.nodes {
            while node.oom_allowance > 0 {
                let Some(page) = node.held.pop_first() else {
                    break;
                };
                node.oom_allowance -= 1;
                node.oom_returned += 1;
                node.reclaimable.insert(page);
                given.push(page);
            }
        }
        self.event |= !given.is_empty();
        given
    }

    fn node(&mut self, node: NodeId) -> Result<&mut Node, BalloonError> {
        let missing = || BalloonError::Call {
            what: format!("look at node {node}"),
            source: io::Error::from_raw_os_error(libc::ENODEV),
        };
        self.nodes.get_mut(node.0 as usize).ok_or_else(missing)
    }
}

fn ranges(pages: impl IntoIterator<Item = u64>) -> Vec<GpaRange> {
    let range = |page: u64| GpaRange {
        start: GuestPhysAddr(page * PAGE_SIZE),
        bytes: ByteCount(PAGE_SIZE),
    };
    join(pages.into_iter().map(range).collect())
}

impl Balloon for SimulatedBalloon {
    fn inflate(
        &mut self,
        node: NodeId,
        bytes: ByteCount,
        reclaim: bool,
    ) -> Result<Inflated, BalloonError> {
        let node = self.node(node)?;
        let wanted = bytes.0 / PAGE_SIZE;
        let mut taken = vec![];
        let stop = loop {
            if taken.len() as u64 == wanted {
                break Stop::Done;
            }
            if taken.len() == CALL_PAGES_MAX {
                break Stop::Again;
            }
            let reclaimable = reclaim.then_some(&mut node.reclaimable);
            let page = node.spare.pop_first();
            let Some(page) = page.or_else(|| reclaimable?.pop_first()) else {
                break Stop::NoMemory;
            };
            taken.push(page);
        };
        node.held.extend(&taken);
        Ok(Inflated {
            ranges: ranges(taken),
            stop,
        })
    }

    fn deflate(&mut self, node: NodeId, bytes: ByteCount) -> Result<Deflated, BalloonError> {
        let node = self.node(node)?;
        let wanted = bytes.0 / PAGE_SIZE;
        let mut moved = 0;
        let stop = loop {
            if moved == wanted {
                break Stop::Done;
            }
            if moved == CALL_PAGES_MAX as u64 {
                break Stop::Again;
            }
            let Some(page) = node.held.pop_last() else {
                break Stop::Empty;
            };
            node.spare.insert(page);
            moved += 1;
        };
        Ok(Deflated {
            moved: ByteCount(moved * PAGE_SIZE),
            stop,
        })
    }

    fn list(&mut self, node: NodeId, cursor: Cursor) -> Result<Listed, BalloonError> {
        let node = self.node(node)?;
        let first = cursor.0 / PAGE_SIZE;
        let pages: Vec<u64> = node.held.range(first..).copied().take(RANGES_MAX).collect();
        let next = pages.last().filter(|_| pages.len() == RANGES_MAX);
        let next = next.map(|page| Cursor((page + 1) * PAGE_SIZE));
        Ok(Listed {
            ranges: ranges(pages),
            next,
        })
    }

    fn allow_oom(&mut self, node: NodeId, bytes: ByteCount) -> Result<(), BalloonError> {
        self.node(node)?.oom_allowance = bytes.0 / PAGE_SIZE;
        Ok(())
    }

    fn prove(&mut self, node: NodeId, nonce: Nonce) -> Result<GuestPhysAddr, BalloonError> {
        let node = self.node(node)?;
        node.nonce = Some(nonce);
        Ok(GuestPhysAddr(node.own_page * PAGE_SIZE))
    }

    fn stats(&mut self, node: NodeId) -> Result<NodeBalloon, BalloonError> {
        let node = self.node(node)?;
        Ok(NodeBalloon {
            held: ByteCount(node.held.len() as u64 * PAGE_SIZE),
            oom_returned: ByteCount(node.oom_returned * PAGE_SIZE),
        })
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn take_event(&mut self) -> Result<bool, BalloonError> {
        Ok(std::mem::take(&mut self.event))
    }
}

/// A driver that several handles share, like an open device.
#[derive(Debug, Clone)]
pub struct Shared(pub Arc<Mutex<SimulatedBalloon>>);

impl Shared {
    /// A driver with two nodes of `pages` each.
    pub fn new(pages: u64) -> Self {
        Self(Arc::new(Mutex::new(SimulatedBalloon::new(pages))))
    }

    /// Access to the driver's state.
    pub fn lock(&self) -> MutexGuard<'_, SimulatedBalloon> {
        self.0.lock().unwrap()
    }

    /// A function that opens the driver.
    pub fn opener(&self) -> Opener {
        let shared = self.clone();
        Box::new(move || Ok(Box::new(shared.clone()) as Box<dyn Balloon>))
    }
}

impl Balloon for Shared {
    fn inflate(
        &mut self,
        node: NodeId,
        bytes: ByteCount,
        reclaim: bool,
    ) -> Result<Inflated, BalloonError> {
        self.lock().inflate(node, bytes, reclaim)
    }

    fn deflate(&mut self, node: NodeId, bytes: ByteCount) -> Result<Deflated, BalloonError> {
        self.lock().deflate(node, bytes)
    }

    fn list(&mut self, node: NodeId, cursor: Cursor) -> Result<Listed, BalloonError> {
        self.lock().list(node, cursor)
    }

    fn allow_oom(&mut self, node: NodeId, bytes: ByteCount) -> Result<(), BalloonError> {
        self.lock().allow_oom(node, bytes)
    }

    fn prove(&mut self, node: NodeId, nonce: Nonce) -> Result<GuestPhysAddr, BalloonError> {
        self.lock().prove(node, nonce)
    }

    fn stats(&mut self, node: NodeId) -> Result<NodeBalloon, BalloonError> {
        self.lock().stats(node)
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn take_event(&mut self) -> Result<bool, BalloonError> {
        self.lock().take_event()
    }
}

#[test]
fn the_simulated_balloon_conforms() {
    super::conformance::conforms(&mut SimulatedBalloon::new(5000), NodeId(0));
    super::conformance::conforms(&mut SimulatedBalloon::new(5000), NodeId(1));
}
