//! A virtual machine: virtual CPUs on cores of their own, a guest's kernel, the program that runs
//! in it, and what manages its memory.
//!
//! # Approach
//! A virtual CPU takes a slice of its thread's accesses through its core, and what that costs
//! moves its clock. Between slices come the events that are due: timer ticks, context switches,
//! and the manager's. The caller always lets the virtual CPU go on whose clock is furthest
//! behind, so that all clocks stay together and the order of events follows from them alone.
//!
//! # Properties
//! - Each virtual CPU's bill adds up to its clock.

use demeter_policy::GuestVirtAddr;

use crate::error::SimError;
use crate::guest::Guest;
use crate::hypervisor::{Backing, Hypervisor};
use crate::latency::{Interruptions, Latencies, Operation};
use crate::machine::actor::{Actor, Vcpu};
use crate::machine::core::{Core, Tables};
use crate::machine::flush::FlushCounts;
use crate::machine::ledger::{Bill, Cause};
use crate::machine::memory::{Memory, TierId};
use crate::machine::radix::PageSize;
use crate::machine::sheet::CostSheet;
use crate::machine::walk::{Fault, Space};
use crate::program::{BATCH, Batch, Program};
use crate::system::{Manager, SCAN_BYTES, scan_period_ps};

/// Time between two timer ticks: 250 a second, as Debian's kernel has it.
const TICK_PS: u64 = 4_000_000_000;

/// Time between two context switches of a busy virtual CPU: the ten wakes a second that a quiet
/// system's own threads need at the least.
const SWITCH_PS: u64 = 100_000_000_000;

/// Time between two wakes of a sampling thread.
const WORKER_PS: u64 = 2_000_000_000;

/// The least accesses in a slice.
const SLICE_MIN: usize = 32;

/// Faults in a row on one access: not present, its tables, its second-level tables, a hint, and
/// as many again for a move in between. More is an error of ours.
const FAULTS_MAX: u32 = 64;

/// A thread of the program.
#[derive(Debug, Clone, Default)]
struct Thread {
    batch: Batch,
    /// Accesses of the batch that are done.
    done: usize,
    /// Marked ends of operations that are behind.
    ended: usize,
    operation: Operation,
}

impl Thread {
    /// Operations of the batch that are done, as many as there are accesses done of all.
    fn operations(&self) -> u64 {
        let (done, all) = (self.done as u64, self.batch.accesses().len() as u64);
        u64::from(self.batch.ops) * done / all.max(1)
    }

    fn begin_batch(&mut self) {
        self.batch.clear();
        self.done = 0;
        self.ended = 0;
    }

    /// Accesses of the batch before the next marked end.
    fn next_end(&self) -> Option<usize> {
        self.batch.ends().get(self.ended).map(|&end| end.into())
    }
}

/// When the events of a virtual CPU are due.
#[derive(Debug, Clone, Copy)]
struct Due {
    tick_ps: u64,
    switch_ps: u64,
}

/// A VM's hardware, and what it has done.
pub(crate) struct Hardware {
    pub(crate) vcpus: Vec<Vcpu>,
    pub(crate) cores: Vec<Core>,
    pub(crate) flushes: FlushCounts,
    pub(crate) space: Space,
    pub(crate) costs: CostSheet,
    /// A base page and an access stand for `2^k` real ones.
    pub(crate) k: u32,
}

impl Hardware {
    fn actor<'a>(&'a mut self, on: usize, memory: &'a mut Memory) -> Actor<'a> {
        Actor {
            vcpus: &mut self.vcpus,
            cores: &mut self.cores,
            on,
            memory,
            costs: &self.costs,
            space: self.space,
            flushes: &mut self.flushes,
            k: self.k,
        }
    }
}

/// What all VMs share.
pub(crate) struct Host {
    pub(crate) memory: Memory,
    pub(crate) hypervisor: Hypervisor,
}

/// A virtual machine.
pub(crate) struct Vm<P> {
    pub(crate) hardware: Hardware,
    pub(crate) guest: Guest,
    pub(crate) backing: Backing,
    pub(crate) manager: Manager,
    pub(crate) program: P,
    /// Operations that the program has completed.
    pub(crate) ops: u64,
    /// Operations after which it is done; else it goes on for ever.
    pub(crate) share: Option<u64>,
    /// When it was done.
    finished_ps: Option<u64>,
    /// How long its operations took.
    pub(crate) latencies: Latencies,
    /// None while it takes a slice.
    threads: Vec<Option<Box<Thread>>>,
    /// The thread that each virtual CPU runs.
    running: Vec<usize>,
    due: Vec<Due>,
    manager_due_ps: u64,
    worker_due_ps: u64,
    /// When the timed phase began.
    start_ps: u64,
    /// Turns of the manager, to spread its work over virtual CPUs.
    turns: usize,
}

impl<P: Program> Vm<P> {
    /// A VM whose program has its memory, but has not touched it yet.
    pub(crate) fn new(
        hardware: Hardware,
        mut guest: Guest,
        backing: Backing,
        manager: Manager,
        mut program: P,
    ) -> Self {
        let bases = guest.map(&program.regions());
        program.place(&bases);
        let vcpus = hardware.vcpus.len();
        let due = Due {
            tick_ps: TICK_PS,
            switch_ps: SWITCH_PS,
        };
        Self {
            threads: (0..program.threads())
                .map(|_| Some(Box::default()))
                .collect(),
            running: (0..vcpus).collect(),
            due: vec![due; vcpus],
            hardware,
            guest,
            backing,
            manager,
            program,
            ops: 0,
            share: None,
            finished_ps: None,
            latencies: Latencies::default(),
            manager_due_ps: u64::MAX,
            worker_due_ps: u64::MAX,
            start_ps: 0,
            turns: 0,
        }
    }

    /// Virtual CPUs that have a thread to run: the first ones, and none once the program is done.
    fn busy(&self) -> usize {
        match self.finished_ps {
            Some(_) => 0,
            None => self.threads.len().min(self.hardware.vcpus.len()),
        }
    }

    /// When the program was done, since the timed phase began.
    pub(crate) fn elapsed_ps(&self) -> Option<u64> {
        Some(self.finished_ps? - self.start_ps)
    }

    /// Time that its threads had by `at_ps` after the timed phase began, taken together.
    pub(crate) fn thread_time_ps(&self, at_ps: u64) -> u64 {
        let ran_ps = self
            .elapsed_ps()
            .map_or(at_ps, |done_ps| done_ps.min(at_ps));
        self.threads.len() as u64 * ran_ps
    }

    /// The busy virtual CPU whose clock is furthest behind, with that clock.
    pub(crate) fn furthest_behind(&self) -> (u64, usize) {
        let clocks = self.hardware.vcpus[..self.busy()].iter();
        let behind = clocks.enumerate().map(|(i, v)| (v.clock_ps, i)).min();
        behind.unwrap_or((u64::MAX, 0))
    }

    /// The clock of the virtual CPU that is furthest ahead.
    pub(crate) fn latest_ps(&self) -> u64 {
        self.hardware
            .vcpus
            .iter()
            .map(|v| v.clock_ps)
            .max()
            .unwrap_or(0)
    }

    /// Lets every virtual CPU that has nothing to run wait until `at_ps` after the timed phase
    /// began, if it is not there yet.
    pub(crate) fn idle_until(&mut self, at_ps: u64) {
        let busy = self.busy();
        wait_until(&mut self.hardware.vcpus[busy..], self.start_ps + at_ps);
    }

    /// Touches the program's memory, on the first virtual CPU; nobody manages it yet.
    pub(crate) fn populate(&mut self, host: &mut Host) -> Result<(), SimError> {
        let mut thread = Thread::default();
        loop {
            thread.begin_batch();
            if !self.program.populate(&mut thread.batch) {
                return Ok(());
            }
            while thread.done < thread.batch.accesses().len() {
                self.take_slice(0, &mut thread, BATCH, host)?;
            }
        }
    }

    /// The timed phase begins: all clocks are there, and the manager starts.
    pub(crate) fn start(&mut self, start_ps: u64) {
        wait_until(&mut self.hardware.vcpus, start_ps);
        self.start_ps = start_ps;
        for thread in self.threads.iter_mut().flatten() {
            thread.operation = Operation::new(start_ps, Interruptions::default());
        }
        for vcpu in &mut self.hardware.vcpus {
            vcpu.interruptions = Interruptions::default();
        }
        let busy = self.busy();
        for (i, due) in self.due.iter_mut().enumerate() {
            // Not all in the same moment.
            let part = |ps: u64| start_ps + ps * (i as u64 + 1) / busy.max(1) as u64;
            *due = Due {
                tick_ps: part(TICK_PS),
                switch_ps: part(SWITCH_PS),
            };
        }
        match &self.manager {
            Manager::Nobody => {}
            Manager::Hints(hints) => self.manager_due_ps = start_ps + hints.period_ps(),
            Manager::Ageing(_) => {
                self.manager_due_ps = start_ps + scan_period_ps(self.guest.end_gpa());
            }
            Manager::Agent(agent) => {
                self.manager_due_ps = start_ps + agent.epoch_ps();
                if agent.has_worker() {
                    self.worker_due_ps = start_ps + WORKER_PS;
                }
                let sampling = agent.sampling();
                for (i, core) in self.hardware.cores.iter_mut().enumerate() {
                    let phase = sampling.period * i as u64 / busy.max(1) as u64;
                    core.sampler.start(sampling, phase);
                }
            }
        }
    }

    /// Lets a virtual CPU go on: the events that are due, then a slice of its thread.
    pub(crate) fn step(&mut self, on: usize, host: &mut Host) -> Result<(), SimError> {
        self.handle_events(on, host);
        let which = self.running[on];
        let mut thread = self.threads[which].take().ok_or(SimError::Stuck)?;
        if thread.done == thread.batch.accesses().len() {
            thread.begin_batch();
            let now_ns = (self.hardware.vcpus[on].clock_ps - self.start_ps) / 1000;
            self.program.next(which, now_ns, &mut thread.batch);
        }
        let slice = (BATCH >> self.hardware.k).max(SLICE_MIN);
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
        let compute_ps = ops * self.program.compute_ps();
        self.hardware.vcpus[on].charge(Cause::Compute, compute_ps);
        thread.operation.compute(compute_ps);
        if self.share.is_some_and(|share| self.ops >= share) {
            self.finished_ps = Some(self.hardware.vcpus[on].clock_ps);
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
                space: self.hardware.space,
            };
            let count = thread.next_end().unwrap_or(end).min(end) - thread.done;
            let (todo, memory) = (&thread.batch.accesses()[thread.done..], &mut host.memory);
            let core = &mut self.hardware.cores[on];
            let progress = core.run::<true, true>(todo, count, &mut tables, memory, &mut bill);
            let vcpu = &mut self.hardware.vcpus[on];
            let clock_ps = vcpu.bill.add_scaled(&bill, k);
            vcpu.clock_ps += clock_ps;
            thread.operation.spend(bill.total(), clock_ps);
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
                let compute_ps = self.program.compute_ps();
                let operation = &mut thread.operation;
                operation.look(vcpu.clock_ps, vcpu.interruptions);
                operation.end(compute_ps, k, &mut self.latencies);
                thread.ended += 1;
            }
        }
        if self.hardware.cores[on].sampler.is_full() {
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
        let mut actor = self.hardware.actor(on, &mut host.memory);
        match fault {
            Fault::Page => self.guest.fault(gva, &mut actor)?,
            Fault::Violation(gpa) => {
                host.hypervisor
                    .violation(&mut self.backing, gpa, &mut actor)?;
            }
            Fault::HostHint(gpa) => {
                if let Manager::Ageing(ageing) = &mut self.manager {
                    ageing.fault(gpa, &mut host.hypervisor, &mut self.backing, &mut actor);
                }
            }
            Fault::Hint => match &mut self.manager {
                Manager::Hints(hints) => hints.fault(gva.0, &mut self.guest, &mut actor),
                _ => {
                    self.guest.hint_fault(gva.0, &mut actor);
                }
            },
        }
        Ok(())
    }

    /// Whether a fault that was handled stands for as many real ones as its page does.
    fn is_scaled(&mut self, fault: Fault, gva: GuestVirtAddr) -> bool {
        let found = match fault {
            Fault::Page | Fault::Hint => self.guest.tables.find_mut(gva.0),
            Fault::Violation(gpa) | Fault::HostHint(gpa) => self.backing.tree.find_mut(gpa),
        };
        found.is_some_and(|(_, size)| size == PageSize::Base)
    }

    fn handle_events(&mut self, on: usize, host: &mut Host) {
        let now_ps = self.hardware.vcpus[on].clock_ps;
        let costs = self.hardware.costs;
        let ticks = overdue(&mut self.due[on].tick_ps, TICK_PS, now_ps);
        if ticks > 0 {
            self.hardware.vcpus[on].charge(Cause::Kernel, ticks * costs.tick_ps);
            let mut actor = self.hardware.actor(on, &mut host.memory);
            match &mut self.manager {
                Manager::Hints(hints) => hints.tick(&mut self.guest, &mut actor),
                Manager::Ageing(ageing) => {
                    let (end_gpa, hypervisor) = (self.guest.end_gpa(), &mut host.hypervisor);
                    ageing.tick(end_gpa, hypervisor, &mut self.backing, &mut actor);
                }
                Manager::Nobody | Manager::Agent(_) => {}
            }
        }
        let switches = overdue(&mut self.due[on].switch_ps, SWITCH_PS, now_ps);
        if switches > 0 {
            let vcpu = &mut self.hardware.vcpus[on];
            vcpu.charge(Cause::Kernel, switches * 2 * costs.switch_ps);
            self.hardware.cores[on].switch();
            let (vcpus, threads) = (self.hardware.vcpus.len(), self.threads.len());
            let next = self.running[on] + vcpus;
            self.running[on] = if next < threads { next } else { on };
            self.drain(on, on);
        }
        if now_ps >= self.worker_due_ps {
            self.run_worker(now_ps);
        }
        if now_ps >= self.manager_due_ps {
            self.run_manager(now_ps, host);
        }
    }

    /// The manager's turn: an epoch or a scan.
    fn run_manager(&mut self, now_ps: u64, host: &mut Host) {
        let on = self.place_of_manager(now_ps);
        let memory = &mut host.memory;
        match &mut self.manager {
            Manager::Nobody => self.manager_due_ps = u64::MAX,
            Manager::Hints(hints) => {
                let mut actor = self.hardware.actor(on, memory);
                hints.scan(&mut self.guest, &mut actor);
                self.manager_due_ps += hints.period_ps();
            }
            Manager::Agent(agent) => {
                agent.run_epoch(&mut self.guest, &mut self.hardware.actor(on, memory));
                self.manager_due_ps += agent.epoch_ps();
            }
            Manager::Ageing(ageing) => {
                let end_gpa = self.guest.end_gpa();
                let mut actor = self.hardware.actor(on, memory);
                let backing = &mut self.backing;
                ageing.scan(SCAN_BYTES, end_gpa, &host.hypervisor, backing, &mut actor);
                self.manager_due_ps += scan_period_ps(end_gpa);
            }
        }
        // What took longer than its period is not made up for.
        let after_ps = self.hardware.vcpus[on].clock_ps;
        self.manager_due_ps = self.manager_due_ps.max(after_ps.min(u64::MAX - 1));
    }

    /// The sampling thread's turn.
    fn run_worker(&mut self, now_ps: u64) {
        let on = self.place_of_manager(now_ps);
        let wakes = overdue(&mut self.worker_due_ps, WORKER_PS, now_ps);
        let switch_ps = self.hardware.costs.switch_ps;
        self.hardware.vcpus[on].charge(Cause::Track, wakes * 2 * switch_ps);
        for core in 0..self.busy() {
            self.drain(core, on);
        }
    }

    /// Where the manager runs: on a virtual CPU that has nothing else to do, else on each in turn.
    fn place_of_manager(&mut self, now_ps: u64) -> usize {
        let (vcpus, busy) = (self.hardware.vcpus.len(), self.busy());
        if vcpus > busy {
            let idle = &mut self.hardware.vcpus[vcpus - 1];
            let wait = now_ps.saturating_sub(idle.clock_ps);
            idle.charge(Cause::Idle, wait);
            return vcpus - 1;
        }
        self.turns += 1;
        self.turns % vcpus
    }

    /// Empties a core's sampling buffer, at the expense of a virtual CPU.
    fn drain(&mut self, core: usize, on: usize) {
        let Manager::Agent(agent) = &mut self.manager else {
            return;
        };
        let sampler = &mut self.hardware.cores[core].sampler;
        let ps = sampler.waiting() as u64 * self.hardware.costs.record_drain_ps;
        agent.take(sampler.drain());
        self.hardware.vcpus[on].charge(Cause::Track, ps);
    }

    /// Bytes promoted and demoted so far, whoever moved them.
    pub(crate) fn moved_bytes(&self) -> [u64; 2] {
        let counts = self.guest.counts;
        let [promoted, demoted] = self.backing.moved_bytes;
        [
            counts.promoted_bytes + promoted,
            counts.demoted_bytes + demoted,
        ]
    }

    /// Hardware samples that the manager has seen.
    pub(crate) fn samples(&self) -> u64 {
        match &self.manager {
            Manager::Agent(agent) => agent.samples_seen,
            _ => 0,
        }
    }

    /// Share of what the program says is hot that lies in the fast tier, 0 to 1; 0 if it does
    /// not say.
    pub(crate) fn hot_in_fast(&mut self, hypervisor: &Hypervisor, now_ns: u64) -> f64 {
        let page_bits = self.guest.page_bits();
        let (mut all, mut fast) = (0u64, 0u64);
        for range in self.program.hot(now_ns) {
            let mut frames = vec![];
            self.guest
                .tables
                .for_each(range.start().0..range.end().0, |_, entry, size| {
                    frames.push((entry.index(), size));
                });
            for (first, size) in frames {
                let count = (self.guest.bytes(size) >> page_bits) as u32;
                for frame in first..first + count {
                    let backed = self.backing.tree.frame(u64::from(frame) << page_bits);
                    let tier = backed.map(|f| hypervisor.tier_of(f));
                    all += 1;
                    fast += u64::from(tier == Some(TierId::Fast));
                }
            }
        }
        if all == 0 {
            0.0
        } else {
            fast as f64 / all as f64
        }
    }
}

/// Lets virtual CPUs wait until `ps` that are not there yet.
fn wait_until(vcpus: &mut [Vcpu], ps: u64) {
    for vcpu in vcpus {
        let wait = ps.saturating_sub(vcpu.clock_ps);
        vcpu.charge(Cause::Idle, wait);
    }
}

/// How often an event was due since it last was, now that it is `now_ps`; sets when it is next.
fn overdue(due_ps: &mut u64, period_ps: u64, now_ps: u64) -> u64 {
    if now_ps < *due_ps {
        return 0;
    }
    let times = (now_ps - *due_ps) / period_ps + 1;
    *due_ps += times * period_ps;
    times
}
