//! Virtual CPUs on cores: each on one of its own, or several in turn.
//!
//! # Approach
//! A core is as far in time as the virtual CPU that runs on it. The core that is furthest behind
//! goes on, so that all stay together. When a time slice is over, the next in the ring that wants
//! to run takes the core; what it has waited is stolen from it. A virtual CPU may be given work
//! while it waits (others interrupt it, or the manager runs on it): that takes the core's time
//! once it gets its turn.
//!
//! # Properties
//! - What a core's virtual CPUs do, idling and waiting aside, fits into the time that passes.
//! - Equal virtual CPUs on a core get equal parts of its time.

use crate::machine::actor::Vcpu;
use crate::machine::core::Core;
use crate::machine::ledger::Cause;
use crate::program::Program;
use crate::vm::Vm;

/// How long a virtual CPU may run while others wait (Linux's slice on a large host).
const SLICE_PS: u64 = 3_000_000_000;

/// A virtual CPU: VM and index.
type Place = (usize, usize);

/// All cores of the host.
#[derive(Debug)]
pub(crate) struct Turns {
    by_core: Vec<Turn>,
}

/// Whose turn it is on one core.
#[derive(Debug, Clone, Default)]
struct Turn {
    ring: Vec<Place>,
    /// The one that runs or has run last, in the ring.
    last: usize,
    running: bool,
    /// When its slice is over.
    until_ps: u64,
    /// Since when nobody runs.
    free_ps: u64,
}

impl Turns {
    /// Cores of which each virtual CPU has the one that its VM says. Nobody runs yet.
    pub(crate) fn new<P>(cores: usize, vms: &[Vm<P>]) -> Self {
        let mut by_core = vec![Turn::default(); cores];
        for (i, vm) in vms.iter().enumerate() {
            for (vcpu, &core) in vm.hardware.placed.iter().enumerate() {
                by_core[core].ring.push((i, vcpu));
            }
        }
        Self { by_core }
    }

    /// All cores are free from now on.
    pub(crate) fn start<P>(&mut self, now_ps: u64, vms: &mut [Vm<P>]) {
        for turn in &mut self.by_core {
            turn.free_ps = now_ps;
            turn.last = turn.ring.len().saturating_sub(1);
            for &place in &turn.ring {
                at(vms, place).end_turn();
            }
        }
    }

    /// The virtual CPU that goes on, with its clock; nothing when none wants to.
    pub(crate) fn next<P: Program>(
        &mut self,
        vms: &mut [Vm<P>],
        cores: &mut [Core],
    ) -> Option<(u64, Place)> {
        loop {
            let turns = self.by_core.iter_mut().enumerate();
            let times = turns.filter_map(|(core, turn)| Some((turn.time(vms)?, core)));
            let (now_ps, core) = times.min()?;
            let turn = &mut self.by_core[core];
            if turn.running && (now_ps < turn.until_ps || turn.ring.len() == 1) {
                return Some((now_ps, turn.ring[turn.last]));
            }
            turn.pass_on(vms, &mut cores[core]);
        }
    }

    /// Those that wait have waited until `ps`.
    pub(crate) fn wait_until<P: Program>(&self, ps: u64, vms: &mut [Vm<P>]) {
        for turn in &self.by_core {
            for (i, &place) in turn.ring.iter().enumerate() {
                if turn.wants(place, vms) && !(turn.running && i == turn.last) {
                    at(vms, place).begin_turn(ps);
                }
            }
        }
    }
}

impl Turn {
    /// How far the core is, or when it goes on; nothing when nobody wants it.
    fn time<P: Program>(&mut self, vms: &mut [Vm<P>]) -> Option<u64> {
        if self.running {
            let place @ (vm, vcpu) = self.ring[self.last];
            if vms[vm].is_busy(vcpu) {
                return Some(at(vms, place).clock_ps);
            }
            self.stop(vms);
        }
        let next = self.ring[self.next(vms)?];
        let vcpu = at(vms, next);
        Some(self.free_ps.max(vcpu.clock_ps - vcpu.undone_ps()))
    }

    /// The next one that wants to run; the last one comes last.
    fn next<P: Program>(&self, vms: &mut [Vm<P>]) -> Option<usize> {
        let count = self.ring.len();
        let mut others = (1..=count).map(|n| (self.last + n) % count);
        others.find(|&i| self.wants(self.ring[i], vms))
    }

    /// Whether a virtual CPU has something to run, or was given work. One that is alone on its
    /// core does that without asking.
    fn wants<P: Program>(&self, place: Place, vms: &mut [Vm<P>]) -> bool {
        let (vm, vcpu) = place;
        vms[vm].is_busy(vcpu) || self.ring.len() > 1 && at(vms, place).undone_ps() > 0
    }

    /// The next one gets the core.
    fn pass_on<P: Program>(&mut self, vms: &mut [Vm<P>], core: &mut Core) {
        let Some(next) = self.next(vms) else {
            return;
        };
        if self.running && next == self.last {
            self.until_ps = at(vms, self.ring[next]).clock_ps + SLICE_PS;
            return;
        }
        if self.running {
            self.stop(vms);
        }
        self.last = next;
        self.running = true;
        let place @ (vm, index) = self.ring[next];
        let (costs, space) = (vms[vm].hardware.costs, vms[vm].hardware.space);
        let vcpu = at(vms, place);
        vcpu.begin_turn(self.free_ps);
        if self.ring.len() > 1 {
            vcpu.charge(Cause::Kernel, costs.exit_ps + costs.switch_ps);
            core.switch(space);
        }
        self.until_ps = vcpu.clock_ps + SLICE_PS;
        if !vms[vm].is_busy(index) {
            // All that it was given to do is done.
            self.stop(vms);
        }
    }

    fn stop<P>(&mut self, vms: &mut [Vm<P>]) {
        let vcpu = at(vms, self.ring[self.last]);
        vcpu.end_turn();
        self.free_ps = vcpu.clock_ps;
        self.running = false;
    }
}

fn at<P>(vms: &mut [Vm<P>], (vm, vcpu): Place) -> &mut Vcpu {
    &mut vms[vm].hardware.vcpus[vcpu]
}
