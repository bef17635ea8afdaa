//! A set-associative array with exact LRU replacement, used for TLBs, page-walk caches and data caches.
//!
//! # Problem
//! Every simulated access looks up several such arrays, so a look-up may take a few nanoseconds only. Even so, the
//! model must be exact LRU, not an approximation.
//!
//! # Approach
//! A set is one small block of memory. Its 32-bit tags are compared all at once. The LRU order is a permutation of way
//! numbers in the nibbles of one word, most recent first.
//!
//! # Properties
//! - Hits and victims equal those of a list that moves each touched entry to its front.
//! - Invalidated ways are replaced first.

use demeter_scenario::Geometry;

/// The maximum number of ways, one for each nibble of a word.
pub(crate) const WAYS_MAX: usize = 16;

/// The tag of an empty way.
const EMPTY: u32 = u32::MAX;

/// The identity permutation of way numbers.
const IDENTITY: u64 = 0xfedc_ba98_7654_3210;

/// One in every nibble.
const ONES: u64 = 0x1111_1111_1111_1111;

/// Whether a geometry is valid: a power of two of sets, and 1 to `ways_max` ways.
pub(crate) fn is_sound(geometry: Geometry, ways_max: usize) -> bool {
    geometry.sets.is_power_of_two() && (1..=ways_max as u32).contains(&geometry.ways)
}

/// Bit mask of the tags that equal `tag`. `W` is 4, 12 or 16.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn equal<const W: usize>(tags: &[u32; W], tag: u32) -> u32 {
    use std::arch::x86_64::{
        __m128i, _mm_castsi128_ps, _mm_cmpeq_epi32, _mm_movemask_epi8, _mm_movemask_ps,
        _mm_packs_epi16, _mm_packs_epi32, _mm_set_epi32, _mm_set1_epi32, _mm_setzero_si128,
    };
    // SAFETY: these intrinsics are SSE2, part of every x86-64; they touch no memory.
    unsafe {
        let four = |i: usize| -> __m128i {
            let t = |j: usize| tags[i + j] as i32;
            _mm_cmpeq_epi32(
                _mm_set_epi32(t(3), t(2), t(1), t(0)),
                _mm_set1_epi32(tag as i32),
            )
        };
        if W == 4 {
            return _mm_movemask_ps(_mm_castsi128_ps(four(0))) as u32;
        }
        let last = if W == 16 {
            four(12)
        } else {
            _mm_setzero_si128()
        };
        let low = _mm_packs_epi32(four(0), four(4));
        let high = _mm_packs_epi32(four(8), last);
        _mm_movemask_epi8(_mm_packs_epi16(low, high)) as u32
    }
}

/// Bit mask of the tags that equal `tag`.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn equal<const W: usize>(tags: &[u32; W], tag: u32) -> u32 {
    let bits = tags.iter().enumerate();
    bits.fold(0, |bits, (way, &there)| {
        bits | u32::from(there == tag) << way
    })
}

#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Set<T, const W: usize> {
    tags: [u32; W],
    /// Way numbers by recency; only the first `ways` nibbles are used.
    order: u64,
    values: [T; W],
}

impl<T: Copy + Default, const W: usize> Set<T, W> {
    fn empty() -> Self {
        Self {
            tags: [EMPTY; W],
            order: IDENTITY,
            values: [T::default(); W],
        }
    }

    #[inline(always)]
    fn find(&self, tag: u32) -> Option<usize> {
        let hits = equal(&self.tags, tag);
        (hits != 0).then(|| hits.trailing_zeros() as usize)
    }

    /// Bit position of `way` in the order.
    #[inline(always)]
    fn position(&self, way: usize) -> u32 {
        // Finds the lowest nibble that is zero after the XOR; borrows only reach higher ones.
        let x = self.order ^ (ONES * way as u64);
        (x.wrapping_sub(ONES) & !x & (ONES << 3)).trailing_zeros() & !3
    }

    #[inline(always)]
    fn bring_forward(&mut self, way: usize) {
        if self.order & 0xf == way as u64 {
            return;
        }
        let before = (1u64 << self.position(way)) - 1;
        let moved = before << 4 | 0xf;
        self.order = self.order & !moved | (self.order & before) << 4 | way as u64;
    }

    /// Replaces the least recent tag; the new one becomes the most recent.
    #[inline(always)]
    fn replace(&mut self, tag: u32, value: T, ways: u32) {
        let end = 4 * (ways - 1);
        let victim = self.order >> end & 0xf;
        let used = u64::MAX >> (60 - end);
        self.order = self.order & !used | (self.order << 4 & used) | victim;
        // A nibble is below 16, so with 16 ways the remainder removes the bounds check.
        let way = victim as usize % W;
        self.tags[way] = tag;
        self.values[way] = value;
    }

    fn send_back(&mut self, way: usize, ways: u32) {
        let at = self.position(way);
        let end = 4 * (ways - 1);
        let within = u64::MAX >> (60 - end);
        let before = (1u64 << at) - 1;
        let after = within & !before & !(0xf << at);
        self.order = self.order & !within
            | self.order & before
            | (self.order & after) >> 4
            | (way as u64) << end;
    }
}

/// A set-associative array. `W` is the capacity in ways, at most [`WAYS_MAX`]; an array may use fewer.
///
/// The low bits of a key choose the set, the rest is the tag. Keys must be below `sets × (2^32 - 1)`.
#[derive(Debug, Clone)]
pub(crate) struct Assoc<T, const W: usize> {
    sets: Box<[Set<T, W>]>,
    set_bits: u32,
    ways: u32,
}

impl<T: Copy + Default, const W: usize> Assoc<T, W> {
    /// An empty array. The geometry must be valid for `W`.
    pub(crate) fn new(geometry: Geometry) -> Self {
        debug_assert!(W <= WAYS_MAX && is_sound(geometry, W), "{geometry:?}");
        Self {
            sets: vec![Set::empty(); geometry.sets as usize].into(),
            set_bits: geometry.sets.trailing_zeros(),
            ways: geometry.ways,
        }
    }

    #[inline(always)]
    fn split(&self, key: u64) -> (usize, u32) {
        debug_assert!(key >> self.set_bits < u64::from(EMPTY), "key {key:#x}");
        let set = key as usize & (self.sets.len() - 1);
        (set, (key >> self.set_bits) as u32)
    }

    /// Looks a key up and makes it the most recent.
    #[inline(always)]
    pub(crate) fn get(&mut self, key: u64) -> Option<&mut T> {
        let (set, tag) = self.split(key);
        let set = &mut self.sets[set];
        let way = set.find(tag)?;
        set.bring_forward(way);
        Some(&mut set.values[way])
    }

    /// Inserts an absent key as the most recent, in place of the least recent.
    #[inline(always)]
    pub(crate) fn insert(&mut self, key: u64, value: T) {
        let (set, tag) = self.split(key);
        let ways = self.ways;
        let set = &mut self.sets[set];
        set.replace(tag, value, ways);
    }

    /// Looks a key up, or inserts it if absent, and makes it the most recent. Returns true for a hit.
    #[inline(always)]
    pub(crate) fn touch(&mut self, key: u64, value: T) -> bool {
        let (set, tag) = self.split(key);
        let ways = self.ways;
        let set = &mut self.sets[set];
        match set.find(tag) {
            Some(way) => {
                set.bring_forward(way);
                true
            }
            None => {
                set.replace(tag, value, ways);
                false
            }
        }
    }

    /// Address of a key's set in the simulator's own memory, for a prefetch.
    #[inline(always)]
    pub(crate) fn place(&self, key: u64) -> *const u8 {
        (&raw const self.sets[self.split(key).0]).cast()
    }

    /// Drops a key.
    pub(crate) fn invalidate(&mut self, key: u64) {
        let (set, tag) = self.split(key);
        let ways = self.ways;
        let set = &mut self.sets[set];
        if let Some(way) = set.find(tag) {
            set.tags[way] = EMPTY;
            set.send_back(way, ways);
        }
    }

    /// Drops every key for which `keep` returns false.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(u64) -> bool) {
        let (set_bits, ways) = (self.set_bits, self.ways);
        for (index, set) in self.sets.iter_mut().enumerate() {
            for way in 0..W {
                let tag = set.tags[way];
                if tag != EMPTY && !keep(u64::from(tag) << set_bits | index as u64) {
                    set.tags[way] = EMPTY;
                    set.send_back(way, ways);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A reference model: one list for each set, most recent first.
    struct Lists {
        sets: Vec<Vec<(u64, u16)>>,
        ways: usize,
    }

    impl Lists {
        fn set(&mut self, key: u64) -> &mut Vec<(u64, u16)> {
            let n = self.sets.len() as u64;
            &mut self.sets[(key % n) as usize]
        }

        fn get(&mut self, key: u64) -> Option<u16> {
            let set = self.set(key);
            let at = set.iter().position(|e| e.0 == key)?;
            let entry = set.remove(at);
            set.insert(0, entry);
            Some(entry.1)
        }

        fn insert(&mut self, key: u64, value: u16) {
            let ways = self.ways;
            let set = self.set(key);
            set.insert(0, (key, value));
            set.truncate(ways);
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Touch(u64, u16),
        Invalidate(u64),
        DropOdd,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            20 => (0u64..200, any::<u16>()).prop_map(|(k, v)| Step::Touch(k, v)),
            3 => (0u64..200).prop_map(Step::Invalidate),
                1 => Just(Step::DropOdd),
        ]
    }

    proptest! {
        /// The array has the same hits and values as the reference model, for any shape.
        #[test]
        fn behaves_as_lists_do(
            set_bits in 0u32..4,
            ways in 1u32..=16,
            steps in prop::collection::vec(step(), 1..600),
        ) {
            let geometry = Geometry { sets: 1 << set_bits, ways };
            let mut fast = Assoc::<u16, 16>::new(geometry);
            let mut slow = Lists { sets: vec![vec![]; 1 << set_bits], ways: ways as usize };
            for step in steps {
                match step {
                    Step::Touch(key, value) => {
                        let found = fast.get(key).copied();
                        prop_assert_eq!(found, slow.get(key));
                        if found.is_none() {
                            fast.insert(key, value);
                            slow.insert(key, value);
                        }
                    }
                    Step::Invalidate(key) => {
                        fast.invalidate(key);
                        slow.set(key).retain(|e| e.0 != key);
                    }
                    Step::DropOdd => {
                        fast.retain(|key| key % 2 == 0);
                        slow.sets.iter_mut().for_each(|s| s.retain(|e| e.0 % 2 == 0));
                    }
                }
            }
        }
    }

    #[test]
    fn unsound_shapes_are_told() {
        let is_sound = |sets, ways, ways_max| is_sound(Geometry { sets, ways }, ways_max);
        assert!(!is_sound(3, 4, 16));
        assert!(!is_sound(4, 0, 16));
        assert!(!is_sound(4, 5, 4));
        assert!(is_sound(1, 4, 4));
    }
}
