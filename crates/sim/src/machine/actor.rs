//! Whoever acts inside a VM or for it: a kernel, an agent, the hypervisor.
//!
//! What it does takes time on the virtual CPU where it runs, and what it invalidates is gone from
//! every core of the VM, whose own time that takes too.

use super::core::Core;
use super::flush::FlushCounts;
use super::ledger::{Bill, Cause};
use super::memory::{LINE_BITS, Memory, TierId};
use super::sheet::CostSheet;
use super::walk::Space;
use crate::latency::Interruptions;

/// A virtual CPU: its time, and what it went to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Vcpu {
    /// Now, on this virtual CPU.
    pub(crate) clock_ps: u64,
    /// Adds up to the clock.
    pub(crate) bill: Bill,
    /// Of these, what other virtual CPUs and the hypervisor made it do.
    pub(crate) interruptions: Interruptions,
}

impl Vcpu {
    /// Lets time pass.
    pub(crate) fn charge(&mut self, cause: Cause, ps: u64) {
        self.clock_ps += ps;
        self.bill.charge(cause, ps);
    }

    /// Is interrupted so often, each time for so long.
    fn interrupt(&mut self, cause: Cause, times: u64, ps: u64) {
        self.charge(cause, times * ps);
        self.interruptions.times += times;
        self.interruptions.ps += times * ps;
    }
}

/// Pages beyond which Linux flushes everything instead of one address after the other
/// (`tlb_single_page_flush_ceiling`).
const FLUSH_PAGES_MAX: u64 = 33;

/// Somebody who acts.
pub(crate) struct Actor<'a> {
    /// The VM's virtual CPUs, each on the core of the same index.
    pub(crate) vcpus: &'a mut [Vcpu],
    pub(crate) cores: &'a mut [Core],
    /// The virtual CPU whose time it takes.
    pub(crate) on: usize,
    pub(crate) memory: &'a mut Memory,
    pub(crate) costs: &'a CostSheet,
    pub(crate) space: Space,
    pub(crate) flushes: &'a mut FlushCounts,
    /// A base page stands for `2^k` real ones.
    pub(crate) k: u32,
}

impl Actor<'_> {
    /// Takes time.
    pub(crate) fn charge(&mut self, cause: Cause, ps: u64) {
        self.vcpus[self.on].charge(cause, ps);
    }

    /// Takes time for each real page that a base page stands for.
    pub(crate) fn charge_page(&mut self, cause: Cause, ps: u64) {
        self.charge(cause, ps << self.k);
    }

    /// Now.
    pub(crate) fn now_ps(&self) -> u64 {
        self.vcpus[self.on].clock_ps
    }

    /// A guest invalidates one base page everywhere.
    pub(crate) fn flush_page(&mut self, gva: u64) {
        for core in &mut *self.cores {
            core.flush_page(self.space, gva);
        }
        let n = 1 << self.k;
        self.flushes.guest_local_one += n;
        self.charge_page(Cause::Flush, self.costs.flush_page_ps);
        self.shoot_down(n, self.costs.flush_page_ps);
    }

    /// A guest invalidates a huge page everywhere.
    pub(crate) fn flush_huge(&mut self, gva: u64) {
        for core in &mut *self.cores {
            core.flush_page(self.space, gva);
        }
        self.flushes.guest_local_one += 1;
        self.charge(Cause::Flush, self.costs.flush_page_ps);
        self.shoot_down(1, self.costs.flush_page_ps);
    }

    /// A guest invalidates so many base pages at once: one shootdown for all.
    pub(crate) fn flush_batch(&mut self, pages: &[u64]) {
        let real = (pages.len() as u64) << self.k;
        if real == 0 {
            return;
        }
        if real > FLUSH_PAGES_MAX {
            return self.flush_all();
        }
        for core in &mut *self.cores {
            pages
                .iter()
                .for_each(|&gva| core.flush_page(self.space, gva));
        }
        self.flushes.guest_local_one += real;
        self.charge(Cause::Flush, real * self.costs.flush_page_ps);
        self.shoot_down(1, real * self.costs.flush_page_ps);
    }

    /// A guest invalidates all of the address space everywhere.
    pub(crate) fn flush_all(&mut self) {
        for core in &mut *self.cores {
            core.flush_space(self.space);
        }
        self.flushes.guest_local_all += 1;
        self.charge(Cause::Flush, self.costs.flush_space_ps);
        self.shoot_down(1, self.costs.flush_space_ps);
    }

    /// The hypervisor forgets all that was cached from the VM's second-level tables, `times`
    /// over: it asks every virtual CPU to leave the guest for it, and does not wait. Requests
    /// that come while a virtual CPU is still on its way merge.
    pub(crate) fn invept(&mut self, times: u64) {
        if times == 0 {
            return;
        }
        for core in &mut *self.cores {
            core.flush_space(self.space);
        }
        let ask_ps = self.costs.ipi_receiver_ps;
        let handle_ps = self.costs.ipi_ps + self.costs.exit_ps + self.costs.invept_ps;
        let handled = (times * ask_ps).div_ceil(handle_ps);
        self.flushes.host_invept += times;
        self.flushes.host_vcpu += handled * self.cores.len() as u64;
        self.charge(Cause::Flush, times * ask_ps);
        for vcpu in &mut *self.vcpus {
            vcpu.interrupt(Cause::Exit, handled, handle_ps);
        }
    }

    /// Interrupts the other virtual CPUs, `times` over; each spends `work_ps` on it.
    fn shoot_down(&mut self, times: u64, work_ps: u64) {
        let receivers = self.vcpus.len() as u64 - 1;
        if receivers == 0 {
            return;
        }
        self.flushes.guest_remote += times;
        let send = self.costs.ipi_ps + receivers * self.costs.ipi_receiver_ps;
        self.charge(Cause::Flush, times * send);
        for (i, vcpu) in self.vcpus.iter_mut().enumerate() {
            if i != self.on {
                vcpu.interrupt(Cause::Flush, times, self.costs.ipi_receiver_ps + work_ps);
            }
        }
    }

    /// Copies bytes between tiers; the traffic is the tiers' and the time `cause`'s.
    pub(crate) fn copy(&mut self, cause: Cause, from: TierId, to: TierId, bytes: u64) {
        let tiers = &mut self.memory.tiers;
        let ps = tiers[from as usize].copy_ps(&tiers[to as usize], bytes);
        let lines = (bytes >> LINE_BITS) >> self.k;
        tiers[from as usize].lines_read += lines;
        tiers[to as usize].lines_written += lines;
        self.charge(cause, ps);
    }

    /// Fills bytes of a tier with zeroes.
    pub(crate) fn clear(&mut self, cause: Cause, tier: TierId, bytes: u64) {
        let tier = &mut self.memory.tiers[tier as usize];
        tier.lines_written += (bytes >> LINE_BITS) >> self.k;
        let ps = tier.clear_ps(bytes);
        self.charge(cause, ps);
    }
}
