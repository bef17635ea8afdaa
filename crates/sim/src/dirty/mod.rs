//! Dirty logging on Arm and x86: the cost to a guest whose written pages KVM tracks.
//!
//! # Problem
//! Without a hardware log of dirty pages, KVM write-protects memory and detects writes by faults. It must first split
//! blocks of 2 MiB. Arm requires that a block becomes invalid on every CPU before it gets a table (break-before-make).
//! That takes two broadcasts, each with a DSB that waits for all broadcasts in flight. A guest with many virtual CPUs
//! may stall for half a minute.
//!
//! # Approach
//! The model has second-level tables, page by page ([`memory`]), and virtual CPUs that sweep their slices and fault
//! ([`vm`]). They queue for one lock and one interconnect ([`contended`]). A monitor protects, splits, clears and sends
//! ([`migration`]). The cost of each step is computed as a whole when it begins; eight successive faults form one step.
//!
//! # Properties
//! - Equal scenarios give equal results.
//! - A page written after its log was cleared is dirty; no write is lost ([`memory`]).
//! - No reader holds the lock beside a writer; no broadcast completes before its turn ([`contended`]).
//!
//! # Left out
//! Not modelled: TLB conflicts, which a CPU with FEAT_BBM level 2 may raise, and their flush. Not modelled, too: x86's
//! IPIs when a fault splits a block, and page walks after invalidations. Sending uses no bandwidth of the guest.

mod contended;
mod cost;
mod memory;
mod migration;
#[cfg(test)]
mod tests;
mod throughput;
mod vm;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use demeter_outcome::{LOGGING_COUNTERS, Metadata, Speed, SystemResult, Unit};
use demeter_scenario::{DirtyLogging, LoggedTask, Pages, Scenario, System, Workload};

use self::contended::{Interconnect, Lock};
use self::cost::Costs;
use self::memory::{PAGES_A_BLOCK, SecondLevelTables};
use self::migration::{Migrated, migrate, protect_all};
use self::throughput::Throughput;
use self::vm::{Counts, Vm};
use crate::digest::Digest;
use crate::error::SimError;
use crate::machine::cost::{PS_PER_NS, PS_PER_S};
use crate::progress::OnProgress;

/// Maximum pages per invalidation with FEAT_TLBIRANGE: the kernel's limit, 8 GiB.
const RANGE_PAGES: u64 = 32 << 16;
/// Picoseconds in a millisecond.
const PS_PER_MS: u64 = PS_PER_S / 1000;

/// Runs a scenario with `sim.dirty_logging`.
///
/// # Errors
/// The error of `watch`.
pub(crate) fn run(
    scenario: &Scenario,
    logging: &DirtyLogging,
    system: System,
    watch: &OnProgress<'_>,
) -> Result<SystemResult, SimError> {
    let mut vm = vm(scenario, logging);
    let vcpus = scenario.machine.vcpus as usize;
    let until_ps = scenario.duration_s * PS_PER_S;
    let done = match logging.task {
        LoggedTask::Unmap => unmap(&mut vm),
        LoggedTask::Pass => pass(&mut vm, vcpus, until_ps, watch)?,
        LoggedTask::Migrate => migrate(&mut vm, vcpus, until_ps, watch)?,
    };
    Ok(result(&vm, vcpus, &done, system))
}

/// The VM of a scenario, before logging begins.
fn vm(scenario: &Scenario, logging: &DirtyLogging) -> Vm {
    let stores = match &scenario.workload {
        Workload::Mix(mix) => mix.parts.first().map_or(0.0, |part| part.stores),
        _ => 0.0,
    };
    let slice = logging.slice_mib(scenario) as usize / 2 * PAGES_A_BLOCK;
    let stride = (logging.stride_kib / 4) as usize;
    let vcpus = scenario.machine.vcpus as usize;
    Vm {
        logging: *logging,
        costs: Costs::of(logging.isa),
        memory: SecondLevelTables::new(vcpus, slice, stride, stores, logging.pages != Pages::Base),
        lock: Lock::default(),
        interconnect: Interconnect::default(),
        counts: Counts::default(),
        access_ps: scenario.machine.fast.latency_ns * PS_PER_NS,
    }
}

/// Unmaps all memory, page by page.
fn unmap(vm: &mut Vm) -> Migrated {
    let pages = vm.memory.pages() as u64;
    let mut now_ps = 0;
    let each = if vm.logging.tlbi_range {
        RANGE_PAGES
    } else {
        1
    };
    for first in (0..pages).step_by(each as usize) {
        now_ps += each.min(pages - first) * vm.costs.entry_ps;
        now_ps = vm.broadcast(1, now_ps);
    }
    Migrated {
        stopped_ps: now_ps,
        done_ps: Some(now_ps),
        ..Migrated::default()
    }
}

/// Enables logging, and lets each virtual CPU sweep its slice once.
fn pass(
    vm: &mut Vm,
    vcpus: usize,
    until_ps: u64,
    watch: &OnProgress<'_>,
) -> Result<Migrated, SimError> {
    let mut begin_ps = protect_all(vm, 0);
    for block in 0..vm.memory.blocks() {
        begin_ps = vm.split(block, begin_ps);
    }
    let mut throughput = Throughput::default();
    let mut done_ps = begin_ps;
    let mut offsets = vec![0; vcpus];
    let mut queue: BinaryHeap<_> = (0..vcpus).map(|vcpu| Reverse((begin_ps, vcpu))).collect();
    let mut steps = 0u64;
    while let Some(Reverse((now_ps, vcpu))) = queue.pop() {
        steps += 1;
        if steps.is_multiple_of(1 << 16) {
            let swept = offsets.iter().sum::<usize>() as f64;
            watch(swept / (vcpus * vm.memory.steps()) as f64)?;
        }
        let (count, then_ps) = vm.access(vcpu, offsets[vcpu], now_ps);
        throughput.add(now_ps - begin_ps, then_ps - begin_ps, count as u64);
        offsets[vcpu] += count;
        done_ps = done_ps.max(then_ps);
        if offsets[vcpu] < vm.memory.steps() {
            queue.push(Reverse((then_ps, vcpu)));
        }
    }
    let took_ps = done_ps - begin_ps;
    Ok(Migrated {
        throughput,
        stopped_ps: took_ps,
        done_ps: (took_ps <= until_ps).then_some(took_ps),
        passes: 1,
        enable_ps: begin_ps,
        ..Migrated::default()
    })
}

fn result(vm: &Vm, vcpus: usize, done: &Migrated, system: System) -> SystemResult {
    let from_ps = match vm.logging.task {
        LoggedTask::Migrate => vm.logging.from_s * PS_PER_S,
        LoggedTask::Pass | LoggedTask::Unmap => 0,
    };
    let full_mops = vcpus as f64 / (vm.access_ps as f64 / PS_PER_S as f64) / 1e6;
    let starved_ms = done
        .throughput
        .starved_ms(from_ps, done.stopped_ps, full_mops);
    let downtime_ps = done.done_ps.map_or(0, |ps| ps - done.stopped_ps);
    let counts = [
        vm.counts.faults,
        vm.counts.splits,
        vm.counts.broadcasts,
        done.passes,
        done.pages_sent,
        starved_ms,
        done.enable_ps / PS_PER_MS,
        downtime_ps / PS_PER_MS,
    ];
    let names = LOGGING_COUNTERS.map(str::to_owned);
    let counters: BTreeMap<String, u64> = names.into_iter().zip(counts).collect();
    let mut digest = Digest::default();
    for number in counts.into_iter().chain([done.stopped_ps]) {
        digest.add(number);
    }
    let series = done.throughput.series(done.stopped_ps);
    let mean = |points: &[demeter_outcome::Point]| {
        let speeds: Vec<f64> = points.iter().filter_map(|point| point.speed).collect();
        (!speeds.is_empty()).then(|| speeds.iter().sum::<f64>() / speeds.len() as f64)
    };
    SystemResult {
        name: system.to_string(),
        metadata: Metadata {
            event_log_hash: Some(digest.0),
            ..Metadata::default()
        },
        elapsed_s: done
            .done_ps
            .map(|ps| (ps - from_ps.min(ps)) as f64 / PS_PER_S as f64),
        speed: Some(Speed::new(
            Unit::MOPS,
            mean(&series),
            mean(&series[series.len() * 2 / 3..]),
        )),
        counters,
        series,
        ..SystemResult::default()
    }
}
