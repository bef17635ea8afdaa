//! What events cost: the one place where the simulator's costs stand.
//!
//! Every cost says where it is from:
//! - a source or *measured*: it was not chosen with a result of this simulator in view;
//! - *assumed*: no source gives it;
//! - *fitted*: chosen so that the simulator meets a published figure, which the comment names.
//!
//! Times are picoseconds, so that sums are whole numbers. What memory itself costs follows from its
//! load, see [`super::tier`]; sizes and latencies of caches and TLBs are in [`super::cpu`].

/// Picoseconds in a nanosecond.
pub const PS_PER_NS: u64 = 1000;

/// Picoseconds in a millisecond.
pub const PS_PER_MS: u64 = 1_000_000 * PS_PER_NS;

/// Time between two timer ticks: 250 a second, as Debian's kernel has it.
pub(crate) const TICK_PERIOD_PS: u64 = 4_000_000_000;

/// What events cost on a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CostModel {
    /// `invlpg`, `invpcid` or `invvpid` of one address.
    pub flush_page_ps: u64,
    /// A full flush of one address space's entries (`mov cr3`, `invpcid` all, `invvpid` single).
    pub flush_space_ps: u64,
    /// `invept`.
    pub invept_ps: u64,
    /// Virtual CPUs beside one of a VM for each `invept` that merges with the next: while they
    /// contend for the tables they are outside of the guest, and one flush at their next entry does
    /// for all that came meanwhile.
    pub vcpus_per_merged_invept: u64,
    /// An inter-processor interrupt on its way.
    pub ipi_ps: u64,
    /// For each core that a hypervisor interrupts.
    pub ipi_receiver_ps: u64,
    /// Virtual CPUs that a guest can interrupt by one call of the hypervisor.
    pub vcpus_per_ipi_call: u64,
    /// Taking an interrupt in a guest, without the work that it asks for: the sender waits so long.
    pub interrupt_ps: u64,
    /// From the guest to the hypervisor and back.
    pub exit_ps: u64,
    /// An EPT violation that the hypervisor handles, exit included.
    pub ept_violation_ps: u64,
    /// What a contended lock takes longer to be handed over for each CPU that waits: with all of
    /// them waiting, one waits so long times the square of the others.
    pub lock_line_ps: u64,
    /// Contended locks that the hypervisor takes when an access exits to show who uses a page.
    pub locks_per_host_hint: u64,
    /// Asking a virtual CPU of a VM whether it has to leave the guest.
    pub ask_vcpu_ps: u64,
    /// A page fault of the guest that its kernel handles, without clearing or copying.
    pub fault_ps: u64,
    /// First touches of base pages for which a process invalidates one address.
    pub touches_per_flush: u64,
    /// First touches of base pages for which one virtual CPU interrupts the others.
    pub touches_per_shootdown: u64,
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
    /// Making one page fault in a scan: its entry, and the time in the page's own record.
    pub mark_page_ps: u64,
    /// Looking in reclaim at one page and, through the reverse map, at whether it was accessed.
    pub reclaim_page_ps: u64,
    /// DAMON: clearing a page's accessed bit and looking at it an interval later.
    pub damon_look_ps: u64,
    /// DAMON: starting and stopping a kdamond.
    pub damon_pass_ps: u64,
    /// DAMON: making the files of a region.
    pub damon_region_ps: u64,
    /// DAMON: setting the addresses of a region.
    pub damon_set_ps: u64,
    /// A call that moves pages, however few.
    pub migrate_call_ps: u64,
    /// Moving one 4 KiB page, copy and call aside: unmap, remap, accounting.
    pub migrate_page_ps: u64,
    /// Moving one 2 MiB page, copy aside.
    pub migrate_huge_ps: u64,
    /// One 4 KiB page of those that are made a huge page, copy aside.
    pub collapse_page_ps: u64,
    /// Memtis: finding a sample's page and counting it.
    pub memtis_sample_ps: u64,
    /// Memtis: looking at one page of the lists of candidates.
    pub memtis_page_ps: u64,
    /// An agent: asking the kernel where a block lies.
    pub agent_lookup_ps: u64,
    /// An agent: reading how full the nodes are.
    pub agent_read_nodes_ps: u64,
    /// An agent: adding a sample to the heat of its block.
    pub agent_sample_ps: u64,
    /// An agent: an epoch, whatever was sampled.
    pub agent_epoch_ps: u64,
    /// An agent: a range, in each epoch.
    pub agent_range_ps: u64,
    /// An agent: a block whose place it knows, in each epoch.
    pub agent_block_ps: u64,
    /// The paper's kernel: finding out in which node a page lies, where all pages are looked at in a
    /// row.
    pub paper_page_ps: u64,
}

/// Costs of an x86-64 server with hardware virtualization and a Linux kernel on both levels.
pub(super) const X86_COSTS: CostModel = CostModel {
    // Linux, arch/x86/mm/tlb.c: "about 100 ns" behind tlb_single_page_flush_ceiling = 33.
    flush_page_ps: 100 * PS_PER_NS,
    // Assumed: a CR3 write.
    flush_space_ps: 200 * PS_PER_NS,
    // Assumed: as a full flush; the misses that follow are modelled, and cost more.
    invept_ps: 200 * PS_PER_NS,
    // Fitted: 58,697,567 flushes of virtual CPUs for 20,214,840 orders.
    vcpus_per_merged_invept: 7,
    // Secondary sources: about 1 us and 200 ns for each receiver.
    ipi_ps: 1000 * PS_PER_NS,
    ipi_receiver_ps: 200 * PS_PER_NS,
    // KVM's KVM_HC_SEND_IPI, which Linux guests use. That one call sends all interrupts of a
    // shootdown is assumed.
    vcpus_per_ipi_call: 128,
    // Assumed: entry, handler, end of interrupt.
    interrupt_ps: 1000 * PS_PER_NS,
    // Whole KVM_RUN of about 2,550 cycles at 2.9 GHz.
    exit_ps: 880 * PS_PER_NS,
    // KVM, 2 to 5 us.
    ept_violation_ps: 3000 * PS_PER_NS,
    // Fitted to the times that TPP takes for GUPS with 36 virtual CPUs, in the hypervisor and in the
    // guest. That it grows so: Boyd-Wickizer et al., Non-scalable locks are dangerous (2012).
    lock_line_ps: 80 * PS_PER_NS,
    // Fitted likewise; fewer are too fast. The second-level tables' lock, to see what is wrong and
    // to mend it, and in between that of the lists of pages.
    locks_per_host_hint: 4,
    // Assumed: a cache line that another core has changed.
    ask_vcpu_ps: 100 * PS_PER_NS,
    // Assumed: entry, handler, exit of a minor fault, in a guest.
    fault_ps: 1000 * PS_PER_NS,
    // Fitted: 2.75 million in 126 GiB, whatever manages the memory and however long it takes.
    touches_per_flush: 12,
    // Fitted likewise: 602,668.
    touches_per_shootdown: 55,
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
    // Assumed: two walks to a page's entry, as reclaim makes one.
    damon_look_ps: 1200 * PS_PER_NS,
    // Assumed: as many times less than in the emulator as a look.
    damon_pass_ps: 400_000 * PS_PER_NS,
    damon_region_ps: 30_000 * PS_PER_NS,
    damon_set_ps: 11_000 * PS_PER_NS,
    // Lab: promoting a page that faulted takes 44 us, of which copying and moving are 24.
    migrate_call_ps: 3500 * PS_PER_NS,
    // Measured on Zen 3 with move_pages in batches: 2.4 us per 4 KiB page and 195 us per 2 MiB,
    // copies at about 10.7 GB/s included; here without them.
    migrate_page_ps: 2000 * PS_PER_NS,
    migrate_huge_ps: 5000 * PS_PER_NS,
    // Assumed: a quarter of moving it, without a reverse map to walk and with one unmapping for all.
    collapse_page_ps: 500 * PS_PER_NS,
    // Measured by Demeter's authors in a guest: 7.5 million samples took 1.9 s, all looks at 3.6
    // million pages, twice a second for four minutes, 8.2 s.
    memtis_sample_ps: 256 * PS_PER_NS,
    memtis_page_ps: 5 * PS_PER_NS,
    // Assumed: a page or two of a move_pages call.
    agent_lookup_ps: 300 * PS_PER_NS,
    // Measured: 45 us to read one node of /proc/zoneinfo on a Xeon.
    agent_read_nodes_ps: 50_000 * PS_PER_NS,
    // These three measured: `cargo bench -p demeter-policy`.
    agent_sample_ps: 10 * PS_PER_NS,
    agent_epoch_ps: 10_000 * PS_PER_NS,
    agent_range_ps: 25 * PS_PER_NS,
    // Two windows of each block are estimated in an epoch.
    agent_block_ps: 20 * PS_PER_NS,
    // Assumed, with `seed-breakdown` in view: the page's entry and its record, held for a moment.
    paper_page_ps: 100 * PS_PER_NS,
};

/// How many times slower a kernel is on the emulator than on hardware, whatever the latencies of
/// memory are taken to be. Measured: a hint fault takes 5 to 7 us.
const EMULATED_KERNEL: u64 = 6;

/// Making a page fault in a scan. Measured: Linux scans 38,000 pages and then for 5 s, 32 times as
/// long, no more.
const EMULATED_MARK_PS: u64 = 3_800 * PS_PER_NS;

/// DAMON's look at a page. Measured: 20 to 50 us.
const EMULATED_DAMON_LOOK_PS: u64 = 35_000 * PS_PER_NS;

/// A pass of DAMON, however few regions it has. Measured in a VM whose fast memory is full, so that the kernel works in slow
/// memory: 8 to 15 ms.
const EMULATED_DAMON_PASS_PS: u64 = 12_000_000 * PS_PER_NS;

/// Making and setting a region of DAMON: two files of sysfs. Measured in such a VM: 386 to 564 ms for some 405 new
/// regions, and 170 us for each file that is there. While fast memory is free a new region costs 400 us.
const EMULATED_DAMON_REGION_PS: u64 = 900_000 * PS_PER_NS;
const EMULATED_DAMON_SET_PS: u64 = 340_000 * PS_PER_NS;

/// A fault in the second-level tables of a guest that the emulator runs on an emulated host, switches between both
/// included. Measured: 41 to 49 us, in seconds in which KVM handled 7,000 to 12,000 of them.
const EMULATED_EPT_VIOLATION_PS: u64 = 45_000 * PS_PER_NS;

/// Costs on the lab's emulator. What a system computes for itself costs what it does on hardware.
pub(super) const EMULATED_COSTS: CostModel = {
    let c = X86_COSTS;
    let slower = EMULATED_KERNEL;
    CostModel {
        flush_page_ps: c.flush_page_ps * slower,
        flush_space_ps: c.flush_space_ps * slower,
        invept_ps: c.invept_ps * slower,
        ipi_ps: c.ipi_ps * slower,
        ipi_receiver_ps: c.ipi_receiver_ps * slower,
        interrupt_ps: c.interrupt_ps * slower,
        // It runs no hypervisor.
        exit_ps: 0,
        ept_violation_ps: 0,
        lock_line_ps: 0,
        ask_vcpu_ps: 0,
        fault_ps: c.fault_ps * slower,
        switch_ps: c.switch_ps * slower,
        tick_ps: c.tick_ps * slower,
        // The plugin's ring costs the guest nothing until it is read.
        pebs_record_ps: 0,
        pebs_interrupt_ps: 0,
        record_drain_ps: c.record_drain_ps * slower,
        scan_entry_ps: c.scan_entry_ps * slower,
        mark_page_ps: EMULATED_MARK_PS,
        reclaim_page_ps: c.reclaim_page_ps * slower,
        damon_look_ps: EMULATED_DAMON_LOOK_PS,
        damon_pass_ps: EMULATED_DAMON_PASS_PS,
        damon_region_ps: EMULATED_DAMON_REGION_PS,
        damon_set_ps: EMULATED_DAMON_SET_PS,
        migrate_call_ps: c.migrate_call_ps * slower,
        migrate_page_ps: c.migrate_page_ps * slower,
        migrate_huge_ps: c.migrate_huge_ps * slower,
        collapse_page_ps: c.collapse_page_ps * slower,
        ..c
    }
};

/// Costs in a guest of an emulated host.
pub(super) const EMULATED_HOST_COSTS: CostModel = CostModel {
    ept_violation_ps: EMULATED_EPT_VIOLATION_PS,
    // Assumed: as small a part of it as on hardware.
    exit_ps: EMULATED_EPT_VIOLATION_PS / X86_COSTS.ept_violation_ps * X86_COSTS.exit_ps,
    ..EMULATED_COSTS
};
