//! Moves batches for the engine, and handles failures.

use std::collections::BTreeSet;

use demeter_policy::engine::{Direction, Input, Request};
use demeter_policy::{Block, ByteCount, Level, MIB, NodeId, Pid, Relocation, Spread, VirtRange};

use super::process::Process;
use super::{Agent, AgentError, headroom, nanoseconds};
use crate::mover::Mover;
use crate::pages::{Errno, Pages, PagesError};

/// Headroom that a cgroup needs before small pages become huge ones: a batch with a margin.
const COLLAPSE_ROOM: ByteCount = ByteCount(32 * MIB);

impl Agent {
    /// Before a batch of a process: ends one that is no longer there, and reads its contracts again where they are old.
    /// Returns whether the batch is still requested.
    pub(super) fn is_ready(&mut self, pid: Pid) -> Result<bool, AgentError> {
        let process = self.processes.get(&pid);
        if process.is_none_or(|process| !process.target.is_there(&self.root)) {
            self.end(pid)?;
            return Ok(false);
        }
        let now = self.clock.now();
        if process.is_some_and(|process| process.contracts.are_stale(&self.budget, now)) {
            self.read_space(pid);
            self.divide()?;
        }
        Ok(match self.engine.request() {
            Request::Move { pid: of, .. } | Request::Collapse { pid: of, .. } => of == pid,
            _ => false,
        })
    }

    /// Lets the requested blocks become huge pages where they lie.
    pub(super) fn collapse_batch(&mut self) -> Result<(), AgentError> {
        let Request::Collapse { pid, blocks: batch } = self.engine.request() else {
            return Ok(());
        };
        let space = self.engine.space(pid);
        let blocks = batch.iter().map(|r| r.block);
        let blocks: Vec<Block> = blocks.filter(|&block| touches(space, block)).collect();
        let began = self.clock.start();
        let result = match headroom::allows(&self.root, pid, COLLAPSE_ROOM) {
            true => self.mover.collapse(&mut *self.pages, pid, &blocks),
            false => Ok(()),
        };
        if let Err(PagesError::Gone(_)) = result {
            return self.end(pid);
        }
        let took = self.clock.since(began);
        self.engine.push(Input::Collapsed {
            took_ns: nanoseconds(took.elapsed),
            cpu_ns: nanoseconds(took.cpu),
        })?;
        self.hinder(pid, result.err())
    }

    /// Moves the requested batch.
    pub(super) fn move_batch(&mut self) -> Result<(), AgentError> {
        let Request::Move {
            pid,
            level,
            direction,
            blocks: batch,
        } = self.engine.request()
        else {
            return Ok(());
        };
        let space = self.engine.space(pid);
        if !batch.iter().all(|r| touches(space, r.block)) {
            return Ok(self.engine.push(Input::MoveFailed)?);
        }
        let began = self.clock.start();
        let may_collapse = self.huge_pages && headroom::allows(&self.root, pid, COLLAPSE_ROOM);
        self.mover.set_collapse(may_collapse);
        let near = self.processes.get(&pid).and_then(Process::near);
        let (pages, prober) = (&mut *self.pages, &mut self.prober);
        pages.set_movers(self.engine.movers());
        let targets = self
            .machine
            .targets(pages, prober, (level, direction), pid, near, batch);
        let result = targets.and_then(|targets| {
            let to = MoveBatch {
                way: (level, direction),
                pid,
                space,
                blocks: batch,
            };
            to.move_to(&targets, &mut self.mover, pages)
        });
        // Asked after failures, too: it would count for the next batch.
        let helped = self.pages.take_helped();
        let mut failed: Vec<(Errno, u64)> = vec![];
        match &result {
            Ok((placements, reasons)) => {
                let left = |(r, spread): (&Relocation, &Spread)| {
                    direction.left(&spread.at(level)).0.min(r.bytes.0)
                };
                let left = batch.iter().zip(placements).map(left);
                failed.extend(
                    reasons
                        .iter()
                        .copied()
                        .zip(left)
                        .filter(|(_, left)| *left > 0),
                );
                let took = self.clock.since(began);
                self.engine.push(Input::Moved {
                    placements,
                    took_ns: nanoseconds(took.elapsed),
                    cpu_ns: nanoseconds(took.cpu + helped),
                })?;
                self.say_why(pid, &failed);
            }
            // A process that has ended is no failure.
            Err(PagesError::Gone(_)) => return self.end(pid),
            Err(error) => {
                failed.extend(batch.iter().map(|r| (error.errno(), r.bytes.0)));
                self.engine.push(Input::MoveFailed)?;
            }
        }
        if !failed.is_empty() {
            self.status.update(|s| {
                for (errno, bytes) in failed {
                    *s.failed_bytes.entry(errno.name()).or_default() += bytes;
                }
            });
        }
        self.hinder(pid, result.err())
    }

    /// Logs once for each process and reason why pages did not move.
    fn say_why(&mut self, pid: Pid, failed: &[(Errno, u64)]) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        for &(errno, _) in failed {
            if process.said.insert(errno) {
                let (name, cause) = (process.name(), errno.cause());
                tracing::info!(
                    "some pages of {name} do not move: {}: {cause}",
                    errno.name()
                );
            }
        }
    }

    /// Notes that none of a process's memory could be moved; the process is skipped for a while.
    pub(super) fn hinder(&mut self, pid: Pid, error: Option<PagesError>) -> Result<(), AgentError> {
        // The next refresh sees that it has ended.
        let error = error.filter(|error| !matches!(error, PagesError::Gone(_)));
        let (Some(error), Some(process)) = (error, self.processes.get_mut(&pid)) else {
            return Ok(());
        };
        let what = format!("cannot move pages of {}: {error}", process.name());
        if process.hinder(error.to_string(), self.clock.now()) {
            self.error = Some(what);
        }
        Ok(self.divide()?)
    }
}

/// Blocks of one process that move together.
struct MoveBatch<'a> {
    /// The boundary between tiers, by its upper tier, and the direction.
    way: (Level, Direction),
    pid: Pid,
    space: &'a [VirtRange],
    blocks: &'a [Relocation],
}

impl MoveBatch<'_> {
    /// Moves each block to its node, one call per node. Reports where blocks lie then, and failures.
    fn move_to(
        &self,
        targets: &[NodeId],
        mover: &mut Mover,
        pages: &mut dyn Pages,
    ) -> Result<(Vec<Spread>, Vec<Errno>), PagesError> {
        let mut came_of = vec![(Spread::default(), Errno(0)); self.blocks.len()];
        let nodes: BTreeSet<NodeId> = targets.iter().copied().collect();
        for to in nodes {
            let at: Vec<usize> = (0..targets.len()).filter(|&at| targets[at] == to).collect();
            let blocks: Vec<Block> = at.iter().map(|&at| self.blocks[at].block).collect();
            let (way, pid, space) = (self.way, self.pid, self.space);
            let (placements, reasons) = mover.migrate(pages, way, to, pid, space, &blocks)?;
            for (at, came) in at.into_iter().zip(placements.into_iter().zip(reasons)) {
                came_of[at] = came;
            }
        }
        Ok(came_of.into_iter().unzip())
    }
}

/// Whether one of the sorted ranges overlaps a block.
fn touches(space: &[VirtRange], block: Block) -> bool {
    let next = space.partition_point(|range| range.end() <= block.start());
    let next = space.get(next);
    next.is_some_and(|range| Block::numbers_of(range).contains(&block.0))
}
