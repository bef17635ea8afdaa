//! Memory tiers, and values per tier.
//!
//! A machine has up to four tiers, each a [`Level`] below the one before it. A host manages two of them, [`Tier::Fast`]
//! and [`Tier::Slow`].

use serde::{Deserialize, Serialize};

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
    /// Makes the value of each tier by `of`.
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

    /// The mutable value for `tier`.
    pub fn get_mut(&mut self, tier: Tier) -> &mut T {
        match tier {
            Tier::Fast => &mut self.fast,
            Tier::Slow => &mut self.slow,
        }
    }
}

impl TierBytes {
    /// Bytes of both tiers.
    pub fn total(&self) -> ByteCount {
        ByteCount(self.fast.0 + self.slow.0)
    }
}

/// Maximum number of tiers of a machine.
pub const LEVELS: usize = 4;

/// A tier's position among those of a machine.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub enum Level {
    /// The fastest.
    #[default]
    First,
    /// The next one.
    Second,
    /// The one after that.
    Third,
    /// The slowest possible one.
    Fourth,
}

impl Level {
    /// All tiers, the fastest first.
    pub const ALL: [Self; LEVELS] = [Self::First, Self::Second, Self::Third, Self::Fourth];

    /// The tier with `faster` faster ones.
    pub fn new(faster: usize) -> Option<Self> {
        Self::ALL.get(faster).copied()
    }

    /// Number of faster tiers.
    pub fn index(self) -> usize {
        self as usize
    }

    /// All slower tiers, the fastest first.
    pub fn slower(self) -> impl Iterator<Item = Self> + Clone {
        Self::ALL.into_iter().filter(move |&other| other > self)
    }

    /// All faster tiers, the fastest first; each has a boundary to the slower ones.
    pub fn faster(self) -> impl Iterator<Item = Self> + Clone {
        Self::ALL.into_iter().filter(move |&other| other < self)
    }
}

/// A value for each possible tier of a machine, the fastest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct ByLevel<T>(pub [T; LEVELS]);

impl<T> ByLevel<T> {
    /// Makes the value of each tier by `of`.
    pub fn from_fn(of: impl FnMut(Level) -> T) -> Self {
        Self(Level::ALL.map(of))
    }

    /// The value for a tier.
    #[inline]
    pub fn get(&self, level: Level) -> &T {
        &self.0[level.index()]
    }

    /// The mutable value for a tier.
    #[inline]
    pub fn get_mut(&mut self, level: Level) -> &mut T {
        &mut self.0[level.index()]
    }
}

impl<T: Default> From<PerTier<T>> for ByLevel<T> {
    /// The values of a machine of two tiers.
    fn from(PerTier { fast, slow }: PerTier<T>) -> Self {
        Self([fast, slow, T::default(), T::default()])
    }
}

/// The direction of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Direction {
    /// From slow to fast memory.
    #[default]
    Promotion,
    /// From fast to slow memory.
    Demotion,
}

impl Direction {
    /// The target side of the boundary.
    pub fn to(self) -> Tier {
        match self {
            Self::Promotion => Tier::Fast,
            Self::Demotion => Tier::Slow,
        }
    }

    /// Bytes of a block that are still on the side that it should have left.
    pub fn left(self, placement: &TierBytes) -> ByteCount {
        match self {
            Self::Promotion => placement.slow,
            Self::Demotion => placement.fast,
        }
    }
}
