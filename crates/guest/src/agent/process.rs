//! A process that the agent manages.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use demeter_linux::cpu::last_runs;
use demeter_policy::{ByteCount, GuestVirtAddr, NodeId, Pid, Share, Socket, VirtRange};

use super::Clock;
use super::contracts::{Contracts, Hold, LeftAlone, ReadingBudget, Rules};
use super::sharing::{Held, Mapped};
use crate::maps::{MapsError, Movable, RANGES_MAX, VmaKind, read_movable};
use crate::pages::Errno;
use crate::targets::Target;

/// How long an unmovable process is skipped at first. Each further failure doubles the time.
const LEFT_OUT: Duration = Duration::from_secs(8);

/// The most doublings: 17 minutes.
const LEFT_OUT_DOUBLINGS: u32 = 7;

/// A managed process and its movable memory.
#[derive(Debug)]
pub(super) struct Process {
    pub target: Target,
    /// Its share of fast memory, as the engine knows it.
    pub share: Option<Share>,
    /// The socket that it runs on, as the engine knows it.
    pub socket: Socket,
    /// CPU ticks of its threads at the last check.
    ticks: BTreeMap<Pid, u64>,
    /// CPU ticks of its threads on each node, halved at each check.
    ran_on: BTreeMap<NodeId, u64>,
    /// Why none of its memory can be moved, if so.
    pub hindrance: Option<Hindrance>,
    /// Reasons of failed moves that were logged already.
    pub said: BTreeSet<Errno>,
    /// Its memory that is left alone.
    pub left_alone: LeftAlone,
    pub contracts: Contracts,
    movable: Movable,
    held: Vec<Held>,
}

/// An obstacle to all moves of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hindrance {
    /// The reason, for people.
    pub what: String,
    /// When moves are tried again.
    until: Duration,
    doublings: u32,
}

impl Process {
    pub fn new(target: Target) -> Self {
        Self {
            target,
            share: None,
            socket: Socket::default(),
            ticks: BTreeMap::new(),
            ran_on: BTreeMap::new(),
            hindrance: None,
            said: BTreeSet::new(),
            left_alone: LeftAlone::new(),
            contracts: Contracts::default(),
            movable: Movable::default(),
            held: vec![],
        }
    }

    /// The node on whose CPUs its threads run most.
    pub fn near(&self) -> Option<NodeId> {
        let most = self.ran_on.iter().max_by_key(|(_, ticks)| **ticks);
        most.map(|(&node, _)| node)
    }

    /// Updates where its threads run. Idle threads count at the first check only.
    pub fn look_where_it_runs(&mut self, root: &Path, node_of: impl Fn(u32) -> Option<NodeId>) {
        let runs = last_runs(root, self.target.pid);
        let before = std::mem::take(&mut self.ticks);
        let mut ran = BTreeMap::new();
        for run in runs {
            let since = before
                .get(&run.thread)
                .map(|&ticks| run.ticks.saturating_sub(ticks));
            self.ticks.insert(run.thread, run.ticks);
            if let Some(node) = node_of(run.cpu) {
                *ran.entry(node).or_insert(0) += since.unwrap_or(1);
            }
        }
        if ran.values().all(|&ticks| ticks == 0) {
            return;
        }
        self.ran_on.values_mut().for_each(|ticks| *ticks /= 2);
        for (node, ticks) in ran {
            *self.ran_on.entry(node).or_insert(0) += ticks;
        }
    }

    /// Its name for messages.
    pub fn name(&self) -> String {
        format!("{} ({})", self.target.pid, self.target.comm)
    }

    /// Number of ranges beyond the limit, which are not managed.
    pub fn ranges_left_out(&self) -> u64 {
        self.movable.left_out
    }

    /// Its mappings, as last read.
    pub fn mapped(&self) -> Mapped<'_> {
        Mapped {
            movable: &self.movable,
            held: &self.held,
        }
    }

    /// Whether an address lies in a block that is left alone.
    pub fn is_left_alone(&self, addr: GuestVirtAddr) -> bool {
        let forbidden = &self.movable.forbidden;
        let next = forbidden.partition_point(|range| range.end() <= addr);
        forbidden
            .get(next)
            .is_some_and(|range| range.contains(addr))
    }

    /// Skips the process for a while because its memory cannot be moved. Returns whether the reason is new.
    pub fn hinder(&mut self, what: String, now: Duration) -> bool {
        let before = self.hindrance.take();
        let doublings = before.as_ref().map_or(0, |before| before.doublings + 1);
        let doublings = doublings.min(LEFT_OUT_DOUBLINGS);
        let is_new = before.is_none_or(|before| before.what != what);
        self.hindrance = Some(Hindrance {
            what,
            until: now + LEFT_OUT * (1 << doublings),
            doublings,
        });
        self.movable = Movable::default();
        is_new
    }

    /// Reads the process's mappings.
    ///
    /// A process that has ended or cannot be inspected has no movable memory. A shortage of descriptors or memory
    /// changes nothing.
    pub fn read_space(
        &mut self,
        root: &Path,
        rules: &Rules,
        budget: &mut ReadingBudget,
        clock: &Clock,
    ) -> Result<(), MapsError> {
        let now = clock.now();
        self.left_alone.clear();
        self.held.clear();
        if self.hindrance.as_ref().is_some_and(|it| now < it.until) {
            self.movable = Movable::default();
            return Ok(());
        }
        let read = self.try_read(root, rules, budget, clock);
        match read {
            Err(MapsError::Gone(_)) => self.movable = Movable::default(),
            Err(MapsError::Io { source, .. })
                if source.kind() == std::io::ErrorKind::PermissionDenied =>
            {
                self.movable = Movable::default();
            }
            read => read?,
        }
        Ok(())
    }

    fn try_read(
        &mut self,
        root: &Path,
        rules: &Rules,
        budget: &mut ReadingBudget,
        clock: &Clock,
    ) -> Result<(), MapsError> {
        let pid = self.target.pid;
        let mut seen = vec![];
        self.movable = self.judged(root, |range| seen.push(range))?;
        let contracts = &mut self.contracts;
        if contracts.are_due(root, pid, &seen, clock.now())
            && contracts.read(root, pid, &seen, rules, budget, clock)?
        {
            self.movable = self.judged(root, |_| ())?;
        }
        Ok(())
    }

    /// Sorts its mappings by judgement, and passes their ranges to `each`.
    fn judged(
        &mut self,
        root: &Path,
        mut each: impl FnMut(VirtRange),
    ) -> Result<Movable, MapsError> {
        let Self {
            contracts,
            left_alone,
            held,
            target,
            ..
        } = self;
        left_alone.clear();
        held.clear();
        read_movable(root, target.pid, |vma| {
            each(vma.range);
            let Some((hold, bytes)) = contracts.judge(vma) else {
                return true;
            };
            if vma.kind != VmaKind::Stack && (vma.readable || vma.writable) {
                let sum = left_alone.entry(hold).or_insert(ByteCount(0));
                sum.0 = sum.0.saturating_add(bytes.0);
            }
            // Other processes with the same mapping have read its policy.
            let is_known = hold != Hold::Unread && held.len() < RANGES_MAX;
            if let Some(backing) = vma.backing.filter(|_| is_known) {
                held.push(Held {
                    backing,
                    bytes: vma.range.len().0,
                });
            }
            false
        })
    }
}
