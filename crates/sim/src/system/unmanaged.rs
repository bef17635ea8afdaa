//! No management: pages stay where they were first put.
//!
//! The oracle is the best placement on the kernel that programs have anyway, with that kernel's page sizes. A system whose
//! own design puts slow memory into huge pages (`hemem`, `colloid`, `memtis`) may surpass it by what fewer TLB misses in cold
//! memory are worth.

use super::{Manager, Needs};

/// Nobody.
#[derive(Debug)]
pub(crate) struct Unmanaged {
    keeps_hot_set: bool,
}

impl Unmanaged {
    /// Pages lie where first touch puts them.
    pub(crate) fn first_touch() -> Self {
        Self {
            keeps_hot_set: false,
        }
    }

    /// What the program says is hot lies in fast memory from the start: the oracle.
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
