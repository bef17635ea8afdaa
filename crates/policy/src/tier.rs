//! The two tiers, and one value for each.

use crate::ByteCount;

/// A kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Tier {
    /// Local DRAM.
    Fast,
    /// CXL, persistent or remote memory.
    Slow,
}

impl Tier {
    /// Both, fast first.
    pub const ALL: [Self; 2] = [Self::Fast, Self::Slow];
}

/// A value for each tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PerTier<T> {
    /// For fast memory.
    pub fast: T,
    /// For slow memory.
    pub slow: T,
}

/// Bytes of each tier.
pub type TierBytes = PerTier<ByteCount>;

impl<T> PerTier<T> {
    /// The value that `of` gives for each tier.
    pub fn from_fn(mut of: impl FnMut(Tier) -> T) -> Self {
        Self {
            fast: of(Tier::Fast),
            slow: of(Tier::Slow),
        }
    }

    /// The value for `tier`.
    pub fn get(&self, tier: Tier) -> &T {
        match tier {
            Tier::Fast => &self.fast,
            Tier::Slow => &self.slow,
        }
    }

    /// The value for `tier`, to change it.
    pub fn get_mut(&mut self, tier: Tier) -> &mut T {
        match tier {
            Tier::Fast => &mut self.fast,
            Tier::Slow => &mut self.slow,
        }
    }
}
