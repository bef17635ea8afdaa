//! The check of the ranges that a guest names.

use demeter_policy::{ByteCount, PAGE_SIZE, PhysRange, Tier};
use demeter_proto::GpaRange;

use super::Guest;
use super::answers::hostile;
use crate::backing::{Backing, Extent};
use crate::provisioner::ProvisionError;
use crate::provisioner::held::HeldSet;

impl<B: Backing> Guest<B> {
    /// Checks the ranges that the guest names and adds their pages to `held`; each must be new and
    /// is passed to `added`. Plugged memory belongs to no tier, so naming it is allowed and has no
    /// effect. Returns its size.
    pub(super) fn take_named(
        &self,
        tier: Tier,
        ranges: &[GpaRange],
        held: &mut HeldSet,
        mut added: impl FnMut(Extent),
    ) -> Result<ByteCount, ProvisionError> {
        let mut plugged = ByteCount(0);
        for range in ranges {
            let aligned = (range.start.0 | range.bytes.0).is_multiple_of(PAGE_SIZE);
            let range = PhysRange::new(range.start, range.bytes)
                .filter(|_| aligned)
                .ok_or_else(|| {
                    let (start, bytes) = (range.start, range.bytes.0);
                    hostile(&format!(
                        "{start} and {bytes:#x} bytes is not a range of whole pages"
                    ))
                })?;
            for part in parts(range, self.backing.plugged()) {
                if is_plugged(part, self.backing.plugged()) {
                    plugged.0 = plugged.0.saturating_add(part.len().0);
                    continue;
                }
                let extent = self.backing.resolve(tier, part);
                let extent = extent.map_err(|error| hostile(&error.to_string()))?;
                if !held.insert(extent.offset, extent.len) {
                    return Err(hostile(&format!("it names {range} twice")));
                }
                added(extent);
            }
        }
        Ok(plugged)
    }
}

/// Splits a range at each border of plugged memory; `plugged` is in order.
fn parts(range: PhysRange, plugged: &[PhysRange]) -> impl Iterator<Item = PhysRange> {
    let first = plugged.partition_point(|run| run.end() <= range.start());
    let edges = plugged[first..]
        .iter()
        .flat_map(|run| [run.start(), run.end()]);
    let mut edges = edges
        .filter(move |&edge| edge > range.start())
        .take_while(move |&edge| edge < range.end())
        .chain([range.end()]);
    let mut at = range.start();
    std::iter::from_fn(move || {
        let edge = edges.find(|&edge| edge > at)?;
        let part = PhysRange::new(at, ByteCount(edge.0 - at.0));
        at = edge;
        part
    })
}

pub(super) fn is_plugged(part: PhysRange, plugged: &[PhysRange]) -> bool {
    plugged.iter().any(|run| run.covers(&part))
}

#[cfg(test)]
mod tests {
    use demeter_policy::GuestPhysAddr;
    use proptest::prelude::*;

    use super::*;

    fn pages(start: u64, count: u64) -> PhysRange {
        PhysRange::new(
            GuestPhysAddr(start * PAGE_SIZE),
            ByteCount(count * PAGE_SIZE),
        )
        .unwrap()
    }

    proptest! {
        /// The parts add up to the range, and no part crosses an edge.
        #[test]
        fn a_range_is_cut_at_every_edge(
            start in 0u64..40,
            count in 1u64..40,
            lengths in prop::collection::vec((0u64..4, 1u64..8), 0..8),
        ) {
            let mut at = 0;
            let mut plugged = vec![];
            for (gap, length) in lengths {
                plugged.push(pages(at + gap, length));
                at += gap + length;
            }
            let parts: Vec<_> = parts(pages(start, count), &plugged).collect();
            let bytes: u64 = parts.iter().map(|part| part.len().0).sum();
            prop_assert_eq!(bytes, count * PAGE_SIZE);
            prop_assert_eq!(parts[0].start().0, start * PAGE_SIZE);
            prop_assert!(parts.windows(2).all(|two| two[0].end() == two[1].start()));
            for part in parts {
                let apart = |run: &PhysRange| run.end() <= part.start() || part.end() <= run.start();
                prop_assert!(is_plugged(part, &plugged) || plugged.iter().all(apart));
            }
        }
    }
}
