//! HeMem: a user-space library that samples loads and migrates its program's 2 MiB pages.
//!
//! Raybuck et al., SOSP 2021; constants from the copy of its code that Colloid's authors compare with (period 5,003,
//! hot at 8 loads, halved above 18). It tracks by sampled loads, classifies by counters of 2 MiB, and migrates whole
//! pages. The sampling thread spins on its own core.
//!
//! # Problem
//! Find hot pages of 2 MiB without kernel support, when page tables are too slow to walk.
//!
//! # Approach
//! Samples are counted per page. A page with enough of them is hot. When one page has too many, all counts are halved,
//! each at its next check. Every 10 ms hot pages of slow memory are promoted in order of discovery. They go to free
//! fast memory or, if none is free, replace the cold page that was listed first. If no page is cold, nothing moves.
//! Four threads copy.
//!
//! All memory consists of 2 MiB pages from its first touch, in both tiers. The library maps `/dev/dax` devices, which
//! are aligned to 2 MiB; `PAGE_SIZE` is `HUGEPAGE_SIZE` in its `hemem.h`. The model does so with `thp = "always"`. With
//! any other setting, the whole scenario uses small pages.
//!
//! Not modelled: writers wait while their page is copied (userfaultfd).
//!
//! # Properties
//! - A halving halves all counts.
//! - No count exceeds the halving limit by more than the last sample.

use std::collections::VecDeque;

use demeter_policy::{BLOCK_SIZE, Block, ByteCount, GuestVirtAddr, Tier, VirtRange};

use super::{Context, Managed, Manager, Needs};
use crate::guest::Guest;
use crate::machine::actor::{Actor, Vcpu};
use crate::machine::ledger::Cause;
use crate::machine::sampler::{Record, Sampling};

/// Loads per sample.
const PERIOD: u64 = 5003;

/// Sample count of a hot page, and the count beyond which all counts are halved.
const HOT: u32 = 8;
const HALVED_ABOVE: u32 = 18;

/// Time between two turns of the policy thread.
pub(super) const TURN_PS: u64 = 10_000_000_000;

/// Number of copying threads.
const COPIERS: usize = 4;

/// Pages checked again in one turn.
const LOOKS: usize = 8192;

/// Sample counts per 2 MiB page.
#[derive(Debug, Clone, Default)]
pub(super) struct Heat {
    first: u64,
    /// Sample count, and the number of halvings included in it.
    counts: Vec<(u32, u32)>,
    halvings: u32,
}

impl Heat {
    /// No samples, for these sorted mappings.
    pub(super) fn new(vmas: &[VirtRange]) -> Self {
        let (Some(first), Some(last)) = (vmas.first(), vmas.last()) else {
            return Self::default();
        };
        let first = Block::of(first.start()).0;
        let end = last.end().0.div_ceil(BLOCK_SIZE);
        Self {
            first,
            counts: vec![(0, 0); (end - first) as usize],
            halvings: 0,
        }
    }

    /// Adds a sample; returns the page's count.
    pub(super) fn add(&mut self, gva: GuestVirtAddr) -> u32 {
        let block = Block::of(gva);
        let samples = self.of(block) + 1;
        let index = block.0.wrapping_sub(self.first) as usize;
        if let Some(count) = self.counts.get_mut(index) {
            *count = (samples, self.halvings);
        }
        if samples > HALVED_ABOVE {
            self.halvings += 1;
        }
        self.of(block)
    }

    /// A page's count.
    pub(super) fn of(&self, block: Block) -> u32 {
        let index = block.0.wrapping_sub(self.first) as usize;
        let &(samples, then) = self.counts.get(index).unwrap_or(&(0, 0));
        samples.checked_shr(self.halvings - then).unwrap_or(0)
    }

    /// Bytes of all counts.
    pub(super) fn state_bytes(&self) -> usize {
        size_of_val(&self.counts[..])
    }

    /// All pages.
    pub(super) fn blocks(&self) -> impl Iterator<Item = Block> + use<> {
        (self.first..self.first + self.counts.len() as u64).map(Block)
    }
}

/// A polling thread that reads samples and never sleeps.
#[derive(Debug, Default)]
pub(super) struct Spinner {
    /// Time until which its spinning is charged.
    until_ps: u64,
    /// Work of all virtual CPUs at that time.
    worked_ps: u64,
}

impl Spinner {
    /// A thread that starts now.
    pub(super) fn since(now_ps: u64) -> Self {
        Self {
            until_ps: now_ps,
            worked_ps: 0,
        }
    }

    /// Charges spinning until now. It uses an idle core if there is one besides the migration core. If not, it takes a
    /// thread's share of the program's cores.
    pub(super) fn spin(&mut self, actor: &mut Actor<'_>) {
        let now_ps = actor.now_ps();
        let since_ps = std::mem::replace(&mut self.until_ps, now_ps);
        let worked_ps = actor.vcpus.iter().map(Vcpu::worked_ps).sum();
        let before_ps = std::mem::replace(&mut self.worked_ps, worked_ps);
        let busy = actor.busy;
        if busy + 1 < actor.vcpus.len() {
            let vcpu = &mut actor.vcpus[busy];
            let left_ps = now_ps.saturating_sub(vcpu.clock_ps.max(since_ps));
            vcpu.charge(Cause::Track, left_ps);
        } else if before_ps > 0 {
            let share_ps = (worked_ps - before_ps) / (busy as u64 + 1);
            actor.charge_all(Cause::Track, share_ps);
        }
    }
}

/// The HeMem library.
#[derive(Debug)]
pub(crate) struct Hemem {
    threshold_ps: u64,
    heat: Heat,
    waiting: Vec<GuestVirtAddr>,
    samples_seen: u64,
    spinner: Spinner,
    /// Hot pages of slow memory and cold pages of fast memory, as of when they were listed.
    hot: VecDeque<Block>,
    cold: VecDeque<Block>,
    /// By page: whether it is listed.
    is_listed: Vec<bool>,
    /// The next page to check.
    next: usize,
}

impl Hemem {
    /// A library without samples.
    pub(crate) fn new(managed: &Managed) -> Self {
        Self {
            threshold_ps: managed.load_ps,
            heat: Heat::default(),
            waiting: vec![],
            samples_seen: 0,
            spinner: Spinner::default(),
            hot: VecDeque::new(),
            cold: VecDeque::new(),
            is_listed: vec![],
            next: 0,
        }
    }

    /// Lists a page that is hot and slow, or cold and fast.
    fn list(&mut self, block: Block, guest: &Guest) {
        let index = (block.0 - self.heat.first) as usize;
        if self.is_listed.get(index) != Some(&false) {
            return;
        }
        let list = match (tier_of(guest, block), self.heat.of(block) >= HOT) {
            (Some(Tier::Slow), true) => &mut self.hot,
            (Some(Tier::Fast), false) => &mut self.cold,
            _ => return,
        };
        list.push_back(block);
        self.is_listed[index] = true;
    }

    /// Removes the first page of a list that still belongs there.
    fn take(&mut self, from: Tier, guest: &Guest) -> Option<Block> {
        loop {
            let list = match from {
                Tier::Slow => &mut self.hot,
                Tier::Fast => &mut self.cold,
            };
            let block = list.pop_front()?;
            self.is_listed[(block.0 - self.heat.first) as usize] = false;
            let is_hot = self.heat.of(block) >= HOT;
            if tier_of(guest, block) == Some(from) && is_hot == (from == Tier::Slow) {
                return Some(block);
            }
        }
    }

    /// Checks some pages again, as their counts may have been halved.
    fn look_again(&mut self, guest: &Guest, actor: &mut Actor<'_>) {
        let all = self.heat.counts.len();
        let looks = LOOKS.min(all);
        actor.charge(Cause::Classify, looks as u64 * actor.costs.scan_entry_ps);
        for _ in 0..looks {
            let block = Block(self.heat.first + self.next as u64);
            self.list(block, guest);
            self.next = (self.next + 1) % all;
        }
    }
}

/// The tier of a 2 MiB page, if mapped. If it is split, the tier of its first part.
pub(super) fn tier_of(guest: &Guest, block: Block) -> Option<Tier> {
    let (entry, _) = guest.tables.find(block.start())?;
    Some(guest.tier_of(entry.index()))
}

impl Manager for Hemem {
    fn needs(&self) -> Needs {
        Needs {
            huge_in_slow: true,
            ..Needs::default()
        }
    }

    fn sampling(&self, k: u32) -> Option<Sampling> {
        Some(Sampling {
            period: PERIOD.max(1 << k),
            threshold_ps: self.threshold_ps,
        })
    }

    fn has_worker(&self) -> bool {
        true
    }

    fn start(&mut self, guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        self.heat = Heat::new(guest.limits());
        self.is_listed = vec![false; self.heat.counts.len()];
        self.spinner = Spinner::since(now_ps);
        now_ps + TURN_PS
    }

    /// Turn of the policy thread.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let Context { guest, actor, .. } = ctx;
        self.look_again(guest, actor);
        actor.copiers = COPIERS;
        let until_ps = actor.now_ps() + TURN_PS;
        while actor.now_ps() < until_ps {
            if guest.usable(Tier::Fast).0 < BLOCK_SIZE {
                if self.hot.is_empty() {
                    break;
                }
                let Some(cold) = self.take(Tier::Fast, guest) else {
                    break;
                };
                if guest.migrate_block(cold, Tier::Slow, actor) == 0 {
                    break;
                }
            }
            let Some(hot) = self.take(Tier::Slow, guest) else {
                break;
            };
            guest.migrate_block(hot, Tier::Fast, actor);
        }
        actor.copiers = 1;
        until_ps.max(actor.now_ps())
    }

    fn take_samples(&mut self, records: &[Record]) {
        self.waiting.extend(records.iter().map(|r| r.gva));
    }

    fn worker_turn(&mut self, _began_ps: u64, ctx: &mut Context<'_>) -> bool {
        let Context { guest, actor, .. } = ctx;
        for gva in std::mem::take(&mut self.waiting) {
            self.samples_seen += 1;
            actor.charge(Cause::Classify, actor.costs.memtis_sample_ps);
            if self.heat.add(gva) >= HOT {
                self.list(Block::of(gva), guest);
            }
        }
        self.spinner.spin(actor);
        false
    }

    fn memory_overhead(&self, _guest: &Guest) -> ByteCount {
        let lists = size_of::<Block>() * (self.hot.len() + self.cold.len());
        ByteCount((self.heat.state_bytes() + self.is_listed.len() + lists) as u64)
    }

    fn samples_seen(&self) -> u64 {
        self.samples_seen
    }
}

#[cfg(test)]
mod tests {
    use demeter_policy::MIB;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn counts_are_bounded_and_halved_together(
            samples in prop::collection::vec(0u64..20, 1..2000),
        ) {
            let at = |block: u64| GuestVirtAddr((100 + block) * 2 * MIB);
            let mut heat = Heat::new(&[VirtRange::new(at(0), at(20)).unwrap()]);
            for block in samples {
                let before: Vec<u32> = heat.blocks().map(|b| heat.of(b)).collect();
                let halvings = heat.halvings;
                heat.add(at(block));
                let halved = heat.halvings - halvings;
                prop_assert_eq!(halved == 1, before[block as usize] == HALVED_ABOVE);
                for (i, block_i) in heat.blocks().enumerate() {
                    let added = before[i] + u32::from(i as u64 == block);
                    prop_assert_eq!(heat.of(block_i), added >> halved);
                    prop_assert!(heat.of(block_i) <= HALVED_ABOVE);
                }
            }
            prop_assert_eq!(heat.of(Block(3)), 0);
        }
    }
}
