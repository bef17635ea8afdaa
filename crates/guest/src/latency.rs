//! Measures the latency of loads from each node.
//!
//! The difference between nodes is the benefit of moving memory.
//!
//! # Approach
//! A pointer chase through memory of the node: each load depends on the one before it, and no line is used twice. The
//! memory is only preferred, not bound: on a full node, binding would make the kernel kill a program to make room.
//! Pages that came from another node make the measurement invalid. Recently written lines may still be in a cache.
//! Hence lines are flushed first where the processor can, and the whole memory is read once in order, which evicts
//! small caches. Other memory is read last, since what was read last stays in a cache. The fastest of a few rounds counts,
//! since others were interrupted.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::time::Instant;
use std::{io, ptr};

use demeter_policy::{ByLevel, GuestVirtAddr, Level, NodeId, PAGE_SIZE, Pid};

use crate::nodes::{Tiers, Topology};
use crate::pages::{LivePages, PageState, Pages};

mod loaded;

pub use loaded::LoadProbe;

/// Bytes between steps: each step has its own line, beyond the reach of adjacent-line prefetch.
const STRIDE: usize = 1024;

/// Number of steps through 8 MiB, in all and in each round; a power of two.
const STEPS: usize = (8 << 20) / STRIDE;
const ROUND: usize = STEPS / 4;

/// Number of steps through 2 MiB of other memory: more than what a cache keeps that no flush reaches.
const OTHER_STEPS: usize = (2 << 20) / STRIDE;

/// Distance between visited lines, coprime to every number of steps, so that no stride can be predicted.
const HOP: usize = 3571;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Prefer memory of this node (linux/mempolicy.h).
const MPOL_PREFERRED: c_int = 1;

/// If faster memory is full, and firmware does not tell how much faster it is, it is assumed to be so by this factor.
const SLOW_FACTOR: f64 = 3.0;

/// Assumed latencies without a measurement: local memory, memory of another socket or CXL memory, and farther memory.
pub const ASSUMED_NS: ByLevel<u32> = ByLevel([100, 200, 400, 800]);

/// Number of times that each node is measured.
const PASSES: usize = 2;

/// Load latency of each node with memory from its nearest CPUs, nanoseconds. Full nodes are omitted.
pub fn measure(topology: &Topology) -> BTreeMap<NodeId, u32> {
    measure_with(topology, |node| {
        timed_near(node, topology.nearest_cpus(node))
    })
}

/// The least latency of each node. All nodes are measured before the first one is measured again, as a busy machine may
/// slow all loads down for a while.
fn measure_with(
    topology: &Topology,
    mut timed: impl FnMut(NodeId) -> io::Result<u32>,
) -> BTreeMap<NodeId, u32> {
    let mut measured = BTreeMap::new();
    for pass in 0..PASSES {
        for node in topology.with_memory() {
            let is_full = pass > 0 && !measured.contains_key(&node.id);
            if is_full {
                continue;
            }
            match timed(node.id) {
                Ok(ns) => {
                    let least = measured.entry(node.id).or_insert(ns);
                    *least = ns.min(*least);
                }
                Err(error) => tracing::info!("no latency of node {}: {error}", node.id),
            }
        }
    }
    measured
}

/// Times loads from a node on these CPUs. It uses a thread of its own, so that the caller's affinity stays. If no
/// thread can be created, the caller's thread does it.
fn timed_near(node: NodeId, cpus: &[u32]) -> io::Result<u32> {
    let cpus = cpus.to_vec();
    let thread = std::thread::Builder::new().spawn(move || {
        run_on(&cpus);
        load_ns(node)
    });
    match thread {
        Ok(thread) => thread.join().unwrap_or(Err(io::ErrorKind::Other.into())),
        Err(_) => load_ns(node),
    }
}

/// Latency of each tier, nanoseconds: the mean of its measured nodes.
///
/// A tier without a measurement is assumed to be faster than the next slower one. The factor is the ratio of `firmware`'s
/// latencies, or three. If the slowest tier was not measured, all values are assumed.
pub fn of_tiers(
    tiers: &Tiers,
    measured: &BTreeMap<NodeId, u32>,
    firmware: &BTreeMap<NodeId, u32>,
) -> ByLevel<u32> {
    let mean = |latencies: &BTreeMap<NodeId, u32>, level: Level| {
        let known = tiers
            .at(level)
            .iter()
            .filter_map(|node| latencies.get(node));
        let known: Vec<u64> = known.map(|&ns| ns.into()).collect();
        let mean = known.iter().sum::<u64>().checked_div(known.len() as u64)?;
        u32::try_from(mean).ok()
    };
    let ratio = |level: Level, slower: Level| {
        let [fast, slow] = [level, slower].map(|level| mean(firmware, level));
        let (fast, slow) = fast.zip(slow).filter(|(fast, slow)| fast < slow)?;
        Some(f64::from(slow) / f64::from(fast))
    };
    let mut latency_ns = ByLevel::default();
    let mut slower = None;
    let levels = Level::ALL.into_iter().rev();
    for level in levels.filter(|&level| level <= tiers.slowest()) {
        let estimate = || {
            let (slower, ns) = slower?;
            let factor = ratio(level, slower).unwrap_or(SLOW_FACTOR);
            Some((f64::from(ns) / factor) as u32)
        };
        let Some(ns) = mean(measured, level).or_else(estimate) else {
            return ASSUMED_NS;
        };
        slower = Some((level, ns));
        *latency_ns.get_mut(level) = ns.max(1);
    }
    latency_ns
}

/// Binds this thread to these CPUs, as far as it may.
fn run_on(cpus: &[u32]) {
    const MASK_BYTES: usize = 1024 / 8;
    let mut mask = [0u8; MASK_BYTES];
    for &cpu in cpus {
        if let Some(byte) = mask.get_mut(cpu as usize / 8) {
            *byte |= 1 << (cpu % 8);
        }
    }
    // SAFETY: the kernel reads the mask, whose length is passed. A refusal only makes the figure worse.
    unsafe { libc::sched_setaffinity(0, MASK_BYTES, mask.as_ptr().cast()) };
}

fn load_ns(node: NodeId) -> io::Result<u32> {
    let (memory, other) = (
        NodeBuffer::on(node, STEPS)?,
        NodeBuffer::on(node, OTHER_STEPS)?,
    );
    memory.evict();
    other.evict();
    let mut best_ns = u128::MAX;
    let mut at = 0;
    for _ in 0..STEPS / ROUND {
        let began = Instant::now();
        for _ in 0..ROUND {
            at = memory.next(at);
        }
        best_ns = best_ns.min(began.elapsed().as_nanos() / ROUND as u128);
    }
    std::hint::black_box(at);
    Ok(u32::try_from(best_ns).unwrap_or(u32::MAX).max(1))
}

/// Memory of a node, with a chain of steps through it.
#[derive(Debug)]
struct NodeBuffer {
    start: NonNull<u8>,
    /// A power of two.
    steps: usize,
}

// SAFETY: the mapping is this value's alone, and any thread may read and unmap it.
unsafe impl Send for NodeBuffer {}

impl NodeBuffer {
    /// Memory of this node, with room for `steps` steps.
    ///
    /// # Errors
    /// The node has no room for it.
    fn on(node: NodeId, steps: usize) -> io::Result<Self> {
        let bytes = steps * STRIDE;
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let memory = NonNull::new(start.cast()).map(|start| Self { start, steps });
        let memory = memory.ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let mut nodes = [0u64; 16];
        let word = nodes.get_mut(node.0 as usize / 64);
        *word.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))? = 1 << (node.0 % 64);
        // SAFETY: the mapping is ours, and the mask has as many bits as the call is given.
        let bound = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                start,
                bytes,
                MPOL_PREFERRED,
                nodes.as_ptr(),
                nodes.len() * 64,
                0,
            )
        };
        if bound < 0 {
            return Err(io::Error::last_os_error());
        }
        // Huge pages keep TLB misses out of the latency. The kernel may ignore the hint. SAFETY: the mapping is ours.
        unsafe { libc::madvise(start, bytes, libc::MADV_HUGEPAGE) };
        memory.link();
        match memory.is_on(node) {
            true => Ok(memory),
            false => Err(io::ErrorKind::OutOfMemory.into()),
        }
    }

    fn bytes(&self) -> usize {
        self.steps * STRIDE
    }

    /// The word at a step.
    fn word(&self, step: usize) -> *mut usize {
        assert!(step < self.steps, "a step that was never linked");
        // SAFETY: within the mapping, and aligned as the stride is.
        unsafe { self.start.as_ptr().add(step * STRIDE).cast() }
    }

    /// Writes the chain of steps.
    fn link(&self) {
        let mut step = 0;
        for _ in 0..self.steps {
            let next = (step + HOP) % self.steps;
            // SAFETY: a word of the mapping, to which no other reference exists.
            unsafe { self.word(step).write(next) };
            step = next;
        }
    }

    /// Evicts the chain from caches, as far as the processor and the size allow.
    fn evict(&self) {
        for line in 0..self.bytes() / LINE {
            // SAFETY: within the mapping; volatile, so that the load is not optimized away.
            unsafe { self.start.as_ptr().add(line * LINE).read_volatile() };
        }
        self.flush();
    }

    /// Flushes the chain from caches, where a program may do that.
    fn flush(&self) {
        #[cfg(target_arch = "x86_64")]
        for step in 0..self.steps {
            // SAFETY: every x86-64 processor has the instruction; it only affects caches.
            unsafe { std::arch::x86_64::_mm_clflush(self.word(step).cast()) };
        }
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 processor has the instruction. Flushes end before later loads begin.
        unsafe {
            std::arch::x86_64::_mm_mfence()
        };
    }

    /// Whether all pages lie on this node.
    fn is_on(&self, node: NodeId) -> bool {
        let start = self.start.as_ptr() as u64;
        let pages: Vec<_> = (start..start + self.bytes() as u64)
            .step_by(PAGE_SIZE as usize)
            .map(GuestVirtAddr)
            .collect();
        let mut states = vec![];
        let looked = LivePages::default().locate(Pid(std::process::id()), &pages, &mut states);
        looked.is_ok() && states.iter().all(|state| *state == PageState::On(node))
    }

    fn next(&self, step: usize) -> usize {
        // SAFETY: a word of the mapping that `link` has written.
        unsafe { self.word(step).read_volatile() }
    }
}

impl Drop for NodeBuffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no pointer into it remains.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_is_visited_once() {
        for steps in [loaded::STEPS, STEPS] {
            let mut seen = vec![false; steps];
            let mut step = 0;
            for _ in 0..steps {
                assert!(!std::mem::replace(&mut seen[step], true));
                step = (step + HOP) % steps;
            }
            assert_eq!(step, 0);
        }
    }

    #[test]
    fn a_node_counts_by_its_quickest_pass() {
        let node = |id| crate::nodes::Node {
            id: NodeId(id),
            total: demeter_policy::ByteCount(1 << 30),
            free: demeter_policy::ByteCount(1 << 29),
            has_cpus: true,
            cpus: vec![0],
            distances: vec![],
            tier: None,
            read_latency_ns: None,
            measured_ns: None,
        };
        let topology = Topology {
            nodes: vec![node(0), node(1), node(2)],
        };
        let mut asked = vec![];
        let measured = measure_with(&topology, |node| {
            asked.push(node.0);
            match (node.0, asked.len()) {
                (0, _) => Ok(100),
                (1, at) if at < 4 => Ok(900),
                (1, _) => Ok(300),
                _ => Err(io::ErrorKind::OutOfMemory.into()),
            }
        });
        assert_eq!(measured, [(NodeId(0), 100), (NodeId(1), 300)].into());
        assert_eq!(asked, [0, 1, 2, 0, 1]);
    }

    #[test]
    fn a_tier_is_as_quick_as_its_nodes_that_were_measured() {
        let tiers: Tiers = "0,1/2,3".parse().unwrap();
        let latencies =
            |of: &[(u32, u32)]| of.iter().map(|&(node, ns)| (NodeId(node), ns)).collect();
        let of = |measured: &[(u32, u32)], firmware: &[(u32, u32)]| {
            let ByLevel([fast, slow, ..]) =
                of_tiers(&tiers, &latencies(measured), &latencies(firmware));
            (fast, slow)
        };
        assert_eq!(
            of(&[(0, 90), (1, 110), (2, 250), (3, 350)], &[]),
            (100, 300)
        );
        assert_eq!(of(&[(1, 90), (3, 300)], &[]), (90, 300));
        assert_eq!(of(&[(0, 70)], &[]), (ASSUMED_NS.0[0], ASSUMED_NS.0[1]));
        // Fast memory is full.
        let slow = [(2, 300)];
        assert_eq!(of(&slow, &[]), (100, 300));
        assert_eq!(of(&slow, &[(0, 40), (1, 60), (3, 100)]), (150, 300));
        assert_eq!(of(&slow, &[(0, 50)]), (100, 300));
        assert_eq!(of(&slow, &[(0, 50), (2, 40)]), (100, 300));
    }

    #[test]
    fn a_node_is_measured_or_refused() {
        match load_ns(NodeId(0)) {
            Ok(ns) => assert!((1..1_000_000).contains(&ns), "{ns}"),
            Err(error) => eprintln!("skipped: {error}"),
        }
        assert!(load_ns(NodeId(100_000)).is_err());
    }
}
