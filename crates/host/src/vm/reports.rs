//! Listens to the hypervisor, the guest's agent and the history thread.

use std::future;
use std::time::Duration;

use demeter_proto::BootId;
use tokio::sync::watch;
use tokio::time::timeout;

use super::News;
use super::end::Cut;
use crate::agent::{GuestSession, NotHeard};
use crate::controller::Observation;
use crate::history::HistoryState;
use crate::hypervisor::{Event, Events};

/// Listener for unsolicited reports of the hypervisor, the agent and the history thread.
pub(super) struct Watch<'a> {
    pub(super) events: &'a mut Events,
    pub(super) guest: Option<Guest>,
    pub(super) history: Option<watch::Receiver<HistoryState>>,
    /// Whether the hypervisor has reported a reset that was not handled yet.
    pub(super) was_reset: bool,
}

/// Listener for reports of the guest's agent.
pub(super) struct Guest {
    pub(super) not_heard: watch::Receiver<Option<NotHeard>>,
    pub(super) peer: watch::Receiver<Option<GuestSession>>,
    /// The guest's boot that was reported last.
    pub(super) boot: Option<BootId>,
    /// Whether the VM can be managed only while its agent is connected.
    pub(super) needed: bool,
    /// Whether the host manages the VM while its agent is not connected.
    pub(super) is_replaced: bool,
}

impl Watch<'_> {
    /// The next report, or the reason to stop. Cancel-safe: a dropped call loses no report.
    pub(super) async fn next(&mut self) -> Result<News, Cut> {
        let guest = async {
            match &mut self.guest {
                Some(guest) => guest.next().await,
                None => future::pending().await,
            }
        };
        tokio::select! {
            biased;
            event = self.events.next() => match event {
                Some(Event::Reset) => {
                    self.was_reset = true;
                    Ok(News::Observation(Observation::Reset))
                }
                Some(Event::Changed) => Err(Cut::Changed),
                None => Err(Cut::Gone),
            },
            news = guest => news,
            news = reported(&mut self.history) => news,
        }
    }
}

/// The next report of the thread that manages the VM by histories.
async fn reported(history: &mut Option<watch::Receiver<HistoryState>>) -> Result<News, Cut> {
    let Some(reports) = history else {
        return future::pending().await;
    };
    loop {
        reports.changed().await.map_err(|_| Cut::Failed)?;
        let report = reports.borrow_and_update().clone();
        if let Some(why) = report.failed {
            return Ok(News::Trouble(why));
        }
        if let Some(stats) = report.usage {
            return Ok(News::Usage(stats));
        }
    }
}

impl Guest {
    /// Waits up to `limit` for the agent to introduce itself.
    pub(super) async fn speaks_within(&mut self, limit: Duration) -> bool {
        self.boot = match timeout(limit, self.peer.wait_for(Option::is_some)).await {
            Ok(Ok(peer)) => peer.as_ref().map(|peer| peer.boot_id),
            Ok(Err(_)) | Err(_) => None,
        };
        self.boot.is_some()
    }

    /// Waits up to `limit` for the agent if it is needed. Returns whether the VM can be managed.
    pub(super) async fn arrives_within(&mut self, limit: Duration) -> bool {
        !self.needed || self.speaks_within(limit).await
    }

    async fn next(&mut self) -> Result<News, Cut> {
        loop {
            tokio::select! {
                biased;
                Ok(()) = self.peer.changed() => {
                    let boot = self.peer.borrow_and_update().as_ref().map(|peer| peer.boot_id);
                    let before = std::mem::replace(&mut self.boot, boot);
                    match (before, boot) {
                        (None, Some(_)) | (Some(_), None) if self.is_replaced => {
                            return Err(Cut::Changed);
                        }
                        _ if !self.needed => {}
                        (_, None) => return Ok(News::Observation(Observation::Lost)),
                        (Some(before), Some(boot)) if before != boot => {
                            return Ok(News::Observation(Observation::Reset));
                        }
                        // The agent arrived or restarted, so everything must be asked again.
                        (_, Some(_)) => return Ok(News::Observation(Observation::Here)),
                    }
                }
                Ok(()) = self.not_heard.changed() => {
                    if let Some(why) = &*self.not_heard.borrow_and_update() {
                        return Ok(News::Trouble(why.to_string()));
                    }
                }
                // The link has ended and will report nothing more.
                else => future::pending().await,
            }
        }
    }
}
