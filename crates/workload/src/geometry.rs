//! Position of the hot set in the array, before and after its jump.

use std::ops::Range;

use super::{Error, Size};

/// Alignment of the hot set after its jump: the size of a huge page on x86-64.
pub(crate) const JUMP_ALIGN_BYTES: u64 = 2 << 20;

/// The array's hot sets, as byte offsets.
///
/// The first hot set lies at the array's start, or with `reverse` at its end. The second, to which `--shift-at` jumps,
/// begins at `(size - hot) / 2` rounded down to 2 MiB: the middle of the array. They never overlap. With `--phase`,
/// there is one hot set per phase, all at one end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Size of the array, bytes.
    pub(crate) size: u64,
    /// The hot sets in order of time.
    pub(crate) hot: Vec<Range<u64>>,
}

impl Geometry {
    /// Computes the hot sets; refuses sizes that do not fit.
    pub(crate) fn new(size: Size, hot: Size, reverse: bool, shift: bool) -> Result<Self, Error> {
        if hot.bytes == 0 || hot.bytes > size.bytes {
            return Err(Error::Arguments(format!(
                "--hot {hot} must be above 0 and at most --size {size}"
            )));
        }
        let first_start = if reverse { size.bytes - hot.bytes } else { 0 };
        let first = first_start..first_start + hot.bytes;
        if !shift {
            return Ok(Self {
                size: size.bytes,
                hot: vec![first],
            });
        }
        let start = (size.bytes - hot.bytes) / 2 / JUMP_ALIGN_BYTES * JUMP_ALIGN_BYTES;
        let second = start..start + hot.bytes;
        if second.start < first.end && first.start < second.end {
            return Err(Error::Arguments(format!(
                "--shift-at: a second hot set of {hot} in the middle of {size} would overlap the \
                 first; --size must be at least three times --hot and some MiB"
            )));
        }
        Ok(Self {
            size: size.bytes,
            hot: vec![first, second],
        })
    }

    /// Hot sets of these sizes, in order of time.
    pub(crate) fn resized(size: Size, hot: &[Size], reverse: bool) -> Result<Self, Error> {
        let hot = hot.iter().map(|&hot| {
            let Self { hot, .. } = Self::new(size, hot, reverse, false)?;
            Ok(hot)
        });
        Ok(Self {
            size: size.bytes,
            hot: hot.collect::<Result<Vec<_>, Error>>()?.concat(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn mib(n: u64) -> Size {
        Size { bytes: n * MIB }
    }

    #[test]
    fn the_fields_case() {
        let g = Geometry::new(mib(800), mib(100), true, true).unwrap();
        assert_eq!(g.hot, [700 * MIB..800 * MIB, 350 * MIB..450 * MIB]);
        let g = Geometry::new(mib(800), mib(100), false, false).unwrap();
        assert_eq!(g.hot.first(), Some(&(0..100 * MIB)));
    }

    #[test]
    fn a_resized_hot_set_keeps_its_edge() {
        let sizes = [mib(100), mib(20), mib(200)];
        let g = Geometry::resized(mib(800), &sizes, true).unwrap();
        let mib_range = |start, end| start * MIB..end * MIB;
        assert_eq!(
            g.hot,
            [
                mib_range(700, 800),
                mib_range(780, 800),
                mib_range(600, 800)
            ]
        );
        let g = Geometry::resized(mib(800), &sizes, false).unwrap();
        assert!(g.hot.iter().all(|hot| hot.start == 0));
        assert!(Geometry::resized(mib(150), &sizes, false).is_err());
    }

    #[test]
    fn hot_sets_that_cannot_be_are_refused() {
        assert!(Geometry::new(mib(8), mib(9), false, false).is_err());
        assert!(Geometry::new(mib(8), Size { bytes: 0 }, false, false).is_err());
        assert!(Geometry::new(mib(8), mib(8), false, false).is_ok());
        assert!(Geometry::new(mib(11), mib(4), false, true).is_err());
        assert!(Geometry::new(mib(12), mib(4), false, true).is_ok());
    }

    proptest! {
        #[test]
        fn hot_sets_lie_inside_and_apart(
            size_kib in 4u64..1 << 22, hot_kib in 0u64..1 << 22, reverse: bool, shift: bool,
        ) {
            let (size, hot) = (Size { bytes: size_kib << 10 }, Size { bytes: hot_kib << 10 });
            let fits = hot_kib > 0 && hot_kib <= size_kib;
            let Ok(g) = Geometry::new(size, hot, reverse, shift) else {
                // Only layouts without enough space are refused.
                prop_assert!(!fits || (shift && size.bytes < 3 * hot.bytes + 2 * JUMP_ALIGN_BYTES));
                return Ok(());
            };
            prop_assert!(fits);
            prop_assert_eq!(g.hot.len(), 1 + usize::from(shift));
            for range in &g.hot {
                prop_assert_eq!(range.end - range.start, hot.bytes);
                prop_assert!(range.end <= size.bytes);
            }
            let edge = if reverse { g.hot[0].end == size.bytes } else { g.hot[0].start == 0 };
            prop_assert!(edge);
            if let [a, b] = &g.hot[..] {
                prop_assert!(a.end <= b.start || b.end <= a.start);
                prop_assert!(b.start.abs_diff((size.bytes - hot.bytes) / 2) < JUMP_ALIGN_BYTES);
            }
        }
    }
}
