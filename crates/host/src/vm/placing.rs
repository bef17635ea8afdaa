//! Reports where a VM's memory lies on the host, now and then.
//!
//! Counting costs time for each page, so it has two bounds: one for each VM, and one for all VMs
//! together. A thousand VMs would otherwise take a thousand times what one may take.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use demeter_policy::PerTier;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

use super::News;
use crate::VmName;
use crate::hypervisor::Hypervisor;
use crate::memory::{Addresses, HostFiles, Places};
use crate::outside::{LIMIT, Outside};
use crate::process::PeerProcess;

/// Minimum pause between two counts of a VM's pages.
const COUNT_EVERY: Duration = Duration::from_secs(60);

/// Pause of a VM after its count, in multiples of the count's time: 1 % of a CPU at most.
const VM_PAUSE_PER_COUNT: u32 = 100;

/// Pause of all VMs after a count, in multiples of its CPU time: 2 % of a CPU at most.
const PAUSE_PER_COUNT: u32 = 50;

/// Limits of a VM's counts. They outlive connections, so that a VM whose connection is renewed again
/// and again is counted no more often than others.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counts {
    /// Its own slot, so that counting delays no punching.
    outside: Outside,
    /// The earliest time of the next count.
    due: Arc<Mutex<Option<Instant>>>,
}

impl Counts {
    fn due(&self) -> Option<Instant> {
        *self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allows the next count after a pause for one that took this long.
    fn pause_for(&self, taken: Duration) {
        let due = Instant::now() + taken * VM_PAUSE_PER_COUNT;
        *self.due.lock().unwrap_or_else(PoisonError::into_inner) = Some(due);
    }
}

/// The VM whose memory is located.
pub(super) struct Placing<H> {
    pub name: VmName,
    pub hypervisor: H,
    pub process: PeerProcess,
    pub memdev: PerTier<Option<String>>,
    /// Addresses of its memory, if known.
    pub addresses: Option<Addresses>,
    pub files: HostFiles,
    pub counts: Counts,
    pub news: mpsc::Sender<(VmName, News)>,
}

impl<H: Hypervisor> Placing<H> {
    /// Counts and reports until it is dropped or nobody listens.
    pub async fn run(mut self) {
        loop {
            // They stay the same as long as the connection. Asking costs QEMU and us more than counting.
            if self.addresses.is_none() {
                let found = Addresses::of_tiers(&self.hypervisor, &self.memdev).await;
                self.addresses = found.ok();
            }
            let places = match &self.addresses {
                Some(addresses) => self.count(addresses).await,
                None => None,
            };
            let news = News::Places(places);
            if self.news.send((self.name.clone(), news)).await.is_err() {
                return;
            }
            sleep(COUNT_EVERY).await;
        }
    }

    /// The memory of each tier by node; `None` if it cannot be counted.
    async fn count(&self, addresses: &Addresses) -> Option<Places> {
        if let Some(due) = self.counts.due() {
            sleep_until(due).await;
        }
        let turn = Arc::clone(&self.files.counting).acquire_owned().await;
        let begun = Instant::now();
        // Counts for a call that is cut off.
        self.counts.pause_for(LIMIT);
        let (addresses, root, process) = (addresses.clone(), self.files.root.clone(), self.process);
        let outside = &self.counts.outside;
        let counting = outside.ask("counting the VM's pages by node", move |wait| {
            let before = cpu_time();
            let counted = addresses.count(&root, process.pid, wait);
            (counted, cpu_time().saturating_sub(before))
        });
        let counted = counting.await;
        self.counts.pause_for(begun.elapsed());
        let counted = counted.map_err(|stuck| stuck.to_string());
        let counted = counted.and_then(|(counted, spent)| {
            // A task of its own: it must not end with this VM's connection. A count that is stuck
            // takes no CPU time, and delays no other VM.
            tokio::spawn(async move {
                sleep(spent * PAUSE_PER_COUNT).await;
                drop(turn);
            });
            counted.map_err(|error| error.to_string())
        });
        let counted = counted.inspect_err(|why| tracing::debug!("VM {}: {why}", self.name));
        // The number may be another process's by now.
        counted.ok()?.filter(|_| self.process.is_there())
    }
}

/// CPU time of this thread so far.
fn cpu_time() -> Duration {
    // It never fails for a thread's own clock, and is not negative.
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}
