//! Tests of the amount and duration of punching.

use std::sync::Mutex;
use std::time::Duration;

use demeter_policy::{GuestPhysAddr, NodeId, PerTier, PhysRange, TierBytes};
use demeter_proto::{Done, GpaRange, Message, Outcome, Ranges, RequestId};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::*;
use crate::agent::AgentClient;
use crate::agent::tests::{Pipe, hello, own_process, shown, soon};
use crate::backing::NotInTier;
use crate::hypervisor::HypervisorError;
use crate::outside::MayWait;
use crate::process::Opener;
use crate::provisioner::Provisioner;
use crate::provisioner::balloon::Balloon;

const GIB: u64 = 1 << 30;

/// Record of the operations on a memory of 1 GiB a tier.
#[derive(Default)]
struct Record {
    holes: Vec<Extent>,
    pinned: Option<String>,
    disturbances: u64,
    /// Amount of punched memory after which the hypervisor reports a disturbance, and a number of
    /// holes.
    disturbed_at: Option<u64>,
    disturbed_after: Option<usize>,
    /// Duration of a hole.
    delay: Duration,
}

impl Record {
    fn punched(&self) -> u64 {
        self.holes.iter().map(|hole| hole.len.0).sum()
    }
}

#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Record>>);

impl Backing for Recorder {
    fn size(&self, _: Tier) -> ByteCount {
        ByteCount(GIB)
    }

    fn resolve(&self, tier: Tier, range: PhysRange) -> Result<Extent, NotInTier> {
        Ok(Extent {
            tier,
            offset: FileOffset(range.start().0),
            len: range.len(),
        })
    }

    fn punch(&self, hole: Extent, _: &MayWait) -> io::Result<()> {
        let delay = self.0.lock().unwrap().delay;
        std::thread::sleep(delay);
        let mut record = self.0.lock().unwrap();
        record.holes.push(hole);
        if record.disturbed_after == Some(record.holes.len()) {
            record.disturbances += 1;
        }
        Ok(())
    }

    fn read(&self, extent: Extent, into: &mut [u8], _: &MayWait) -> io::Result<()> {
        let nonce = shown(GuestPhysAddr(extent.offset.0)).ok_or(io::ErrorKind::NotFound)?;
        into.copy_from_slice(&nonce.0);
        Ok(())
    }

    fn pinned_by(&self, _: &MayWait) -> io::Result<Option<String>> {
        Ok(self.0.lock().unwrap().pinned.clone())
    }

    fn disturbances(&self) -> u64 {
        self.0.lock().unwrap().disturbances
    }

    async fn catch_up(&self) -> Result<(), HypervisorError> {
        let mut record = self.0.lock().unwrap();
        if record.disturbed_at == Some(record.punched()) {
            record.disturbed_at = None;
            record.disturbances += 1;
        }
        Ok(())
    }

    fn backed(&self, _: Tier, _: &MayWait) -> io::Result<ByteCount> {
        let punched = self.0.lock().unwrap().punched();
        Ok(ByteCount(GIB.saturating_sub(punched)))
    }
}

/// A host that has just met a guest that holds all its fast memory. `ping` gets the punched memory
/// before each ping.
async fn meet(
    recorder: &Recorder,
    mut ping: impl FnMut(u64) + Send + 'static,
) -> (Balloon<Recorder>, JoinHandle<()>, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let record = recorder.clone();
    let guest = tokio::spawn(async move {
        let mut pipe = Pipe::welcomed(&listener, hello(1, 1)).await;
        while let Some(message) = pipe.hear().await {
            match message {
                Message::Ping { nonce } => {
                    let punched = record.0.lock().unwrap().punched();
                    ping(punched);
                    pipe.say(&Message::Pong { nonce }).await;
                }
                Message::List { request, node, .. } => {
                    let all = GpaRange {
                        start: GuestPhysAddr(0),
                        bytes: ByteCount(GIB),
                    };
                    let held = Message::Held(Ranges {
                        request,
                        node,
                        more: false,
                        ranges: [all].into_iter().filter(|_| node == NodeId(0)).collect(),
                    });
                    pipe.say(&held).await;
                    let done = Message::Done(Done {
                        request,
                        node,
                        moved: ByteCount(0),
                        held: ByteCount(0),
                        outcome: Outcome::Ok,
                        reason: String::new(),
                    });
                    pipe.say(&done).await;
                }
                _ => {}
            }
        }
    });
    let agent = AgentClient::connect(socket, Opener::only(own_process()), RequestId(0));
    soon(agent.peer().wait_for(Option::is_some)).await.unwrap();
    let nodes = PerTier {
        fast: NodeId(0),
        slow: NodeId(1),
    };
    let balloon = Balloon::new(agent, recorder.clone(), nodes, ByteCount(0));
    (balloon, guest, dir)
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[tokio::test]
async fn a_ping_is_good_for_a_batch_and_a_call_for_a_hole() {
    let recorder = Recorder::default();
    let mut before = 0;
    let bounded = move |punched| {
        assert!(punched - before <= BATCH_MAX.0, "{}", punched - before);
        before = punched;
    };
    let (mut balloon, guest, _dir) = meet(&recorder, bounded).await;
    let owned = balloon.actual(deadline()).await.unwrap();
    let want = TierBytes {
        fast: ByteCount(0),
        slow: ByteCount(GIB),
    };
    assert_eq!(owned, want);
    assert!(!guest.is_finished(), "no ping was late");
    let record = recorder.0.lock().unwrap();
    assert!(record.holes.iter().all(|hole| hole.len <= HOLE_MAX));
    let mut holes: Vec<_> = record.holes.iter().map(|hole| hole.offset.0).collect();
    holes.dedup();
    assert_eq!(holes.len() as u64, GIB / HOLE_MAX.0, "each page once");
}

#[tokio::test]
async fn a_call_that_is_dropped_ends_with_its_hole_and_the_next_one_waits_for_that() {
    let recorder = Recorder::default();
    recorder.0.lock().unwrap().delay = Duration::from_millis(50);
    let (mut balloon, _guest, _dir) = meet(&recorder, |_| {}).await;
    let begun = async {
        while recorder.0.lock().unwrap().holes.is_empty() {
            sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        _ = balloon.actual(deadline()) => panic!("it takes seconds"),
        () = begun => {}
    }
    let begun = recorder.0.lock().unwrap().holes.len();
    soon(balloon.guest.punching_ended()).await;
    let ended = recorder.0.lock().unwrap().holes.len();
    assert!(ended <= begun + 1, "{ended} after {begun}");
    sleep(Duration::from_millis(120)).await;
    assert_eq!(recorder.0.lock().unwrap().holes.len(), ended);
}

#[tokio::test]
async fn a_disturbance_between_ping_and_punch_stops_the_batch_before_its_first_hole() {
    for batches in 0..2 {
        let recorder = Recorder::default();
        recorder.0.lock().unwrap().disturbed_at = Some(batches * BATCH_MAX.0);
        let (mut balloon, _guest, _dir) = meet(&recorder, |_| {}).await;
        let result = balloon.actual(deadline()).await;
        assert!(
            matches!(result, Err(ProvisionError::Disturbed)),
            "{result:?}"
        );
        assert_eq!(recorder.0.lock().unwrap().punched(), batches * BATCH_MAX.0);
        // The earlier batches were complete; everything is asked again.
        balloon.actual(deadline()).await.unwrap();
    }
}

#[tokio::test]
async fn a_disturbance_within_a_batch_stops_it_at_the_next_hole() {
    let recorder = Recorder::default();
    recorder.0.lock().unwrap().disturbed_after = Some(3);
    let (mut balloon, _guest, _dir) = meet(&recorder, |_| {}).await;
    let result = balloon.actual(deadline()).await;
    assert!(
        matches!(result, Err(ProvisionError::Disturbed)),
        "{result:?}"
    );
    assert_eq!(recorder.0.lock().unwrap().holes.len(), 3);
}

#[tokio::test]
async fn nothing_is_punched_while_a_device_pins_memory() {
    let recorder = Recorder::default();
    let pinned = recorder.clone();
    // A device is plugged in during punching.
    let plug = move |punched| {
        if punched > 0 {
            pinned.0.lock().unwrap().pinned = Some("/dev/vfio/17".into());
        }
    };
    let (mut balloon, _guest, _dir) = meet(&recorder, plug).await;
    let said = balloon.actual(deadline()).await.unwrap_err().to_string();
    assert!(said.contains("/dev/vfio/17 keeps guest memory"), "{said}");
    assert_eq!(recorder.0.lock().unwrap().punched(), BATCH_MAX.0);
}
