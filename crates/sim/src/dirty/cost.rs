//! What the steps of dirty logging cost, picoseconds.
//!
//! Three are fitted, all to one table: dirty_log_perf_test on Arm before and after eager splitting (cover
//! letter of version 4 of that series, one write in each 2 MiB, 1 to 152 virtual CPUs), `line` also to x86's
//! pass with faults. What else is measured was measured by others on single steps; scenarios that show those
//! steps again prove nothing about them.

use demeter_scenario::Isa;

use crate::machine::cost::PS_PER_NS;

/// Costs of one machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Costs {
    /// A fault on a write-protected page from exit to entry, alone, with a local invalidation.
    pub fault_ps: u64,
    /// A cache line that another CPU has changed is fetched.
    pub line_ps: u64,
    /// Lines that a reader of `mmu_lock` fetches: its count, twice.
    pub lines_by_reader: u64,
    /// One page's entry is found and changed under the lock.
    pub entry_ps: u64,
    /// One broadcast invalidation and its DSB, alone.
    pub invalidate_ps: u64,
    /// What each broadcast occupies the interconnect for.
    pub broadcast_ps: u64,
    /// Broadcasts that break one block: by address, then everything of the VM's first dimension.
    pub broadcasts_by_break: u64,
    /// One entry of a table that is made before it is linked.
    pub split_entry_ps: u64,
    /// One page is write-protected again.
    pub protect_page_ps: u64,
    /// One block is.
    pub protect_block_ps: u64,
    /// Hardware writes a page to its log: the store's own slowdown, and the page's part in emptying the log.
    pub logged_page_ps: u64,
}

impl Costs {
    /// Those of a family of processors.
    pub fn of(isa: Isa) -> Self {
        // Ampere Altra, Neoverse N1.
        let arm = Self {
            // Fitted: 1 virtual CPU with eager splitting, 1.66 ms for 512 faults.
            fault_ps: 3240 * PS_PER_NS,
            // Fitted: 64 to 152 virtual CPUs with eager splitting, and 96 on x86 that fault.
            line_ps: 72 * PS_PER_NS,
            lines_by_reader: 2,
            // Measured: 128 GiB of 4 KiB pages unmapped with FEAT_TLBIRANGE in 17.70 s. That mapping a page takes
            // as long is assumed.
            entry_ps: 527 * PS_PER_NS,
            // Measured: the same without in 68.92 s, less the entry, by two.
            invalidate_ps: 763 * PS_PER_NS,
            // Fitted: 32 to 152 virtual CPUs that split on fault, 1.2 us for each split.
            broadcast_ps: 600 * PS_PER_NS,
            // Source: the kernel's __kvm_tlb_flush_vmid_ipa: ipas2e1is, vmalle1is.
            broadcasts_by_break: 2,
            // Assumed to be x86's.
            split_entry_ps: 62 * PS_PER_NS,
            // Measured: 650 ms for 128 GB of 4 KiB pages, 4 ms of 2 MiB pages (Kunpeng 920, Linux c862626e19ef).
            protect_page_ps: 19 * PS_PER_NS,
            protect_block_ps: 61 * PS_PER_NS,
            // Assumed to be x86's; for FEAT_HDBSS no measurement is published.
            logged_page_ps: 434 * PS_PER_NS,
        };
        match isa {
            Isa::Arm => arm,
            Isa::X86 => Self {
                // An EPT violation takes KVM 2 to 5 us; with many CPUs the lock's line decides.
                fault_ps: 2500 * PS_PER_NS,
                // Measured: 96 GiB split in 1.55 s (Linux a3fe5dbda0a4).
                split_entry_ps: 62 * PS_PER_NS,
                // Measured there: 96 virtual CPUs write 1 GiB each in 0.14 s: 534 ns a page, less the store.
                logged_page_ps: 434 * PS_PER_NS,
                ..arm
            },
        }
    }

    /// What a fault takes outside of the lock, alone.
    pub fn outside_ps(&self) -> u64 {
        self.fault_ps - self.lines_by_reader * self.line_ps - self.entry_ps
    }
}
