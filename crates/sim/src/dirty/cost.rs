//! Costs of the steps of dirty logging, in picoseconds.
//!
//! Three costs are fitted to one table: dirty_log_perf_test on Arm before and after eager splitting. It is in the cover
//! letter of version 4 of that series, with one write in each 2 MiB and 1 to 152 virtual CPUs. `line` is also fitted to
//! x86's pass with faults. The other costs come from published measurements of single steps. Scenarios that reproduce
//! those steps do not validate them.

use demeter_scenario::Isa;

use crate::machine::cost::PS_PER_NS;

/// Costs of one machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Costs {
    /// A write-protection fault from exit to entry without contention, with a local invalidation.
    pub fault_ps: u64,
    /// Fetching a cache line that another CPU has modified.
    pub line_ps: u64,
    /// Cache lines that a reader of `mmu_lock` fetches: its count, twice.
    pub lines_by_reader: u64,
    /// Finding and changing one page's entry under the lock.
    pub entry_ps: u64,
    /// One broadcast invalidation and its DSB, without contention.
    pub invalidate_ps: u64,
    /// Time for which each broadcast occupies the interconnect.
    pub broadcast_ps: u64,
    /// Broadcasts to break one block: one by address, and one for all first-dimension entries of the VM.
    pub broadcasts_by_break: u64,
    /// Filling one entry of a table before it is linked.
    pub split_entry_ps: u64,
    /// Write-protecting one page again.
    pub protect_page_ps: u64,
    /// Write-protecting one block again.
    pub protect_block_ps: u64,
    /// Logging one page in hardware: the slowdown of the store, and the page's part in draining the log.
    pub logged_page_ps: u64,
}

impl Costs {
    /// Costs of a processor family.
    pub fn of(isa: Isa) -> Self {
        // Ampere Altra, Neoverse N1.
        let arm = Self {
            // Fitted: 1 virtual CPU with eager splitting, 1.66 ms for 512 faults.
            fault_ps: 3240 * PS_PER_NS,
            // Fitted: 64 to 152 virtual CPUs with eager splitting, and 96 on x86 with faults.
            line_ps: 72 * PS_PER_NS,
            lines_by_reader: 2,
            // Measured: unmapping 128 GiB of 4 KiB pages with FEAT_TLBIRANGE takes 17.70 s. Assumed: mapping a page
            // takes as long.
            entry_ps: 527 * PS_PER_NS,
            // Measured: 68.92 s without FEAT_TLBIRANGE, minus the entry, halved.
            invalidate_ps: 763 * PS_PER_NS,
            // Fitted: 32 to 152 virtual CPUs that split on fault, 1.2 us for each split.
            broadcast_ps: 600 * PS_PER_NS,
            // Source: the kernel's __kvm_tlb_flush_vmid_ipa: ipas2e1is, vmalle1is.
            broadcasts_by_break: 2,
            // Assumed equal to x86's.
            split_entry_ps: 62 * PS_PER_NS,
            // Measured: 650 ms for 128 GB of 4 KiB pages, 4 ms of 2 MiB pages (Kunpeng 920, Linux c862626e19ef).
            protect_page_ps: 19 * PS_PER_NS,
            protect_block_ps: 61 * PS_PER_NS,
            // Assumed equal to x86's; no measurement of FEAT_HDBSS is published.
            logged_page_ps: 434 * PS_PER_NS,
        };
        match isa {
            Isa::Arm => arm,
            Isa::X86 => Self {
                // An EPT violation takes KVM 2 to 5 us; with many CPUs the lock's cache line dominates.
                fault_ps: 2500 * PS_PER_NS,
                // Measured: splitting 96 GiB takes 1.55 s (Linux a3fe5dbda0a4).
                split_entry_ps: 62 * PS_PER_NS,
                // Measured there: 96 virtual CPUs write 1 GiB each in 0.14 s. That is 534 ns a page, minus the store.
                logged_page_ps: 434 * PS_PER_NS,
                ..arm
            },
        }
    }

    /// Cost of a fault outside the lock, without contention.
    pub fn outside_ps(&self) -> u64 {
        self.fault_ps - self.lines_by_reader * self.line_ps - self.entry_ps
    }
}
