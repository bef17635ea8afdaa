//! Events between slices: timer ticks, context switches, the manager's turns.

use super::{Host, Vm, wait_until};
use crate::error::SimError;
use crate::machine::cost::TICK_PERIOD_PS;
use crate::machine::ledger::Cause;
use crate::program::Program;
use crate::system::NEVER_PS;

/// Time between two context switches of a busy virtual CPU: ten wakes a second, the least that a quiet system's own
/// threads need.
pub(super) const SWITCH_PS: u64 = 100_000_000_000;

/// Time between two wakes of a sampling thread.
pub(super) const WORKER_PS: u64 = 2_000_000_000;

/// Due times of a virtual CPU's events.
#[derive(Debug, Clone, Copy)]
pub(super) struct Due {
    pub(super) tick_ps: u64,
    pub(super) switch_ps: u64,
}

impl<P: Program> Vm<P> {
    pub(super) fn handle_events(&mut self, on: usize, host: &mut Host) -> Result<(), SimError> {
        let now_ps = self.hardware.vcpus[on].clock_ps;
        let costs = self.hardware.costs;
        let ticks = overdue(&mut self.due[on].tick_ps, TICK_PERIOD_PS, now_ps);
        if ticks > 0 {
            self.hardware.vcpus[on].charge(Cause::Kernel, ticks * costs.tick_ps);
            self.run_reclaimer(on, now_ps, host)?;
        }
        let switches = overdue(&mut self.due[on].switch_ps, SWITCH_PS, now_ps);
        if switches > 0 {
            let vcpu = &mut self.hardware.vcpus[on];
            vcpu.charge(Cause::Kernel, switches * 2 * costs.switch_ps);
            host.machine.cores[self.hardware.placed[on]].switch(self.hardware.space);
            let (vcpus, threads) = (self.hardware.vcpus.len(), self.threads.len());
            let next = self.running[on] + vcpus;
            self.running[on] = if next < threads { next } else { on };
            if !self.manager.has_worker() {
                self.drain(on, on);
            }
        }
        if now_ps >= self.worker_due_ps {
            self.run_worker(on, now_ps, host);
        }
        if now_ps >= self.manager_due_ps {
            self.run_manager(on, now_ps, host)?;
        }
        if now_ps >= self.khugepaged_due_ps {
            self.run_khugepaged(on, now_ps, host)?;
        }
        Ok(())
    }

    /// Runs the reclaim thread, on an idle virtual CPU if there is one, or beside the program on `on`.
    fn run_reclaimer(&mut self, on: usize, now_ps: u64, host: &mut Host) -> Result<(), SimError> {
        let Some(woken_ps) = self.manager.reclaim_since_ps(now_ps) else {
            return Ok(());
        };
        let idle = self.idle_at(woken_ps);
        if idle.is_some_and(|idle| self.hardware.vcpus[idle].clock_ps > now_ps) {
            // Its previous work is not done yet.
            return Ok(());
        }
        let on = idle.unwrap_or(on);
        let (manager, mut ctx) = self.manager_on(on, host);
        manager.reclaim(now_ps, &mut ctx);
        self.back_what_was_written(on, host)
    }

    /// Backs pages that the guest's kernel copied to, and charges the virtual CPU that copied them.
    pub(super) fn back_what_was_written(
        &mut self,
        on: usize,
        host: &mut Host,
    ) -> Result<(), SimError> {
        for gpa in self.guest.take_written() {
            if self.backing.tree.find_mut(gpa).is_none() {
                let mut actor = self.hardware.actor(on, self.busy, &mut host.machine);
                host.hypervisor
                    .violation(&mut self.backing, gpa, &mut actor)?;
            }
        }
        Ok(())
    }

    /// Runs the manager's epoch or scan, on an idle virtual CPU if there is one, or beside the program on `on`.
    fn run_manager(&mut self, on: usize, now_ps: u64, host: &mut Host) -> Result<(), SimError> {
        let on = self.idle_at(now_ps).unwrap_or(on);
        let (manager, mut ctx) = self.manager_on(on, host);
        let due_ps = manager.turn(&mut ctx);
        if let Some(fault) = manager.fault() {
            return Err(fault);
        }
        // If a turn took longer than its period, the missed turns are skipped.
        let after_ps = self.hardware.vcpus[on].clock_ps;
        self.manager_due_ps = due_ps.max(after_ps);
        // Managers with a worker say so themselves.
        let is_asked = !self.manager.has_worker();
        if is_asked && self.manager.sampling(self.hardware.k) != self.sampling {
            self.sample();
        }
        self.back_what_was_written(on, host)
    }

    /// Runs a pass of khugepaged, on an idle virtual CPU if there is one.
    fn run_khugepaged(&mut self, on: usize, now_ps: u64, host: &mut Host) -> Result<(), SimError> {
        let on = self.idle_at(now_ps).unwrap_or(on);
        let (_, mut ctx) = self.manager_on(on, host);
        let due_ps = ctx.guest.run_khugepaged(&mut ctx.actor);
        self.khugepaged_due_ps = due_ps.unwrap_or(NEVER_PS);
        self.back_what_was_written(on, host)
    }

    /// Runs the sampling thread, on an idle virtual CPU if there is one.
    fn run_worker(&mut self, on: usize, now_ps: u64, host: &mut Host) {
        let on = self.idle_at(now_ps).unwrap_or(on);
        let began_ps = self.hardware.vcpus[on].clock_ps;
        let wakes = overdue(&mut self.worker_due_ps, WORKER_PS, now_ps);
        let switch_ps = self.hardware.costs.switch_ps;
        self.hardware.vcpus[on].charge(Cause::Track, wakes * 2 * switch_ps);
        for vcpu in 0..self.busy {
            self.drain(vcpu, on);
        }
        let (manager, mut ctx) = self.manager_on(on, host);
        if manager.worker_turn(began_ps, &mut ctx) {
            self.sample();
        }
    }

    /// An idle virtual CPU, advanced to `now_ps`.
    pub(super) fn idle_at(&mut self, now_ps: u64) -> Option<usize> {
        let last = self.hardware.vcpus.len() - 1;
        (last >= self.busy).then(|| {
            wait_until(&mut self.hardware.vcpus[last..], now_ps);
            last
        })
    }

    /// Drains a virtual CPU's sampling buffer and charges the time to `on`.
    pub(super) fn drain(&mut self, vcpu: usize, on: usize) {
        let sampler = &mut self.hardware.vcpus[vcpu].sampler;
        let ps = sampler.waiting() as u64 * self.hardware.costs.record_drain_ps;
        self.manager.take_samples(sampler.drain().as_slice());
        self.hardware.vcpus[on].charge(Cause::Track, ps);
    }
}

/// Number of periods that have elapsed by `now_ps`; advances the due time.
fn overdue(due_ps: &mut u64, period_ps: u64, now_ps: u64) -> u64 {
    if now_ps < *due_ps {
        return 0;
    }
    let times = (now_ps - *due_ps) / period_ps + 1;
    *due_ps += times * period_ps;
    times
}
