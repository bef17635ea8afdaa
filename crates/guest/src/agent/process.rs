//! One process that the agent looks after.

use std::collections::BTreeMap;
use std::path::Path;

use demeter_linux::cpu::last_runs;
use demeter_policy::{NodeId, Pid, Share};

use crate::maps::{MapsError, Movable, read_movable};
use crate::targets::Target;

/// A process. What it maps, the engine knows.
#[derive(Debug)]
pub(super) struct Process {
    pub target: Target,
    /// Ranges of memory that were too many to be looked after.
    pub ranges_left_out: u64,
    /// Its share of fast memory, as the engine was told.
    pub share: Option<Share>,
    /// The socket that it runs on, as the engine knows it.
    pub socket: u32,
    /// Time of its threads when last looked at, ticks.
    ticks: BTreeMap<Pid, u64>,
    /// Ticks that its threads ran on each node's CPUs; half of them are forgotten with each look.
    ran_on: BTreeMap<NodeId, u64>,
}

impl Process {
    pub fn new(target: Target) -> Self {
        Self {
            target,
            ranges_left_out: 0,
            share: None,
            socket: 0,
            ticks: BTreeMap::new(),
            ran_on: BTreeMap::new(),
        }
    }

    /// The node on whose CPUs its threads run most.
    pub fn near(&self) -> Option<NodeId> {
        let most = self.ran_on.iter().max_by_key(|(_, ticks)| **ticks);
        most.map(|(&node, _)| node)
    }

    /// Looks on which nodes' CPUs its threads have run since the last look. Threads that were idle say nothing, but for the
    /// first time.
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

    /// Reads what the process maps now. One that has gone, or that may not be looked at, has no
    /// memory to move; that the system had no descriptor or memory to spare says nothing of it.
    pub fn read_space(&mut self, root: &Path) -> Result<Movable, MapsError> {
        let space = match read_movable(root, self.target.pid) {
            Err(MapsError::Gone(_)) => Movable::default(),
            Err(MapsError::Io { source, .. })
                if source.kind() == std::io::ErrorKind::PermissionDenied =>
            {
                Movable::default()
            }
            space => space?,
        };
        self.ranges_left_out = space.left_out;
        Ok(space)
    }
}
