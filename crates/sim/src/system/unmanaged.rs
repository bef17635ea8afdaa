//! No management: pages stay where they were first put.
//!
//! The oracle is the best that lies still, in placement and in page size: what does not fit fast memory has huge pages of
//! slow memory, where huge pages are the rule. Else systems with such pages (`hemem`) would surpass it. On the lab's
//! emulator it has Linux's, as the lab's own oracle.

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
            huge_in_slow: self.keeps_hot_set,
            ..Needs::default()
        }
    }
}
