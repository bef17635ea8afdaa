//! The agent's tracker on DAMON. As in a live guest, [`Observer`] decides what to scan and when; a simulated kdamond
//! scans.
//!
//! Passes run while the agent works and sleeps; it reads their findings at its next epoch. In each interval that is
//! long enough, helper processes flush the TLB, as in a live agent. In the simulator the flush follows directly after
//! bits are cleared, before the program continues.
//!
//! Not modelled: the time to start and stop a kdamond, and to read its findings.

use std::num::NonZero;
use std::time::Duration;

use demeter_policy::damon::{CPU_PERCENT, Cost, Found, Look, Next, Observer, Prospect};
use demeter_policy::{BLOCK_SIZE, Block, GuestVirtAddr, Observation, Pid};

use super::super::NEVER_PS;
use crate::damon::{Attrs, Bounds, Kdamond};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::cost::PS_PER_NS;
use crate::machine::ledger::Cause;

/// A tracker that scans with DAMON.
#[derive(Debug)]
pub(super) struct DamonTracker {
    observer: Observer,
    running: Option<Running>,
    /// The blocks of the kdamond's current regions.
    set: Vec<(Pid, Block)>,
    /// Regions with files in sysfs. A real agent's kdamonds for several sizes count as one.
    made: u64,
    /// Time at which to ask the observer again.
    due_ps: u64,
    passes: u64,
    found: Vec<Observation>,
}

/// A pass in progress.
#[derive(Debug)]
struct Running {
    look: Look,
    kdamond: Kdamond<GuestVirtAddr>,
    /// Start time.
    began_ps: u64,
    /// Number of blocks whose regions were set, and the time to set them.
    set: u64,
    set_ps: u64,
    /// Time spent on flushes.
    flushed_ps: u64,
}

impl Running {
    /// Flushes the TLB at the start of an interval.
    fn flush(&mut self, actor: &mut Actor<'_>) {
        if self.look.pass.is_flushed {
            self.flushed_ps += actor.crowd_out();
        }
    }
}

impl DamonTracker {
    /// A tracker of all processes, on a machine with this many virtual CPUs.
    pub(super) fn new(vcpus: u32, now_ps: u64) -> Self {
        Self {
            observer: Observer::new(CPU_PERCENT, vcpus, time(now_ps)),
            running: None,
            set: vec![],
            made: 0,
            due_ps: now_ps,
            passes: 0,
            found: vec![],
        }
    }

    /// Time of its kdamond's next sample, or of the next pass.
    pub(super) fn due_ps(&self) -> u64 {
        let running = self.running.as_ref();
        running.map_or(self.due_ps, |running| running.kdamond.due_ps())
    }

    /// Bytes of the kdamond's current regions.
    pub(super) fn region_bytes(&self) -> usize {
        let running = self.running.as_ref();
        running.map_or(0, |running| size_of_val(running.kdamond.regions()))
    }

    /// Runs its kdamond or starts a pass, if due.
    pub(super) fn run(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        if actor.now_ps() < self.due_ps() {
            return;
        }
        if let Some(mut running) = self.running.take() {
            if !running.kdamond.look(guest, actor) {
                running.kdamond.go_on(guest, actor);
                running.flush(actor);
                self.running = Some(running);
                return;
            }
            self.end(running, guest, actor);
        }
        self.start(guest, actor);
    }

    /// Sets the blocks to scan first.
    pub(super) fn want(&mut self, wanted: &[(Pid, Block)]) {
        self.observer.want(wanted);
    }

    /// The agent goes to sleep with this prospect.
    pub(super) fn epoch_ended(&mut self, prospect: Prospect, now_ps: u64) {
        self.observer.set_prospect(prospect);
        self.due_ps = self.due_ps.min(now_ps);
    }

    /// Returns the findings since the last call.
    pub(super) fn take_found(&mut self) -> Vec<Observation> {
        std::mem::take(&mut self.found)
    }

    /// Starts the next pass, if due.
    fn start(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        for (pid, vmas) in guest.processes() {
            self.observer.set_memory(pid, vmas);
        }
        let look = match self.observer.next(time(actor.now_ps())) {
            Next::Look(look) => look,
            Next::Rest(until) => {
                let until_ns = u64::try_from(until.as_nanos()).unwrap_or(NEVER_PS);
                // One nanosecond later, so that rounding never makes it early.
                self.due_ps = until_ns.saturating_add(1).saturating_mul(PS_PER_NS);
                return;
            }
            Next::Idle => {
                self.due_ps = NEVER_PS;
                return;
            }
        };
        let blocks = look.blocks.len() as u64;
        let is_kept = self.set == look.blocks;
        let set = if is_kept { 0 } else { blocks };
        let new = set.saturating_sub(self.made);
        self.made += new;
        let costs = &actor.costs;
        let regions_ps = new * costs.damon_region_ps + set * costs.damon_set_ps;
        let set_ps = costs.damon_pass_ps + regions_ps;
        actor.charge(Cause::Track, set_ps);
        self.set.clone_from(&look.blocks);
        let attrs = Attrs {
            sample_ps: look.pass.interval.as_nanos() as u64 * PS_PER_NS,
            looks: look.pass.looks,
            bounds: Bounds {
                least: blocks,
                most: blocks,
                page_bytes: 1 << guest.page_bits(),
            },
        };
        self.passes += 1;
        let began_ps = actor.now_ps();
        let regions = look.blocks.iter();
        let regions = regions.map(|(_, block)| block.start()..Block(block.0 + 1).start());
        let kdamond = Kdamond::start_at(regions, attrs, self.passes, guest, actor);
        let mut running = Running {
            look,
            kdamond,
            began_ps,
            set,
            set_ps,
            flushed_ps: 0,
        };
        running.flush(actor);
        self.running = Some(running);
    }

    /// Collects the findings of a pass.
    fn end(&mut self, running: Running, guest: &mut Guest, actor: &mut Actor<'_>) {
        let elapsed = time(actor.now_ps() - running.began_ps);
        let mut asked = 0;
        let regions = running.kdamond.regions().iter();
        let found: Vec<_> = regions
            .map(|region| {
                let middle = GuestVirtAddr(region.range.start.0 + BLOCK_SIZE / 2);
                let page_bytes = match region.accesses {
                    0 => None,
                    _ => page_bytes(middle, guest),
                };
                asked += u64::from(region.accesses > 0);
                Found {
                    pid: guest.pid_of(region.range.start),
                    block: Block::of(region.range.start),
                    accesses: region.accesses,
                    page_bytes,
                }
            })
            .collect();
        let asked_ps = asked * actor.costs.agent_lookup_ps;
        actor.charge(Cause::Track, asked_ps);
        let cost = Cost {
            looking: time(running.kdamond.spent_ps() + running.flushed_ps),
            setting: time(running.set_ps + asked_ps),
            set: running.set,
        };
        let Running { look, kdamond, .. } = running;
        kdamond.stop(guest, actor);
        self.observer
            .found(&look, elapsed, &cost, &found, &mut self.found);
    }
}

/// Bytes that one page table entry stands for. A simulated access stands for 2^k real ones. A huge page therefore
/// counts as 2^k entries, and a base page as its real pages.
fn page_bytes(gva: GuestVirtAddr, guest: &Guest) -> Option<NonZero<u64>> {
    let (_, size) = guest.tables.find(gva)?;
    NonZero::new(guest.bytes(size) >> guest.k())
}

fn time(ps: u64) -> Duration {
    Duration::from_nanos(ps / PS_PER_NS)
}
