//! No system: `none`, and `oracle`, for which the workload places its own hot set.

use super::{Fault, Rival, Totals};

/// A rival that does nothing.
#[derive(Debug)]
pub struct Unmanaged;

impl Rival for Unmanaged {
    fn moved_bytes(&mut self, _totals: &Totals) -> Option<(u64, u64)> {
        Some((0, 0))
    }

    fn stop(self: Box<Self>) -> Result<(), Fault> {
        Ok(())
    }
}
