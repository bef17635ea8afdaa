//! A candidate of an epoch's plan: a block, and the worth of moving it.

use super::Rule;
use super::scan::Part;
use crate::heat::{ChunkHeat, Estimate, WINDOWS};
use crate::residency::CHUNK_BLOCKS;
use crate::{
    BLOCK_SIZE, Block, ByteCount, COLLAPSE_HOLES_MAX, Pid, Relocation, Situation, Socket, Spread,
    Tier,
};

/// A block that may change its tier.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unit<'a> {
    pub(super) pid: Pid,
    pub(super) heat: ChunkHeat<'a>,
    pub(super) block: Block,
    /// Bytes of it in the tier that it would leave.
    pub(super) bytes: u64,
    /// Part of its events that fall there.
    pub(super) part: f64,
    pub(super) estimate: Estimate,
    /// Events a second and byte, by which units are ordered.
    pub(super) density: f64,
    /// The extra cost of an event where it lies, compared with the other side of the boundary, seconds; zero for a partner.
    pub(super) event_s: f64,
    /// Whether it would go back to where it lay first.
    pub(super) goes_home: bool,
    /// The socket where it has to be: of a hot block that on which its process runs, of a partner that near which it
    /// lies.
    pub(super) socket: Socket,
    /// Whether it lies in one tier, almost without holes, and was not collapsed before.
    pub(super) may_collapse: bool,
}

impl<'a> Unit<'a> {
    /// The part of a block on one side of the boundary; `None` if its place is unknown.
    pub(super) fn new(
        rule: &Rule,
        situation: &Situation<'_>,
        part: &Part<'a>,
        (tier, at): (Tier, usize),
        (estimate, density): (Estimate, f64),
    ) -> Option<Self> {
        let (known, level) = (part.chunk.block(at)?, situation.level);
        let spread = known.spread();
        let bytes = spread.at(level).get(tier).0;
        Some(Self {
            pid: part.pid,
            heat: part.heat,
            block: Block(part.chunk.first.0 + at as u64),
            bytes,
            part: bytes as f64 / spread.resident().0.max(1) as f64,
            estimate,
            density,
            event_s: match tier {
                Tier::Fast => 0.0,
                Tier::Slow => rule.extra_s(level, &spread, bytes),
            },
            goes_home: known.away.is_some_and(|away| match tier {
                Tier::Fast => away.home > level,
                Tier::Slow => away.home == level,
            }),
            socket: match tier {
                Tier::Fast => spread.socket,
                Tier::Slow => situation.sockets.of(part.pid),
            },
            may_collapse: !known.is_collapsed && is_whole(&spread),
        })
    }
}

/// Whether a block lies in one tier, almost without holes.
fn is_whole(spread: &Spread) -> bool {
    let most = spread
        .bytes
        .0
        .iter()
        .map(|bytes| bytes.0)
        .max()
        .unwrap_or(0);
    most == spread.resident().0 && most + COLLAPSE_HOLES_MAX >= BLOCK_SIZE
}

impl Unit<'_> {
    pub(super) fn relocation(&self) -> Relocation {
        Relocation {
            pid: self.pid,
            block: self.block,
            bytes: ByteCount(self.bytes),
        }
    }

    /// Events a second.
    pub(super) fn rate(&self) -> f64 {
        self.estimate.rate * self.part
    }

    /// Its estimates in all windows shorter than `window`.
    pub(super) fn shorter(&self, window: usize) -> [Estimate; WINDOWS] {
        let at = (self.block.0 % CHUNK_BLOCKS as u64) as usize;
        self.heat.first_estimates(window, at)
    }

    /// The length of a window's memory, seconds.
    pub(super) fn span_s(&self, window: usize) -> f64 {
        self.heat.whole().span_s(window)
    }

    /// Expected events in a window by its estimate, in `bytes` like these, and their variance.
    pub(super) fn events_by(&self, estimate: Estimate, window: usize, bytes: u64) -> (f64, f64) {
        let scale = self.part * bytes as f64 / self.bytes.max(1) as f64;
        let events = estimate.rate * self.span_s(window) * scale;
        (
            events,
            events * events / estimate.sure.max(f64::MIN_POSITIVE),
        )
    }
}
