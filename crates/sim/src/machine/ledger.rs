//! The time of a virtual CPU, by cause.

use strum::{Display, EnumCount, VariantArray};

/// A cause of CPU time; results use these names in lower case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display, EnumCount, VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum Cause {
    /// The program's own instructions.
    Compute,
    /// Page walks and hits of the second-level TLB.
    Walk,
    /// Data from caches.
    Cache,
    /// Data from the fast tier.
    Fast,
    /// Data from the slow tier.
    Slow,
    /// Collecting access information.
    Track,
    /// Classifying pages and choosing moves.
    Classify,
    /// Moving pages.
    Migrate,
    /// Page faults.
    Fault,
    /// Faults and exits provoked to detect accesses.
    Hint,
    /// Exits to the hypervisor, and its own faults.
    Exit,
    /// Invalidating translations.
    Flush,
    /// Timer ticks, context switches, and kernel threads that do not manage tiers.
    Kernel,
    /// Nothing to do.
    Idle,
    /// Waiting for a core that others occupy.
    Steal,
}

/// Number of causes.
const CAUSES: usize = Cause::COUNT;

impl Cause {
    /// All causes, in order.
    pub const ALL: &[Self] = Self::VARIANTS;
}

/// Picoseconds by cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bill([u64; CAUSES]);

impl Bill {
    /// Adds time.
    #[inline(always)]
    pub fn charge(&mut self, cause: Cause, ps: u64) {
        self.0[cause as usize] += ps;
    }

    /// Time of one cause.
    pub fn of(&self, cause: Cause) -> u64 {
        self.0[cause as usize]
    }

    /// Time of all causes.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Adds another bill `2^k` times; returns the time that was added.
    pub fn add_scaled(&mut self, other: &Self, k: u32) -> u64 {
        for (sum, ps) in self.0.iter_mut().zip(other.0) {
            *sum += ps << k;
        }
        other.total() << k
    }

    /// Time added since an earlier state of this bill.
    #[cfg(test)]
    pub fn since(&self, before: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] - before.0[i]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bills_add_up() {
        let mut bill = Bill::default();
        bill.charge(Cause::Walk, 3);
        bill.charge(Cause::Idle, 4);
        let before = bill;
        let mut sum = Bill::default();
        assert_eq!(sum.add_scaled(&bill, 2), 28);
        assert_eq!((sum.of(Cause::Walk), sum.total()), (12, 28));
        bill.charge(Cause::Walk, 5);
        assert_eq!(bill.since(&before).of(Cause::Walk), 5);
    }
}
