//! No management: pages stay on their first node.
//!
//! The oracle is the best placement on an ordinary kernel with that kernel's page sizes. A system that uses huge pages
//! in slow memory by design (`hemem`, `colloid`, `memtis`) may surpass it, by fewer TLB misses in cold memory.

use super::{Manager, Needs};

/// A manager that does nothing.
#[derive(Debug)]
pub(crate) struct Unmanaged {
    keeps_hot_set: bool,
}

impl Unmanaged {
    /// Pages stay where first touch puts them.
    pub(crate) fn first_touch() -> Self {
        Self {
            keeps_hot_set: false,
        }
    }

    /// The oracle: the declared hot set lies in fast memory from the start.
    pub(crate) fn hot_set_first() -> Self {
        Self {
            keeps_hot_set: true,
        }
    }
}

impl Manager for Unmanaged {
    fn needs(&self) -> Needs {
        Needs {
            keeps_hot_set: self.keeps_hot_set,
            ..Needs::default()
        }
    }
}
