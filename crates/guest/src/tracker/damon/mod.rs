//! The tracker on DAMON, the kernel's monitor of data accesses: works in any guest whose kernel
//! has it, at a coarser grain than load samples.
//!
//! The kernel clears a page's accessed bit and looks again one sampling interval later; regions.rs
//! says what can be made of it. One thing blurs it beyond repair: the kernel does not flush the
//! TLB, so a page that stays in it looks untouched. Where huge pages are hot and processes rarely
//! switch, the counts are a weak hint.

mod admin;
mod aggregations;
mod page_size;
mod regions;

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use demeter_policy::{GuestVirtAddr, Pid, Sample};

pub use aggregations::Format;
pub use regions::{Region, samples};

use super::{Drained, Settings, Tracker, TrackerError};
use admin::Kdamond;
use aggregations::Aggregations;
use page_size::PageSizes;

const NAME: &str = "damon";

/// Between two looks at a page of each region: not a round figure, so that it does not keep step
/// with a program's own period.
const SAMPLE: Duration = Duration::from_micros(5003);
/// Looks that are counted before regions are reported, merged and split again.
const LOOKS: u32 = 20;
const AGGREGATION: Duration = Duration::from_micros(5003 * LOOKS as u64);

/// Most processes that are watched; the first win.
const MAX_TARGETS: usize = 64;
/// Regions cost a look each per sampling interval. The least number, over all targets, sets the
/// grain from the start; above it DAMON splits where counts differ.
const MIN_REGIONS: u32 = 40;
const MIN_REGIONS_PER_TARGET: u32 = 10;
const MAX_REGIONS: u32 = 80;

/// How often a start is tried again without the processes that went meanwhile.
const START_ATTEMPTS: u32 = 5;

type Listen = fn(&Path, Pid) -> Result<Aggregations, TrackerError>;

/// Reads regions and their access counts from a kdamond of our own.
pub struct DamonTracker {
    root: PathBuf,
    kdamond: Kdamond,
    listen: Listen,
    wanted: Vec<Pid>,
    running: Option<Running>,
    paused: bool,
}

struct Running {
    aggregations: Aggregations,
    /// In the kdamond's order.
    targets: Vec<Pid>,
}

impl DamonTracker {
    /// Takes DAMON, if nobody else has it; observes nothing before targets are set.
    pub fn new(settings: &Settings) -> Result<Self, TrackerError> {
        Self::with_listener(settings, Aggregations::open)
    }

    fn with_listener(settings: &Settings, listen: Listen) -> Result<Self, TrackerError> {
        let kdamond = Kdamond::claim(&settings.root)?;
        // Proves that we may listen, to ourselves while there is no kdamond yet.
        listen(&settings.root, Pid(std::process::id()))?;
        Ok(Self {
            root: settings.root.clone(),
            kdamond,
            listen,
            wanted: Vec::new(),
            running: None,
            paused: false,
        })
    }

    fn stop(&mut self) -> Result<(), TrackerError> {
        self.running = None;
        self.kdamond.stop()
    }

    /// Starts to watch what is wanted and alive.
    fn start(&mut self) -> Result<(), TrackerError> {
        let mut attempt = 1;
        loop {
            self.stop()?;
            let mut targets = self.wanted.clone();
            targets.retain(|pid| self.root.join(format!("proc/{pid}/maps")).exists());
            targets.truncate(MAX_TARGETS);
            if targets.is_empty() {
                return Ok(());
            }
            let started = self
                .kdamond
                .start(&targets, &region_bounds(targets.len()))
                .and_then(|kdamond| (self.listen)(&self.root, kdamond));
            match started {
                Ok(aggregations) => {
                    self.running = Some(Running {
                        aggregations,
                        targets,
                    });
                    return Ok(());
                }
                Err(error) if attempt == START_ATTEMPTS => return Err(error),
                Err(error) => tracing::debug!(%error, "a target may have ended: trying again"),
            }
            attempt += 1;
        }
    }
}

impl Tracker for DamonTracker {
    fn name(&self) -> &'static str {
        NAME
    }

    /// DAMON clears access bits without flushing the TLB: what is hot and huge stays in the TLB,
    /// sets no bit again and looks cold.
    fn sees_huge_pages(&self) -> bool {
        false
    }

    fn set_targets(&mut self, targets: &[Pid]) -> Result<(), TrackerError> {
        // A new start forgets the regions: not for nothing.
        if self.wanted == targets {
            return Ok(());
        }
        if targets.len() > MAX_TARGETS {
            tracing::warn!(
                targets = targets.len(),
                watched = MAX_TARGETS,
                "DAMON watches only the first processes"
            );
        }
        self.wanted = targets.to_vec();
        if self.paused { Ok(()) } else { self.start() }
    }

    fn drain(&mut self, out: &mut Vec<Sample>, max: usize) -> Result<Drained, TrackerError> {
        let Some(Running {
            aggregations,
            targets,
        }) = &self.running
        else {
            return Ok(Drained::default());
        };
        let (mut regions, lost, rejected) =
            aggregations
                .take(targets)
                .map_err(|what| TrackerError::Corrupt {
                    tracker: NAME,
                    what,
                })?;
        // DAMON reports target after target.
        for regions in regions.chunk_by_mut(|a, b| a.pid == b.pid) {
            let pages = PageSizes::of(&self.root, regions[0].pid);
            for region in regions.iter_mut().filter(|region| region.accesses > 0) {
                let middle = region.range.start().0 + region.range.len().0 / 2;
                region.page_bytes = pages.at(GuestVirtAddr(middle));
            }
        }
        let before = out.len();
        samples(&regions, LOOKS, max, out);
        Ok(Drained {
            taken: (out.len() - before) as u64,
            lost,
            rejected,
        })
    }

    fn pause(&mut self) -> Result<(), TrackerError> {
        self.paused = true;
        self.stop()
    }

    fn resume(&mut self) -> Result<(), TrackerError> {
        if self.paused {
            self.paused = false;
            self.start()?;
        }
        Ok(())
    }
}

/// How many regions a kdamond keeps: at least so many for each target, at most so many for all.
fn region_bounds(targets: usize) -> RangeInclusive<u32> {
    let targets = u32::try_from(targets).unwrap_or(u32::MAX).max(1);
    let min = (MIN_REGIONS / targets).max(MIN_REGIONS_PER_TARGET);
    min..=MAX_REGIONS.max(min.saturating_mul(targets).saturating_mul(2))
}

#[cfg(test)]
pub(super) mod tests;
