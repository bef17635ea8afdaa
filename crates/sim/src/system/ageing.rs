//! Tiering by the hypervisor with accessed bits: TPP moved into the host (H-TPP).
//!
//! The hypervisor sees guest-physical addresses only. To see the next access to a page whose bit
//! it cleared, it has to forget everything that was cached from the VM's tables.

use crate::hypervisor::{Backing, Hypervisor};
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::memory::TierId;
use crate::machine::radix::PageSize;
use demeter_policy::MIB;

/// Bytes of guest-physical memory that one scan looks at, as Linux's scanner does.
const SCAN_BYTES: u64 = 256 * MIB;

/// The hypervisor's part for one VM.
#[derive(Debug, Default)]
pub(crate) struct Ageing {
    cursor: u64,
    hand: u64,
    /// By guest-physical page: whether the last look found it accessed.
    seen: Vec<bool>,
    short: bool,
}

impl Ageing {
    /// Looks at the next stretch: pages of the slow tier that were accessed at two looks in a row
    /// are promoted.
    pub(crate) fn scan(
        &mut self,
        end_gpa: u64,
        host: &mut Hypervisor,
        backing: &mut Backing,
        actor: &mut Actor<'_>,
    ) {
        let start = if self.cursor >= end_gpa {
            0
        } else {
            self.cursor
        };
        let end = (start + SCAN_BYTES).min(end_gpa);
        self.cursor = end;
        let looked = self.look(start..end, TierId::Slow, host, backing, actor);
        for gpa in looked.twice {
            if host.is_short() {
                self.short = true;
            } else if host.migrate(backing, gpa, TierId::Fast, actor) {
                actor.invept(1 << actor.k);
            }
        }
        if std::mem::take(&mut self.short) {
            self.reclaim(end_gpa, host, backing, actor);
        }
    }

    /// Demotes pages of the fast tier that were not accessed since the last look.
    fn reclaim(
        &mut self,
        end_gpa: u64,
        host: &mut Hypervisor,
        backing: &mut Backing,
        actor: &mut Actor<'_>,
    ) {
        let step = SCAN_BYTES / 8;
        // Twice around at most.
        for _ in 0..2 * end_gpa.div_ceil(step) {
            if !host.is_short() {
                return;
            }
            let start = if self.hand >= end_gpa { 0 } else { self.hand };
            self.hand = (start + step).min(end_gpa);
            let looked = self.look(start..self.hand, TierId::Fast, host, backing, actor);
            for gpa in looked.never {
                if !host.is_short() {
                    break;
                }
                if host.migrate(backing, gpa, TierId::Slow, actor) {
                    actor.invept(1 << actor.k);
                }
            }
        }
    }

    /// Reads and clears the accessed bits of a tier's pages.
    fn look(
        &mut self,
        range: std::ops::Range<u64>,
        tier: TierId,
        host: &Hypervisor,
        backing: &mut Backing,
        actor: &mut Actor<'_>,
    ) -> Looked {
        let page_bits = backing.tree.page_bits();
        let mut looked = Looked::default();
        let (mut entries, mut accessed_now) = (0u64, 0u64);
        let seen = &mut self.seen;
        backing.tree.for_each(range, |gpa, entry, size| {
            if size != PageSize::Base || host.tier_of(entry.index()) != tier {
                return;
            }
            entries += 1;
            let page = (gpa >> page_bits) as usize;
            if seen.len() <= page {
                seen.resize(page + 1, false);
            }
            let accessed = entry.take_accessed();
            accessed_now += u64::from(accessed);
            match (accessed, seen[page]) {
                (true, true) => looked.twice.push(gpa),
                (false, false) => looked.never.push(gpa),
                _ => {}
            }
            seen[page] = accessed;
        });
        actor.charge_page(Cause::Track, entries * actor.costs.scan_entry_ps);
        // Nothing runs in the guest between the flushes of one stretch.
        actor.invept(accessed_now << actor.k);
        looked
    }
}

/// What a look found.
#[derive(Debug, Default)]
struct Looked {
    /// Accessed now and at the last look.
    twice: Vec<u64>,
    /// Accessed neither now nor at the last look.
    never: Vec<u64>,
}
