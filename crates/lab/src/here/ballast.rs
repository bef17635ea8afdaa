//! Memory of the fast node that is held, so that a scenario finds as much free there as it names.
//!
//! Held memory is bound to the node and locked: nobody's reclaim, demotion or balancing takes it. Only
//! what is free is taken, a part at a time, so that the kernel never has to make room for it.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use demeter_policy::{MIB, NodeId};

use crate::error::Error;
use crate::inside::zones::node_free_mib;
use crate::workload::bind;

/// The most that is taken at once, MiB.
const PART_MIB: u64 = 256;

/// How near is near enough, MiB: CPUs hold some free pages ready for themselves.
const TOLERANCE_MIB: u64 = 2;

/// More parts than the largest node that a scenario can name has (16 TiB).
const STEPS_MAX: usize = 1 << 17;

/// Held memory; free again when dropped.
#[derive(Debug)]
pub struct Ballast {
    root: PathBuf,
    node: NodeId,
    parts: Vec<Part>,
}

/// What brings the free memory nearer to what is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Take(u64),
    Give,
    Enough,
}

impl Ballast {
    /// Nothing is held yet of `node`, as the kernel's files below `root` show it.
    pub fn new(root: PathBuf, node: NodeId) -> Self {
        Self {
            root,
            node,
            parts: vec![],
        }
    }

    /// Takes memory, or gives some back, until programs can take `wanted_mib` of the node.
    ///
    /// # Errors
    /// When the node has less even with nothing held, with the figure; when it is not at rest.
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

/// What comes next. Each part that is taken is less than what is free of it, by all that is wanted.
fn step(free_mib: u64, wanted_mib: u64) -> Step {
    if free_mib > wanted_mib + TOLERANCE_MIB {
        Step::Take((free_mib - wanted_mib).min(PART_MIB))
    } else if free_mib + TOLERANCE_MIB < wanted_mib {
        Step::Give
    } else {
        Step::Enough
    }
}

/// One part of it: a mapping of its own.
#[derive(Debug)]
struct Part {
    base: *mut libc::c_void,
    bytes: usize,
}

// SAFETY: the mapping is the part's own, nobody reads or writes it, and any thread may unmap it.
unsafe impl Send for Part {}

impl Part {
    fn take(node: NodeId, mib: u64) -> io::Result<Self> {
        let bytes = usize::try_from(mib * MIB).map_err(io::Error::other)?;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
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
        // SAFETY: locks, and thereby fills, exactly the mapping above.
        match unsafe { libc::mlock(part.base, part.bytes) } {
            0 => Ok(part),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly what `take` mapped; nobody else knows of it.
        unsafe { libc::munmap(self.base, self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever is free, and though others take some at every step, the steps end at what is
        /// wanted or with nothing held, and never take what is wanted.
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
        let mut ballast = Ballast::new(root.path().into(), NodeId(0));
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
