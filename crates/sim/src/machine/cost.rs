//! Costs of events, all in one place.
//!
//! Every cost states its origin:
//! - a source, or *measured*: it was chosen without regard to results of this simulator;
//! - *assumed*: no source gives it;
//! - *fitted*: chosen so that the simulator meets a published figure, which the comment names.
//!
//! Times are picoseconds, so that sums are integers. Memory latency follows from load, see [`super::tier`]. Sizes and
//! latencies of caches and TLBs are in [`super::cpu`]. A scenario can change the costs of a kind (`sim.cost_percent`).

use demeter_scenario::CostPercent;

/// Picoseconds in a nanosecond.
pub const PS_PER_NS: u64 = 1000;

/// Picoseconds in a second, which is also the interval of a result's series.
pub(crate) const PS_PER_S: u64 = 1_000_000_000_000;

/// Picoseconds in a millisecond.
pub const PS_PER_MS: u64 = 1_000_000 * PS_PER_NS;

/// Time between two timer ticks: 250 a second, as in Debian's kernel.
pub(crate) const TICK_PERIOD_PS: u64 = 4_000_000_000;

/// Costs of events on a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CostModel {
    /// `invlpg`, `invpcid` or `invvpid` of one address.
    pub flush_page_ps: u64,
    /// A full flush of one address space's entries (`mov cr3`, `invpcid` all, `invvpid` single).
    pub flush_space_ps: u64,
    /// `invept`.
    pub invept_ps: u64,
    /// Number of a VM's other virtual CPUs for each `invept` that merges with the next. While they contend for the tables they
    /// are outside the guest, so one flush at their next entry serves all requests.
    pub vcpus_per_merged_invept: u64,
    /// Delivery of an inter-processor interrupt.
    pub ipi_ps: u64,
    /// Extra cost for each core that a hypervisor interrupts.
    pub ipi_receiver_ps: u64,
    /// Virtual CPUs that a guest can interrupt with one hypercall.
    pub vcpus_per_ipi_call: u64,
    /// Taking an interrupt in a guest, without its work. The sender waits this long.
    pub interrupt_ps: u64,
    /// A round trip from the guest to the hypervisor.
    pub exit_ps: u64,
    /// An EPT violation that the hypervisor handles, exit included.
    pub ept_violation_ps: u64,
    /// Extra time to hand over a contended lock, for each CPU that waits. If all wait, total waiting grows with the
    /// square of their number.
    pub lock_line_ps: u64,
    /// Contended locks that the hypervisor takes for a hint fault in the second-level tables.
    pub locks_per_host_hint: u64,
    /// Checking whether a virtual CPU must leave the guest.
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
    /// Reading one page table entry in a scan.
    pub scan_entry_ps: u64,
    /// Making one page fault in a scan: its entry, and the time stamp in the page's record.
    pub mark_page_ps: u64,
    /// Examining one page in reclaim: the reverse map and the accessed bit.
    pub reclaim_page_ps: u64,
    /// DAMON: clearing a page's accessed bit and reading it an interval later.
    pub damon_look_ps: u64,
    /// DAMON: starting and stopping a kdamond.
    pub damon_pass_ps: u64,
    /// DAMON: creating the files of a region.
    pub damon_region_ps: u64,
    /// DAMON: setting the addresses of a region.
    pub damon_set_ps: u64,
    /// A call that moves pages, for any number of pages.
    pub migrate_call_ps: u64,
    /// Time of a copy of pages, percent of what the tiers' bandwidths say.
    pub copy_percent: u64,
    /// Time of a page walk, percent of that of its references.
    pub walk_percent: u64,
    /// Moving one 4 KiB page without copy and call: unmap, remap, accounting.
    pub migrate_page_ps: u64,
    /// Moving one 2 MiB page, without the copy.
    pub migrate_huge_ps: u64,
    /// Collapsing one 4 KiB page into a huge page, without the copy.
    pub collapse_page_ps: u64,
    /// Memtis: finding a sample's page and counting it.
    pub memtis_sample_ps: u64,
    /// Memtis: examining one page of the candidate lists.
    pub memtis_page_ps: u64,
    /// An agent: asking the kernel for a block's node.
    pub agent_lookup_ps: u64,
    /// An agent: reading the fill level of the nodes.
    pub agent_read_nodes_ps: u64,
    /// An agent: adding a sample to the heat of its block.
    pub agent_sample_ps: u64,
    /// An agent: the fixed cost of an epoch.
    pub agent_epoch_ps: u64,
    /// An agent: a range, per epoch.
    pub agent_range_ps: u64,
    /// An agent: a block whose node it knows, per epoch.
    pub agent_block_ps: u64,
    /// The paper's kernel: finding the node of a page while it scans all pages in a row.
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
    // KVM's KVM_HC_SEND_IPI, which Linux guests use. Assumed: one call sends all interrupts of a shootdown.
    vcpus_per_ipi_call: 128,
    // Assumed: entry, handler, end of interrupt.
    interrupt_ps: 1000 * PS_PER_NS,
    // Whole KVM_RUN of about 2,550 cycles at 2.9 GHz.
    exit_ps: 880 * PS_PER_NS,
    // KVM, 2 to 5 us.
    ept_violation_ps: 3000 * PS_PER_NS,
    // Fitted to the times that TPP takes for GUPS with 36 virtual CPUs, in the hypervisor and in the guest. Source of
    // the quadratic growth: Boyd-Wickizer et al., Non-scalable locks are dangerous (2012).
    lock_line_ps: 80 * PS_PER_NS,
    // Fitted likewise; fewer are too fast. The second-level tables' lock is taken to find the cause and to repair the
    // entry, and in between that of the page lists.
    locks_per_host_hint: 4,
    // Assumed: a cache line that another core has modified.
    ask_vcpu_ps: 100 * PS_PER_NS,
    // Assumed: entry, handler, exit of a minor fault, in a guest.
    fault_ps: 1000 * PS_PER_NS,
    // Fitted: 2.75 million in 126 GiB, for any memory manager and run time.
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
    // Assumed: an entry, and a line of the page's record that misses all caches.
    mark_page_ps: 150 * PS_PER_NS,
    // Lab: kswapd takes 4 us for each page that it examines: the emulator's slowdown times this cost.
    reclaim_page_ps: 600 * PS_PER_NS,
    // Assumed: two walks to a page's entry; reclaim makes one.
    damon_look_ps: 1200 * PS_PER_NS,
    // Measured on Linux 6.18 in a VM with hardware virtualization, through sysfs: 95 us to start and stop a kdamond, and
    // 8 us for each of ten settings.
    damon_pass_ps: 175_000 * PS_PER_NS,
    // Measured there, for 500 to 4,000 regions: 0.4 to 1.3 us to create a region, and 12 to 15 us to open both its files.
    damon_region_ps: 16_000 * PS_PER_NS,
    // Measured there: writing to both, once they are open.
    damon_set_ps: 2_200 * PS_PER_NS,
    // Lab: promoting a page that faulted takes 44 us, of which copying and moving are 24.
    migrate_call_ps: 3500 * PS_PER_NS,
    copy_percent: 100,
    walk_percent: 100,
    // Measured on Zen 3 with move_pages in batches: 2.4 us per 4 KiB page and 195 us per 2 MiB. That includes copies at
    // about 10.7 GB/s, which are subtracted here.
    migrate_page_ps: 2000 * PS_PER_NS,
    migrate_huge_ps: 5000 * PS_PER_NS,
    // Assumed: a quarter of a move, as there is no reverse map to walk and one unmapping serves all.
    collapse_page_ps: 500 * PS_PER_NS,
    // Measured by Demeter's authors in a guest: 7.5 million samples took 1.9 s. Examining 3.6 million pages twice a
    // second for four minutes took 8.2 s.
    memtis_sample_ps: 256 * PS_PER_NS,
    memtis_page_ps: 5 * PS_PER_NS,
    // Assumed: the cost of a page or two in a move_pages call.
    agent_lookup_ps: 300 * PS_PER_NS,
    // Measured: 45 us to read one node of /proc/zoneinfo on a Xeon.
    agent_read_nodes_ps: 50_000 * PS_PER_NS,
    // These three measured: `cargo bench -p demeter-policy`.
    agent_sample_ps: 10 * PS_PER_NS,
    agent_epoch_ps: 10_000 * PS_PER_NS,
    agent_range_ps: 25 * PS_PER_NS,
    // Two windows of each block are evaluated in an epoch.
    agent_block_ps: 20 * PS_PER_NS,
    // Assumed, with `seed-breakdown` in view: the page's entry and its record, locked briefly.
    paper_page_ps: 100 * PS_PER_NS,
};

impl CostModel {
    /// The costs with those of some kinds changed.
    pub(crate) fn changed(mut self, percent: &CostPercent) -> Self {
        let change = |percent: u32, costs: &mut [&mut u64]| {
            for cost in costs {
                **cost = **cost * u64::from(percent) / 100;
            }
        };
        change(percent.copy, &mut [&mut self.copy_percent]);
        change(percent.walk, &mut [&mut self.walk_percent]);
        change(percent.migrate, &mut self.of_migrations());
        change(percent.shootdown, &mut self.of_shootdowns());
        change(percent.fault, &mut self.of_faults());
        change(percent.sample, &mut self.of_samples());
        change(percent.interrupt, &mut self.of_interrupts());
        change(percent.damon, &mut self.of_damon());
        change(percent.scan, &mut self.of_scans());
        self
    }

    fn of_migrations(&mut self) -> [&mut u64; 4] {
        [
            &mut self.migrate_call_ps,
            &mut self.migrate_page_ps,
            &mut self.migrate_huge_ps,
            &mut self.collapse_page_ps,
        ]
    }

    fn of_shootdowns(&mut self) -> [&mut u64; 6] {
        [
            &mut self.flush_page_ps,
            &mut self.flush_space_ps,
            &mut self.invept_ps,
            &mut self.ipi_ps,
            &mut self.ipi_receiver_ps,
            &mut self.ask_vcpu_ps,
        ]
    }

    fn of_faults(&mut self) -> [&mut u64; 4] {
        [
            &mut self.fault_ps,
            &mut self.exit_ps,
            &mut self.ept_violation_ps,
            &mut self.lock_line_ps,
        ]
    }

    fn of_samples(&mut self) -> [&mut u64; 5] {
        [
            &mut self.pebs_record_ps,
            &mut self.pebs_interrupt_ps,
            &mut self.record_drain_ps,
            &mut self.memtis_sample_ps,
            &mut self.agent_sample_ps,
        ]
    }

    fn of_interrupts(&mut self) -> [&mut u64; 3] {
        [
            &mut self.interrupt_ps,
            &mut self.switch_ps,
            &mut self.tick_ps,
        ]
    }

    fn of_damon(&mut self) -> [&mut u64; 4] {
        [
            &mut self.damon_look_ps,
            &mut self.damon_pass_ps,
            &mut self.damon_region_ps,
            &mut self.damon_set_ps,
        ]
    }

    fn of_scans(&mut self) -> [&mut u64; 10] {
        [
            &mut self.scan_entry_ps,
            &mut self.mark_page_ps,
            &mut self.reclaim_page_ps,
            &mut self.memtis_page_ps,
            &mut self.paper_page_ps,
            &mut self.agent_lookup_ps,
            &mut self.agent_read_nodes_ps,
            &mut self.agent_epoch_ps,
            &mut self.agent_range_ps,
            &mut self.agent_block_ps,
        ]
    }
}

/// Slowdown of a kernel on the emulator against hardware, for any memory latency. Measured: a hint fault takes 5 to 7
/// us.
const EMULATED_KERNEL: u64 = 6;

/// Making a page fault in a scan. Measured: Linux scans 38,000 pages and then pauses for 5 s, at most 32 times as long
/// as the scan.
const EMULATED_MARK_PS: u64 = 3_800 * PS_PER_NS;

/// Examining a page in DAMON. Measured: 20 to 50 us.
const EMULATED_DAMON_LOOK_PS: u64 = 35_000 * PS_PER_NS;

/// A pass of DAMON with any number of regions. Measured at 8 to 15 ms in a VM with full fast memory, whose kernel works
/// in slow memory.
const EMULATED_DAMON_PASS_PS: u64 = 12_000_000 * PS_PER_NS;

/// Creating a DAMON region with its two files, and writing to these. Measured in such a VM: 112 to 276 ms for 112 to 484
/// new regions. If their files are open, 14 to 20 ms for 180 regions.
const EMULATED_DAMON_REGION_PS: u64 = 500_000 * PS_PER_NS;
const EMULATED_DAMON_SET_PS: u64 = 70_000 * PS_PER_NS;

/// A second-level fault on an emulated host, including both switches. Measured: 41 to 49 us, in seconds in which KVM
/// handled 7,000 to 12,000 of them.
const EMULATED_EPT_VIOLATION_PS: u64 = 45_000 * PS_PER_NS;

/// Slowdown of a kernel by the clock of the lab's exact emulator, where an instruction takes a nanosecond. Measured in
/// `gups-exact`: to move a page of 4 KiB takes 4.9 us, and 2.4 us on hardware, both with the copy.
const EXACT_KERNEL: u64 = 2;

/// Costs on an emulator without a hypervisor. Its kernel is `slower` times as slow as on hardware, and a system's own
/// computation as fast.
const fn slowed(slower: u64) -> CostModel {
    let c = X86_COSTS;
    CostModel {
        flush_page_ps: c.flush_page_ps * slower,
        flush_space_ps: c.flush_space_ps * slower,
        invept_ps: c.invept_ps * slower,
        ipi_ps: c.ipi_ps * slower,
        ipi_receiver_ps: c.ipi_receiver_ps * slower,
        interrupt_ps: c.interrupt_ps * slower,
        exit_ps: 0,
        ept_violation_ps: 0,
        lock_line_ps: 0,
        ask_vcpu_ps: 0,
        fault_ps: c.fault_ps * slower,
        switch_ps: c.switch_ps * slower,
        tick_ps: c.tick_ps * slower,
        // Records in the plugin's ring cost the guest nothing until it reads them.
        pebs_record_ps: 0,
        pebs_interrupt_ps: 0,
        record_drain_ps: c.record_drain_ps * slower,
        scan_entry_ps: c.scan_entry_ps * slower,
        mark_page_ps: c.mark_page_ps * slower,
        reclaim_page_ps: c.reclaim_page_ps * slower,
        damon_look_ps: c.damon_look_ps * slower,
        damon_pass_ps: c.damon_pass_ps * slower,
        damon_region_ps: c.damon_region_ps * slower,
        damon_set_ps: c.damon_set_ps * slower,
        migrate_call_ps: c.migrate_call_ps * slower,
        migrate_page_ps: c.migrate_page_ps * slower,
        migrate_huge_ps: c.migrate_huge_ps * slower,
        collapse_page_ps: c.collapse_page_ps * slower,
        ..c
    }
}

/// Costs on the lab's exact emulator.
pub(super) const EXACT_COSTS: CostModel = slowed(EXACT_KERNEL);

/// Costs on the lab's packaged emulator.
pub(super) const EMULATED_COSTS: CostModel = CostModel {
    mark_page_ps: EMULATED_MARK_PS,
    damon_look_ps: EMULATED_DAMON_LOOK_PS,
    damon_pass_ps: EMULATED_DAMON_PASS_PS,
    damon_region_ps: EMULATED_DAMON_REGION_PS,
    damon_set_ps: EMULATED_DAMON_SET_PS,
    ..slowed(EMULATED_KERNEL)
};

/// Costs in a guest of an emulated host.
pub(super) const EMULATED_HOST_COSTS: CostModel = CostModel {
    ept_violation_ps: EMULATED_EPT_VIOLATION_PS,
    // Assumed: the same ratio as on hardware.
    exit_ps: EMULATED_EPT_VIOLATION_PS / X86_COSTS.ept_violation_ps * X86_COSTS.exit_ps,
    ..EMULATED_COSTS
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_of_costs_changes_alone() {
        let changed = |percent| X86_COSTS.changed(&percent);
        assert_eq!(changed(CostPercent::default()), X86_COSTS);
        let faults = changed(CostPercent {
            fault: 50,
            ..CostPercent::default()
        });
        let expected = CostModel {
            fault_ps: X86_COSTS.fault_ps / 2,
            exit_ps: X86_COSTS.exit_ps / 2,
            ept_violation_ps: X86_COSTS.ept_violation_ps / 2,
            lock_line_ps: X86_COSTS.lock_line_ps / 2,
            ..X86_COSTS
        };
        assert_eq!(faults, expected);
    }
}
