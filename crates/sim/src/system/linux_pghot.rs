//! `pghot`: hot pages found by several sources, promoted by a thread of their own (kernel patches, version 7, May 2026;
//! not merged by October 2026).
//!
//! # Problem
//! Linux promotes a page in the fault that shows it hot. The program waits for the copy, and sources that take no
//! faults, such as hardware's samples, cannot use the same path.
//!
//! # Approach
//! Each frame of slow memory has a record of a byte: how often it was reported, to 3, and when last, in steps of 128 ms. Two
//! reports make it ready, each within 3 s of the one before. Each 100 ms a thread of the slow node, `kmigrated`, promotes
//! ready pages in the order of their frames, in batches of 512. It passes over pages whose last report is older than 3 s, and
//! over all once the fast node has no room. A huge page has one record.
//! Records of pages that are looked at are cleared, promoted or not. Reclaim demotes, as under `linux`.
//!
//! Reports come from hint faults, as they do by default, or from AMD's memory profiler (IBS). It looks at one of 10,000
//! operations and reports those that miss the third-level cache: so one of 10,000 misses. Each report interrupts.
//!
//! All figures are the documented defaults. Left out: the precise mode (4 bytes a frame), and the limit of 64 GiB a second,
//! which nothing reaches. `kmigrated` looks at each frame of a section of 128 MiB in which one is ready. Assumed: a look
//! costs as much as one at a page table entry.
//!
//! # Properties
//! - A page is ready after two reports within the window, and not after one.

use std::collections::BTreeMap;

use demeter_policy::{ByteCount, GuestVirtAddr, Tier};

use super::{Context, HintFaultTiering, Managed, Manager, NEVER_PS, Needs};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::cost::PS_PER_MS;
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;
use crate::machine::sampler::{Record, Sampling};

/// Reports that make a page ready (`pghot_freq_threshold`), and the most that are counted.
const READY: u8 = 2;
const COUNTED: u8 = 3;

/// Milliseconds within which they come (`pghot_promote_freq_window_ms`).
const WINDOW_MS: u64 = 3000;

/// Milliseconds of a step of a record's time, and steps after which that begins again.
const STEP_MS: u64 = 128;
const STEPS: u64 = 32;

/// Time between two turns of `kmigrated` (`kmigrated_sleep_ms`), and pages of a batch (`kmigrated_batch_nr`).
const SLEEP_PS: u64 = 100 * PS_PER_MS;
const BATCH: usize = 512;

/// Misses for each of the profiler's samples.
const PERIOD: u64 = 10_000;

/// log2 of the bytes of a section, whose frames share a mark.
const SECTION_BITS: u32 = 27;

/// The source of reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    HintFaults,
    /// Samples of loads that take so long and more.
    Profiler {
        threshold_ps: u64,
    },
}

/// The record of a frame: reports, and the step of the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Hotness {
    reports: u8,
    step: u8,
}

impl Hotness {
    /// Time since the last report. A time longer than all steps looks shorter, as in the kernel.
    fn since_ms(self, now_ms: u64) -> u64 {
        let steps = (now_ms / STEP_MS + STEPS - u64::from(self.step)) % STEPS;
        steps * STEP_MS
    }

    /// Takes a report in; true if the page is ready.
    fn report(&mut self, now_ms: u64) -> bool {
        self.reports = match self.since_ms(now_ms) > WINDOW_MS {
            true => 1,
            false => (self.reports + 1).min(COUNTED),
        };
        self.step = (now_ms / STEP_MS % STEPS) as u8;
        self.reports >= READY
    }
}

/// The kernel's part.
#[derive(Debug)]
pub(crate) struct Pghot {
    source: Source,
    /// Marks pages of slow memory, and reclaims.
    numa: HintFaultTiering,
    /// By first frame.
    hotness: BTreeMap<u32, Hotness>,
    /// Pages that are ready, by first frame.
    ready: BTreeMap<u32, GuestVirtAddr>,
    waiting: Vec<GuestVirtAddr>,
    samples_seen: u64,
    scan_due_ps: u64,
    promote_due_ps: u64,
}

impl Pghot {
    /// On hint faults.
    pub(crate) fn on_hint_faults(managed: &Managed<'_>) -> Self {
        Self::new(Source::HintFaults, managed)
    }

    /// On the profiler's samples alone.
    pub(crate) fn on_samples(managed: &Managed<'_>) -> Self {
        let threshold_ps = managed.load_ps;
        Self::new(Source::Profiler { threshold_ps }, managed)
    }

    fn new(source: Source, managed: &Managed<'_>) -> Self {
        Self {
            source,
            numa: HintFaultTiering::linux(managed),
            hotness: BTreeMap::new(),
            ready: BTreeMap::new(),
            waiting: vec![],
            samples_seen: 0,
            scan_due_ps: NEVER_PS,
            promote_due_ps: NEVER_PS,
        }
    }

    /// Takes a report of an access to a page.
    fn report(&mut self, gva: GuestVirtAddr, guest: &Guest, now_ps: u64) {
        let Some((entry, size)) = guest.tables.find(gva) else {
            return;
        };
        let frame = entry.index();
        if guest.tier_of(frame) == Tier::Fast {
            return;
        }
        let hotness = self.hotness.entry(frame).or_default();
        if hotness.report(now_ps / PS_PER_MS) {
            self.ready.insert(frame, guest.page_start(gva, size));
        }
    }

    /// Takes what was sampled in. Each sample has interrupted the virtual CPU that it is of.
    fn take_in(&mut self, guest: &Guest, actor: &mut Actor<'_>) {
        let samples = std::mem::take(&mut self.waiting);
        let busy = actor.busy.max(1);
        let each_ps = samples.len() as u64 * actor.costs.pebs_interrupt_ps / busy as u64;
        for vcpu in &mut actor.vcpus[..busy] {
            vcpu.charge(Cause::Track, each_ps);
        }
        self.samples_seen += samples.len() as u64;
        for gva in samples {
            self.report(gva, guest, actor.now_ps());
        }
    }

    /// The turn of `kmigrated`: promotes ready pages while there is room.
    fn promote(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        let now_ms = actor.now_ps() / PS_PER_MS;
        self.look_at_sections(guest, actor);
        let mut room = guest.promotable().0;
        let mut up = vec![];
        for (frame, gva) in std::mem::take(&mut self.ready) {
            let hotness = self.hotness.remove(&frame).unwrap_or_default();
            let found = guest.tables.find(gva);
            let Some((entry, size)) = found.filter(|(entry, _)| entry.index() == frame) else {
                continue;
            };
            debug_assert_eq!(guest.tier_of(entry.index()), Tier::Slow);
            if hotness.since_ms(now_ms) >= WINDOW_MS {
                continue;
            }
            match room.checked_sub(guest.bytes(size)) {
                Some(left) => {
                    room = left;
                    up.push(gva);
                }
                None => self.numa.wake_reclaim(actor.now_ps()),
            }
        }
        let batch = match guest.wants_huge() {
            true => BATCH,
            false => (BATCH >> actor.k).max(1),
        };
        for pages in up.chunks(batch) {
            guest.migrate_pages(pages, Tier::Fast, actor);
        }
    }

    /// Looks through the sections in which something is ready.
    fn look_at_sections(&self, guest: &Guest, actor: &mut Actor<'_>) {
        let section_bits = SECTION_BITS - guest.page_bits();
        let mut sections: Vec<u32> = self.ready.keys().map(|f| f >> section_bits).collect();
        sections.dedup();
        let page = match guest.wants_huge() {
            true => PageSize::Huge,
            false => PageSize::Base,
        };
        let looks = sections.len() as u64 * ((1 << SECTION_BITS) / guest.bytes(page));
        let took_ps = looks * actor.costs.scan_entry_ps;
        match page {
            PageSize::Base => actor.charge_page(Cause::Classify, took_ps),
            _ => actor.charge(Cause::Classify, took_ps),
        }
    }
}

impl Manager for Pghot {
    fn needs(&self) -> Needs {
        self.numa.needs()
    }

    fn sampling(&self, k: u32) -> Option<Sampling> {
        match self.source {
            Source::HintFaults => None,
            Source::Profiler { threshold_ps } => Some(Sampling {
                period: PERIOD.max(1 << k),
                threshold_ps,
            }),
        }
    }

    fn start(&mut self, guest: &Guest, now_ps: u64, filling: bool) -> u64 {
        if self.source == Source::HintFaults {
            self.scan_due_ps = self.numa.start(guest, now_ps, filling);
        }
        self.promote_due_ps = now_ps + SLEEP_PS;
        self.scan_due_ps.min(self.promote_due_ps)
    }

    /// The turn of the scanner or of `kmigrated`.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        if self.scan_due_ps <= self.promote_due_ps {
            self.scan_due_ps = self.numa.scan(Tier::Slow, ctx);
        } else {
            let Context { guest, actor, .. } = ctx;
            self.take_in(guest, actor);
            self.promote(guest, actor);
            self.promote_due_ps = actor.now_ps() + SLEEP_PS;
        }
        self.scan_due_ps.min(self.promote_due_ps)
    }

    fn take_samples(&mut self, records: &[Record]) {
        self.waiting.extend(records.iter().map(|r| r.gva));
    }

    fn hint_fault(&mut self, gva: GuestVirtAddr, ctx: &mut Context<'_>) {
        let Context { guest, actor, .. } = ctx;
        if guest.hint_fault(gva, actor).is_some() {
            self.report(gva, guest, actor.now_ps());
        }
    }

    fn reclaim_since_ps(&self, now_ps: u64) -> Option<u64> {
        self.numa.reclaim_since_ps(now_ps)
    }

    fn reclaim(&mut self, now_ps: u64, ctx: &mut Context<'_>) {
        self.numa.reclaim(now_ps, ctx);
    }

    /// A byte for each frame of slow memory.
    fn memory_overhead(&self, guest: &Guest) -> ByteCount {
        ByteCount(u64::from(guest.frames_of(Tier::Slow)) << guest.k())
    }

    fn samples_seen(&self) -> u64 {
        self.samples_seen
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn two_reports_within_the_window_make_a_page_ready(
            first_ms in 0u64..1 << 40, later_ms in 0u64..(STEPS - 1) * STEP_MS,
        ) {
            let mut hotness = Hotness::default();
            // The time of a record that was never written to may look recent.
            hotness.report(first_ms);
            hotness.reports = 1;
            let is_ready = hotness.report(first_ms + later_ms);
            if later_ms <= WINDOW_MS - STEP_MS {
                prop_assert!(is_ready);
            }
            if later_ms > WINDOW_MS + STEP_MS {
                prop_assert!(!is_ready);
            }
        }
    }

    #[test]
    fn one_report_is_not_enough() {
        assert!(!Hotness::default().report(5));
        let mut hotness = Hotness::default();
        let ready = [0, 3200, 3300, 3400].map(|ms| hotness.report(ms));
        assert_eq!(ready, [false, false, true, true]);
        assert_eq!(hotness.reports, COUNTED);
    }
}
