//! Access bits of a VM's memory: the seam, and its implementation by DAMON.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use demeter_linux::cpu;
use demeter_linux::damon::{DamonError, Kdamond, Region, Statistic, Tracepoint};
use demeter_policy::{Block, GuestVirtAddr, Pid, VirtRange};

use super::VmMemory;
use crate::VmName;
use crate::config::{Config, Manage};

/// A reader of access bits.
pub(super) trait AccessBits: Send {
    /// Clears the access bits of all blocks, waits, and appends an address in each accessed block.
    ///
    /// Returns the CPU time that the kernel spent. Appends nothing if the result is incomplete.
    fn look(
        &mut self,
        window: Duration,
        accessed: &mut Vec<GuestVirtAddr>,
    ) -> Result<Duration, DamonError>;
}

/// DAMON for all VMs without an agent. Each VM has its own kdamond, because each has its own run
/// time. The kdamonds are acquired with the first VM and released with the last.
#[derive(Debug)]
pub(crate) struct SharedDamon {
    root: PathBuf,
    /// VMs that may need a kdamond.
    vms: Vec<VmName>,
    taken: Mutex<Weak<Kdamonds>>,
}

/// The kdamonds of all VMs.
struct Kdamonds {
    list: Vec<Kdamond>,
    /// Serializes switching: the kernel rejects concurrent changes with EBUSY.
    switching: Mutex<()>,
}

impl fmt::Debug for Kdamonds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} kdamonds", self.list.len())
    }
}

/// One VM's kdamond.
pub(crate) struct Mine {
    all: Arc<Kdamonds>,
    index: usize,
}

impl SharedDamon {
    /// Creates the state without acquiring DAMON.
    pub fn new(root: &Path, config: &Config) -> Self {
        let vms = config.vms.iter();
        let vms = vms.filter(|(_, vm)| vm.manage != Manage::Agent);
        Self::of(root, vms.map(|(name, _)| name.clone()))
    }

    /// DAMON for the given VMs.
    pub(super) fn of(root: &Path, vms: impl IntoIterator<Item = VmName>) -> Self {
        Self {
            root: root.into(),
            vms: vms.into_iter().collect(),
            taken: Mutex::new(Weak::new()),
        }
    }

    /// Acquires the kdamond of a VM.
    pub fn take(&self, vm: &VmName) -> Result<Mine, DamonError> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let all = match taken.upgrade() {
            Some(all) => all,
            None => {
                let list = Kdamond::claim(&self.root, self.vms.len(), Statistic::Leave)?;
                Arc::new(Kdamonds {
                    list,
                    switching: Mutex::default(),
                })
            }
        };
        *taken = Arc::downgrade(&all);
        let index = self.vms.iter().position(|known| known == vm);
        let index = index.filter(|&index| index < all.list.len());
        let index = index.ok_or_else(|| DamonError::Unavailable {
            why: format!("no kdamond is reserved for VM {vm}"),
            hint: "restart the controller".into(),
        })?;
        Ok(Mine { all, index })
    }
}

impl Mine {
    fn kdamond(&self) -> &Kdamond {
        &self.all.list[self.index]
    }

    /// Switches the kdamond while no other one is switched.
    fn switch<T>(
        &self,
        how: impl FnOnce(&Kdamond) -> Result<T, DamonError>,
    ) -> Result<T, DamonError> {
        let switching = self.all.switching.lock();
        let _switching = switching.unwrap_or_else(PoisonError::into_inner);
        how(self.kdamond())
    }
}

impl fmt::Debug for Mine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kdamond {}", self.index)
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        if let Err(error) = self.switch(Kdamond::stop) {
            tracing::warn!(%error, "cannot stop a kdamond");
        }
    }
}

/// Bytes of a record in the ring, with its header.
const RECORD_BYTES: usize = 96;

/// Minimum size of a ring.
const RING_BYTES_MIN: usize = 256 << 10;

/// Time limit of a scan beyond its window, and the poll interval of its ring.
const PATIENCE: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(5);

/// Access bits from a kdamond with one region for each block.
///
/// A scan is one sampling interval that is also an aggregation interval. The result is exact for a
/// huge page. Of small pages, DAMON checks one in each block.
pub(super) struct DamonBits {
    root: PathBuf,
    damon: Mine,
    tracepoint: Tracepoint,
    process: Pid,
    ring_bytes: usize,
    batch: Batch,
}

impl DamonBits {
    /// Configures the kdamond with the VM's blocks.
    pub fn new(root: &Path, damon: Mine, memory: &VmMemory) -> Result<Self, DamonError> {
        let regions: Vec<VirtRange> = memory.ranges.iter().flat_map(blocks_of).collect();
        let of_process: Vec<_> = regions.iter().map(|&r| (memory.process, r)).collect();
        damon.kdamond().set_regions(&of_process)?;
        let ring_bytes = (regions.len() * RECORD_BYTES).max(RING_BYTES_MIN);
        let ring_bytes = ring_bytes.next_power_of_two();
        Ok(Self {
            root: root.into(),
            damon,
            tracepoint: Tracepoint::on(root)?,
            process: memory.process,
            ring_bytes,
            batch: Batch::new(&regions),
        })
    }

    /// Reads one whole aggregation from the ring of a kdamond's thread.
    fn listen(
        &self,
        thread: Pid,
        window: Duration,
        accessed: &mut Vec<GuestVirtAddr>,
    ) -> Result<(), DamonError> {
        let aggregations = self.tracepoint.listen(thread, self.ring_bytes, 0)?;
        let deadline = Instant::now() + window + PATIENCE;
        std::thread::sleep(window);
        let mut batch = self.batch;
        while Instant::now() < deadline {
            let taken = aggregations.take(&[self.process]);
            let reported = taken.map_err(|what| DamonError::Unavailable {
                why: format!("invalid data in the ring of damon_aggregated: {what}"),
                hint: "the controller retries".into(),
            })?;
            let is_whole = batch.add(&reported.regions, accessed);
            if reported.lost > 0 {
                // Missing records would make their blocks look idle.
                accessed.clear();
                return Ok(());
            }
            if is_whole {
                return Ok(());
            }
            std::thread::sleep(POLL);
        }
        accessed.clear();
        Ok(())
    }
}

impl AccessBits for DamonBits {
    fn look(
        &mut self,
        window: Duration,
        accessed: &mut Vec<GuestVirtAddr>,
    ) -> Result<Duration, DamonError> {
        let thread = self.damon.switch(|kdamond| kdamond.start(window, 1))?;
        let listened = self.listen(thread, window, accessed);
        let spent = cpu::of(&self.root, thread).unwrap_or_default();
        self.damon.switch(Kdamond::stop)?;
        listened.map(|()| spent)
    }
}

/// Splits a range into blocks; the first and the last may be partial.
fn blocks_of(range: &VirtRange) -> impl Iterator<Item = VirtRange> + use<> {
    let range = *range;
    Block::all_of(&range).filter_map(move |block| {
        let end = GuestVirtAddr(Block(block.0 + 1).start().0);
        VirtRange::new(block.start(), end)?.intersection(&range)
    })
}

/// Finds one whole aggregation in a stream of records, from the first region to the last.
#[derive(Debug, Clone, Copy)]
struct Batch {
    first: GuestVirtAddr,
    end: GuestVirtAddr,
    has_begun: bool,
    is_whole: bool,
}

impl Batch {
    fn new(regions: &[VirtRange]) -> Self {
        Self {
            first: regions.first().map(VirtRange::start).unwrap_or_default(),
            end: regions.last().map(VirtRange::end).unwrap_or_default(),
            has_begun: false,
            is_whole: false,
        }
    }

    /// Takes records, appends accessed blocks, and returns whether the aggregation is complete.
    fn add(&mut self, regions: &[Region], accessed: &mut Vec<GuestVirtAddr>) -> bool {
        for region in regions {
            self.has_begun |= region.range.start() <= self.first;
            if !self.has_begun || self.is_whole {
                continue;
            }
            if region.accesses > 0 {
                accessed.push(region.range.start());
            }
            self.is_whole = region.range.end() >= self.end;
        }
        self.is_whole
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use demeter_policy::BLOCK_SIZE;

    fn range(start: u64, end: u64) -> VirtRange {
        VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(end)).unwrap()
    }

    #[test]
    fn blocks_end_with_their_range() {
        let (half, block) = (BLOCK_SIZE / 2, BLOCK_SIZE);
        let blocks: Vec<_> = blocks_of(&range(half, 2 * block + 1)).collect();
        assert_eq!(
            blocks,
            [
                range(half, block),
                range(block, 2 * block),
                range(2 * block, 2 * block + 1)
            ]
        );
    }

    proptest! {
        /// Records may arrive in any pieces, and listening may begin anywhere.
        #[test]
        fn one_whole_aggregation_is_taken(
            looks in prop::collection::vec(any::<bool>(), 1..30),
            skipped in 0usize..30,
            cuts in prop::collection::vec(1usize..8, 1..40),
        ) {
            let blocks: Vec<_> =
                (0..looks.len() as u64).map(|b| range(b * BLOCK_SIZE, (b + 1) * BLOCK_SIZE)).collect();
            let records: Vec<_> = blocks.iter().zip(&looks).map(|(&range, &is_accessed)| Region {
                pid: Pid(1), range, accesses: is_accessed.into(),
            }).collect();
            // The first aggregation is partial; the second and third follow.
            let skipped = skipped % records.len();
            let all = [&records[skipped..], &records, &records].concat();
            let mut batch = Batch::new(&blocks);
            let (mut rest, mut accessed) = (&all[..], vec![]);
            let mut cuts = cuts.into_iter().cycle();
            loop {
                prop_assert!(!rest.is_empty());
                let cut = cuts.next().unwrap().min(rest.len());
                let (piece, left) = rest.split_at(cut);
                rest = left;
                if batch.add(piece, &mut accessed) {
                    break;
                }
            }
            let want: Vec<_> =
                records.iter().filter(|r| r.accesses > 0).map(|r| r.range.start()).collect();
            prop_assert_eq!(accessed, want);
        }
    }
}
