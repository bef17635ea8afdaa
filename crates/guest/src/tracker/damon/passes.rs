//! Carries passes out: our own kdamonds scan given blocks.
//!
//! There is one kdamond for each size of a pass. The kernel makes files for its regions, and making them costs several
//! times as much as using them again. So a pass takes a kdamond that has files already, if it has not too many.

use std::num::NonZero;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use demeter_linux::cpu;
use demeter_linux::damon::{
    Aggregations, DamonError, Kdamond, REGIONS_PER_BLOCK_MAX, Region, is_filler,
};
use demeter_linux::page_size::PageSizes;
use demeter_linux::tlb_flusher::TlbFlusher;
use demeter_policy::damon::{Cost, Found, Look, RUNGS, SET_MAX};
use demeter_policy::{BLOCK_SIZE, Block, GuestVirtAddr, Pid, VirtRange};

use super::super::TrackerError;
use super::NAME;

/// A pass is aborted after this multiple of its length plus `PATIENCE_MIN`: kdamond may have to wait for a CPU.
const PATIENCE: u32 = 4;
const PATIENCE_MIN: Duration = Duration::from_secs(2);

/// Time to wait for the last reports after most have arrived.
const REPORT_WAIT: Duration = Duration::from_millis(1);

/// How often a start is retried without the processes that ended meanwhile.
const START_ATTEMPTS: u32 = 5;

/// Listens to a kdamond's thread until the given number of regions has arrived.
pub(super) type Listen = Box<dyn Fn(Pid, u32) -> Result<Aggregations, DamonError> + Send>;

/// The most blocks in a pass of the smallest kdamond.
const LEAST: usize = 16;

/// Number of kdamonds: for passes of up to 16, 32, 64 blocks and so on up to the maximum.
pub(super) const KDAMONDS: usize = (SET_MAX / LEAST).ilog2() as usize + 1;

/// The kdamond for a pass of this many blocks, given how many regions each has files for.
fn kdamond_for(blocks: usize, made: impl Fn(usize) -> usize) -> usize {
    let has_made =
        |kdamond: &usize| (blocks..=REGIONS_PER_BLOCK_MAX * blocks).contains(&made(*kdamond));
    let takes = |kdamond: &usize| blocks <= LEAST << kdamond;
    let made = (0..KDAMONDS).find(has_made);
    made.or_else(|| (0..KDAMONDS).find(takes))
        .unwrap_or(KDAMONDS - 1)
}

/// The kdamonds and their settings.
pub(super) struct Passes {
    root: PathBuf,
    kdamonds: Vec<Prepared>,
    listen: Listen,
    /// `None` if TLBs cannot be flushed. Pages whose entries stay in the TLB look unaccessed then.
    flusher: Option<TlbFlusher>,
}

/// A kdamond, and the blocks of its regions.
struct Prepared {
    kdamond: Kdamond,
    blocks: Vec<(Pid, Block)>,
    /// Number of regions that it reports.
    reports: usize,
}

/// The result of a pass.
#[derive(Debug, Default)]
pub(super) struct Taken {
    /// Time from its start to the first report.
    pub(super) elapsed: Duration,
    pub(super) cost: Cost,
    pub(super) found: Vec<Found>,
    /// Reports that were lost for lack of space, or belong to other regions.
    pub(super) lost: u64,
    pub(super) rejected: u64,
}

/// A running kdamond: its index and its thread.
struct Running {
    kdamond: usize,
    thread: Pid,
    started_ns: u64,
    aggregations: Aggregations,
}

impl Passes {
    /// Takes a kdamond that monitors given regions.
    ///
    /// # Errors
    /// The kernel does not accept our regions.
    pub(super) fn new(
        root: PathBuf,
        kdamonds: Vec<Kdamond>,
        listen: Listen,
        flusher: Option<TlbFlusher>,
    ) -> Result<Self, TrackerError> {
        let prepared = |kdamond| Prepared {
            kdamond,
            blocks: vec![],
            reports: 0,
        };
        let mut passes = Self {
            root,
            kdamonds: kdamonds.into_iter().map(prepared).collect(),
            listen,
            flusher,
        };
        passes.prove()?;
        Ok(passes)
    }

    /// Tests that the kernel scans a block of this process.
    fn prove(&mut self) -> Result<(), TrackerError> {
        let here = 0u8;
        let block = Block::of(GuestVirtAddr(&raw const here as u64));
        let regions: Vec<_> = region(Pid(std::process::id()), block).into_iter().collect();
        let kdamond = &self.kdamonds[0].kdamond;
        let tried = kdamond
            .set_regions(&regions)
            .and_then(|_| kdamond.start(RUNGS[RUNGS.len() - 1].interval, 1));
        let stopped = kdamond.stop();
        match tried.and(stopped.map(|()| Pid(0))) {
            Ok(_) => Ok(()),
            Err(error @ DamonError::Held(_)) => Err(error.into()),
            Err(error) => Err(TrackerError::Unavailable {
                tracker: NAME,
                why: format!("the kernel's DAMON refuses regions of 2 MiB ({error})"),
                hint: "use Linux 5.19 or later, or another tracker".into(),
            }),
        }
    }

    /// Carries a pass out, if it is still wanted. Ended processes are skipped.
    pub(super) fn carry_out(
        &mut self,
        look: &Look,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Taken, TrackerError> {
        let own = cpu::of_this_thread();
        let mut taken = Taken::default();
        let Some((running, set)) = self.start(look)? else {
            taken.cost.setting = cpu::of_this_thread().saturating_sub(own);
            return Ok(taken);
        };
        taken.cost.set = set;
        let listened = self.listen(look, &running, is_wanted, &mut taken);
        let kdamond = cpu::of(&self.root, running.thread).unwrap_or_default();
        let stopped = self.kdamonds[running.kdamond].kdamond.stop();
        let flushes = self.flusher.as_mut().map(|flusher| {
            flusher.stop();
            flusher.take_spent()
        });
        taken.cost.looking = kdamond + flushes.unwrap_or_default();
        taken.cost.setting = cpu::of_this_thread().saturating_sub(own);
        listened?;
        stopped?;
        Ok(taken)
    }

    /// Starts the kdamond. Returns it with its number of regions; `None` if no process is left.
    fn start(&mut self, look: &Look) -> Result<Option<(Running, u64)>, TrackerError> {
        let mut tried = 0;
        loop {
            tried += 1;
            match self.try_start(look) {
                Ok(running) => return Ok(running),
                Err(error @ DamonError::Held(_)) => return Err(error.into()),
                Err(error) if tried == START_ATTEMPTS => return Err(error.into()),
                Err(error) => {
                    tracing::debug!(%error, "a process may have ended: trying again");
                    let kdamond = self.kdamond_for(look.blocks.len());
                    let prepared = &mut self.kdamonds[kdamond];
                    prepared.blocks.clear();
                    prepared.kdamond.stop()?;
                }
            }
        }
    }

    fn kdamond_for(&self, blocks: usize) -> usize {
        kdamond_for(blocks, |kdamond| self.kdamonds[kdamond].reports)
    }

    fn try_start(&mut self, look: &Look) -> Result<Option<(Running, u64)>, DamonError> {
        let mut pids: Vec<Pid> = look.blocks.iter().map(|&(pid, _)| pid).collect();
        pids.dedup();
        pids.retain(|pid| self.root.join(format!("proc/{pid}/maps")).exists());
        let mut blocks = look.blocks.clone();
        blocks.retain(|(pid, _)| pids.binary_search(pid).is_ok());
        if blocks.is_empty() {
            return Ok(None);
        }
        let mut set = 0;
        let kdamond = self.kdamond_for(look.blocks.len());
        let prepared = &mut self.kdamonds[kdamond];
        if prepared.blocks != blocks {
            prepared.blocks.clear();
            let regions = blocks.iter().filter_map(|&(pid, block)| region(pid, block));
            prepared.reports = prepared.kdamond.set_regions(&regions.collect::<Vec<_>>())?;
            set = blocks.len() as u64;
            prepared.blocks = blocks;
        }
        let pass = look.pass;
        let thread = prepared.kdamond.start(pass.interval, pass.looks)?;
        let started_ns = cpu::monotonic_ns();
        let aggregations = (self.listen)(thread, prepared.reports as u32)?;
        if let Some(flusher) = self.flusher.as_mut().filter(|_| pass.is_flushed) {
            flusher.flush_each(pass.interval, pass.looks);
        }
        let running = Running {
            kdamond,
            thread,
            started_ns,
            aggregations,
        };
        Ok(Some((running, set)))
    }

    /// Reads the first report of each region.
    fn listen(
        &self,
        look: &Look,
        running: &Running,
        is_wanted: &dyn Fn() -> bool,
        taken: &mut Taken,
    ) -> Result<(), TrackerError> {
        let Prepared {
            blocks, reports, ..
        } = &self.kdamonds[running.kdamond];
        let mut pids: Vec<Pid> = blocks.iter().map(|&(pid, _)| pid).collect();
        pids.dedup();
        let patience = look.pass.length() * PATIENCE + PATIENCE_MIN;
        let deadline = Instant::now() + patience;
        let mut regions: Vec<Region> = vec![];
        let mut first_ns = None;
        while regions.len() < *reports && Instant::now() < deadline && is_wanted() {
            running
                .aggregations
                .wait(look.pass.length().max(REPORT_WAIT));
            let reported = running.aggregations.take(&pids);
            let reported = reported.map_err(|what| TrackerError::Corrupt {
                tracker: NAME,
                what,
            })?;
            first_ns = first_ns.or(reported.first_ns);
            taken.lost += reported.lost;
            taken.rejected += reported.rejected;
            if reported.regions.is_empty() {
                std::thread::sleep(REPORT_WAIT);
            }
            regions.extend(reported.regions);
        }
        let first_ns = first_ns.unwrap_or(running.started_ns);
        taken.elapsed = Duration::from_nanos(first_ns.saturating_sub(running.started_ns));
        // A second aggregation may have begun before kdamond stopped.
        regions.truncate(*reports);
        regions.retain(|region| !is_filler(&region.range));
        self.judge(&regions, taken);
        Ok(())
    }

    /// Maps regions to blocks, and finds the page sizes of the accessed ones.
    fn judge(&self, regions: &[Region], taken: &mut Taken) {
        for regions in regions.chunk_by(|a, b| a.pid == b.pid) {
            let pages = PageSizes::of(&self.root, regions[0].pid);
            for &Region {
                pid,
                range,
                accesses,
            } in regions
            {
                let block = Block::of(range.start());
                if region(pid, block) != Some((pid, range)) {
                    taken.rejected += 1;
                    continue;
                }
                let middle = GuestVirtAddr(range.start().0 + BLOCK_SIZE / 2);
                let page_bytes = match accesses {
                    0 => None,
                    _ => NonZero::new(pages.at(middle)),
                };
                taken.found.push(Found {
                    pid,
                    block,
                    accesses,
                    page_bytes,
                });
            }
        }
    }
}

/// The region of a whole block.
fn region(pid: Pid, block: Block) -> Option<(Pid, VirtRange)> {
    let end = Block(block.0.checked_add(1)?).start();
    Some((pid, VirtRange::new(block.start(), end)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pass_has_a_kdamond_of_its_size() {
        for blocks in 1..=SET_MAX {
            let size = LEAST << kdamond_for(blocks, |_| 0);
            assert!(
                blocks <= size && (size == LEAST || size < 2 * blocks),
                "{blocks}: {size}"
            );
        }
        assert_eq!(kdamond_for(SET_MAX, |_| 0), KDAMONDS - 1);
    }

    #[test]
    fn files_that_were_made_are_used_again_unless_there_are_too_many() {
        let made = |kdamond| if kdamond == 5 { 400 } else { 0 };
        let size = |blocks| LEAST << kdamond_for(blocks, made);
        assert_eq!([400, 300, 100].map(size), [512; 3]);
        assert_eq!([401, 99, 3].map(size), [512, 128, 16]);
    }
}
