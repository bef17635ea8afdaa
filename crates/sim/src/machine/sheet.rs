//! CPU sheets: sizes and costs of real processors, with their sources.
//!
//! Latencies and costs are picoseconds, so that sums are whole numbers. A figure that no source
//! gives is marked *assumed*.

use super::assoc::{Geometry, WAYS_MAX};

/// Picoseconds in a nanosecond.
pub const PS_PER_NS: u64 = 1000;

/// What kind of TLB a core has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlbKind {
    /// A processor's: tagged by address space, an entry for each page of any size.
    Hardware,
    /// An emulator's (QEMU's `cputlb`): huge pages are held piece by piece as base pages, to drop one
    /// drops everything, and so does a context switch. Walks are the emulator's own work.
    Soft,
}

/// Entries of the TLBs and page-walk caches of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TlbSheet {
    /// How it works.
    pub kind: TlbKind,
    /// First level, 4 KiB pages; at most 4 ways, as the next two.
    pub l1_4k: Geometry,
    /// First level, 2 MiB pages.
    pub l1_2m: Geometry,
    /// First level, 1 GiB pages.
    pub l1_1g: Geometry,
    /// Second level, for 4 KiB and 2 MiB pages.
    pub l2: Geometry,
    /// Second level, 1 GiB pages.
    pub l2_1g: Geometry,
    /// Page-walk caches of one dimension: for entries that map 2 MiB, 1 GiB, 512 GiB and 256 TiB;
    /// at most 4 ways each.
    pub walk: [Geometry; 4],
    /// A hit in the second level.
    pub l2_hit_ps: u64,
}

/// A level of data cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheSheet {
    /// Its shape, in lines of 64 bytes.
    pub geometry: Geometry,
    /// Load to use.
    pub hit_ps: u64,
}

/// What invalidations, exits and samples cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CostSheet {
    /// `invlpg`, `invpcid` or `invvpid` of one address.
    pub flush_page_ps: u64,
    /// A full flush of one address space's entries (`mov cr3`, `invpcid` all, `invvpid` single).
    pub flush_space_ps: u64,
    /// `invept`.
    pub invept_ps: u64,
    /// An inter-processor interrupt on its way.
    pub ipi_ps: u64,
    /// For each core that a hypervisor interrupts.
    pub ipi_receiver_ps: u64,
    /// Taking an interrupt in a guest, what it asks for aside: those who sent it wait so long.
    pub interrupt_ps: u64,
    /// From the guest to the hypervisor and back.
    pub exit_ps: u64,
    /// An EPT violation that the hypervisor handles, exit included.
    pub ept_violation_ps: u64,
    /// What a contended lock takes longer to be handed over for each CPU that waits: with all of
    /// them waiting, one waits so long times the square of the others.
    pub lock_line_ps: u64,
    /// Asking a virtual CPU of a VM whether it has to leave the guest.
    pub ask_vcpu_ps: u64,
    /// A page fault of the guest that its kernel handles, without clearing or copying.
    pub fault_ps: u64,
    /// A context switch.
    pub switch_ps: u64,
    /// A timer tick.
    pub tick_ps: u64,
    /// The hardware's slowdown for one PEBS record.
    pub pebs_record_ps: u64,
    /// A PEBS interrupt in a guest.
    pub pebs_interrupt_ps: u64,
    /// Taking one record out of the buffer in software.
    pub record_drain_ps: u64,
    /// Looking at one page table entry in a scan.
    pub scan_entry_ps: u64,
    /// Making one page fault in a scan: its entry, and when that was in the page's own record.
    pub mark_page_ps: u64,
    /// Looking in reclaim at one page and, through the reverse map, at whether it was accessed.
    pub reclaim_page_ps: u64,
    /// A call that moves pages, however few.
    pub migrate_call_ps: u64,
    /// Moving one 4 KiB page, copy and call aside: unmap, remap, accounting.
    pub migrate_page_ps: u64,
    /// Moving one 2 MiB page, copy aside.
    pub migrate_huge_ps: u64,
}

/// A processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sheet {
    /// Its name.
    pub name: &'static str,
    /// Levels of its page tables, 4 or 5: guest's and second-level.
    pub levels: u32,
    /// TLBs and page-walk caches.
    pub tlb: TlbSheet,
    /// First and second level of each core, third level of all; at most 12, 16 and 12 ways.
    pub caches: [CacheSheet; 3],
    /// Costs of events.
    pub costs: CostSheet,
    /// Bytes per second that one core streams at best.
    pub core_stream_bytes_per_s: u64,
}

const fn geometry(sets: u32, ways: u32) -> Geometry {
    Geometry { sets, ways }
}

/// Costs of an x86-64 server with hardware virtualization and a Linux kernel on both levels.
const X86_COSTS: CostSheet = CostSheet {
    // Linux, arch/x86/mm/tlb.c: "about 100 ns" behind tlb_single_page_flush_ceiling = 33.
    flush_page_ps: 100 * PS_PER_NS,
    // Assumed: a CR3 write.
    flush_space_ps: 200 * PS_PER_NS,
    // Assumed: as a full flush; what it really costs are the misses that follow, which the model
    // has anyway.
    invept_ps: 200 * PS_PER_NS,
    // Secondary sources: about 1 us and 200 ns for each receiver.
    ipi_ps: 1000 * PS_PER_NS,
    ipi_receiver_ps: 200 * PS_PER_NS,
    // Assumed: entry, handler, end of interrupt.
    interrupt_ps: 1000 * PS_PER_NS,
    // Whole KVM_RUN of about 2,550 cycles at 2.9 GHz.
    exit_ps: 880 * PS_PER_NS,
    // KVM, 2 to 5 us.
    ept_violation_ps: 3000 * PS_PER_NS,
    // Fitted to the times that TPP takes for GUPS with 36 virtual CPUs, in the hypervisor and in the
    // guest. That it grows so: Boyd-Wickizer et al., Non-scalable locks are dangerous (2012).
    lock_line_ps: 80 * PS_PER_NS,
    // Assumed: a cache line that another core has changed.
    ask_vcpu_ps: 100 * PS_PER_NS,
    // Assumed: entry, handler, exit of a minor fault, in a guest.
    fault_ps: 1000 * PS_PER_NS,
    // Assumed.
    switch_ps: 1500 * PS_PER_NS,
    // Assumed: timer interrupt with its exits in a guest.
    tick_ps: 3000 * PS_PER_NS,
    // 200 to 300 ns per record.
    pebs_record_ps: 250 * PS_PER_NS,
    // 1 to 3 us on bare metal, two to three times that in a guest.
    pebs_interrupt_ps: 5000 * PS_PER_NS,
    // Measured by Demeter's authors in a guest: Memtis took 7.6 s for 7.5 million records.
    record_drain_ps: 1000 * PS_PER_NS,
    // Assumed: a cache-friendly walk of a leaf table.
    scan_entry_ps: 10 * PS_PER_NS,
    // Assumed: an entry, and a line of the page's record that no cache has.
    mark_page_ps: 150 * PS_PER_NS,
    // Lab: kswapd takes 4 us for each page that it looks at, which is the emulator's factor times
    // this.
    reclaim_page_ps: 600 * PS_PER_NS,
    // Lab: promoting a page that faulted takes 44 us, of which copying and moving are 24.
    migrate_call_ps: 3500 * PS_PER_NS,
    // Measured on Zen 3 with move_pages in batches: 2.4 us per 4 KiB page and 195 us per 2 MiB,
    // copies at about 10.7 GB/s included; here without them.
    migrate_page_ps: 2000 * PS_PER_NS,
    migrate_huge_ps: 5000 * PS_PER_NS,
};

/// Intel Ice Lake-SP (Xeon Gold 6354 class), 2.9 GHz.
///
/// TLBs from Intel's optimization manual; the L2 of 20 ways and the L3 are rounded to what the
/// model holds (16 and 12 ways, a power of two of sets).
pub const ICE_LAKE_SP: Sheet = Sheet {
    name: "ice-lake-sp",
    levels: 4,
    tlb: TlbSheet {
        kind: TlbKind::Hardware,
        l1_4k: geometry(16, 4),
        l1_2m: geometry(8, 4),
        l1_1g: geometry(2, 4),
        l2: geometry(128, 16),
        l2_1g: geometry(4, 4),
        // Assumed, as for Skylake.
        walk: [
            geometry(8, 4),
            geometry(1, 4),
            geometry(1, 4),
            geometry(1, 2),
        ],
        // 7 cycles.
        l2_hit_ps: 2400,
    },
    caches: [
        // 48 KiB, 5 cycles, of which an out-of-order core hides most: assumed 1 cycle.
        CacheSheet {
            geometry: geometry(64, 12),
            hit_ps: 345,
        },
        // 1 MiB, 14 cycles.
        CacheSheet {
            geometry: geometry(1024, 16),
            hit_ps: 4800,
        },
        // 48 MiB, about 70 cycles.
        CacheSheet {
            geometry: geometry(65536, 12),
            hit_ps: 24_000,
        },
    ],
    costs: X86_COSTS,
    core_stream_bytes_per_s: 12_000_000_000,
};

/// AMD Zen 3 (Milan), 3.4 GHz. The fully associative first TLB is modelled with four ways.
pub const ZEN_3: Sheet = Sheet {
    name: "zen-3",
    tlb: TlbSheet {
        l1_4k: geometry(16, 4),
        l1_2m: geometry(16, 4),
        l1_1g: geometry(16, 4),
        ..ICE_LAKE_SP.tlb
    },
    caches: [
        CacheSheet {
            geometry: geometry(64, 8),
            hit_ps: 300,
        },
        CacheSheet {
            geometry: geometry(1024, 8),
            hit_ps: 3500,
        },
        CacheSheet {
            geometry: geometry(65536, 8),
            hit_ps: 14_000,
        },
    ],
    ..ICE_LAKE_SP
};

/// The lab's emulator.
///
/// Its only cache is the plugin's filter of 16 Ki lines. Hits and translations cost nothing of their
/// own: what the emulator needs for them is part of the time that the next miss takes.
pub(crate) fn emulator() -> Sheet {
    let c = X86_COSTS;
    let software = EMULATED_KERNEL;
    let nothing = CacheSheet {
        geometry: geometry(1, 1),
        hit_ps: 0,
    };
    Sheet {
        name: "emulator",
        levels: 4,
        tlb: TlbSheet {
            kind: TlbKind::Soft,
            l1_4k: geometry(1 << 15, 4),
            l2_hit_ps: 0,
            ..ICE_LAKE_SP.tlb
        },
        caches: [
            CacheSheet {
                geometry: geometry(1 << 14, 1),
                ..nothing
            },
            nothing,
            nothing,
        ],
        costs: CostSheet {
            flush_page_ps: c.flush_page_ps * software,
            flush_space_ps: c.flush_space_ps * software,
            invept_ps: c.invept_ps * software,
            ipi_ps: c.ipi_ps * software,
            ipi_receiver_ps: c.ipi_receiver_ps * software,
            interrupt_ps: c.interrupt_ps * software,
            // It runs no hypervisor.
            exit_ps: 0,
            ept_violation_ps: 0,
            lock_line_ps: 0,
            ask_vcpu_ps: 0,
            fault_ps: c.fault_ps * software,
            switch_ps: c.switch_ps * software,
            tick_ps: c.tick_ps * software,
            // The plugin's ring costs the guest nothing until it is read.
            pebs_record_ps: 0,
            pebs_interrupt_ps: 0,
            record_drain_ps: c.record_drain_ps * software,
            scan_entry_ps: c.scan_entry_ps * software,
            mark_page_ps: EMULATED_MARK_PS,
            reclaim_page_ps: c.reclaim_page_ps * software,
            migrate_call_ps: c.migrate_call_ps * software,
            migrate_page_ps: c.migrate_page_ps * software,
            migrate_huge_ps: c.migrate_huge_ps * software,
        },
        core_stream_bytes_per_s: EMULATED_STREAM,
    }
}

/// How many times slower a kernel is on the emulator than on hardware, whatever the latencies of
/// memory are taken to be. Measured: a hint fault takes 5 to 7 us.
const EMULATED_KERNEL: u64 = 6;

/// Making a page fault in a scan. Measured: Linux scans 38,000 pages and then for 5 s, 32 times as
/// long, no more.
const EMULATED_MARK_PS: u64 = 3_800 * PS_PER_NS;

/// Bytes per second that the emulated CPU copies: its own instructions are the bound. Measured:
/// 320 MiB of huge pages in a second.
const EMULATED_STREAM: u64 = 350_000_000;

/// Why a machine cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{part} of {sets} sets and {ways} ways: give a power of two of sets and 1 to {ways_max} ways"
)]
pub struct UnsoundGeometry {
    part: &'static str,
    sets: u32,
    ways: u32,
    ways_max: usize,
}

impl Sheet {
    /// Checks that every array can be.
    pub fn check(&self) -> Result<(), UnsoundGeometry> {
        let tlb = &self.tlb;
        let small = [tlb.l1_4k, tlb.l1_2m, tlb.l1_1g, tlb.l2_1g].map(|g| ("a TLB", g, 4));
        let walk = tlb.walk.map(|g| ("a page-walk cache", g, 4));
        let [l1, l2, l3] = self.caches.map(|c| c.geometry);
        let large = [
            ("the second-level TLB", tlb.l2, WAYS_MAX),
            ("the first-level cache", l1, 12),
            ("the second-level cache", l2, WAYS_MAX),
            ("the third-level cache", l3, 12),
        ];
        let unsound = small
            .into_iter()
            .chain(walk)
            .chain(large)
            .find(|&(_, g, ways_max)| !g.is_sound(ways_max));
        match unsound {
            None => Ok(()),
            Some((part, Geometry { sets, ways }, ways_max)) => Err(UnsoundGeometry {
                part,
                sets,
                ways,
                ways_max,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sheets_are_sound_and_bad_ones_are_not() {
        for sheet in [ICE_LAKE_SP, ZEN_3, emulator()] {
            sheet.check().unwrap();
        }
        let mut bad = ZEN_3;
        bad.caches[2].geometry.ways = 0;
        assert!(bad.check().unwrap_err().to_string().contains("0 ways"));
        bad = ZEN_3;
        bad.tlb.l2.sets = 96;
        assert!(bad.check().unwrap_err().to_string().contains("96 sets"));
    }

    #[test]
    fn ice_lake_has_the_entries_that_its_manual_says() {
        let tlb = ICE_LAKE_SP.tlb;
        let entries = [tlb.l1_4k, tlb.l1_2m, tlb.l1_1g, tlb.l2].map(Geometry::entries);
        assert_eq!(entries, [64, 32, 8, 2048]);
    }
}
