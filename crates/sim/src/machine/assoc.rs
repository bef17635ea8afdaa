//! A set-associative array with exact LRU replacement: what TLBs, page-walk caches and data
//! caches are made of.
//!
//! # Problem
//! Every simulated access asks several such arrays, so that a look-up may cost a few nanoseconds
//! only, and yet the model must be the textbook's, not an approximation of it.
//!
//! # Approach
//! A set is one small block of memory: 32-bit tags that are compared all at once, and the LRU
//! order as a permutation of way numbers in the nibbles of one word, most recent first.
//!
//! # Properties
//! - Hits and victims are those of a list that moves what is touched to its front.
//! - What was invalidated is replaced first.

/// The most ways of a set: as many as a word has nibbles.
pub(crate) const WAYS_MAX: usize = 16;

/// The tag of a way that holds nothing.
const EMPTY: u32 = u32::MAX;

/// Way numbers in their own order.
const IDENTITY: u64 = 0xfedc_ba98_7654_3210;

/// One in every nibble.
const ONES: u64 = 0x1111_1111_1111_1111;

/// The shape of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Sets; a power of two.
    pub sets: u32,
    /// Entries in each; 1 to 16.
    pub ways: u32,
}

impl Geometry {
    /// Whether such an array can be: a power of two of sets, and 1 to `ways_max` ways.
    pub(crate) fn is_sound(self, ways_max: usize) -> bool {
        self.sets.is_power_of_two() && (1..=ways_max as u32).contains(&self.ways)
    }

    /// The same with `2^bits` times fewer sets, at least one.
    pub(crate) fn shrunk(self, bits: u32) -> Self {
        Self {
            sets: (self.sets >> bits).max(1),
            ..self
        }
    }
}

/// The tags that equal `tag`, as bits. `W` is 4, 12 or 16.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn equal<const W: usize>(tags: &[u32; W], tag: u32) -> u32 {
    use std::arch::x86_64::{
        __m128i, _mm_castsi128_ps, _mm_cmpeq_epi32, _mm_movemask_epi8, _mm_movemask_ps,
        _mm_packs_epi16, _mm_packs_epi32, _mm_set_epi32, _mm_set1_epi32, _mm_setzero_si128,
    };
    // SAFETY: SSE2, which these belong to, is part of every x86-64; they touch no memory.
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

/// The tags that equal `tag`, as bits.
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
    /// Way numbers by recency; only the first `ways` nibbles count.
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
        // The lowest nibble that is zero after the XOR; borrows only reach higher ones.
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

    /// Puts a tag in the place of the least recent, as the most recent.
    #[inline(always)]
    fn replace(&mut self, tag: u32, value: T, ways: u32) {
        let end = 4 * (ways - 1);
        let victim = self.order >> end & 0xf;
        let used = u64::MAX >> (60 - end);
        self.order = self.order & !used | (self.order << 4 & used) | victim;
        // A nibble is below 16; the remainder spares a check where there are 16 ways.
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

/// The array. `W` is the room for ways, at most [`WAYS_MAX`]; an array may use fewer.
///
/// A key's low bits choose the set, the rest is the tag: keys must be below `sets × (2^32 - 1)`.
#[derive(Debug, Clone)]
pub(crate) struct Assoc<T, const W: usize> {
    sets: Box<[Set<T, W>]>,
    set_bits: u32,
    ways: u32,
}

impl<T: Copy + Default, const W: usize> Assoc<T, W> {
    /// An empty array. The geometry is sound for `W`.
    pub(crate) fn new(geometry: Geometry) -> Self {
        debug_assert!(W <= WAYS_MAX && geometry.is_sound(W), "{geometry:?}");
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

    /// Puts a key that is not there in, as the most recent, in the place of the least recent.
    #[inline(always)]
    pub(crate) fn insert(&mut self, key: u64, value: T) {
        let (set, tag) = self.split(key);
        let ways = self.ways;
        let set = &mut self.sets[set];
        set.replace(tag, value, ways);
    }

    /// Looks a key up and puts it in if it is not there; true when it was. The most recent then.
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

    /// Where the set of a key lies in this computer's memory, for a prefetch.
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

    /// Drops every key for which `keep` does not hold.
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

    /// The obvious twin: one list for each set, most recent first.
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
        /// Same hits and same values as the twin, whatever the shape.
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
        assert!(!Geometry { sets: 3, ways: 4 }.is_sound(16));
        assert!(!Geometry { sets: 4, ways: 0 }.is_sound(16));
        assert!(!Geometry { sets: 4, ways: 5 }.is_sound(4));
        assert!(Geometry { sets: 1, ways: 4 }.is_sound(4));
    }
}
