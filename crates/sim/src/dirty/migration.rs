//! Live migration: memory is sent in passes while the VM runs.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use demeter_scenario::{DirtyLogging, Split};

use super::memory::PAGES_A_BLOCK;
use super::throughput::Throughput;
use super::vm::Vm;
use crate::error::SimError;
use crate::machine::cost::PS_PER_S;
use crate::progress::OnProgress;

/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;
/// Simulation steps between progress reports.
const STEPS_TOLD: u64 = 1 << 16;

/// Result of a migration.
#[derive(Debug, Default)]
pub(super) struct Migrated {
    pub throughput: Throughput,
    /// Time at which the VM was stopped for the final pass, or at which the time limit was reached.
    pub stopped_ps: u64,
    /// Time at which the destination had all memory; none if the time limit came first.
    pub done_ps: Option<u64>,
    pub passes: u64,
    pub pages_sent: u64,
    pub enable_ps: u64,
}

/// A virtual CPU in its endless sweep.
#[derive(Debug, Clone, Copy, Default)]
struct Vcpu {
    /// Next step of the sweep.
    offset: usize,
    /// Time of that step.
    at_ps: u64,
    /// Whether no access in its slice stops. Free virtual CPUs are not simulated step by step.
    is_free: bool,
}

/// The monitor's next action.
#[derive(Debug, Clone, Copy)]
enum Next {
    Enable,
    Split { block: usize },
    Chunk { first: usize },
    Done,
}

/// A migration in progress.
struct Migration<'a> {
    vm: &'a mut Vm,
    vcpus: Vec<Vcpu>,
    queue: BinaryHeap<Reverse<(u64, usize)>>,
    next: Next,
    out: Migrated,
}

/// Migrates a VM, until `until_ps` at most.
pub(super) fn migrate(
    vm: &mut Vm,
    vcpus: usize,
    until_ps: u64,
    watch: &OnProgress<'_>,
) -> Result<Migrated, SimError> {
    let from_ps = vm.logging.from_s * PS_PER_S;
    let mut migration = Migration {
        vm,
        vcpus: vec![Vcpu::default(); vcpus],
        queue: (0..vcpus).map(|vcpu| Reverse((0, vcpu))).collect(),
        next: Next::Enable,
        out: Migrated::default(),
    };
    // At equal times the monitor acts last.
    migration.queue.push(Reverse((from_ps, vcpus)));
    let mut steps = 0u64;
    while let Some(Reverse((now_ps, actor))) = migration.queue.pop() {
        steps += 1;
        if steps.is_multiple_of(STEPS_TOLD) {
            watch(now_ps as f64 / until_ps as f64)?;
        }
        if now_ps >= until_ps {
            migration.out.stopped_ps = until_ps;
            break;
        }
        if actor < vcpus {
            migration.sweep(actor, now_ps);
            continue;
        }
        let then_ps = migration.monitor(now_ps);
        if let Next::Done = migration.next {
            break;
        }
        migration.queue.push(Reverse((then_ps, vcpus)));
    }
    let stopped_ps = migration.out.stopped_ps;
    for vcpu in 0..vcpus {
        migration.catch_up(vcpu, stopped_ps);
    }
    Ok(migration.out)
}

impl Migration<'_> {
    /// Runs a virtual CPU's next accesses.
    fn sweep(&mut self, number: usize, now_ps: u64) {
        let vcpu = &mut self.vcpus[number];
        vcpu.at_ps = now_ps;
        if self.vm.memory.pending(number) == 0 {
            vcpu.is_free = true;
            return;
        }
        let (count, done_ps) = self.vm.access(number, vcpu.offset, now_ps);
        vcpu.offset = (vcpu.offset + count) % self.vm.memory.steps();
        self.out.throughput.add(now_ps, done_ps, count as u64);
        self.queue.push(Reverse((done_ps, number)));
    }

    /// Adds the accesses of a free virtual CPU up to now.
    fn catch_up(&mut self, number: usize, now_ps: u64) {
        let vcpu = &mut self.vcpus[number];
        if !vcpu.is_free || now_ps <= vcpu.at_ps {
            return;
        }
        let count = (now_ps - vcpu.at_ps) / self.vm.access_ps;
        self.out.throughput.add(vcpu.at_ps, now_ps, count);
        let steps = self.vm.memory.steps() as u64;
        vcpu.offset = ((vcpu.offset as u64 + count) % steps) as usize;
        vcpu.at_ps = now_ps;
    }

    /// Resumes step-by-step simulation of free virtual CPUs with accesses that now stop.
    fn wake(&mut self, now_ps: u64) {
        for number in 0..self.vcpus.len() {
            if self.vcpus[number].is_free && self.vm.memory.pending(number) > 0 {
                self.catch_up(number, now_ps);
                self.vcpus[number].is_free = false;
                self.queue.push(Reverse((now_ps, number)));
            }
        }
    }

    /// Runs the monitor's next action; returns its end.
    fn monitor(&mut self, now_ps: u64) -> u64 {
        match self.next {
            Next::Enable => {
                self.next = Next::Chunk { first: 0 };
                if self.vm.logging.initially_set {
                    return now_ps;
                }
                if self.vm.logging.split == Split::Eager {
                    self.next = Next::Split { block: 0 };
                }
                let then_ps = protect_all(self.vm, now_ps);
                self.out.enable_ps = then_ps - now_ps;
                self.wake(then_ps);
                then_ps
            }
            Next::Split { block } => {
                let then_ps = self.vm.split(block, now_ps);
                self.out.enable_ps += then_ps - now_ps;
                self.next = match block + 1 < self.vm.memory.blocks() {
                    true => Next::Split { block: block + 1 },
                    false => Next::Chunk { first: 0 },
                };
                then_ps
            }
            Next::Chunk { first } => self.chunk(first, now_ps),
            Next::Done => now_ps,
        }
    }

    /// Clears the log of a chunk and sends its dirty pages.
    fn chunk(&mut self, first: usize, now_ps: u64) -> u64 {
        let DirtyLogging { chunk_mib, .. } = self.vm.logging;
        let length = usize::try_from(chunk_mib / 2).unwrap_or(usize::MAX) * PAGES_A_BLOCK;
        let all = self.vm.memory.pages();
        let end = first.saturating_add(length).min(all);
        let mut at_ps = now_ps;
        // The first pass sends all memory, even with logs cleared chunk by chunk.
        let is_first = self.out.passes == 0;
        let protected = self.vm.memory.protect(first..end);
        at_ps = protect(
            self.vm,
            protected.pages as u64,
            protected.blocks as u64,
            at_ps,
        );
        for block in first / PAGES_A_BLOCK..end / PAGES_A_BLOCK {
            at_ps = self.vm.split(block, at_ps);
        }
        self.wake(at_ps);
        let sent = if is_first {
            end - first
        } else {
            protected.dirty
        } as u64;
        self.out.pages_sent += sent;
        let sent_ps = at_ps.max(now_ps + self.send_ps(sent));
        self.next = Next::Chunk { first: end };
        if end < all {
            return sent_ps;
        }
        self.out.passes += 1;
        self.next = Next::Chunk { first: 0 };
        let rest = self.vm.memory.dirty() as u64;
        let rest_ps = self.send_ps(rest);
        let DirtyLogging {
            passes_max,
            downtime_ms,
            ..
        } = self.vm.logging;
        let fits = rest_ps <= downtime_ms * (PS_PER_S / 1000);
        if fits || self.out.passes >= passes_max.into() {
            self.next = Next::Done;
            self.out.pages_sent += rest;
            self.out.stopped_ps = sent_ps;
            self.out.done_ps = Some(sent_ps + rest_ps);
        }
        sent_ps
    }

    fn send_ps(&self, pages: u64) -> u64 {
        // 10^9 bytes a second equal one byte in 1,000 ps.
        pages * PAGE_BYTES * 1000 / self.vm.logging.bandwidth_gbps
    }
}

/// Write-protects all memory at once; returns the end time.
pub(super) fn protect_all(vm: &mut Vm, now_ps: u64) -> u64 {
    let protected = vm.memory.protect(0..vm.memory.pages());
    protect(vm, protected.pages as u64, protected.blocks as u64, now_ps)
}

/// End of write-protecting this many entries, with one invalidation for all.
fn protect(vm: &mut Vm, pages: u64, blocks: u64, now_ps: u64) -> u64 {
    if pages + blocks == 0 {
        return now_ps;
    }
    let lines_ps = vm.costs.lines_by_reader * vm.costs.line_ps;
    let work_ps = pages * vm.costs.protect_page_ps + blocks * vm.costs.protect_block_ps;
    let changed_ps = vm.lock.write(now_ps, lines_ps) + work_ps;
    let done_ps = vm.broadcast(1, changed_ps);
    vm.lock.written_until(done_ps);
    done_ps
}
