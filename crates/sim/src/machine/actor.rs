//! Whoever acts inside a VM or for it: a kernel, an agent, the hypervisor.
//!
//! What it does takes time on the virtual CPU where it runs, and what it invalidates is gone from
//! every core of the VM, whose own time that takes too.

use demeter_policy::GuestVirtAddr;

use super::core::Core;
use super::cost::CostModel;
use super::flush::FlushCounts;
use super::ledger::{Bill, Cause};
use super::memory::{LINE_BITS, Memory, TierId};
use super::sampler::Sampler;
use super::walk::Space;
use crate::latency::Interruptions;

/// A virtual CPU: its time, and what it went to.
#[derive(Debug, Clone)]
pub(crate) struct Vcpu {
    /// Now, on this virtual CPU.
    pub(crate) clock_ps: u64,
    /// Adds up to the clock.
    pub(crate) bill: Bill,
    /// Of these, what other virtual CPUs and the hypervisor made it do.
    pub(crate) interruptions: Interruptions,
    /// Its sampling unit.
    pub(crate) sampler: Sampler,
    /// Accesses of the program whose data came from memory, in real ones.
    pub(crate) misses: u64,
    /// Of its work, what it had a core for by the end of its last turn.
    served_ps: u64,
}

impl Vcpu {
    /// One that did nothing yet; each simulated access stands for `2^k`.
    pub(crate) fn new(k: u32) -> Self {
        Self {
            clock_ps: 0,
            bill: Bill::default(),
            interruptions: Interruptions::default(),
            sampler: Sampler::new(k),
            misses: 0,
            served_ps: 0,
        }
    }

    /// All that it did.
    pub(crate) fn worked_ps(&self) -> u64 {
        self.clock_ps - self.bill.of(Cause::Idle) - self.bill.of(Cause::Steal)
    }

    /// What it did or was given to do since its last turn ended.
    pub(crate) fn undone_ps(&self) -> u64 {
        self.worked_ps() - self.served_ps
    }

    /// It gets a core at this time, or goes on waiting then: what it was given to do is yet to
    /// come.
    pub(crate) fn begin_turn(&mut self, now_ps: u64) {
        let waited_ps = (now_ps + self.undone_ps()).saturating_sub(self.clock_ps);
        self.charge(Cause::Steal, waited_ps);
    }

    /// It gives up its core.
    pub(crate) fn end_turn(&mut self) {
        self.served_ps = self.worked_ps();
    }

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
    /// The VM's virtual CPUs.
    pub(crate) vcpus: &'a mut [Vcpu],
    /// The host's cores.
    pub(crate) cores: &'a mut [Core],
    /// Those on which the virtual CPUs run, each once.
    pub(crate) placed: &'a [usize],
    /// The virtual CPU whose time it takes.
    pub(crate) on: usize,
    /// Virtual CPUs that run the program, the first ones: only they have its translations.
    pub(crate) busy: usize,
    pub(crate) memory: &'a mut Memory,
    pub(crate) costs: &'a CostModel,
    pub(crate) space: Space,
    pub(crate) flushes: &'a mut FlushCounts,
    /// A base page stands for `2^k` real ones.
    pub(crate) k: u32,
    /// Threads that copy side by side, each on a virtual CPU of its own.
    pub(crate) copiers: usize,
}

impl Actor<'_> {
    /// Takes time.
    pub(crate) fn charge(&mut self, cause: Cause, ps: u64) {
        self.vcpus[self.on].charge(cause, ps);
    }

    /// Another thread takes time, which the scheduler moves from one virtual CPU to the next.
    pub(crate) fn charge_all(&mut self, cause: Cause, ps: u64) {
        let part_ps = ps / self.vcpus.len() as u64;
        self.vcpus.iter_mut().for_each(|v| v.charge(cause, part_ps));
    }

    /// Takes time for each real page that a base page stands for.
    pub(crate) fn charge_page(&mut self, cause: Cause, ps: u64) {
        self.charge(cause, ps << self.k);
    }

    /// Looks in reclaim at so many real pages. Half of it is the walk to the accessed bit, half the
    /// lists (Demeter's authors measured 7.2 s and 8 s for TPP).
    pub(crate) fn look_in_reclaim(&mut self, pages: u64) {
        let half_ps = pages * self.costs.reclaim_page_ps / 2;
        self.charge(Cause::Track, half_ps);
        self.charge(Cause::Classify, half_ps);
    }

    /// Whether no thread of the program wants the virtual CPU.
    pub(crate) fn is_alone(&self) -> bool {
        self.on >= self.busy
    }

    /// Now.
    pub(crate) fn now_ps(&self) -> u64 {
        self.vcpus[self.on].clock_ps
    }

    /// The guest's kernel invalidates one base page of a process that it moves memory of: not
    /// the process itself does it, so there is nothing to do on the CPU where that runs.
    pub(crate) fn flush_page(&mut self, gva: GuestVirtAddr) {
        for &core in self.placed {
            self.cores[core].flush_page(self.space, gva);
        }
        self.shoot_down(self.busy, 1 << self.k, self.costs.flush_page_ps);
    }

    /// The same for a huge page.
    pub(crate) fn flush_huge(&mut self, gva: GuestVirtAddr) {
        for &core in self.placed {
            self.cores[core].flush_huge(self.space, gva);
        }
        self.shoot_down(self.busy, 1, self.costs.flush_page_ps);
    }

    /// The same for so many base pages at once: one shootdown for all.
    pub(crate) fn flush_batch(&mut self, pages: &[GuestVirtAddr]) {
        let real = (pages.len() as u64) << self.k;
        if real == 0 {
            return;
        }
        if real > FLUSH_PAGES_MAX {
            return self.flush_all();
        }
        for &core in self.placed {
            let core = &mut self.cores[core];
            pages
                .iter()
                .for_each(|&gva| core.flush_page(self.space, gva));
        }
        self.shoot_down(self.busy, 1, real * self.costs.flush_page_ps);
    }

    /// The same for all of the process's address space.
    pub(crate) fn flush_all(&mut self) {
        for &core in self.placed {
            self.cores[core].flush_space(self.space);
        }
        self.shoot_down(self.busy, 1, self.costs.flush_space_ps);
    }

    /// A process invalidates all of its own address space everywhere.
    pub(crate) fn flush_own(&mut self) {
        self.flushes.guest_local_all += 1;
        self.charge(Cause::Flush, self.costs.flush_space_ps);
        self.flush_all();
    }

    /// Processes that do nothing run for a moment on each virtual CPU, so many that it forgets the program's translations.
    /// Returns what they have taken together.
    pub(crate) fn crowd_out(&mut self) -> u64 {
        let mut all_ps = 0;
        for &core in self.placed {
            self.cores[core].flush_space(self.space);
        }
        let spaces = self.cores.first().map_or(0, Core::spaces_to_flush);
        for vcpu in &mut *self.vcpus {
            vcpu.interrupt(Cause::Track, spaces, self.costs.switch_ps);
            all_ps += spaces * self.costs.switch_ps;
        }
        all_ps
    }

    /// The hypervisor forgets all that was cached from the VM's second-level tables, `times`
    /// over, one after the other: it asks the virtual CPUs to leave the guest for it and waits
    /// for them, with the lock of the VM's tables held.
    pub(crate) fn invept(&mut self, times: u64) {
        if times == 0 {
            return;
        }
        for &core in self.placed {
            self.cores[core].flush_space(self.space);
        }
        let vcpus = self.busy as u64;
        let ask_ps = self.vcpus.len() as u64 * self.costs.ask_vcpu_ps
            + self.costs.ipi_ps
            + vcpus * self.costs.ipi_receiver_ps
            + self.costs.exit_ps;
        let handle_ps = self.costs.exit_ps + self.costs.invept_ps;
        let merged = 1 + vcpus.saturating_sub(1) / self.costs.vcpus_per_merged_invept;
        let handled = times.div_ceil(merged);
        self.flushes.host_invept += times;
        self.flushes.host_vcpu += handled * vcpus;
        self.charge(Cause::Flush, times * ask_ps);
        self.contend(Cause::Exit, times);
        for vcpu in &mut self.vcpus[..self.busy] {
            vcpu.interrupt(Cause::Exit, handled, handle_ps);
        }
    }

    /// Takes locks, so many in all, for which all virtual CPUs that run the program contend.
    pub(crate) fn contend(&mut self, cause: Cause, locks: u64) {
        let others = self.others(self.busy);
        self.charge(cause, locks * others * others * self.costs.lock_line_ps);
    }

    /// Virtual CPUs beside this one among the first `count`.
    fn others(&self, count: usize) -> u64 {
        (count - usize::from(self.on < count)) as u64
    }

    /// The guest's kernel interrupts all other virtual CPUs so often for reasons of its own.
    pub(crate) fn shoot_down_for_others(&mut self, times: u64) {
        self.shoot_down(self.vcpus.len(), times, self.costs.flush_page_ps);
    }

    /// Interrupts the others of the first `count` virtual CPUs, `times` over; each spends `work_ps`
    /// on it.
    fn shoot_down(&mut self, count: usize, times: u64, work_ps: u64) {
        let receivers = self.others(count);
        if receivers == 0 || times == 0 {
            return;
        }
        self.flushes.guest_remote += times;
        // Until Sapphire Rapids the hypervisor has to send interrupts to other virtual CPUs.
        let sends = receivers.div_ceil(self.costs.vcpus_per_ipi_call);
        let send_ps = sends * self.costs.exit_ps + self.costs.ipi_ps + self.costs.interrupt_ps;
        self.charge(Cause::Flush, times * send_ps);
        for (i, vcpu) in self.vcpus[..count].iter_mut().enumerate() {
            if i != self.on {
                vcpu.interrupt(Cause::Flush, times, self.costs.interrupt_ps + work_ps);
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
        let copiers = self.copiers.clamp(1, self.vcpus.len());
        let part_ps = ps / copiers as u64;
        // Those that have nothing else to do come last.
        let others = (0..self.vcpus.len()).rev().filter(|&i| i != self.on);
        for i in others.take(copiers - 1) {
            self.vcpus[i].charge(cause, part_ps);
        }
        self.charge(cause, ps - part_ps * (copiers as u64 - 1));
    }

    /// Fills bytes of a tier with zeroes.
    pub(crate) fn clear(&mut self, cause: Cause, tier: TierId, bytes: u64) {
        let tier = &mut self.memory.tiers[tier as usize];
        tier.lines_written += (bytes >> LINE_BITS) >> self.k;
        let ps = tier.clear_ps(bytes);
        self.charge(cause, ps);
    }
}
