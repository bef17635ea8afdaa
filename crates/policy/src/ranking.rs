//! Ranks the ranges of all processes by heat.

use serde::{Deserialize, Serialize};

use crate::saved::finite;
use crate::{Pid, VirtRange};

/// A range of one process from its classifier.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClassifiedRange {
    /// Its addresses, aligned to blocks, so that it may extend beyond the mapping.
    pub range: VirtRange,
    /// Its decayed number of samples.
    pub count: f64,
    /// The epoch in which its edges were last set, if the classifier splits ranges.
    pub born_epoch: u32,
}

/// A range of one process with its heat.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RankedRange {
    /// The process.
    pub pid: Pid,
    /// Its addresses.
    pub range: VirtRange,
    /// Decayed samples in it.
    #[serde(deserialize_with = "finite")]
    pub count: f64,
    /// The epoch in which its edges were last set.
    pub born_epoch: u32,
}

impl RankedRange {
    /// Samples per byte.
    pub fn density(&self) -> f64 {
        self.count / self.range.len().0 as f64
    }
}

/// The ranges of all spaces, the hottest first: by samples per byte, then the younger first, then by pid and address.
pub fn rank(
    spaces: impl IntoIterator<Item = (Pid, impl IntoIterator<Item = ClassifiedRange>)>,
) -> Vec<RankedRange> {
    let mut ranking: Vec<RankedRange> = spaces
        .into_iter()
        .flat_map(|(pid, ranges)| {
            ranges.into_iter().map(move |r| RankedRange {
                pid,
                range: r.range,
                count: r.count,
                born_epoch: r.born_epoch,
            })
        })
        .collect();
    ranking.sort_unstable_by(|a, b| {
        b.density()
            .total_cmp(&a.density())
            .then(b.born_epoch.cmp(&a.born_epoch))
            .then(a.pid.cmp(&b.pid))
            .then(a.range.cmp(&b.range))
    });
    ranking
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GuestVirtAddr;

    fn classified(start: u64, len: u64, count: f64, born_epoch: u32) -> ClassifiedRange {
        let range = VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(start + len)).unwrap();
        ClassifiedRange {
            range,
            count,
            born_epoch,
        }
    }

    #[test]
    fn by_density_then_youth_then_place() {
        let one = [
            classified(0, 100, 50.0, 1),
            classified(100, 10, 50.0, 1),
            classified(200, 20, 10.0, 9),
        ];
        let two = [classified(0, 20, 10.0, 1)];
        let order: Vec<_> = rank([(Pid(1), one.to_vec()), (Pid(2), two.to_vec())])
            .iter()
            .map(|r| (r.pid.0, r.range.start().0))
            .collect();
        assert_eq!(order, [(1, 100), (1, 200), (1, 0), (2, 0)]);
    }
}
