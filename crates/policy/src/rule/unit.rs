//! A candidate of an epoch's plan: a block, and the worth of moving it.

use std::cmp::Ordering;

use crate::heat::{Estimate, Heat};
use crate::{Block, ByteCount, Pid, Relocation};

/// A block that may change its tier.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unit<'a> {
    pub(super) pid: Pid,
    pub(super) heat: &'a Heat,
    pub(super) block: Block,
    /// Bytes of it in the tier that it would leave.
    pub(super) bytes: u64,
    /// Part of its events that fall there.
    pub(super) part: f64,
    pub(super) estimate: Estimate,
    /// Events a second and byte, by which units are ordered.
    pub(super) density: f64,
    /// The extra cost of its events where it lies, compared with the faster side of the boundary, seconds.
    pub(super) event_s: f64,
    /// Whether it would go back to where it lay first.
    pub(super) goes_home: bool,
    /// The socket that its process runs on.
    pub(super) socket: u32,
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

    /// Expected events in a window, in `bytes` like these, and their variance.
    pub(super) fn events(&self, window: usize, bytes: u64) -> (f64, f64) {
        self.events_by(self.heat.estimate(window, self.block), window, bytes)
    }

    pub(super) fn events_by(&self, estimate: Estimate, window: usize, bytes: u64) -> (f64, f64) {
        let scale = self.part * bytes as f64 / self.bytes.max(1) as f64;
        let events = estimate.rate * self.heat.span_s(window) * scale;
        (
            events,
            events * events / estimate.sure.max(f64::MIN_POSITIVE),
        )
    }
}

pub(super) fn by_density(a: &Unit<'_>, b: &Unit<'_>) -> Ordering {
    let by_density = a.density.total_cmp(&b.density);
    by_density.then((a.pid, a.block).cmp(&(b.pid, b.block)))
}
