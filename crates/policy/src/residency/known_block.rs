//! The knowledge of one block, and how it is stored.

use serde::{Deserialize, Serialize};

use super::Away;
use crate::{BLOCK_SIZE, ByLevel, ByteCount, LEVELS, Level, PAGE_SIZE, Socket, Spread, TierBytes};

/// Place and history of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Known {
    /// Pages of 4 KiB in each tier.
    pub(super) pages: ByLevel<u16>,
    /// The socket nearest to most of them.
    pub(super) socket: Socket,
    /// The block backs off until this epoch.
    pub(crate) aside_until: u32,
    /// Number of consecutive failures, at most [`FAILURES_MAX`].
    pub(crate) failures: u8,
    /// The move, while the block is not in its first tier.
    pub(crate) away: Option<Away>,
    /// Its small pages, if any, were collapsed to a huge one, or that was tried.
    pub(crate) is_collapsed: bool,
}

impl Known {
    /// A block with a known place only.
    pub(crate) fn at(spread: Spread) -> Self {
        let pages = |bytes: ByteCount| (bytes.0 / PAGE_SIZE).min(BLOCK_SIZE / PAGE_SIZE) as u16;
        Self {
            pages: ByLevel(spread.bytes.0.map(pages)),
            socket: spread.socket,
            aside_until: 0,
            failures: 0,
            away: None,
            is_collapsed: false,
        }
    }

    /// Whether all of it fits into a block, and it is away only from another tier.
    pub(crate) fn is_possible(&self) -> bool {
        let pages: u64 = self.pages.0.iter().map(|pages| u64::from(*pages)).sum();
        pages <= BLOCK_SIZE / PAGE_SIZE
            && self.failures <= FAILURES_MAX
            && self.away.is_none_or(|away| away.home != away.now)
    }

    /// Its place.
    pub(crate) fn spread(&self) -> Spread {
        let bytes = |pages: u16| ByteCount(u64::from(pages) * PAGE_SIZE);
        Spread {
            bytes: ByLevel(self.pages.0.map(bytes)),
            socket: self.socket,
        }
    }

    /// Its bytes on both sides of the boundary below the fastest tier.
    pub(crate) fn placement(&self) -> TierBytes {
        self.spread().at(Level::First)
    }

    /// Whether none of it is resident.
    pub(super) fn is_absent(&self) -> bool {
        self.pages == ByLevel::default()
    }

    pub(super) fn is_movable(&self, epoch: u32) -> bool {
        self.aside_until <= epoch
    }
}

/// The knowledge of one block, if any, in twelve bytes. A machine with 1 TiB has half a million.
///
/// The first two words have, from the lowest bit on, ten bits for the pages in each tier and four for failures. Two each
/// for first and present tier follow, one that is set if the block is known, one if it was collapsed, and six for the
/// socket. The last word is the end of the back-off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Packed([u32; 3]);

/// Number of failures that still count.
pub(crate) const FAILURES_MAX: u8 = 15;

const PAGES_BITS: usize = 10;
const FAILURES_AT: usize = PAGES_BITS * LEVELS;
const HOME_AT: usize = FAILURES_AT + 4;
const NOW_AT: usize = HOME_AT + 2;
const KNOWN_AT: usize = NOW_AT + 2;
const COLLAPSED_AT: usize = KNOWN_AT + 1;
const SOCKET_AT: usize = COLLAPSED_AT + 1;
const SOCKET_BITS: usize = Socket::MAX.ilog2() as usize;

impl Packed {
    pub(super) fn pack(known: Option<Known>) -> Self {
        let Some(known) = known else {
            return Self::default();
        };
        let pages = known.pages.0.iter().rev();
        let pages = pages.fold(0, |bits, pages| bits << PAGES_BITS | u64::from(*pages));
        // A block that is not away has the same tier twice.
        let index = |level: Level| level.index() as u64;
        let (home, now) = known
            .away
            .map_or((0, 0), |away| (index(away.home), index(away.now)));
        let bits = pages
            | u64::from(known.failures.min(FAILURES_MAX)) << FAILURES_AT
            | home << HOME_AT
            | now << NOW_AT
            | 1 << KNOWN_AT
            | u64::from(known.is_collapsed) << COLLAPSED_AT
            | u64::from(known.socket.number()) << SOCKET_AT;
        Self([bits as u32, (bits >> 32) as u32, known.aside_until])
    }

    #[inline]
    pub(super) fn unpack(self) -> Option<Known> {
        let [low, high, aside_until] = self.0;
        let bits = u64::from(low) | u64::from(high) << 32;
        let field = |at: usize, len: usize| bits >> at & ((1 << len) - 1);
        let away = Away {
            home: Level::ALL[field(HOME_AT, 2) as usize],
            now: Level::ALL[field(NOW_AT, 2) as usize],
        };
        (field(KNOWN_AT, 1) == 1).then_some(Known {
            pages: ByLevel::from_fn(|level| field(level.index() * PAGES_BITS, PAGES_BITS) as u16),
            socket: Socket::new(field(SOCKET_AT, SOCKET_BITS) as usize),
            aside_until,
            failures: field(FAILURES_AT, 4) as u8,
            away: (away.home != away.now).then_some(away),
            is_collapsed: field(COLLAPSED_AT, 1) == 1,
        })
    }

    pub(super) fn is_known(self) -> bool {
        self != Self::default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_known_of_a_block_is_kept_in_twelve_bytes(
            pages in prop::array::uniform4(0u16..=512),
            aside_until: u32,
            failures in 0..=FAILURES_MAX,
            (home, now) in (0..LEVELS, 0..LEVELS),
            is_collapsed: bool,
            socket in 0..usize::from(Socket::MAX),
        ) {
            let away = Away { home: Level::ALL[home], now: Level::ALL[now] };
            let known = Known {
                pages: ByLevel(pages),
                socket: Socket::new(socket),
                aside_until,
                failures,
                away: (home != now).then_some(away),
                is_collapsed,
            };
            prop_assert_eq!(Packed::pack(Some(known)).unpack(), Some(known));
            prop_assert_eq!(Packed::pack(None).unpack(), None);
            prop_assert_eq!(size_of::<Packed>(), 12);
        }
    }
}
