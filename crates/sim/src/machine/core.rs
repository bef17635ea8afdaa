//! A CPU core: TLBs, page-walk caches, two levels of data cache, and the loop that runs a program's accesses.
//!
//! # Approach
//! An access to the same line or page as the previous access takes a short cut. That line and page are the most recent
//! of their sets, so the LRU order stays exact. Every other access is looked up. Each access, and each reference of its
//! page walk, is charged by the level that holds its data.
//!
//! Loads wait for their data. Stores wait too, as they read the line first. If a program's misses are independent,
//! several are in flight: each is charged a part of its latency, or its transfer time if that is longer. Page walks are
//! always serial. A line that is written right after it was read is written back later, which takes bandwidth only. A
//! miss on the line after a recent miss belongs to a stream. Prefetchers predict streams, so such a miss costs its
//! transfer only.

use demeter_policy::damon::SPACES_TO_FLUSH;
use demeter_policy::{GuestPhysAddr, GuestVirtAddr};

use super::assoc::Assoc;
use super::caches::{Caches, Found};
use super::cpu::{CpuModel, TlbKind};
use super::ledger::{Bill, Cause};
use super::mapping::{Fault, Mapping};
use super::memory::{LINE_BITS, Memory};
use super::prefetch::prefetch;
use super::radix::{PageSize, Radix};
use super::sampler::Sampler;
use super::segment::Segments;
use super::tlb::{Tlb, Translation};
use super::walk::{SecondLevel, Space, WalkCaches, native, nested};
use crate::program::Access;

/// How many accesses ahead the simulator prefetches its own data structures: the guest's page table entry, the
/// second-level entry, and the set of the third-level cache.
const AHEAD: [usize; 3] = [18, 12, 6];

/// A number that no line and no page has.
const NOTHING: u64 = u64::MAX;

/// The page tables that a core walks.
pub(crate) struct Tables<'a> {
    /// The guest's page tables.
    pub(crate) guest: &'a mut Radix<GuestVirtAddr>,
    /// The hypervisor's tables for this guest. Unused without a hypervisor.
    pub(crate) host: &'a mut Radix<GuestPhysAddr>,
    /// The 4 KiB page of host memory where the host tables begin.
    pub(crate) host_first_page: u32,
    /// Segments, which translate without page tables.
    pub(crate) segments: &'a Segments,
    /// The VM's address space.
    pub(crate) space: Space,
}

/// How many accesses a run completed, and why it stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Accesses completed.
    pub(crate) done: usize,
    /// The fault of the next access, if it stopped the run.
    pub(crate) fault: Option<Fault>,
    /// Records written by the sampling unit.
    pub(crate) records: u64,
    /// Accesses whose data came from memory.
    pub(crate) misses: u64,
}

/// The previous access.
#[derive(Debug, Clone, Copy)]
struct Last {
    /// Its virtual line and page.
    line: u64,
    page: u64,
    frame: u32,
    /// Whether stores may take the short cut, too.
    dirty: bool,
}

const NO_LAST: Last = Last {
    line: NOTHING,
    page: NOTHING,
    frame: 0,
    dirty: false,
};

/// Counts of TLB misses and of their page walks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Walks {
    /// Walks that ended with a translation.
    pub(crate) walks: u64,
    /// Entries of page tables that were read.
    pub(crate) references: u64,
    /// Time of the walks, without TLB latencies.
    pub(crate) ps: u64,
    /// Translations by segments alone.
    pub(crate) by_segment: u64,
}

/// A core.
#[derive(Debug, Clone)]
pub(crate) struct Core {
    /// Counts per simulated access, not scaled by the pages that it stands for.
    pub(crate) walks: Walks,
    /// Accesses whose data came from memory, counted likewise.
    misses: u64,
    tlb: Tlb,
    guest_walk: WalkCaches,
    host_walk: WalkCaches,
    caches: Caches,
    tlb_second_ps: u64,
    walk_percent: u64,
    bound_check_ps: u64,
    /// Misses of the program that are in flight at once.
    in_flight: u64,
    kind: TlbKind,
    page_bits: u32,
    last: Last,
}

impl Core {
    /// A core with empty caches. Pages have `2^page_bits` bytes.
    pub(crate) fn new(cpu: &CpuModel, page_bits: u32) -> Self {
        Self {
            walks: Walks::default(),
            misses: 0,
            tlb: Tlb::new(&cpu.tlb.sizes, page_bits),
            guest_walk: WalkCaches::new(&cpu.tlb),
            host_walk: WalkCaches::new(&cpu.tlb),
            caches: Caches::new(cpu),
            tlb_second_ps: cpu.tlb.l2_hit_ps,
            walk_percent: cpu.costs.walk_percent,
            bound_check_ps: cpu.bound_check_ps,
            in_flight: 1,
            kind: cpu.tlb.kind,
            page_bits,
            last: NO_LAST,
        }
    }

    /// The core, for a program with this many independent misses in flight.
    pub(crate) fn overlapping(self, in_flight: u32) -> Self {
        Self {
            in_flight: u64::from(in_flight.max(1)),
            ..self
        }
    }

    /// The core, on a socket with these paths to memory.
    pub(crate) fn on_socket(self, socket: usize, memory: &Memory) -> Self {
        Self {
            caches: self.caches.on_socket(socket, memory),
            ..self
        }
    }

    /// Runs the first `count` accesses until all are done or one faults. The accesses behind them are used only for
    /// prefetching. `sampler` belongs to the virtual CPU that runs them. `bill` is charged per simulated access,
    /// unscaled.
    pub(crate) fn run<const NESTED: bool, const CACHES: bool>(
        &mut self,
        accesses: &[Access],
        count: usize,
        tables: &mut Tables<'_>,
        memory: &mut Memory,
        sampler: &mut Sampler,
        bill: &mut Bill,
    ) -> Progress {
        let (mut done, mut records, mut fault) = (0, 0, None);
        let misses_before = self.misses;
        let mut repeated = 0;
        loop {
            let again = self.repeats(&accesses[done..count], memory);
            repeated += again as u64;
            done += again;
            if done == count {
                break;
            }
            let l3 = &memory.l3[self.caches.socket];
            look_ahead::<NESTED, CACHES>(&accesses[done..], &self.last, tables, l3);
            match self.access::<NESTED, CACHES>(accesses[done], tables, memory, sampler, bill) {
                Ok(recorded) => records += u64::from(recorded),
                Err(found) => {
                    fault = Some(found);
                    break;
                }
            }
            done += 1;
        }
        bill.charge(Cause::Cache, repeated * self.caches.hit_ps[0]);
        Progress {
            done,
            fault,
            records,
            misses: self.misses - misses_before,
        }
    }

    /// Counts the next accesses that go to the line of the last one. A store among them sets its dirty state.
    #[inline(always)]
    fn repeats(&mut self, accesses: &[Access], memory: &mut Memory) -> usize {
        let Last { line, dirty, .. } = self.last;
        let mut has_store = false;
        let repeats = accesses.iter().take_while(|access| {
            let is_again = access.gva().0 >> LINE_BITS == line && (dirty | !access.is_store());
            has_store |= is_again & access.is_store();
            is_again
        });
        let count = repeats.count();
        if has_store {
            self.caches.write_back(memory);
        }
        count
    }

    /// Runs one access to another line than the last. Returns true when it was sampled.
    #[inline(always)]
    fn access<const NESTED: bool, const CACHES: bool>(
        &mut self,
        access: Access,
        tables: &mut Tables<'_>,
        memory: &mut Memory,
        sampler: &mut Sampler,
        bill: &mut Bill,
    ) -> Result<bool, Fault> {
        let (gva, store) = (access.gva(), access.is_store());
        let usable = self.last.dirty | !store;
        let page = gva.0 >> self.page_bits;
        let mut ps = 0;
        if page != self.last.page || !usable {
            ps = self.translate::<NESTED, CACHES>(gva, store, tables, memory)?;
            bill.charge(Cause::Walk, ps);
        }
        self.last.line = gva.0 >> LINE_BITS;
        let within = gva.0 & ((1 << self.page_bits) - 1);
        let line = (u64::from(self.last.frame) << self.page_bits | within) >> LINE_BITS;
        self.caches.clean_from = None;
        let found = self.caches.fetch::<CACHES>(memory, line, true);
        if store {
            self.caches.write_back(memory);
        }
        let waited_ps = match self.in_flight {
            1 => found.ps,
            _ => self.overlapped_ps(&found, memory),
        };
        self.misses += u64::from(found.cause != Cause::Cache);
        bill.charge(found.cause, waited_ps);
        Ok(!store && sampler.load(gva, ps + found.ps))
    }

    /// Time that a program waits for a line while other misses are in flight.
    #[cold]
    #[inline(never)]
    fn overlapped_ps(&self, found: &Found, memory: &Memory) -> u64 {
        if found.cause == Cause::Cache {
            // An out-of-order core hides hits already.
            return found.ps;
        }
        let transfer_ps = memory.paths[found.path].stream_ps;
        (found.ps / self.in_flight).max(transfer_ps.min(found.ps))
    }

    /// Finds the frame of `gva`; returns the time that took.
    #[inline(always)]
    fn translate<const NESTED: bool, const CACHES: bool>(
        &mut self,
        gva: GuestVirtAddr,
        store: bool,
        tables: &mut Tables<'_>,
        memory: &mut Memory,
    ) -> Result<u64, Fault> {
        let held = self.tlb.get(tables.space, gva);
        if let Some(hit) = held
            && (hit.translation.is_dirty() || !store)
        {
            let within = tables.guest.within(gva, hit.size);
            self.last = Last {
                line: NOTHING,
                page: gva.0 >> self.page_bits,
                frame: hit.translation.first_frame() + within,
                dirty: hit.translation.is_dirty(),
            };
            return Ok(if hit.second { self.tlb_second_ps } else { 0 });
        }
        self.last = NO_LAST;
        if let Some(address) = tables.segments.translate(gva, NESTED) {
            return Ok(self.take_segment::<NESTED>(tables.space, gva, address));
        }
        let (mut ps, mut references) = (0, 0);
        let (caches, walks) = (
            &mut self.caches,
            [&mut self.guest_walk, &mut self.host_walk],
        );
        let (mapping, bound_checks) = match self.kind {
            TlbKind::Hardware => walk::<NESTED>(tables, walks, gva, store, &mut |address| {
                let line = address >> LINE_BITS;
                references += 1;
                ps += caches.fetch::<CACHES>(memory, line, false).ps;
            })?,
            TlbKind::Modelled => walk::<NESTED>(tables, walks, gva, store, &mut |_| {})?,
            TlbKind::Soft => {
                let (mapping, checks) = walk::<NESTED>(tables, walks, gva, store, &mut |_| {})?;
                let size = PageSize::Base;
                (Mapping { size, ..mapping }, checks)
            }
        };
        let Mapping { frame, size, dirty } = mapping;
        ps = ps * self.walk_percent / 100 + bound_checks * self.bound_check_ps;
        self.walks.walks += 1;
        self.walks.references += references;
        self.walks.ps += ps;
        let first = frame - tables.guest.within(gva, size);
        let translation = Translation::new(first, dirty);
        match held {
            None => self.tlb.insert_new(tables.space, gva, size, translation),
            Some(_) => self.tlb.insert(tables.space, gva, size, translation),
        }
        self.last = Last {
            line: NOTHING,
            page: gva.0 >> self.page_bits,
            frame,
            dirty,
        };
        Ok(self.tlb_second_ps + ps)
    }

    /// Uses a segment's translation to `address` in host memory. Without a hypervisor, bounds are compared in parallel
    /// with the first TLB, which never holds such pages. With a hypervisor, they are compared in parallel with the
    /// second TLB.
    fn take_segment<const NESTED: bool>(
        &mut self,
        space: Space,
        gva: GuestVirtAddr,
        address: u64,
    ) -> u64 {
        let frame = (address >> self.page_bits) as u32;
        self.walks.by_segment += 1;
        self.last = Last {
            line: NOTHING,
            page: gva.0 >> self.page_bits,
            frame,
            dirty: true,
        };
        if !NESTED {
            return 0;
        }
        self.tlb
            .insert_first(space, gva, Translation::new(frame, true));
        self.tlb_second_ps
    }

    /// Drops the translations of one address of a space and all page-walk caches, as the hardware does (`invlpg`,
    /// `invvpid`).
    pub(crate) fn flush_page(&mut self, space: Space, gva: GuestVirtAddr) {
        self.last = NO_LAST;
        self.tlb.invalidate(space, gva);
        self.guest_walk.clear_space(space);
    }

    /// Drops the translations of a huge page.
    pub(crate) fn flush_huge(&mut self, space: Space, gva: GuestVirtAddr) {
        match self.kind {
            TlbKind::Hardware | TlbKind::Modelled => self.flush_page(space, gva),
            TlbKind::Soft => self.flush_space(space),
        }
    }

    /// Drops all translations of a space (`invept` single, `invvpid` all addresses, a guest's full flush).
    pub(crate) fn flush_space(&mut self, space: Space) {
        self.last = NO_LAST;
        self.tlb.clear_space(space);
        self.guest_walk.clear_space(space);
        self.host_walk.clear_space(space);
    }

    /// Number of address spaces that must run here briefly to evict all other translations.
    pub(crate) fn spaces_to_flush(&self) -> u64 {
        match self.kind {
            TlbKind::Hardware => SPACES_TO_FLUSH as u64,
            TlbKind::Soft | TlbKind::Modelled => 1,
        }
    }

    /// Lets another context run for a while, which invalidates the short cuts of the last access.
    pub(crate) fn switch(&mut self, space: Space) {
        match self.kind {
            TlbKind::Hardware => self.last = NO_LAST,
            TlbKind::Soft | TlbKind::Modelled => self.flush_space(space),
        }
    }
}

/// Walks the tables and passes each address that it reads to `reference`. Also returns how often segment bounds were
/// compared.
#[inline(always)]
fn walk<const NESTED: bool>(
    tables: &mut Tables<'_>,
    [guest_walk, host_walk]: [&mut WalkCaches; 2],
    gva: GuestVirtAddr,
    store: bool,
    reference: &mut impl FnMut(u64),
) -> Result<(Mapping, u64), Fault> {
    if !NESTED {
        let mapping = native(
            tables.guest,
            guest_walk,
            tables.space,
            gva,
            store,
            reference,
        );
        return mapping.map(|mapping| (mapping, 0));
    }
    let mut second = SecondLevel {
        tree: tables.host,
        caches: host_walk,
        first_page: tables.host_first_page,
        space: tables.space,
        segments: tables.segments,
        bound_checks: 0,
    };
    let mapping = nested(tables.guest, guest_walk, &mut second, gva, store, reference)?;
    Ok((mapping, second.bound_checks))
}

/// Prefetches the simulator's data structures for upcoming accesses into the caches of the real CPU. It works in steps,
/// since each step needs data that the previous step fetched. The structures for the page of the last access are
/// already cached. Changes no simulated state.
#[inline(always)]
fn look_ahead<const NESTED: bool, const CACHES: bool>(
    accesses: &[Access],
    last: &Last,
    tables: &Tables<'_>,
    l3: &Assoc<(), 12>,
) {
    let page_bits = tables.guest.page_bits();
    let is_near = |a: &Access| a.gva().0 >> page_bits == last.page;
    let within = |address: u64| address & ((1 << page_bits) - 1);
    if let Some(a) = accesses.get(AHEAD[0])
        && !is_near(a)
        && let Some(place) = tables.guest.bottom_place(a.gva())
    {
        prefetch(place);
    }
    let gpa = |a: &Access| {
        let frame = tables.guest.bottom_frame(a.gva())?;
        Some(GuestPhysAddr(
            u64::from(frame) << page_bits | within(a.gva().0),
        ))
    };
    if NESTED
        && let Some(a) = accesses.get(AHEAD[1])
        && !is_near(a)
        && let Some(gpa) = gpa(a)
        && let Some(place) = tables.host.bottom_place(gpa)
    {
        prefetch(place);
    }
    if CACHES && let Some(access) = accesses.get(AHEAD[2]) {
        let touch = |address: u64| prefetch(l3.place(address >> LINE_BITS));
        if is_near(access) {
            touch(u64::from(last.frame) << page_bits | within(access.gva().0));
            return;
        }
        let host_address = |gpa: GuestPhysAddr| {
            let frame = if NESTED {
                tables.host.frame(gpa)?
            } else {
                (gpa.0 >> page_bits) as u32
            };
            Some(u64::from(frame) << page_bits | within(gpa.0))
        };
        let guest_entry = tables.guest.bottom_address(access.gva());
        guest_entry
            .map(GuestPhysAddr)
            .and_then(host_address)
            .map(touch);
        if let Some(gpa) = gpa(access) {
            host_address(gpa).map(touch);
            if NESTED && let Some(entry) = tables.host.bottom_address(gpa) {
                touch((u64::from(tables.host_first_page) << 12) + entry);
            }
        }
    }
}

#[cfg(test)]
mod tests;
