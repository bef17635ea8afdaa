//! Slices of a thread's accesses on a virtual CPU, and their faults.

use demeter_policy::GuestVirtAddr;

use super::{Host, Machine, Vm, wait_until};
use crate::error::SimError;
use crate::latency::Operation;
use crate::machine::actor::Vcpu;
use crate::machine::core::{Core, Tables};
use crate::machine::ledger::{Bill, Cause};
use crate::machine::mapping::Fault;
use crate::machine::radix::PageSize;
use crate::program::{BATCH, Batch, Program};

/// Minimum number of accesses in a slice, unless each access faults.
const SLICE_MIN: usize = 32;

/// Maximum computation in a slice beyond that of one access, so that events are never late by more.
const COMPUTE_MAX_PS: u64 = 10_000_000_000;

/// Maximum number of successive faults on one access. A page fault, its tables, its second-level tables and a hint may
/// each fault, and again after a migration. More than this is a bug.
const FAULTS_MAX: u32 = 64;

/// A thread of the program.
#[derive(Debug, Clone, Default)]
pub(super) struct Thread {
    batch: Batch,
    /// Number of completed accesses of the batch.
    done: usize,
    /// Number of completed operation marks.
    ended: usize,
    pub(super) operation: Operation,
}

impl Thread {
    /// Completed operations of the batch, in proportion to its completed accesses.
    fn operations(&self) -> u64 {
        let (done, all) = (self.done as u64, self.batch.accesses().len() as u64);
        u64::from(self.batch.ops) * done / all.max(1)
    }

    /// Accesses of the batch whose computation fits into `most_ps`, at least one. Each operation computes for `op_ps`.
    fn accesses_within(&self, most_ps: u64, op_ps: u64) -> usize {
        let all_ps = u64::from(self.batch.ops) * op_ps;
        let accesses = self.batch.accesses().len() as u64;
        match all_ps {
            0 => usize::MAX,
            _ => (accesses * most_ps / all_ps).max(1) as usize,
        }
    }

    fn begin_batch(&mut self) {
        self.batch.clear();
        self.done = 0;
        self.ended = 0;
    }

    /// Accesses of the batch before the next operation mark.
    fn next_end(&self) -> Option<usize> {
        self.batch.ends().get(self.ended).map(|&end| end.into())
    }
}

impl<P: Program> Vm<P> {
    /// Populates the program's memory on the first virtual CPU, before the manager starts.
    pub(crate) fn populate(&mut self, host: &mut Host) -> Result<(), SimError> {
        let mut thread = Thread::default();
        loop {
            thread.begin_batch();
            let page_bytes = self.guest.bytes(PageSize::Base);
            if !self.program.populate(page_bytes, &mut thread.batch) {
                return Ok(());
            }
            while thread.done < thread.batch.accesses().len() {
                self.take_slice(0, &mut thread, BATCH, host)?;
            }
        }
    }

    /// Starts all threads from the state of the first, which has populated memory.
    fn filled(&mut self) {
        let now_ps = self.hardware.vcpus[0].clock_ps;
        self.filling = false;
        self.busy = self.program.threads().min(self.hardware.vcpus.len());
        wait_until(&mut self.hardware.vcpus, now_ps);
        self.begin_events(now_ps);
    }

    /// Advances a virtual CPU: handles due events, then runs a slice of its thread.
    pub(crate) fn step(&mut self, on: usize, host: &mut Host) -> Result<(), SimError> {
        self.handle_events(on, host)?;
        let which = self.running[on];
        let mut thread = self.threads[which].take().ok_or(SimError::Stuck)?;
        if thread.done == thread.batch.accesses().len() {
            thread.begin_batch();
            let page_bytes = self.guest.bytes(PageSize::Base);
            if self.filling && !self.program.populate(page_bytes, &mut thread.batch) {
                self.filled();
            }
            if !self.filling {
                let now_ns = (self.hardware.vcpus[on].clock_ps - self.start_ps) / 1000;
                self.program.next(which, now_ns, &mut thread.batch);
            }
        }
        let least = if self.filling { 1 } else { SLICE_MIN };
        let op_ps = self.program.compute_ps(which) << self.hardware.k;
        let slice = (BATCH >> self.hardware.k).max(least);
        let slice = slice.min(thread.accesses_within(COMPUTE_MAX_PS, op_ps));
        let Vcpu {
            clock_ps,
            interruptions,
            ..
        } = self.hardware.vcpus[on];
        thread.operation.look(clock_ps, interruptions);
        let before = thread.operations();
        let taken = self.take_slice(on, &mut thread, slice, host);
        let ops = (thread.operations() - before) << self.hardware.k;
        self.ops += ops;
        self.ops_by_process[self.program.process_of(which) as usize] += ops;
        let compute_ps = ops * self.program.compute_ps(which);
        self.hardware.vcpus[on].charge(Cause::Compute, compute_ps);
        thread.operation.compute(compute_ps);
        if self.share.is_some_and(|share| self.ops >= share) {
            self.finished_ps = Some(self.hardware.vcpus[on].clock_ps);
            self.busy = 0;
        }
        self.threads[which] = Some(thread);
        taken
    }

    /// Runs up to `most` accesses of a thread's batch.
    fn take_slice(
        &mut self,
        on: usize,
        thread: &mut Thread,
        most: usize,
        host: &mut Host,
    ) -> Result<(), SimError> {
        let end = thread.batch.accesses().len().min(thread.done + most);
        let k = self.hardware.k;
        let mut faults = 0;
        while thread.done < end {
            let mut bill = Bill::default();
            let mut tables = Tables {
                guest: &mut self.guest.tables,
                host: &mut self.backing.tree,
                host_first_page: self.backing.first_page,
                segments: &self.backing.segments,
                space: self.hardware.space,
            };
            let count = thread.next_end().unwrap_or(end).min(end) - thread.done;
            let todo = &thread.batch.accesses()[thread.done..];
            let Machine { cores, memory } = &mut host.machine;
            let (vcpu, core) = (&mut self.hardware.vcpus[on], self.hardware.placed[on]);
            let run = if self.backing.is_native {
                Core::run::<false, true>
            } else {
                Core::run::<true, true>
            };
            let (tables, sampler) = (&mut tables, &mut vcpu.sampler);
            let progress = run(
                &mut cores[core],
                todo,
                count,
                tables,
                memory,
                sampler,
                &mut bill,
            );
            let clock_ps = vcpu.bill.add_scaled(&bill, k);
            vcpu.clock_ps += clock_ps;
            thread.operation.spend(bill.total(), clock_ps);
            vcpu.misses += progress.misses << k;
            let record_ps = self.hardware.costs.pebs_record_ps;
            vcpu.charge(Cause::Track, progress.records * record_ps);
            thread.done += progress.done;
            if let Some(fault) = progress.fault {
                faults = if progress.done == 0 { faults + 1 } else { 1 };
                if faults > FAULTS_MAX {
                    return Err(SimError::Stuck);
                }
                let gva = thread.batch.accesses()[thread.done].gva();
                let before_ps = self.hardware.vcpus[on].clock_ps;
                self.handle_fault(on, fault, gva, host)?;
                if self.is_scaled(fault, gva) {
                    let ps = self.hardware.vcpus[on].clock_ps - before_ps;
                    thread.operation.spend(ps >> k, ps);
                }
            }
            while thread.next_end() == Some(thread.done) {
                let vcpu = &self.hardware.vcpus[on];
                let compute_ps = self.program.compute_ps(self.running[on]);
                let operation = &mut thread.operation;
                operation.look(vcpu.clock_ps, vcpu.interruptions);
                operation.end(compute_ps, k, &mut self.latencies);
                thread.ended += 1;
            }
        }
        if self.hardware.vcpus[on].sampler.is_full() {
            let interrupt_ps = self.hardware.costs.pebs_interrupt_ps;
            self.hardware.vcpus[on].charge(Cause::Track, interrupt_ps);
            self.drain(on, on);
        }
        Ok(())
    }

    fn handle_fault(
        &mut self,
        on: usize,
        fault: Fault,
        gva: GuestVirtAddr,
        host: &mut Host,
    ) -> Result<(), SimError> {
        let (manager, mut ctx) = self.manager_on(on, host);
        match fault {
            Fault::Page => {
                ctx.guest.fault(gva, &mut ctx.actor)?;
                manager.guest_took_memory(&mut ctx);
            }
            Fault::Violation(gpa) => {
                ctx.hypervisor.violation(ctx.backing, gpa, &mut ctx.actor)?;
                manager.host_took_memory(&mut ctx);
            }
            Fault::HostHint(gpa) => manager.host_hint_fault(gpa, &mut ctx),
            Fault::Hint => {
                manager.hint_fault(gva, &mut ctx);
                self.back_what_was_written(on, host)?;
            }
        }
        Ok(())
    }

    /// Whether a handled fault stands for as many real faults as its page has real pages.
    fn is_scaled(&mut self, fault: Fault, gva: GuestVirtAddr) -> bool {
        let found = match fault {
            Fault::Page | Fault::Hint => self.guest.tables.find_mut(gva),
            Fault::Violation(gpa) | Fault::HostHint(gpa) => self.backing.tree.find_mut(gpa),
        };
        found.is_some_and(|(_, size)| size == PageSize::Base)
    }
}
