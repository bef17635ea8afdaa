//! Tests of guests whose held memory is extremely fragmented.
//!
//! A guest holds every second page, then more pages, then all the others instead. Every listing
//! completes despite short deadlines, and the host's memory is bounded.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use demeter_host::agent::AgentClient;
use demeter_host::backing::{Backing, Extent, FileOffset, NotInTier};
use demeter_host::outside::MayWait;
use demeter_host::process::{Opener, PeerProcess};
use demeter_host::provisioner::balloon::Balloon;
use demeter_host::provisioner::{ProvisionError, Provisioner};
use demeter_policy::{ByteCount, GuestPhysAddr, NodeId, PAGE_SIZE, PerTier, PhysRange, Tier};
use demeter_proto::{
    BootId, Decoder, Done, GpaRange, Hello, Message, NodeTotal, Nonce, Outcome, RANGES_MAX, Ranges,
    RequestId, Resize, SessionId, encode,
};
use tokio::time::Instant;

/// An allocator that counts the host's live memory. It ignores the guest's thread, whose memory
/// depends on how fast the host reads.
struct Counting;

thread_local! {
    static IS_GUEST: Cell<bool> = const { Cell::new(false) };
}

static LIVE: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !IS_GUEST.get() {
            let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
            MOST.fetch_max(live, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        if !IS_GUEST.get() {
            LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const GIB: u64 = 1 << 30;

/// Page in which the driver shows a nonce, beyond all memory.
const OWN_PAGE: u64 = 1 << 50;

/// Fast memory that is only counted; no slow memory.
#[derive(Clone)]
struct Memory {
    size: u64,
    punched: Arc<AtomicU64>,
    /// Whether the guest holds the odd pages instead of the even ones.
    odd: Arc<AtomicBool>,
    nonce: Arc<Mutex<Nonce>>,
}

impl Backing for Memory {
    fn size(&self, tier: Tier) -> ByteCount {
        match tier {
            Tier::Fast => ByteCount(self.size),
            Tier::Slow => ByteCount(0),
        }
    }

    fn resolve(&self, tier: Tier, range: PhysRange) -> Result<Extent, NotInTier> {
        let end = range.start().0 + range.len().0;
        if end > self.size && range.start().0 != OWN_PAGE {
            return Err(NotInTier { range, tier });
        }
        Ok(Extent {
            tier,
            offset: FileOffset(range.start().0),
            len: range.len(),
        })
    }

    fn punch(&self, extent: Extent, _: &MayWait) -> io::Result<()> {
        self.punched.fetch_add(extent.len.0, Ordering::Relaxed);
        Ok(())
    }

    fn read(&self, _: Extent, into: &mut [u8], _: &MayWait) -> io::Result<()> {
        into.copy_from_slice(&self.nonce.lock().unwrap().0);
        Ok(())
    }

    fn pinned_by(&self, _: &MayWait) -> io::Result<Option<String>> {
        Ok(None)
    }

    fn backed(&self, tier: Tier, _: &MayWait) -> io::Result<ByteCount> {
        let punched = self.punched.load(Ordering::Relaxed);
        Ok(ByteCount(self.size(tier).0.saturating_sub(punched)))
    }
}

/// A guest that holds every second page of its fast node, and more on request.
#[expect(clippy::too_many_lines, reason = "an arm for each message")]
fn serve(mut host: UnixStream, memory: &Memory) -> io::Result<()> {
    let mut say = {
        let mut host = host.try_clone()?;
        move |message: Message| {
            let mut bytes = vec![];
            encode(&message, &mut bytes).unwrap();
            host.write_all(&bytes)
        }
    };
    let node = |node| NodeTotal {
        node: NodeId(node),
        total: ByteCount(memory.size),
    };
    say(Message::Hello(Hello {
        boot_id: BootId([1; 16]),
        session: SessionId(1),
        driver: true,
        nodes: vec![node(0), node(1)],
    }))?;
    let (mut decoder, mut bytes) = (Decoder::default(), [0; 4096]);
    loop {
        let read = host.read(&mut bytes)?;
        if read == 0 {
            return Ok(());
        }
        decoder.push(&bytes[..read]);
        while let Some(message) = decoder.next().unwrap() {
            match message {
                Message::Ping { nonce } => say(Message::Pong { nonce })?,
                Message::Prove {
                    request,
                    node,
                    nonce,
                } => {
                    *memory.nonce.lock().unwrap() = nonce;
                    say(Message::Proof {
                        request,
                        node,
                        page: GuestPhysAddr(OWN_PAGE),
                    })?;
                }
                Message::List {
                    request,
                    node,
                    from,
                } => {
                    let end = if node == NodeId(0) { memory.size } else { 0 };
                    let step = 2 * PAGE_SIZE;
                    let odd = match memory.odd.load(Ordering::Relaxed) {
                        true => PAGE_SIZE,
                        false => 0,
                    };
                    let first = from.0.saturating_sub(odd).next_multiple_of(step) + odd;
                    let mut pages = (first..end).step_by(step as usize).map(page);
                    say(Message::Held(Ranges {
                        request,
                        node,
                        ranges: pages.by_ref().take(RANGES_MAX).collect(),
                        more: pages.next().is_some(),
                    }))?;
                    say(done(request, node))?;
                }
                // Pages that are as far apart as possible.
                Message::Inflate(Resize {
                    request,
                    node,
                    bytes,
                }) => {
                    let count = bytes.0 / PAGE_SIZE;
                    let apart = memory.size / count / (2 * PAGE_SIZE) * 2 * PAGE_SIZE;
                    let mut pages = (0..count).map(|at| page(at * apart + PAGE_SIZE)).peekable();
                    while pages.peek().is_some() {
                        say(Message::Inflated(Ranges {
                            request,
                            node,
                            ranges: pages.by_ref().take(RANGES_MAX).collect(),
                            more: pages.peek().is_some(),
                        }))?;
                    }
                    say(done(request, node))?;
                }
                _ => {}
            }
        }
    }
}

fn page(start: u64) -> GpaRange {
    GpaRange {
        start: GuestPhysAddr(start),
        bytes: ByteCount(PAGE_SIZE),
    }
}

fn done(request: RequestId, node: NodeId) -> Message {
    Message::Done(Done {
        request,
        node,
        moved: ByteCount(0),
        held: ByteCount(0),
        outcome: Outcome::Ok,
        reason: String::new(),
    })
}

/// Maximum size of the host's inflate requests.
const ASK_MAX: u64 = 256 << 20;

/// Runs a host against such a guest, in calls of `patience`. Returns the number of unfinished calls
/// and the peak memory.
fn meet(size: u64, patience: Duration) -> (u64, usize) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent");
    let listener = UnixListener::bind(&socket).unwrap();
    let memory = Memory {
        size,
        punched: Arc::default(),
        odd: Arc::default(),
        nonce: Arc::new(Mutex::new(Nonce([0; 16]))),
    };
    let guests = memory.clone();
    thread::spawn(move || {
        IS_GUEST.set(true);
        serve(listener.accept().unwrap().0, &guests)
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let before = LIVE.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let unfinished = runtime.block_on(async {
        let (ours, _theirs) = tokio::net::UnixStream::pair().unwrap();
        let server = PeerProcess::of(&ours).unwrap();
        let agent = AgentClient::connect(socket, Opener::only(server), RequestId(0));
        let mut peer = agent.peer();
        peer.wait_for(Option::is_some).await.unwrap();
        let nodes = PerTier {
            fast: NodeId(0),
            slow: NodeId(1),
        };
        let mut balloon = Balloon::new(agent, memory.clone(), nodes, ByteCount(0));
        let mut unfinished = 0;
        let mut before = 0;
        for odd in [false, true] {
            memory.odd.store(odd, Ordering::Relaxed);
            let owned = loop {
                match balloon.actual(Instant::now() + patience).await {
                    Ok(owned) => break owned.fast,
                    Err(ProvisionError::Unfinished) => unfinished += 1,
                    // The machine gave this program no CPU time at all.
                    Err(ProvisionError::Timeout(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            };
            assert_eq!(owned, ByteCount(size / 2));
            // A call that was cut off repeats at most one batch of 512 holes.
            let punched = memory.punched.load(Ordering::Relaxed) - before;
            let again = punched - size / 2;
            assert!(again <= unfinished * 512 * PAGE_SIZE, "{again} bytes twice");
            if !odd {
                let target = ByteCount(size / 2 - ASK_MAX);
                let patience = Instant::now() + Duration::from_secs(300);
                let progress = balloon.set(Tier::Fast, target, patience).await.unwrap();
                assert_eq!(progress.owned, target);
                before = memory.punched.load(Ordering::Relaxed);
                assert_eq!(before - punched, ASK_MAX, "and nothing besides");
            }
        }
        unfinished
    });
    (unfinished, MOST.load(Ordering::Relaxed) - before)
}

/// Bound of the host's memory: a bit a page, a 64th of that, and data in flight.
///
/// An inflate request covers 65,536 pages with 16 bytes each, and half of that again while their
/// list grows. The rest is for the buffers of the connection.
fn bound(size: u64) -> usize {
    let kept = size / PAGE_SIZE / 8 * 65 / 64;
    (kept + (3 << 20)) as usize
}

#[test]
fn a_list_in_many_pieces_converges_within_bounds() {
    let size = 2 * GIB;
    let (unfinished, most) = meet(size, Duration::from_millis(100));
    assert!(unfinished > 0, "all was known at once");
    assert!(most <= bound(size), "{most} bytes");
}

#[test]
#[ignore = "takes minutes in a debug build: cargo test --release -p demeter-host --test fragments -- --ignored --nocapture"]
fn sixteen_million_pieces_converge_within_bounds() {
    let size = 128 * GIB;
    let started = Instant::now();
    let (unfinished, most) = meet(size, Duration::from_secs(3));
    println!(
        "{} pieces: {:.1} s, {unfinished} calls of 3 s were not enough, {:.2} MiB at most",
        size / 2 / PAGE_SIZE,
        started.elapsed().as_secs_f64(),
        most as f64 / (1 << 20) as f64,
    );
    assert!(most <= bound(size), "{most} bytes");
}
