//! Ballast: locks memory of the fast node to leave a specified amount free.
//!
//! Ballast memory is bound to the node and locked, so reclaim, demotion and balancing leave it alone. Only free memory
//! is taken, in small parts, so the kernel never has to reclaim for it.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use demeter_policy::{MIB, NodeId};
use demeter_workload::bind;

use crate::error::Error;
use crate::inside::zones::node_free_mib;

/// Maximum size of one part, MiB.
const PART_MIB: u64 = 256;

/// Tolerance, MiB; per-CPU free pages make an exact amount impossible.
const TOLERANCE_MIB: u64 = 2;

/// Maximum number of steps; exceeds the parts of the largest node in a scenario (16 TiB).
const STEPS_MAX: usize = 1 << 17;

/// Locked memory; dropping it frees it.
#[derive(Debug)]
pub struct LockedMemory {
    root: PathBuf,
    node: NodeId,
    parts: Vec<Part>,
}

/// The next step towards the desired free memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Take(u64),
    Give,
    Enough,
}

impl LockedMemory {
    /// An empty ballast for `node`, with the kernel's files below `root`.
    pub fn new(root: PathBuf, node: NodeId) -> Self {
        Self {
            root,
            node,
            parts: vec![],
        }
    }

    /// Takes or frees memory until programs can allocate `wanted_mib` of the node.
    ///
    /// # Errors
    /// When the node has less even without ballast (with the figure), or its free memory keeps changing.
    pub fn leave(&mut self, wanted_mib: u64, stop: &AtomicBool) -> Result<(), Error> {
        let mut free_mib = 0;
        for _ in 0..STEPS_MAX {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            free_mib = node_free_mib(&self.root, self.node.0).map_err(|fault| {
                Error::io("read", "the node's free memory")(io::Error::other(fault))
            })?;
            match step(free_mib, wanted_mib) {
                Step::Take(mib) => {
                    let part = Part::take(self.node, mib);
                    self.parts.push(part.map_err(Error::io("hold", "memory"))?);
                }
                Step::Give if self.parts.pop().is_none() => break,
                Step::Give => {}
                Step::Enough => return Ok(()),
            }
        }
        Err(Error::Unfit {
            what: format!(
                "node {} has {free_mib} MiB free, which is not the {wanted_mib} MiB of \
                 machine.fast.usable_mib",
                self.node
            ),
            hint: "stop other programs".into(),
        })
    }
}

/// The next step. Each part is smaller than the free memory by the desired amount.
fn step(free_mib: u64, wanted_mib: u64) -> Step {
    if free_mib > wanted_mib + TOLERANCE_MIB {
        Step::Take((free_mib - wanted_mib).min(PART_MIB))
    } else if free_mib + TOLERANCE_MIB < wanted_mib {
        Step::Give
    } else {
        Step::Enough
    }
}

/// One part of the ballast, with its own mapping.
#[derive(Debug)]
struct Part {
    base: *mut libc::c_void,
    bytes: usize,
}

// SAFETY: the part owns the mapping, no code reads or writes it, and any thread may unmap it.
unsafe impl Send for Part {}

impl Part {
    fn take(node: NodeId, mib: u64) -> io::Result<Self> {
        let bytes = usize::try_from(mib * MIB).map_err(io::Error::other)?;
        // SAFETY: a new anonymous mapping at an address that the kernel chooses.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let part = Self { base, bytes };
        bind(base as u64, bytes as u64, &[node], libc::MPOL_BIND)?;
        // SAFETY: locks, and thereby populates, exactly the mapping above.
        match unsafe { libc::mlock(part.base, part.bytes) } {
            0 => Ok(part),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly the mapping of `take`, to which there are no references.
        unsafe { libc::munmap(self.base, self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// For any free memory, and even if others allocate at every step, the steps end at the target or with an empty
        /// ballast. They never take memory of the target.
        #[test]
        fn steps_lead_to_what_is_wanted(
            node_mib in 1u64..1 << 20,
            wanted_mib in 1u64..1 << 20,
            others in proptest::collection::vec(0u64..8, 0..40),
        ) {
            let mut free_mib = node_mib;
            let mut held = vec![];
            let mut others = others.into_iter();
            for _ in 0..STEPS_MAX {
                free_mib = free_mib.saturating_sub(others.next().unwrap_or(0));
                match step(free_mib, wanted_mib) {
                    Step::Take(mib) => {
                        prop_assert!(mib <= free_mib - wanted_mib);
                        free_mib -= mib;
                        held.push(mib);
                    }
                    Step::Give => match held.pop() {
                        Some(mib) => free_mib += mib,
                        None => break,
                    },
                    Step::Enough => break,
                }
            }
            let is_near = free_mib.abs_diff(wanted_mib) <= TOLERANCE_MIB;
            prop_assert!(is_near || held.is_empty() && free_mib < wanted_mib);
        }
    }

    #[test]
    fn a_node_without_that_much_is_told_with_the_figure() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("proc")).unwrap();
        let zones =
            "Node 0, zone Normal\n  pages free 25600\n        low 0\n        spanned 30000\n";
        std::fs::write(root.path().join("proc/zoneinfo"), zones).unwrap();
        let mut ballast = LockedMemory::new(root.path().into(), NodeId(0));
        let go_on = AtomicBool::new(false);
        ballast.leave(101, &go_on).unwrap();
        let said = ballast.leave(200, &go_on).unwrap_err().to_string();
        assert!(
            said.contains("100 MiB") && said.contains("200 MiB"),
            "{said}"
        );
        let stop = AtomicBool::new(true);
        assert!(matches!(ballast.leave(100, &stop), Err(Error::Interrupted)));
    }
}
