//! Software that acts in a VM or for it: a kernel, an agent, the hypervisor.
//!
//! Work takes time on the virtual CPU that does it. Invalidations take effect on every core of the VM, and cost time
//! there too.

use demeter_policy::GuestVirtAddr;

use super::core::Core;
use super::cost::CostModel;
use super::flush::FlushCounts;
use super::ledger::{Bill, Cause};
use super::memory::{LINE_BITS, Memory, NodeIndex};
use super::sampler::Sampler;
use super::walk::Space;
use crate::latency::Interruptions;

/// A virtual CPU: its clock and the causes of its time.
#[derive(Debug, Clone)]
pub(crate) struct Vcpu {
    /// Current time on this virtual CPU.
    pub(crate) clock_ps: u64,
    /// Time by cause. The sum equals the clock.
    pub(crate) bill: Bill,
    /// The part of the bill caused by interruptions from other virtual CPUs and the hypervisor.
    pub(crate) interruptions: Interruptions,
    /// The socket that it runs on.
    pub(crate) socket: usize,
    /// Its sampling unit.
    pub(crate) sampler: Sampler,
    /// The program's accesses that memory served, as real accesses.
    pub(crate) misses: u64,
    /// Work for which it had a core, by the end of its last turn.
    served_ps: u64,
}

impl Vcpu {
    /// An idle virtual CPU of a socket; each simulated access stands for `2^k` real ones.
    pub(crate) fn new(socket: usize, k: u32) -> Self {
        Self {
            socket,
            clock_ps: 0,
            bill: Bill::default(),
            interruptions: Interruptions::default(),
            sampler: Sampler::new(k),
            misses: 0,
            served_ps: 0,
        }
    }

    /// All its work so far.
    pub(crate) fn worked_ps(&self) -> u64 {
        self.clock_ps - self.bill.of(Cause::Idle) - self.bill.of(Cause::Steal)
    }

    /// Work done or assigned since its last turn ended.
    pub(crate) fn undone_ps(&self) -> u64 {
        self.worked_ps() - self.served_ps
    }

    /// Starts a turn on a core, or goes on waiting, from this time. Assigned work that is not done moves to after this
    /// time.
    pub(crate) fn begin_turn(&mut self, now_ps: u64) {
        let waited_ps = (now_ps + self.undone_ps()).saturating_sub(self.clock_ps);
        self.charge(Cause::Steal, waited_ps);
    }

    /// Ends its turn on a core.
    pub(crate) fn end_turn(&mut self) {
        self.served_ps = self.worked_ps();
    }

    /// Advances its clock.
    pub(crate) fn charge(&mut self, cause: Cause, ps: u64) {
        self.clock_ps += ps;
        self.bill.charge(cause, ps);
    }

    /// Adds a number of interruptions of `ps` each.
    fn interrupt(&mut self, cause: Cause, times: u64, ps: u64) {
        self.charge(cause, times * ps);
        self.interruptions.times += times;
        self.interruptions.ps += times * ps;
    }
}

/// Number of pages beyond which Linux flushes all instead of single addresses (`tlb_single_page_flush_ceiling`).
const FLUSH_PAGES_MAX: u64 = 33;

/// A context that acts on a VM, with the resources that it uses.
pub(crate) struct Actor<'a> {
    /// The VM's virtual CPUs.
    pub(crate) vcpus: &'a mut [Vcpu],
    /// The host's cores.
    pub(crate) cores: &'a mut [Core],
    /// The distinct cores on which the virtual CPUs run.
    pub(crate) placed: &'a [usize],
    /// The virtual CPU that pays for the work.
    pub(crate) on: usize,
    /// Number of virtual CPUs that run the program, from the first. Only these hold its translations.
    pub(crate) busy: usize,
    pub(crate) memory: &'a mut Memory,
    pub(crate) costs: &'a CostModel,
    pub(crate) space: Space,
    pub(crate) flushes: &'a mut FlushCounts,
    /// A base page stands for `2^k` real ones.
    pub(crate) k: u32,
    /// Number of threads that copy in parallel, each on its own virtual CPU.
    pub(crate) copiers: usize,
}

impl Actor<'_> {
    /// Charges time.
    pub(crate) fn charge(&mut self, cause: Cause, ps: u64) {
        self.vcpus[self.on].charge(cause, ps);
    }

    /// Charges another thread's time. The scheduler spreads that thread over all virtual CPUs.
    pub(crate) fn charge_all(&mut self, cause: Cause, ps: u64) {
        let part_ps = ps / self.vcpus.len() as u64;
        self.vcpus.iter_mut().for_each(|v| v.charge(cause, part_ps));
    }

    /// The other virtual CPUs of the VM, idle ones first.
    fn other_cpus(&self) -> impl Iterator<Item = usize> + use<> {
        let on = self.on;
        // The program runs on the first ones.
        (0..self.vcpus.len()).rev().filter(move |&cpu| cpu != on)
    }

    /// Runs `threads` threads at the same time, each on a virtual CPU of its own, idle ones first. The actor is one of them
    /// and waits for the others. Returns their CPU time.
    pub(crate) fn side_by_side(&mut self, threads: usize, mut run: impl FnMut(&mut Self)) -> u64 {
        let main = self.on;
        let cpus: Vec<usize> = std::iter::once(main).chain(self.other_cpus()).collect();
        let (mut longest_ps, mut all_ps, mut main_ps) = (0, 0, 0);
        for thread in 0..threads {
            self.on = cpus[thread % cpus.len()];
            let began_ps = self.now_ps();
            run(self);
            let took_ps = self.now_ps() - began_ps;
            all_ps += took_ps;
            longest_ps = longest_ps.max(took_ps);
            main_ps += if self.on == main { took_ps } else { 0 };
        }
        self.on = main;
        self.charge(Cause::Idle, longest_ps.saturating_sub(main_ps));
        all_ps
    }

    /// Charges time for each real page of a simulated base page.
    pub(crate) fn charge_page(&mut self, cause: Cause, ps: u64) {
        self.charge(cause, ps << self.k);
    }

    /// Charges the examination of real pages by reclaim. Half is the walk to the accessed bit, half the list handling
    /// (Demeter's authors measured 7.2 s and 8 s for TPP).
    pub(crate) fn look_in_reclaim(&mut self, pages: u64) {
        let half_ps = pages * self.costs.reclaim_page_ps / 2;
        self.charge(Cause::Track, half_ps);
        self.charge(Cause::Classify, half_ps);
    }

    /// Whether no thread of the program runs on this virtual CPU.
    pub(crate) fn is_alone(&self) -> bool {
        self.on >= self.busy
    }

    /// Current time.
    pub(crate) fn now_ps(&self) -> u64 {
        self.vcpus[self.on].clock_ps
    }

    /// Invalidates one base page for the guest's kernel, which moves memory of a process. The process runs on other
    /// CPUs, so this CPU has nothing to flush.
    pub(crate) fn flush_page(&mut self, gva: GuestVirtAddr) {
        for &core in self.placed {
            self.cores[core].flush_page(self.space, gva);
        }
        self.shoot_down(self.busy, 1 << self.k, self.costs.flush_page_ps);
    }

    /// Invalidates one huge page for the guest's kernel.
    pub(crate) fn flush_huge(&mut self, gva: GuestVirtAddr) {
        for &core in self.placed {
            self.cores[core].flush_huge(self.space, gva);
        }
        self.shoot_down(self.busy, 1, self.costs.flush_page_ps);
    }

    /// Invalidates several base pages with one shootdown.
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

    /// Invalidates the whole address space of the process.
    pub(crate) fn flush_all(&mut self) {
        for &core in self.placed {
            self.cores[core].flush_space(self.space);
        }
        self.shoot_down(self.busy, 1, self.costs.flush_space_ps);
    }

    /// Invalidates a process's own address space on all CPUs.
    pub(crate) fn flush_own(&mut self) {
        self.flushes.guest_local_all += 1;
        self.charge(Cause::Flush, self.costs.flush_space_ps);
        self.flush_all();
    }

    /// Runs enough idle processes on each virtual CPU to evict the program's translations. Returns their total time.
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

    /// Flushes all translations cached from the VM's second-level tables, `times` times in a row. The hypervisor asks
    /// the virtual CPUs to leave the guest and waits for them, while it holds the lock of the VM's tables.
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

    /// Takes a number of locks for which all virtual CPUs of the program contend.
    pub(crate) fn contend(&mut self, cause: Cause, locks: u64) {
        let others = self.others(self.busy);
        self.charge(cause, locks * others * others * self.costs.lock_line_ps);
    }

    /// Number of other virtual CPUs among the first `count`.
    fn others(&self, count: usize) -> u64 {
        (count - usize::from(self.on < count)) as u64
    }

    /// Charges interruptions that the guest's kernel sends to all other virtual CPUs for its own purposes.
    pub(crate) fn shoot_down_for_others(&mut self, times: u64) {
        self.shoot_down(self.vcpus.len(), times, self.costs.flush_page_ps);
    }

    /// Interrupts the others of the first `count` virtual CPUs, `times` times. Each spends `work_ps` on every
    /// interrupt.
    fn shoot_down(&mut self, count: usize, times: u64, work_ps: u64) {
        let receivers = self.others(count);
        if receivers == 0 || times == 0 {
            return;
        }
        self.flushes.guest_remote += times;
        // Before Sapphire Rapids, the hypervisor must send interrupts to other virtual CPUs.
        let sends = receivers.div_ceil(self.costs.vcpus_per_ipi_call);
        let send_ps = sends * self.costs.exit_ps + self.costs.ipi_ps + self.costs.interrupt_ps;
        self.charge(Cause::Flush, times * send_ps);
        for (i, vcpu) in self.vcpus[..count].iter_mut().enumerate() {
            if i != self.on {
                vcpu.interrupt(Cause::Flush, times, self.costs.interrupt_ps + work_ps);
            }
        }
    }

    /// The path from this virtual CPU's socket to a node.
    fn path_to(&self, node: impl Into<NodeIndex>) -> usize {
        let NodeIndex(node) = node.into();
        self.memory.first_path(self.vcpus[self.on].socket) + node
    }

    /// Current latency of a load from a node.
    pub(crate) fn latency_ps(&self, node: impl Into<NodeIndex>) -> u64 {
        self.memory.paths[self.path_to(node)].latency_ps
    }

    /// Copies bytes between nodes. The traffic counts for the nodes and the time for `cause`.
    pub(crate) fn copy(
        &mut self,
        cause: Cause,
        from: impl Into<NodeIndex>,
        to: impl Into<NodeIndex>,
        bytes: u64,
    ) {
        let (from, to) = (self.path_to(from), self.path_to(to));
        let paths = &mut self.memory.paths;
        let ps = paths[from].copy_ps(&paths[to], bytes) * self.costs.copy_percent / 100;
        let lines = (bytes >> LINE_BITS) >> self.k;
        paths[from].lines_read += lines;
        paths[to].lines_written += lines;
        let copiers = self.copiers.clamp(1, self.vcpus.len());
        let part_ps = ps / copiers as u64;
        for i in self.other_cpus().take(copiers - 1) {
            self.vcpus[i].charge(cause, part_ps);
        }
        self.charge(cause, ps - part_ps * (copiers as u64 - 1));
    }

    /// Zeroes bytes of a node.
    pub(crate) fn clear(&mut self, cause: Cause, node: impl Into<NodeIndex>, bytes: u64) {
        let path = self.path_to(node);
        let path = &mut self.memory.paths[path];
        path.lines_written += (bytes >> LINE_BITS) >> self.k;
        let ps = path.clear_ps(bytes);
        self.charge(cause, ps);
    }
}
