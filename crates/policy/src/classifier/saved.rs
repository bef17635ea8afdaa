//! A classifier's state between two epochs as numbers.

use super::histogram::{CAPACITY, Entry};
use super::{Classifier, Range};
use crate::engine::{NotAState, Numbers, Saved};

/// More weight than any range gets.
const WEIGHT_MAX: u64 = 1 << 48;

impl Saved for Classifier {
    fn save(&self, to: &mut Vec<u64>) {
        to.extend([self.epoch.into(), self.unplaced]);
        to.push(self.ranges.len() as u64);
        let mut end = 0;
        for r in &self.ranges {
            to.extend([r.start - end, r.len(), r.born].map(u64::from));
            to.push(r.residual);
            end = r.end;
        }
        let entries = self.histogram.entries();
        to.push(entries.len() as u64);
        let mut next = 0;
        for e in entries {
            to.extend([u64::from(e.granule()) - next, e.weight()]);
            next = u64::from(e.granule()) + 1;
        }
    }

    fn restore(&mut self, from: &mut Numbers<'_>) -> Result<(), NotAState> {
        self.epoch = from.next_u32()?;
        self.unplaced = from.next(WEIGHT_MAX)?;
        let mut end = 0u32;
        for _ in 0..from.next(self.config.max_ranges as u64)? {
            let gap = from.next_u32()?;
            let start = from.known(end.checked_add(gap))?;
            let len = from.next_u32()?;
            end = from.known(start.checked_add(len).filter(|_| len > 0))?;
            self.ranges.push(Range {
                start,
                end,
                born: from.next_u32()?,
                located: 0,
                residual: from.next(WEIGHT_MAX)?,
            });
        }
        let (mut next, mut entries) = (0u64, vec![]);
        for _ in 0..from.next(CAPACITY as u64)? {
            let granule = next + u64::from(from.next_u32()?);
            let granule = from.known(u32::try_from(granule).ok())?;
            let range = self.ranges.partition_point(|r| r.end <= granule);
            let range = self.ranges.get(range).filter(|r| r.start <= granule);
            from.known(range)?;
            let weight = from.next_u32()?;
            from.known((weight > 0).then_some(()))?;
            entries.push(Entry::new(granule, weight));
            next = u64::from(granule) + 1;
        }
        self.histogram.restore(entries);
        self.locate();
        Ok(())
    }
}
