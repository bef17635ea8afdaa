//! One core and its memory, to benchmark the model itself.

use demeter_policy::{ByteCount, GuestPhysAddr, GuestVirtAddr, PAGE_SIZE};
use demeter_scenario::Curve;

use crate::machine::core::{Core, Tables};
use crate::machine::cost::PS_PER_NS;
use crate::machine::cpu::ICE_LAKE_SP;
use crate::machine::ledger::Bill;
use crate::machine::memory::Memory;
use crate::machine::radix::{PageSize, Radix, table_bytes};
use crate::machine::sampler::{Sampler, Sampling};
use crate::machine::segment::Segments;
use crate::machine::tier::TierModel;
use crate::machine::walk::Space;
use crate::program::Access;

/// Parts of the machine to model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Model {
    /// Native walks, no data caches.
    Native,
    /// Native walks and three levels of data cache.
    NativeCaches,
    /// Nested walks, no data caches.
    Nested,
    /// Nested walks, three levels of data cache, sampling: the full model.
    Full,
}

/// A core with memory in pages of 4 KiB, half in each tier.
pub struct Testbed {
    core: Core,
    sampler: Sampler,
    guest: Radix<GuestVirtAddr>,
    host: Radix<GuestPhysAddr>,
    memory: Memory,
    pages: u64,
}

impl Testbed {
    /// Address of its memory.
    pub const BASE: GuestVirtAddr = GuestVirtAddr(1 << 30);

    /// Maps `bytes` of memory, at most 240 GiB, rounded up to a page.
    pub fn new(bytes: ByteCount) -> Self {
        let pages = bytes.0.div_ceil(PAGE_SIZE);
        let table_pages = table_bytes(bytes.0) / PAGE_SIZE;
        let mut guest = Radix::new(4, 12);
        for page in 0..pages {
            let gva = GuestVirtAddr(Self::BASE.0 + page * PAGE_SIZE);
            guest.map(gva, PageSize::Base, (table_pages + page) as u32);
        }
        let mut host = Radix::new(4, 12);
        let host_tables = table_bytes((table_pages + pages) * PAGE_SIZE) / PAGE_SIZE;
        for page in 0..table_pages + pages {
            host.map(
                GuestPhysAddr(page * PAGE_SIZE),
                PageSize::Base,
                (host_tables + page) as u32,
            );
        }
        let tier = |latency_ns| TierModel {
            latency_ps: latency_ns * PS_PER_NS,
            read_bytes_per_s: 100_000_000_000,
            write_bytes_per_s: 100_000_000_000,
            granule_lines: 1,
            curve: Curve::default(),
            loaded_percent: 100,
            others_bytes_per_s: 0,
        };
        let middle = (host_tables + table_pages + pages / 2) * PAGE_SIZE;
        let mut sampler = Sampler::new(0);
        let sampling = Sampling {
            period: 4093,
            threshold_ps: 64 * PS_PER_NS,
        };
        sampler.start(sampling, 0);
        Self {
            core: Core::new(&ICE_LAKE_SP, 12),
            sampler,
            guest,
            host,
            memory: Memory::of_tiers(&ICE_LAKE_SP, [tier(80), tier(250)], middle),
            pages,
        }
    }

    /// Runs accesses within the mapped memory; returns the simulated time in picoseconds.
    ///
    /// # Panics
    /// When an access lies outside.
    pub fn run(&mut self, model: Model, accesses: &[Access]) -> u64 {
        let mut bill = Bill::default();
        let mut tables = Tables {
            guest: &mut self.guest,
            host: &mut self.host,
            host_first_page: 0,
            segments: &Segments::default(),
            space: Space(0),
        };
        let (core, memory) = (&mut self.core, &mut self.memory);
        let sampler = &mut self.sampler;
        let all = accesses.len();
        let (tables, bill_now) = (&mut tables, &mut bill);
        let progress = match model {
            Model::Native => {
                core.run::<false, false>(accesses, all, tables, memory, sampler, bill_now)
            }
            Model::NativeCaches => {
                core.run::<false, true>(accesses, all, tables, memory, sampler, bill_now)
            }
            Model::Nested => {
                core.run::<true, false>(accesses, all, tables, memory, sampler, bill_now)
            }
            Model::Full => core.run::<true, true>(accesses, all, tables, memory, sampler, bill_now),
        };
        assert_eq!(progress.fault, None, "an access outside of the testbed");
        if sampler.is_full() {
            sampler.drain().for_each(drop);
        }
        bill.total()
    }

    /// Bytes of page tables for each mapped page.
    pub fn table_bytes_per_page(&self) -> f64 {
        (self.guest.state_bytes() + self.host.state_bytes()) as f64 / self.pages as f64
    }
}
