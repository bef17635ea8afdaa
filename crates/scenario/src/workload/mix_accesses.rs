//! The accesses of a mix: the part of each access, and its offset. Simulator and lab share this code.

use demeter_policy::{BLOCK_SIZE, MIB};

use super::mix::{Mix, Part, Pattern};
use crate::rng::{Rng, bound};

const NS_PER_S: u64 = 1_000_000_000;

/// The sequence of accesses.
#[derive(Debug, Clone)]
pub struct MixAccesses {
    /// The parts, in order of allocation.
    pub parts: Vec<MixPart>,
    turns_ns: Option<u64>,
}

/// A part of memory and its access pattern.
#[derive(Debug, Clone)]
pub struct MixPart {
    /// Its size, bytes.
    pub bytes: u64,
    /// Whether its lines are accessed in order, instead of at random.
    pub is_in_order: bool,
    /// Size of its hot set, bytes; 0 if it has none.
    pub hot_bytes: u64,
    /// The part is chosen by random numbers below this and not below the previous part's.
    below: u64,
    stores_below: u64,
    hot_below: u64,
    moves_ns: Option<u64>,
    growth: Option<Growth>,
}

/// The growth of a part.
#[derive(Debug, Clone, Copy)]
struct Growth {
    start_bytes: u64,
    until_ns: u64,
}

impl MixAccesses {
    /// Accesses in a part before the next part is chosen: the lines of a page. So sweeps stay streams even if other
    /// parts are used in between.
    pub const RUN: usize = 64;

    /// Size of an access: a cache line.
    pub const LINE: u64 = 64;

    /// The sequence for these parameters, which have been checked.
    pub fn new(mix: &Mix) -> Self {
        let shares: f64 = mix.parts.iter().map(|part| part.share).sum();
        let mut share = 0.0;
        let stretch = |part: &Part| {
            share += part.share / shares;
            MixPart {
                bytes: part.size_mib * MIB,
                is_in_order: part.pattern == Pattern::Sweep,
                hot_bytes: part.hot_mib * MIB,
                below: bound(share.min(1.0)),
                stores_below: bound(part.stores),
                hot_below: bound(part.hot_weight),
                moves_ns: part.moves_s.map(|s| s * NS_PER_S),
                growth: part.start_mib.zip(part.grows_s).map(|(mib, s)| Growth {
                    start_bytes: mib * MIB,
                    until_ns: s * NS_PER_S,
                }),
            }
        };
        Self {
            parts: mix.parts.iter().map(stretch).collect(),
            turns_ns: mix.turns_s.map(|s| s * NS_PER_S),
        }
    }

    /// The part in use, if parts take turns. Times are of the timed phase.
    pub fn turn(&self, now_ns: u64) -> Option<usize> {
        self.turns_ns
            .map(|turns_ns| (now_ns / turns_ns) as usize % self.parts.len())
    }

    /// The part of the next [`Self::RUN`] accesses.
    #[inline]
    pub fn choose(&self, turn: Option<usize>, rng: &mut Rng) -> usize {
        turn.unwrap_or_else(|| {
            let random = rng.next();
            let chosen = self.parts.iter().position(|part| random < part.below);
            chosen.unwrap_or(self.parts.len() - 1)
        })
    }
}

impl MixPart {
    /// Its size at a time of the timed phase, in whole blocks if it grows.
    pub fn bytes_at(&self, now_ns: u64) -> u64 {
        let Some(growth) = self.growth.filter(|growth| now_ns < growth.until_ns) else {
            return self.bytes;
        };
        let more = u128::from(self.bytes - growth.start_bytes) * u128::from(now_ns)
            / u128::from(growth.until_ns);
        growth.start_bytes + more as u64 / BLOCK_SIZE * BLOCK_SIZE
    }

    /// Whether it grows.
    pub fn grows(&self) -> bool {
        self.growth.is_some()
    }

    /// Start of its hot set, bytes from the part's start; without a hot set, the end of its memory.
    pub fn hot_start(&self, now_ns: u64) -> u64 {
        let Some(moves_ns) = self.moves_ns else {
            return self.bytes_at(now_ns) - self.hot_bytes;
        };
        let places = self.bytes / self.hot_bytes;
        let moved = now_ns / moves_ns;
        // Downwards from the end.
        (places - 1 - moved % places) * self.hot_bytes
    }

    /// Whether its hot set moves.
    pub fn moves(&self) -> bool {
        self.moves_ns.is_some()
    }

    /// The offset of an access at random, bytes.
    #[inline]
    pub fn offset(&self, hot_start: u64, rng: &mut Rng) -> u64 {
        if self.hot_bytes > 0 && rng.next() < self.hot_below {
            return hot_start + rng.below(self.hot_bytes / MixAccesses::LINE) * MixAccesses::LINE;
        }
        let cold_bytes = match self.hot_bytes {
            0 => hot_start,
            hot_bytes => self.bytes - hot_bytes,
        };
        let cold = rng.below(cold_bytes / MixAccesses::LINE) * MixAccesses::LINE;
        // Offsets at or above `hot_start` continue after the hot set.
        cold + if cold < hot_start { 0 } else { self.hot_bytes }
    }

    /// Whether the next access is a store.
    #[inline]
    pub fn is_store(&self, rng: &mut Rng) -> bool {
        self.stores_below > 0 && rng.next() < self.stores_below
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_hot_sets_and_turns_are_as_asked() {
        let mix: Mix = toml::from_str(
            "turns_s = 2\n\
             parts = [{ size_mib = 4, share = 1 },\
                      { size_mib = 8, share = 3, hot_mib = 2, hot_weight = 0.5, moves_s = 1, stores = 0.25 }]",
        )
        .unwrap();
        let (accesses, mut rng) = (MixAccesses::new(&mix), Rng::new(1, 0));
        assert_eq!(
            [0, 2, 4].map(|s| accesses.turn(s * NS_PER_S)),
            [0, 1, 0].map(Some)
        );
        let second = (0..10_000)
            .filter(|_| accesses.choose(None, &mut rng) == 1)
            .count();
        assert!((7200..7800).contains(&second), "{second}");

        let part = &accesses.parts[1];
        assert_eq!(part.hot_start(0), 6 * MIB);
        let hot_start = part.hot_start(NS_PER_S);
        assert_eq!(hot_start, 4 * MIB);
        let (mut hot, mut stores) = (0, 0);
        for _ in 0..10_000 {
            let offset = part.offset(hot_start, &mut rng);
            assert!(offset < part.bytes && offset.is_multiple_of(MixAccesses::LINE));
            hot += u32::from((hot_start..hot_start + part.hot_bytes).contains(&offset));
            stores += u32::from(part.is_store(&mut rng));
        }
        assert!((4700..5300).contains(&hot), "{hot}");
        assert!((2200..2800).contains(&stores), "{stores}");
    }

    #[test]
    fn a_part_that_grows_is_used_as_far_as_it_has_grown() {
        let mix: Mix =
            toml::from_str("parts = [{ size_mib = 101, start_mib = 1, grows_s = 10 }]").unwrap();
        let (accesses, mut rng) = (MixAccesses::new(&mix), Rng::new(1, 0));
        let part = &accesses.parts[0];
        let sizes = [0, 1, 5, 10, 99].map(|s| part.bytes_at(s * NS_PER_S) / MIB);
        assert_eq!(sizes, [1, 11, 51, 101, 101]);
        for s in 0..12 {
            let bytes = part.bytes_at(s * NS_PER_S);
            let hot_start = part.hot_start(s * NS_PER_S);
            let last = (0..2000).map(|_| part.offset(hot_start, &mut rng)).max();
            let last = last.unwrap();
            assert!(
                last < bytes && last > bytes - bytes / 50,
                "{last} of {bytes}"
            );
        }
    }
}
