//! Hint faults: pages of the slow node are made to fault, so that the kernel sees who uses them.

use super::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::memory::TierId;
use crate::machine::radix::PageSize;

/// Picoseconds in a millisecond.
const PS_PER_MS: u64 = 1_000_000_000;

/// A hint fault on a page of the slow node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hint {
    /// Time since the page was made to fault, ms.
    pub(crate) since_ms: u32,
    /// Whether it was on the active list.
    pub(crate) active: bool,
}

impl Guest {
    /// Makes the slow node's pages in so many bytes of address space fault, from where the last
    /// call ended on and at most to the end. Stretches in which there are none to be marked do not
    /// count, but for `reach`.
    ///
    /// As in Linux a stretch is what is left of `bytes`, and counts whole if one page in it was
    /// marked.
    pub(crate) fn hint_scan(&mut self, bytes: u64, reach: u64, actor: &mut Actor<'_>) {
        let now_ms = (actor.now_ps() / PS_PER_MS) as u32;
        let middle = self.nodes[1].frames().start;
        let (mut seen, mut marked, mut marked_huge) = (0u64, 0u64, 0u64);
        let (mut bytes, mut reach) = (bytes, reach);
        while bytes > 0 && reach > 0 {
            let next = self.vmas.iter().find(|v| v.end().0 > self.hint_cursor);
            let Some(vma) = next else {
                self.hint_cursor = 0;
                self.hint_passes += 1;
                break;
            };
            let start = self.hint_cursor.max(vma.start().0);
            let end = vma.end().0.min(start.saturating_add(bytes.min(reach)));
            let before = marked + marked_huge;
            let frames = &mut self.frames;
            self.tables.for_each(start..end, |_, entry, size| {
                seen += 1;
                if entry.index() >= middle && !entry.is_hint() {
                    entry.set_hint(true);
                    *frames.word(entry.index()) = now_ms;
                    match size {
                        PageSize::Base => marked += 1,
                        _ => marked_huge += 1,
                    }
                }
            });
            self.hint_cursor = end;
            reach = reach.saturating_sub(end - start);
            if marked + marked_huge > before {
                bytes = bytes.saturating_sub(end - start);
            }
        }
        actor.charge_page(Cause::Track, seen * actor.costs.scan_entry_ps);
        actor.charge_page(Cause::Track, marked * actor.costs.mark_page_ps);
        actor.charge(Cause::Track, marked_huge * actor.costs.mark_page_ps);
        if marked + marked_huge > 0 {
            actor.flush_own();
        }
    }

    /// Puts the page that holds `gva` on the active list.
    pub(crate) fn activate(&mut self, gva: u64) {
        if let Some((entry, _)) = self.tables.find(gva) {
            self.frames.set_active(entry.index(), true);
        }
    }

    /// Passes over the whole address space that scans have completed.
    pub(crate) fn hint_passes(&self) -> u32 {
        self.hint_passes
    }

    /// Handles a hint fault: the page works again. Tells what the kernel learns if it lies in the
    /// slow node.
    pub(crate) fn hint_fault(&mut self, gva: u64, actor: &mut Actor<'_>) -> Option<Hint> {
        let (entry, size) = self.tables.find_mut(gva)?;
        entry.set_hint(false);
        let frame = entry.index();
        let real = if size == PageSize::Base { actor.k } else { 0 };
        self.counts.hint_faults += 1 << real;
        actor.charge(Cause::Fault, actor.costs.fault_ps << real);
        let used = self.frames.used(frame)?;
        let then_ms = *self.frames.word(frame);
        (self.node_of(frame) == TierId::Slow).then(|| Hint {
            since_ms: ((actor.now_ps() / PS_PER_MS) as u32).saturating_sub(then_ms),
            active: used.active,
        })
    }
}
