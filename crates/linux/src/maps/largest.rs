//! Keeps the largest of many ranges within a bound.

use super::RANGES_MAX;

/// The largest [`RANGES_MAX`] of the pushed elements, in their order. At most twice as many are in memory.
pub(super) struct Largest<T> {
    kept: Vec<T>,
    len: fn(&T) -> u64,
    left_out: u64,
}

impl<T> Largest<T> {
    pub(super) fn new(len: fn(&T) -> u64) -> Self {
        Self {
            kept: vec![],
            len,
            left_out: 0,
        }
    }

    pub(super) fn last_mut(&mut self) -> Option<&mut T> {
        self.kept.last_mut()
    }

    pub(super) fn push(&mut self, item: T) {
        if self.kept.len() == 2 * RANGES_MAX {
            self.cut();
        }
        self.kept.push(item);
    }

    fn cut(&mut self) {
        let Some(surplus) = self.kept.len().checked_sub(RANGES_MAX).filter(|&n| n > 0) else {
            return;
        };
        let mut lengths: Vec<u64> = self.kept.iter().map(self.len).collect();
        let (_, &mut longest, _) = lengths.select_nth_unstable(surplus - 1);
        // If several have the same length at the limit, the first are dropped.
        let shorter = lengths.iter().filter(|&&len| len < longest).count();
        let mut as_long = surplus - shorter;
        let len = self.len;
        self.kept.retain(|item| {
            let goes = len(item) < longest || (len(item) == longest && as_long > 0);
            as_long -= usize::from(goes && len(item) == longest);
            !goes
        });
        self.left_out += surplus as u64;
    }

    pub(super) fn finish(mut self) -> (Vec<T>, u64) {
        self.cut();
        (self.kept, self.left_out)
    }
}
