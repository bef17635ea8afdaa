//! Weighted interleaving with automatic weights (`MPOL_WEIGHTED_INTERLEAVE`, Linux 6.9; weights from the tables that the
//! firmware gives, 6.16).
//!
//! # Problem
//! A program that is bound by bandwidth runs slower from the fast tier alone than from both at once.
//!
//! # Approach
//! Fresh memory goes to both nodes in turn, page by page, in proportion to their bandwidth. A node's weight is its part of 32
//! by bandwidth, at least 1, and weights are divided by their greatest common divisor. Nothing moves later. A page that its node has no room for
//! comes from the other one. A huge page is one page.
//!
//! The bandwidth is the scenario's, that of loads, as firmware tells it. All threads of a program take turns together; in
//! the kernel each thread has turns of its own.
//!
//! # Properties
//! - Weights are at least 1, have no common divisor, and follow the bandwidths' order.

use super::{Managed, Manager, Needs};

/// The sum of all weights before they are divided (`weightiness`).
const PARTS: u64 = 32;

/// Both nodes' weights, from their bandwidths.
fn weights(bytes_per_s: [u64; 2]) -> [u32; 2] {
    let all = bytes_per_s[0].saturating_add(bytes_per_s[1]).max(1);
    let part = |bytes: u64| (u128::from(bytes) * u128::from(PARTS) / u128::from(all)).max(1) as u32;
    let [fast, slow] = bytes_per_s.map(part);
    let divisor = common_divisor(fast, slow);
    [fast / divisor, slow / divisor]
}

fn common_divisor(a: u32, b: u32) -> u32 {
    match b {
        0 => a.max(1),
        _ => common_divisor(b, a % b),
    }
}

/// The kernel's part: it allocates, and leaves memory where it is.
#[derive(Debug)]
pub(crate) struct Interleaving {
    weights: [u32; 2],
}

impl Interleaving {
    /// By the tiers' bandwidths.
    pub(crate) fn new(managed: &Managed<'_>) -> Self {
        Self {
            weights: weights(managed.tiers.map(|tier| tier.read_bytes_per_s)),
        }
    }
}

impl Manager for Interleaving {
    fn needs(&self) -> Needs {
        Needs {
            interleave: Some(self.weights),
            ..Needs::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn weights_are_parts_of_32() {
        assert_eq!(weights([77, 30]), [23, 8]);
        assert_eq!(weights([96, 32]), [3, 1]);
        assert_eq!(weights([1 << 40, 1]), [31, 1]);
        assert_eq!(weights([0, 0]), [1, 1]);
    }

    proptest! {
        #[test]
        fn weights_follow_bandwidths(fast in 1u64..1 << 40, slow in 1u64..1 << 40) {
            let [a, b] = weights([fast, slow]);
            prop_assert!(a >= 1 && b >= 1 && u64::from(a.max(b)) <= PARTS);
            prop_assert_eq!(common_divisor(a, b), 1);
            prop_assert!((fast >= slow) == (a >= b) || a == b);
        }
    }
}
