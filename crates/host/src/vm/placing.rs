//! Reports where a VM's memory lies on the host, now and then.

use std::sync::Arc;
use std::time::Duration;

use demeter_policy::PerTier;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use super::News;
use crate::VmName;
use crate::hypervisor::Hypervisor;
use crate::memory::{HostFiles, Places, TierAddresses};
use crate::outside::Outside;
use crate::process::PeerProcess;

/// Minimum pause between two counts of a VM's pages.
const COUNT_EVERY: Duration = Duration::from_secs(60);

/// Pause after a count, in multiples of its time: counting takes at most 1 % of a CPU.
const PAUSE_PER_COUNT: u32 = 100;

/// The VM whose memory is located.
pub(super) struct Placing<H> {
    pub name: VmName,
    pub hypervisor: H,
    pub process: PeerProcess,
    pub memdev: PerTier<Option<String>>,
    pub files: HostFiles,
    pub news: mpsc::Sender<(VmName, News)>,
}

impl<H: Hypervisor> Placing<H> {
    /// Counts and reports until it is dropped or nobody listens.
    pub async fn run(self) {
        // Its own slot, so that counting delays no punching.
        let outside = Outside::default();
        loop {
            let turn = Arc::clone(&self.files.counting).acquire_owned().await;
            let begun = Instant::now();
            let places = self.count(&outside).await;
            let taken = begun.elapsed();
            drop(turn);
            let news = News::Places(places);
            if self.news.send((self.name.clone(), news)).await.is_err() {
                return;
            }
            sleep(COUNT_EVERY.max(taken * PAUSE_PER_COUNT)).await;
        }
    }

    /// The memory of each tier by node; `None` if it cannot be counted.
    async fn count(&self, outside: &Outside) -> Option<Places> {
        let found = TierAddresses::find(&self.hypervisor, &self.memdev).await;
        let addresses = found.ok()?;
        let (root, process) = (self.files.root.clone(), self.process);
        let counting = outside.ask("counting the VM's pages by node", move |wait| {
            addresses.count(&root, process.pid, wait)
        });
        let counted = counting.await.map_err(|stuck| stuck.to_string());
        let counted = counted.and_then(|counted| counted.map_err(|error| error.to_string()));
        let counted = counted.inspect_err(|why| tracing::debug!("VM {}: {why}", self.name));
        // The number may be another process's by now.
        counted.ok()?.filter(|_| self.process.is_there())
    }
}
