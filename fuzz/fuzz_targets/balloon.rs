//! The host's balloon against a hostile guest that also forgets, restarts and falls silent.
//!
//! Only pages that the guest named in its own memory are punched, after a proof, while the driver's
//! allowance is zero. A lie punches nothing, a restart at most one batch, and each call ends in
//! time. With an honest guest the reported sizes are right.
#![no_main]

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use arbitrary::Arbitrary;
use demeter_fuzz::Said;
use demeter_host::agent::AgentClient;
use demeter_host::backing::{Backing, Extent, FileOffset, NotInTier};
use demeter_host::memory::{MemoryMap, Piece};
use demeter_host::outside::MayWait;
use demeter_host::provisioner::balloon::Balloon;
use demeter_host::provisioner::{ProvisionError, Provisioner};
use demeter_policy::{
    ByteCount, GuestPhysAddr, NodeId, PAGE_SIZE, PerTier, PhysRange, Tier, TierBytes,
};
use demeter_proto::{
    BootId, Decoder, Done, GpaRange, Hello, Message, NodeTotal, Nonce, Outcome, Ranges, RequestId,
    SessionId, encode,
};
use libfuzzer_sys::fuzz_target;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::time::{Instant, timeout};

#[derive(Debug, Arbitrary)]
struct Script {
    /// Whether the honest driver prefers pages that do not touch.
    scatters: bool,
    /// Replies to the host's questions, in order; honest afterwards.
    replies: Vec<Reply>,
    calls: Vec<Call>,
}

#[derive(Debug, Arbitrary)]
enum Reply {
    Honest,
    Silent,
    Lie(Vec<Said>),
    Before(Said),
    After(Said),
    /// Restarts the agent or the guest, with or without an honest answer first.
    Restart {
        is_reset: bool,
        answers: bool,
    },
}

#[derive(Debug, Arbitrary)]
enum Call {
    Actual,
    /// Tier, pages, and extra bytes below a page.
    Set(bool, u16, u8),
    /// The guest uses a page, held or not.
    Touch(bool, u16),
}

/// First guest page, pages, tier, first page in its file.
const LAYOUT: [(u64, u64, Tier, u64); 3] = [
    (0, 32, Tier::Fast, 0),
    (48, 32, Tier::Fast, 32),
    (256, 1536, Tier::Slow, 0),
];

const NODES: PerTier<NodeId> = PerTier {
    fast: NodeId(0),
    slow: NodeId(1),
};

/// Maximum number of holes in a batch (`HOLES_MAX`).
const HOLES_MAX: usize = 512;

/// Ranges in one part of an honest list.
const LISTED_MAX: usize = 100;

const PATIENCE: Duration = Duration::from_secs(5);

fn pages(tier: Tier) -> usize {
    let parts = LAYOUT.iter().filter(|part| part.2 == tier);
    parts.map(|part| part.1 as usize).sum()
}

fn tier(fast: bool) -> Tier {
    if fast { Tier::Fast } else { Tier::Slow }
}

fn tier_of(node: NodeId) -> Option<Tier> {
    Tier::ALL.into_iter().find(|tier| *NODES.get(*tier) == node)
}

fn map() -> MemoryMap {
    let piece = |&(guest, pages, tier, file): &(u64, u64, Tier, u64)| Piece {
        range: PhysRange::new(
            GuestPhysAddr(guest * PAGE_SIZE),
            ByteCount(pages * PAGE_SIZE),
        )
        .unwrap(),
        tier,
        offset: FileOffset(file * PAGE_SIZE),
    };
    MemoryMap::new(LAYOUT.iter().map(piece).collect()).unwrap()
}

/// Guest page of a page in a tier's file.
fn guest_page(tier: Tier, page: usize) -> u64 {
    let page = page as u64;
    let holds =
        |part: &&(u64, u64, Tier, u64)| part.2 == tier && (part.3..part.3 + part.1).contains(&page);
    let part = LAYOUT.iter().find(holds).unwrap();
    part.0 + page - part.3
}

fn file_pages(extent: Extent) -> std::ops::Range<usize> {
    let first = (extent.offset.0 / PAGE_SIZE) as usize;
    first..first + (extent.len.0 / PAGE_SIZE) as usize
}

/// The true state of the VM's memory, by page of each file.
struct Truth {
    is_backed: PerTier<Vec<bool>>,
    /// Pages that the guest named as held, in this run of its agent and in earlier ones.
    is_named: PerTier<Vec<bool>>,
    was_named: PerTier<Vec<bool>>,
    /// Holes that are still allowed in pages named before the agent's last start: one batch, if it
    /// answered a ping right before.
    stale_holes: usize,
    is_proved: PerTier<bool>,
    /// Place of a nonce.
    shown: Option<(Tier, usize, Nonce)>,
    is_punched_since_question: bool,
    /// The driver's out-of-memory allowance.
    allowed: ByteCount,
}

impl Truth {
    fn new() -> Self {
        let all = |value| PerTier::from_fn(|tier| vec![value; pages(tier)]);
        Self {
            is_backed: all(true),
            is_named: all(false),
            was_named: all(false),
            stale_holes: 0,
            is_proved: PerTier::default(),
            shown: None,
            is_punched_since_question: false,
            allowed: ByteCount(0),
        }
    }

    fn backed(&self, tier: Tier) -> ByteCount {
        let backed = self.is_backed.get(tier).iter().filter(|is| **is);
        ByteCount(backed.count() as u64 * PAGE_SIZE)
    }

    fn restart(&mut self, was_confirmed: bool) {
        for tier in Tier::ALL {
            let named = std::mem::replace(self.is_named.get_mut(tier), vec![false; pages(tier)]);
            for (was, is) in self.was_named.get_mut(tier).iter_mut().zip(named) {
                *was |= is;
            }
        }
        self.stale_holes = if was_confirmed { HOLES_MAX } else { 0 };
    }

    fn punch(&mut self, extent: Extent) {
        assert!((extent.offset.0 | extent.len.0).is_multiple_of(PAGE_SIZE) && extent.len.0 > 0);
        assert_eq!(self.allowed, ByteCount(0), "pages may vanish under a punch");
        for tier in Tier::ALL {
            assert!(self.is_proved.get(tier), "punched before a proof");
        }
        let (named, before) = (
            self.is_named.get(extent.tier),
            self.was_named.get(extent.tier),
        );
        let mut is_stale = false;
        for page in file_pages(extent) {
            assert!(named[page] || before[page], "page {page} was never named");
            is_stale |= !named[page];
        }
        if is_stale {
            let left = self.stale_holes.checked_sub(1);
            self.stale_holes = left.expect("nothing that was named before a restart is punched");
        }
        self.is_punched_since_question = true;
        self.is_backed.get_mut(extent.tier)[file_pages(extent)].fill(false);
    }
}

#[derive(Clone)]
struct Memory {
    truth: Arc<Mutex<Truth>>,
    map: Arc<MemoryMap>,
}

impl Memory {
    fn truth(&self) -> MutexGuard<'_, Truth> {
        self.truth.lock().unwrap()
    }

    /// Host memory of both files.
    fn whole_backed(&self) -> TierBytes {
        let truth = self.truth();
        TierBytes::from_fn(|tier| truth.backed(tier))
    }

    /// Records that the guest has sent this message.
    fn note(&self, message: &Message) {
        let (Message::Inflated(part) | Message::Held(part)) = message else {
            return;
        };
        let Some(tier) = tier_of(part.node) else {
            return;
        };
        for range in &part.ranges {
            let range = PhysRange::new(range.start, range.bytes);
            let extent = range.and_then(|range| self.map.resolve(tier, range).ok());
            if let Some(extent) = extent {
                self.truth().is_named.get_mut(tier)[file_pages(extent)].fill(true);
            }
        }
    }
}

impl Backing for Memory {
    fn size(&self, tier: Tier) -> ByteCount {
        ByteCount(pages(tier) as u64 * PAGE_SIZE)
    }

    fn resolve(&self, tier: Tier, range: PhysRange) -> Result<Extent, NotInTier> {
        self.map.resolve(tier, range)
    }

    fn punch(&self, extent: Extent, _: &MayWait) -> io::Result<()> {
        self.truth().punch(extent);
        Ok(())
    }

    fn read(&self, extent: Extent, into: &mut [u8], _: &MayWait) -> io::Result<()> {
        into.fill(0);
        let page = file_pages(extent).start;
        match self.truth().shown {
            Some((tier, at, nonce)) if (tier, at) == (extent.tier, page) => {
                into.copy_from_slice(&nonce.0);
            }
            _ => {}
        }
        Ok(())
    }

    fn pinned_by(&self, _: &MayWait) -> io::Result<Option<String>> {
        Ok(None)
    }

    fn backed(&self, tier: Tier, _: &MayWait) -> io::Result<ByteCount> {
        Ok(self.truth().backed(tier))
    }
}

/// A guest with an agent and a driver.
struct Guest {
    memory: Memory,
    boot: u8,
    session: u64,
    is_held: PerTier<Vec<bool>>,
    scatters: bool,
    replies: std::vec::IntoIter<Reply>,
}

impl Guest {
    async fn run(mut self, mut pipe: DuplexStream) {
        let (mut decoder, mut bytes) = (Decoder::default(), [0; 4096]);
        let mut out = vec![];
        self.say(self.hello(), &mut out);
        loop {
            // The host may have hung up.
            let _ = pipe.write_all(&out).await;
            out.clear();
            let Ok(read @ 1..) = pipe.read(&mut bytes).await else {
                return;
            };
            decoder.push(&bytes[..read]);
            while let Some(message) = decoder.next().expect("the host speaks well") {
                self.hear(&message, &mut out);
            }
        }
    }

    fn hello(&self) -> Message {
        let node = |tier: Tier| NodeTotal {
            node: *NODES.get(tier),
            total: self.memory.size(tier),
        };
        Message::Hello(Hello {
            boot_id: BootId([self.boot; 16]),
            session: SessionId(self.session),
            driver: true,
            nodes: Tier::ALL.map(node).to_vec(),
        })
    }

    fn say(&self, message: Message, out: &mut Vec<u8>) {
        self.memory.note(&message);
        encode(&message, out).expect("within the protocol's bounds");
    }

    fn lie(&self, said: Said, last: u64, out: &mut Vec<u8>) {
        match said.message(last) {
            Ok(message) => self.say(message, out),
            Err(raw) => {
                // The meaning of the raw bytes, if any.
                let mut decoder = Decoder::default();
                decoder.push(&raw);
                decoder.push(&[0]);
                while let Some(found) = decoder.next().transpose() {
                    found.iter().for_each(|message| self.memory.note(message));
                }
                // Zeros end any frame that they begin.
                out.extend(raw);
                out.push(0);
            }
        }
    }

    fn hear(&mut self, message: &Message, out: &mut Vec<u8>) {
        let last = match message {
            Message::Allow { oom } => {
                self.memory.truth().allowed = *oom;
                return;
            }
            Message::Welcome {
                session: SessionId(0),
            } => {
                let hello = self.hello();
                return self.say(hello, out);
            }
            Message::Prove { request, .. } | Message::List { request, .. } => request.0,
            Message::Inflate(resize) | Message::Deflate(resize) => resize.request.0,
            Message::Ping { nonce } => *nonce,
            _ => return,
        };
        if !matches!(message, Message::Ping { .. }) {
            self.memory.truth().is_punched_since_question = false;
        }
        match self.replies.next() {
            None | Some(Reply::Honest) => self.answer(message, out),
            Some(Reply::Silent) => {}
            Some(Reply::Lie(all)) => {
                all.into_iter()
                    .take(8)
                    .for_each(|said| self.lie(said, last, out));
            }
            Some(Reply::Before(said)) => {
                self.lie(said, last, out);
                self.answer(message, out);
            }
            Some(Reply::After(said)) => {
                self.answer(message, out);
                self.lie(said, last, out);
            }
            Some(Reply::Restart { is_reset, answers }) => {
                if answers {
                    self.answer(message, out);
                }
                self.session += 1;
                if is_reset {
                    self.boot = self.boot.wrapping_add(1);
                    self.is_held = PerTier::from_fn(|tier| vec![false; pages(tier)]);
                }
                let was_confirmed = answers && matches!(message, Message::Ping { .. });
                self.memory.truth().restart(was_confirmed);
                let hello = self.hello();
                self.say(hello, out);
            }
        }
    }

    fn answer(&mut self, message: &Message, out: &mut Vec<u8>) {
        let (request, node) = match *message {
            Message::Ping { nonce } => return self.say(Message::Pong { nonce }, out),
            Message::Prove { request, node, .. } | Message::List { request, node, .. } => {
                (request, node)
            }
            Message::Inflate(resize) | Message::Deflate(resize) => (resize.request, resize.node),
            _ => return,
        };
        let tier = tier_of(node).expect("a node that it has");
        let count = |bytes: ByteCount| (bytes.0 / PAGE_SIZE) as usize;
        let (moved, asked) = match *message {
            Message::Prove { nonce, .. } => {
                // The first page is the driver's own.
                let mut truth = self.memory.truth();
                truth.shown = Some((tier, 0, nonce));
                truth.is_backed.get_mut(tier)[0] = true;
                *truth.is_proved.get_mut(tier) = true;
                drop(truth);
                let page = GuestPhysAddr(guest_page(tier, 0) * PAGE_SIZE);
                let proof = Message::Proof {
                    request,
                    node,
                    page,
                };
                return self.say(proof, out);
            }
            Message::Inflate(resize) => {
                let taken = self.turn(tier, count(resize.bytes), true);
                self.name(request, node, (&taken, false), Message::Inflated, out);
                (taken.len(), count(resize.bytes))
            }
            Message::Deflate(resize) => {
                let given = self.turn(tier, count(resize.bytes), false);
                (given.len(), count(resize.bytes))
            }
            Message::List { from, .. } => {
                let mut held = self.held(tier);
                held.retain(|&page| guest_page(tier, page) * PAGE_SIZE >= from.0);
                let more = held.len() > LISTED_MAX;
                held.truncate(LISTED_MAX);
                self.name(request, node, (&held, more), Message::Held, out);
                (0, 0)
            }
            _ => return,
        };
        let done = Message::Done(Done {
            request,
            node,
            moved: ByteCount(moved as u64 * PAGE_SIZE),
            held: ByteCount(self.held(tier).len() as u64 * PAGE_SIZE),
            outcome: if moved == asked {
                Outcome::Ok
            } else {
                Outcome::Partial
            },
            reason: "that is all".into(),
        });
        self.say(done, out);
    }

    fn held(&self, tier: Tier) -> Vec<usize> {
        let all = self.is_held.get(tier).iter().enumerate();
        all.filter(|(_, is)| **is).map(|(page, _)| page).collect()
    }

    /// Makes pages held or free, and returns them.
    fn turn(&mut self, tier: Tier, count: usize, held: bool) -> Vec<usize> {
        let order: Vec<usize> = match self.scatters {
            true => (1..pages(tier))
                .step_by(2)
                .chain((2..pages(tier)).step_by(2))
                .collect(),
            false => (1..pages(tier)).collect(),
        };
        let is_held = self.is_held.get_mut(tier);
        let other = order.into_iter().filter(|&page| is_held[page] != held);
        let turned: Vec<_> = other.take(count).collect();
        turned.iter().for_each(|&page| is_held[page] = held);
        turned
    }

    fn name(
        &self,
        request: RequestId,
        node: NodeId,
        (pages, more): (&[usize], bool),
        kind: fn(Ranges) -> Message,
        out: &mut Vec<u8>,
    ) {
        let tier = tier_of(node).expect("a node that it has");
        let range = |&page: &usize| GpaRange {
            start: GuestPhysAddr(guest_page(tier, page) * PAGE_SIZE),
            bytes: ByteCount(PAGE_SIZE),
        };
        let part = Ranges {
            request,
            node,
            more,
            ranges: pages.iter().map(range).collect(),
        };
        self.say(kind(part), out);
    }
}

async fn case(script: Script) {
    let is_honest = script.replies.iter().all(|r| matches!(r, Reply::Honest));
    let memory = Memory {
        truth: Arc::new(Mutex::new(Truth::new())),
        map: Arc::new(map()),
    };
    let (host, pipe) = tokio::io::duplex(1 << 17);
    let guest = Guest {
        memory: memory.clone(),
        boot: 1,
        session: 1000,
        is_held: PerTier::from_fn(|tier| vec![false; pages(tier)]),
        scatters: script.scatters,
        replies: script.replies.into_iter(),
    };
    let guest = tokio::spawn(guest.run(pipe));
    let agent = AgentClient::over(host, RequestId(1 << 40));
    let mut peer = agent.peer();
    drop(timeout(PATIENCE, peer.wait_for(Option::is_some)).await);
    let oom = ByteCount(8 * PAGE_SIZE);
    let mut balloon = Balloon::new(agent, memory.clone(), NODES, oom);
    let mut is_touched = false;
    for call in script.calls.into_iter().take(8) {
        let deadline = Instant::now() + PATIENCE;
        let mut whole = TierBytes::from_fn(|tier| memory.size(tier));
        let result = match call {
            Call::Touch(fast, page) => {
                let page = usize::from(page) % pages(tier(fast));
                memory.truth().is_backed.get_mut(tier(fast))[page] = true;
                is_touched = true;
                balloon.overrun(memory.whole_backed());
                continue;
            }
            Call::Actual => balloon.actual(deadline).await.map(|owned| {
                is_touched = false;
                whole = owned;
            }),
            Call::Set(fast, pages, odd) => {
                let target = u64::from(pages) % 2000 * PAGE_SIZE + u64::from(odd);
                let moved = balloon.set(tier(fast), ByteCount(target), deadline).await;
                moved.map(|progress| *whole.get_mut(tier(fast)) = progress.owned)
            }
        };
        let late = Instant::now().saturating_duration_since(deadline);
        assert!(late <= Duration::from_millis(2), "{late:?} late");
        let truth = memory.truth();
        match result {
            Err(ProvisionError::Hostile(_)) => {
                assert!(!truth.is_punched_since_question, "punched by a lie");
            }
            Err(error) => assert!(!is_honest, "{error}"),
            Ok(()) => {
                for tier in Tier::ALL {
                    assert!(*whole.get(tier) <= memory.size(tier));
                    if !is_touched {
                        assert!(truth.backed(tier) <= *whole.get(tier), "{tier} is overrun");
                    }
                }
            }
        }
        drop(truth);
        balloon.overrun(memory.whole_backed());
    }
    guest.abort();
}

fuzz_target!(|script: Script| demeter_fuzz::run(case(script)));
