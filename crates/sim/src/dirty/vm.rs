//! A VM's virtual CPUs, each sweeping its slice, and the faults of their accesses.

use demeter_scenario::{DirtyLogging, Isa, MmuLock, Split};

use super::contended::{Interconnect, Lock};
use super::cost::Costs;
use super::memory::{Entry, PAGES_A_BLOCK, SecondLevelTables};

/// Successive faults that are simulated as one step.
const FAULTS_A_STEP: usize = 8;

/// A VM with its tables and shared resources.
pub(super) struct Vm {
    pub logging: DirtyLogging,
    pub costs: Costs,
    pub memory: SecondLevelTables,
    pub lock: Lock,
    pub interconnect: Interconnect,
    pub counts: Counts,
    /// Cost of an access that does not stop.
    pub access_ps: u64,
}

/// Event counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Counts {
    pub faults: u64,
    pub splits: u64,
    pub broadcasts: u64,
}

/// The reason that an access stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// A store to a block that must be split.
    Split,
    /// A page that is not mapped.
    Map,
    /// A store to a page that is write-protected.
    Relax,
    /// A store that hardware logs.
    Logged,
}

impl Vm {
    /// Runs a virtual CPU's next accesses: those of one block that do not stop, or several that stop for one reason.
    /// `offset` counts the sweep's steps in the slice. Returns the number of accesses and their end time.
    pub fn access(&mut self, vcpu: usize, offset: usize, now_ps: u64) -> (usize, u64) {
        let (steps, stride) = (self.memory.steps(), self.memory.stride());
        let first = self.memory.slice(vcpu).start + offset * stride;
        let in_block = (PAGES_A_BLOCK - first % PAGES_A_BLOCK).div_ceil(stride);
        let most = in_block.min(steps - offset);
        let Some(stop) = self.stop(first) else {
            let free = (1..most).take_while(|n| self.stop(first + n * stride).is_none());
            let count = 1 + free.count();
            return (count, now_ps + count as u64 * self.access_ps);
        };
        let most = match stop {
            Stop::Split => 1,
            _ => most.min(FAULTS_A_STEP),
        };
        let same = (1..most).take_while(|n| self.stop(first + n * stride) == Some(stop));
        let count = 1 + same.count();
        let done_ps = now_ps + count as u64 * self.access_ps;
        let done_ps = match stop {
            Stop::Logged => done_ps + count as u64 * self.costs.logged_page_ps,
            _ => self.fault(stop, count as u64, done_ps),
        };
        if stop == Stop::Split {
            self.counts.splits += 1;
            self.memory.split(first, true);
        }
        for page in (first..).step_by(stride).take(count) {
            let is_written = self.memory.is_written(page);
            let entry = if is_written {
                Entry::Writable
            } else {
                Entry::ReadOnly
            };
            self.memory.set(page, entry);
        }
        (count, done_ps)
    }

    /// The reason that the sweep's access to a page stops, if it does.
    fn stop(&self, page: usize) -> Option<Stop> {
        if !self.memory.is_pending(page) {
            return None;
        }
        Some(match self.memory.entry(page) {
            _ if !self.memory.is_split(page) => Stop::Split,
            Entry::Absent => Stop::Map,
            _ if self.logs_in_hardware() => Stop::Logged,
            _ => Stop::Relax,
        })
    }

    fn logs_in_hardware(&self) -> bool {
        self.logging.isa == Isa::X86 || self.logging.hardware_buffer
    }

    /// End of `count` successive faults of a virtual CPU.
    fn fault(&mut self, stop: Stop, count: u64, now_ps: u64) -> u64 {
        self.counts.faults += count;
        let asked_ps = now_ps + count * self.costs.outside_ps();
        let lines_ps = count * self.costs.lines_by_reader * self.costs.line_ps;
        let is_alone = match self.logging.lock {
            MmuLock::Spinlock => true,
            MmuLock::ReadForPermissions => stop != Stop::Relax,
            MmuLock::ReadForAll => false,
        };
        let has_ps = if is_alone {
            self.lock.write(asked_ps, lines_ps)
        } else {
            self.lock.read(asked_ps, lines_ps)
        };
        let changed_ps = has_ps + count * self.costs.entry_ps;
        let done_ps = match stop {
            Stop::Split => self.break_before_make(changed_ps),
            Stop::Relax if !self.logging.local_invalidation => self.broadcast(count, changed_ps),
            _ => changed_ps,
        };
        if is_alone {
            self.lock.written_until(done_ps);
        } else {
            self.lock.read_until(done_ps);
        }
        done_ps
    }

    /// Splits a block before any fault on it; returns the end time. Arm's kernel holds the lock exclusively meanwhile.
    pub fn split(&mut self, block: usize, now_ps: u64) -> u64 {
        let page = block * PAGES_A_BLOCK;
        if self.memory.is_split(page) || self.logging.split == Split::Lazy {
            return now_ps;
        }
        self.counts.splits += 1;
        self.memory.split(page, false);
        let lines_ps = self.costs.lines_by_reader * self.costs.line_ps;
        let table_ps = PAGES_A_BLOCK as u64 * self.costs.split_entry_ps;
        if self.logging.isa == Isa::X86 {
            let done_ps = self.lock.read(now_ps, lines_ps) + table_ps;
            self.lock.read_until(done_ps);
            return done_ps;
        }
        let made_ps = self.lock.write(now_ps, lines_ps) + table_ps;
        let done_ps = self.break_before_make(made_ps);
        self.lock.written_until(done_ps);
        done_ps
    }

    /// Invalidates a block on all CPUs before it gets its table, if the processor requires that.
    fn break_before_make(&mut self, now_ps: u64) -> u64 {
        if self.logging.isa == Isa::X86 || self.logging.bbm2 {
            return now_ps;
        }
        self.broadcast(1, now_ps)
    }

    /// Broadcasts this many invalidations, one at a time.
    pub fn broadcast(&mut self, translations: u64, now_ps: u64) -> u64 {
        let count = translations * self.costs.broadcasts_by_break;
        self.counts.broadcasts += count;
        let Costs {
            invalidate_ps,
            broadcast_ps,
            ..
        } = self.costs;
        self.interconnect
            .broadcast(now_ps, count, invalidate_ps, broadcast_ps)
    }
}
