//! Tests of the provisioner on a simulated guest, honest or hostile, with memory that is really
//! punched.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, LazyLock, Mutex};

use demeter_policy::{GuestPhysAddr, MIB, PAGE_SIZE, PhysRange};
use demeter_proto::{Done, GpaRange, Nonce, Outcome, Ranges, RequestId, Resize};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;

use super::*;
use crate::agent::tests::{Pipe, hello, own_process, shown, soon};
use crate::backing::{Extent, FileOffset, NotInTier};
use crate::outside::MayWait;
use crate::process::Opener;

/// Guest-physical start, length, tier, offset in its file; all in MiB. The first node has a hole.
const LAYOUT: [(u64, u64, Tier, u64); 3] = [
    (0, 4, Tier::Fast, 0),
    (8, 4, Tier::Fast, 4),
    (16, 16, Tier::Slow, 0),
];

const NODES: PerTier<NodeId> = PerTier {
    fast: NodeId(0),
    slow: NodeId(1),
};

/// Plugged memory of the first node, MiB, right behind its boot memory.
const PLUGGED: (u64, u64) = (12, 2);

/// A VM's memory: a file per tier, full of data.
struct TestBacking(PerTier<File>);

impl TestBacking {
    fn new() -> Self {
        let memory = Self(PerTier::from_fn(|_| memfd()));
        for tier in Tier::ALL {
            let data = untouched(tier);
            memory.0.get(tier).write_all_at(data, 0).unwrap();
        }
        memory
    }

    fn another(&self) -> Self {
        Self(PerTier::from_fn(|tier| {
            self.0.get(tier).try_clone().unwrap()
        }))
    }

    fn bytes(&self, tier: Tier) -> Vec<u8> {
        let mut bytes = vec![0; untouched(tier).len()];
        self.0.get(tier).read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn is_untouched(&self) -> bool {
        Tier::ALL
            .into_iter()
            .all(|tier| self.bytes(tier) == untouched(tier))
    }
}

/// The initial content of a tier's memory: no zero bytes.
fn untouched(tier: Tier) -> &'static [u8] {
    static DATA: LazyLock<Vec<u8>> =
        LazyLock::new(|| (0..16 * MIB).map(|i| (i % 251) as u8 + 1).collect());
    let mib: u64 = LAYOUT
        .iter()
        .filter(|part| part.2 == tier)
        .map(|part| part.1)
        .sum();
    &DATA[..(mib * MIB) as usize]
}

fn memfd() -> File {
    // SAFETY: the name is a C string; the new descriptor is ours alone.
    unsafe {
        let fd = libc::memfd_create(c"memory".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        File::from_raw_fd(fd)
    }
}

impl Backing for TestBacking {
    fn size(&self, tier: Tier) -> ByteCount {
        ByteCount(untouched(tier).len() as u64)
    }

    fn resolve(&self, tier: Tier, range: PhysRange) -> Result<Extent, NotInTier> {
        if shown(range.start()).is_some() {
            return Ok(Extent {
                tier,
                offset: FileOffset(range.start().0),
                len: range.len(),
            });
        }
        let inside = |&&(start, len, of, _): &&(u64, u64, Tier, u64)| {
            let part = PhysRange::new(GuestPhysAddr(start * MIB), ByteCount(len * MIB)).unwrap();
            of == tier && part.covers(&range)
        };
        let found = LAYOUT
            .iter()
            .find(inside)
            .ok_or(NotInTier { range, tier })?;
        Ok(Extent {
            tier,
            offset: FileOffset(range.start().0 - found.0 * MIB + found.3 * MIB),
            len: range.len(),
        })
    }

    fn punch(&self, extent: Extent, _: &MayWait) -> io::Result<()> {
        let fd = self.0.get(extent.tier).as_raw_fd();
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: changes the file only, which nobody has mapped.
        match unsafe { libc::fallocate(fd, mode, extent.offset.0 as i64, extent.len.0 as i64) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn read(&self, extent: Extent, into: &mut [u8], _: &MayWait) -> io::Result<()> {
        match shown(GuestPhysAddr(extent.offset.0)) {
            Some(nonce) => into.copy_from_slice(&nonce.0),
            None => self
                .0
                .get(extent.tier)
                .read_exact_at(into, extent.offset.0)?,
        }
        Ok(())
    }

    fn plugged(&self) -> &[PhysRange] {
        static RANGE: LazyLock<[PhysRange; 1]> = LazyLock::new(|| {
            let (start, len) = PLUGGED;
            [PhysRange::new(GuestPhysAddr(start * MIB), mib(len)).unwrap()]
        });
        &*RANGE
    }

    fn pinned_by(&self, _: &MayWait) -> io::Result<Option<String>> {
        Ok(None)
    }

    fn backed(&self, tier: Tier, _: &MayWait) -> io::Result<ByteCount> {
        let blocks = self.0.get(tier).metadata()?.blocks();
        Ok(ByteCount(blocks * 512))
    }
}

fn range(start: u64, bytes: u64) -> GpaRange {
    GpaRange {
        start: GuestPhysAddr(start),
        bytes: ByteCount(bytes),
    }
}

/// The driver of an honest guest, in pieces of 64 KiB.
struct Driver {
    free: BTreeMap<NodeId, Vec<GpaRange>>,
    held: BTreeMap<NodeId, Vec<GpaRange>>,
    /// The last allowance.
    allowed: ByteCount,
}

const PIECE: u64 = 64 << 10;

impl Driver {
    fn new() -> Self {
        let mut free: BTreeMap<NodeId, Vec<_>> = BTreeMap::new();
        for (start, len, tier, _) in LAYOUT {
            let pieces = (start * MIB..(start + len) * MIB).step_by(PIECE as usize);
            let node = free.entry(*NODES.get(tier)).or_default();
            node.extend(pieces.map(|start| range(start, PIECE)));
        }
        Self {
            free,
            held: BTreeMap::from([(NodeId(0), vec![]), (NodeId(1), vec![])]),
            allowed: ByteCount(0),
        }
    }

    fn answer(&mut self, message: &Message) -> Vec<Message> {
        let (request, node) = match *message {
            Message::Ping { nonce } => return vec![Message::Pong { nonce }],
            Message::Allow { oom } => {
                self.allowed = oom;
                return vec![];
            }
            Message::Inflate(r) | Message::Deflate(r) => (r.request, r.node),
            Message::List { request, node, .. } => (request, node),
            _ => return vec![],
        };
        let (free, held) = match (self.free.get_mut(&node), self.held.get_mut(&node)) {
            (Some(free), Some(held)) => (free, held),
            _ => return vec![],
        };
        let pieces = |bytes: ByteCount| (bytes.0 / PIECE) as usize;
        let (mut answers, moved, asked) = match message {
            Message::Inflate(resize) => {
                assert_eq!(
                    self.allowed,
                    ByteCount(0),
                    "pages may vanish under the punch"
                );
                let count = pieces(resize.bytes).min(free.len());
                let ranges = free.split_off(free.len() - count);
                held.extend(&ranges);
                (
                    parts(request, node, &ranges, Message::Inflated),
                    count,
                    pieces(resize.bytes),
                )
            }
            Message::Deflate(resize) => {
                let count = pieces(resize.bytes).min(held.len());
                free.extend(held.drain(..count));
                (vec![], count, pieces(resize.bytes))
            }
            _ => {
                assert_eq!(
                    self.allowed,
                    ByteCount(0),
                    "pages may vanish under the punch"
                );
                (parts(request, node, held, Message::Held), 0, 0)
            }
        };
        let outcome = if moved == asked {
            Outcome::Ok
        } else {
            Outcome::Partial
        };
        answers.push(done(request, node, outcome));
        answers
    }
}

/// A list in parts of 50 ranges.
fn parts(
    request: RequestId,
    node: NodeId,
    ranges: &[GpaRange],
    kind: fn(Ranges) -> Message,
) -> Vec<Message> {
    let mut parts: Vec<_> = ranges.chunks(50).map(|part| part.to_vec()).collect();
    let last = parts.pop().unwrap_or_default();
    let part = |more| {
        move |ranges| {
            kind(Ranges {
                request,
                node,
                more,
                ranges,
            })
        }
    };
    let parts = parts.into_iter().map(part(true));
    parts.chain([part(false)(last)]).collect()
}

fn done(request: RequestId, node: NodeId, outcome: Outcome) -> Message {
    Message::Done(Done {
        request,
        node,
        moved: ByteCount(0),
        held: ByteCount(0),
        outcome,
        reason: match outcome {
            Outcome::Ok => String::new(),
            _ => "that is all there is".to_owned(),
        },
    })
}

/// A host's view of one VM, and the guest that runs in it.
struct Vm {
    memory: TestBacking,
    balloon: Balloon<TestBacking>,
    guest: JoinHandle<()>,
    dir: tempfile::TempDir,
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.guest.abort();
    }
}

/// Boots a guest that answers every message by `answer`, on every connection of the host.
async fn vm(mut answer: impl FnMut(Message) -> Vec<Message> + Send + 'static) -> Vm {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let guest = tokio::spawn(async move {
        loop {
            let mut pipe = Pipe::welcomed(&listener, hello(1, 1)).await;
            while let Some(message) = pipe.hear().await {
                for message in answer(message) {
                    pipe.say(&message).await;
                }
            }
        }
    });
    let memory = TestBacking::new();
    let balloon = balloon(&memory, &socket).await;
    Vm {
        memory,
        balloon,
        guest,
        dir,
    }
}

const OOM: ByteCount = ByteCount(MIB);

async fn balloon(memory: &TestBacking, socket: &std::path::Path) -> Balloon<TestBacking> {
    let agent = AgentClient::connect(socket.into(), Opener::only(own_process()), RequestId(0));
    soon(agent.peer().wait_for(Option::is_some)).await.unwrap();
    Balloon::new(agent, memory.another(), NODES, OOM)
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn mib(n: u64) -> ByteCount {
    ByteCount(n * MIB)
}

/// An honest guest and its driver.
async fn honest() -> (Vm, Arc<Mutex<Driver>>) {
    let driver = Arc::new(Mutex::new(Driver::new()));
    let answering = Arc::clone(&driver);
    let vm = vm(move |message| answering.lock().unwrap().answer(&message)).await;
    (vm, driver)
}

/// Asserts that exactly the driver's held memory is gone and all other memory is unchanged.
fn only_held_memory_is_gone(memory: &TestBacking, driver: &Driver) {
    for tier in Tier::ALL {
        let mut expected = untouched(tier).to_vec();
        for held in &driver.held[NODES.get(tier)] {
            let range = PhysRange::new(held.start, held.bytes).unwrap();
            let at = memory.resolve(tier, range).unwrap().offset.0 as usize;
            expected[at..at + held.bytes.0 as usize].fill(0);
        }
        assert!(memory.bytes(tier) == expected, "{tier} memory differs");
    }
}

#[tokio::test]
async fn memory_goes_back_to_the_host_and_comes_again() {
    let (mut vm, driver) = honest().await;
    let owned = vm.balloon.actual(deadline()).await.unwrap();
    assert_eq!(
        owned,
        PerTier {
            fast: mib(8),
            slow: mib(16)
        }
    );

    let progress = vm
        .balloon
        .set(Tier::Fast, mib(3), deadline())
        .await
        .unwrap();
    let expected = Progress {
        owned: mib(3),
        returned_to_host: mib(5),
        reason: None,
    };
    assert_eq!(progress, expected);
    only_held_memory_is_gone(&vm.memory, &driver.lock().unwrap());
    assert_eq!(
        vm.memory.backed(Tier::Fast, &MayWait::in_a_test()).unwrap(),
        mib(3)
    );

    let progress = vm
        .balloon
        .set(Tier::Fast, mib(6), deadline())
        .await
        .unwrap();
    assert_eq!((progress.owned, progress.reason), (mib(6), None));
    assert_eq!(
        driver.lock().unwrap().held[&NodeId(0)].len() as u64 * PIECE,
        2 * MIB
    );
    // Returned memory that was written again can be punched again.
    let progress = vm
        .balloon
        .set(Tier::Fast, mib(1), deadline())
        .await
        .unwrap();
    assert_eq!((progress.owned, progress.reason), (mib(1), None));
    assert_eq!(
        driver.lock().unwrap().held[&NodeId(0)].len() as u64 * PIECE,
        7 * MIB
    );
}

/// A driver cannot tell plugged memory from its node's other memory.
#[tokio::test]
async fn what_was_plugged_in_is_of_no_use_and_no_lie() {
    let (mut vm, driver) = honest().await;
    {
        let mut driver = driver.lock().unwrap();
        let free = driver.free.get_mut(&NodeId(0)).unwrap();
        let (start, len) = PLUGGED;
        let pieces = (start * MIB..(start + len) * MIB).step_by(PIECE as usize);
        // The driver takes these pieces first.
        free.extend(pieces.map(|piece| range(piece, PIECE)));
    }
    let held = || {
        let driver = driver.lock().unwrap();
        driver.held[&NodeId(0)].len() as u64 * PIECE
    };
    let set = async |vm: &mut Vm, size: ByteCount| {
        let progress = vm.balloon.set(Tier::Fast, size, deadline()).await.unwrap();
        assert_eq!((progress.owned, progress.reason), (size, None));
    };
    // Plugged memory is held as well, and the requested size is still punched.
    set(&mut vm, mib(3)).await;
    assert_eq!(
        vm.memory.backed(Tier::Fast, &MayWait::in_a_test()).unwrap(),
        mib(3)
    );
    assert_eq!(held(), 7 * MIB);
    set(&mut vm, mib(6)).await;
    assert_eq!(held(), 4 * MIB);
    // Plugged memory is released first and does not count towards the target.
    set(&mut vm, mib(8)).await;
    assert_eq!(held(), 0);
    // Memory that is neither boot nor plugged memory is a lie.
    let beyond = range(14 * MIB, PIECE);
    {
        let mut driver = driver.lock().unwrap();
        let free = driver.free.get_mut(&NodeId(0)).unwrap();
        free.push(beyond);
    }
    let lied = vm.balloon.set(Tier::Fast, mib(1), deadline()).await;
    assert!(matches!(lied, Err(ProvisionError::Hostile(_))), "{lied:?}");
}

#[tokio::test]
async fn who_cannot_prove_whose_guest_it_is_changes_nothing() {
    let proves: [fn(NodeId, Nonce) -> Option<GuestPhysAddr>; 4] = [
        // Memory of the VM without the nonce.
        |_, _| Some(GuestPhysAddr(0)),
        // Memory of no VM, of the other tier, and a partial page.
        |_, _| Some(GuestPhysAddr(1 << 40)),
        |_, _| Some(GuestPhysAddr(16 * MIB)),
        |_, _| Some(GuestPhysAddr(8)),
    ];
    for prove in proves {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let guest = tokio::spawn(async move {
            let mut driver = Driver::new();
            let mut pipe = Pipe::welcomed(&listener, hello(1, 1)).await;
            pipe.prove_by(Box::new(prove));
            while let Some(message) = pipe.hear().await {
                for message in driver.answer(&message) {
                    pipe.say(&message).await;
                }
            }
        });
        let memory = TestBacking::new();
        let mut balloon = balloon(&memory, &socket).await;
        let refused = balloon.set(Tier::Fast, mib(3), deadline()).await;
        let Err(ProvisionError::Refused(why)) = refused else {
            panic!("{refused:?}");
        };
        assert!(why.contains("does not speak for this VM"), "{why}");
        assert!(memory.is_untouched());
        guest.abort();
    }
}

#[tokio::test]
async fn held_memory_that_was_touched_is_taken_back_again() {
    let (mut vm, driver) = honest().await;
    let progress = vm.balloon.set(Tier::Fast, mib(3), deadline()).await;
    assert_eq!(progress.unwrap().owned, mib(3));
    let held = driver.lock().unwrap().held[&NodeId(0)][0];
    let held = PhysRange::new(held.start, held.bytes).unwrap();
    let extent = vm.memory.resolve(Tier::Fast, held).unwrap();
    let file = vm.memory.0.get(Tier::Fast);
    file.write_all_at(&[1; PAGE_SIZE as usize], extent.offset.0)
        .unwrap();
    assert!(vm.memory.backed(Tier::Fast, &MayWait::in_a_test()).unwrap() > mib(3));
    vm.balloon.actual(deadline()).await.unwrap();
    assert_eq!(
        vm.memory.backed(Tier::Fast, &MayWait::in_a_test()).unwrap(),
        mib(3)
    );
    only_held_memory_is_gone(&vm.memory, &driver.lock().unwrap());
}

#[tokio::test]
async fn a_guest_gives_what_it_can() {
    let (mut vm, driver) = honest().await;
    driver
        .lock()
        .unwrap()
        .free
        .get_mut(&NodeId(1))
        .unwrap()
        .truncate(32);
    let progress = vm
        .balloon
        .set(Tier::Slow, mib(10), deadline())
        .await
        .unwrap();
    let reason = Some("that is all there is".to_owned());
    assert_eq!((progress.owned, progress.reason), (mib(14), reason));
    only_held_memory_is_gone(&vm.memory, &driver.lock().unwrap());
}

#[tokio::test]
async fn the_allowance_is_what_may_be_owned_beyond_the_target() {
    let (mut vm, driver) = honest().await;
    let allowed = || driver.lock().unwrap().allowed;
    vm.balloon.actual(deadline()).await.unwrap();
    assert_eq!(allowed(), ByteCount(0));
    vm.balloon
        .set(Tier::Slow, mib(10), deadline())
        .await
        .unwrap();
    wait_until(|| allowed() == OOM).await;
    // The driver gives back a quarter of it by itself.
    let pages: Vec<_> = driver
        .lock()
        .unwrap()
        .held
        .get_mut(&NodeId(1))
        .unwrap()
        .drain(..4)
        .collect();
    assert_eq!(pages.len() as u64 * PIECE, OOM.0 / 4);
    let owned = vm.balloon.actual(deadline()).await.unwrap();
    assert_eq!(owned.slow.0, mib(10).0 + OOM.0 / 4);
    wait_until(|| allowed().0 == OOM.0 * 3 / 4).await;
}

async fn wait_until(condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    soon(wait).await;
}

#[tokio::test]
async fn a_new_controller_learns_what_is_held_and_takes_back_what_was_missed() {
    let (mut vm, driver) = honest().await;
    vm.balloon
        .set(Tier::Fast, mib(5), deadline())
        .await
        .unwrap();
    // The pages are held, but the controller died before it learned of them.
    let request = RequestId(9);
    let (node, bytes) = (NodeId(0), mib(1));
    driver.lock().unwrap().allowed = ByteCount(0);
    driver.lock().unwrap().answer(&Message::Inflate(Resize {
        request,
        node,
        bytes,
    }));
    let socket = vm.dir.path().join("agent.sock");
    let again = balloon(&vm.memory, &socket);
    // The guest's port takes one connection at a time.
    vm.balloon.guest.agent = AgentClient::connect(
        "/nonexistent".into(),
        Opener::only(own_process()),
        RequestId(0),
    );
    vm.balloon = again.await;
    let owned = vm.balloon.actual(deadline()).await.unwrap();
    assert_eq!(
        owned,
        PerTier {
            fast: mib(4),
            slow: mib(16)
        }
    );
    only_held_memory_is_gone(&vm.memory, &driver.lock().unwrap());
}

#[tokio::test]
async fn a_reset_between_answer_and_punch_destroys_nothing() {
    let mut driver = Driver::new();
    let mut vm = vm(move |message| match message {
        // The machine was reset before the ping; another agent answers it.
        Message::Ping { nonce } => {
            vec![Message::Hello(hello(2, 2)), Message::Pong { nonce }]
        }
        message => driver.answer(&message),
    })
    .await;
    let error = vm
        .balloon
        .set(Tier::Fast, mib(3), deadline())
        .await
        .unwrap_err();
    assert!(matches!(error, ProvisionError::Unreachable(_)), "{error}");
    assert!(vm.memory.is_untouched());
}

#[tokio::test]
async fn what_a_guest_does_not_have_is_told() {
    let (mut vm, _driver) = honest().await;
    vm.balloon.guest.nodes.slow = NodeId(7);
    let error = vm.balloon.actual(deadline()).await.unwrap_err();
    assert_eq!(error.to_string(), "refused: the guest has no node 7");

    let mut without = self::vm(|message| match message {
        Message::List { request, node, .. } => vec![done(request, node, Outcome::NoDriver)],
        _ => vec![],
    })
    .await;
    let error = without.balloon.actual(deadline()).await.unwrap_err();
    assert!(matches!(error, ProvisionError::NoDriver), "{error}");
    assert!(error.to_string().contains("load demeter_balloon"));
}

/// Lies of a hostile guest that is asked for 1 MiB of fast memory, as (lie, ranges).
fn lies() -> Vec<(&'static str, Vec<GpaRange>)> {
    let page = PAGE_SIZE;
    vec![
        ("slow memory as fast", vec![range(16 * MIB, MIB)]),
        ("in the hole", vec![range(5 * MIB, page)]),
        (
            "over the edge of the hole",
            vec![range(4 * MIB - page, 2 * page)],
        ),
        (
            "across the hole",
            vec![range(4 * MIB - page, 4 * MIB + 2 * page)],
        ),
        ("beyond all memory", vec![range(1 << 50, page)]),
        (
            "beyond all addresses",
            vec![range(u64::MAX - page + 1, 2 * page)],
        ),
        ("everything", vec![range(0, !(page - 1))]),
        ("unaligned start", vec![range(512, page)]),
        ("unaligned length", vec![range(0, page + 1)]),
        ("nothing", vec![range(0, 0)]),
        ("twice", vec![range(0, page), range(0, page)]),
        (
            "overlapping",
            vec![range(0, 3 * page), range(2 * page, 2 * page)],
        ),
        ("more than asked", vec![range(0, MIB), range(MIB, page)]),
        ("one bad of many", {
            let mut pages: Vec<_> = (0..200).map(|i| range(i * page, page)).collect();
            pages.push(range(32 * MIB, page));
            pages
        }),
    ]
}

#[tokio::test]
async fn a_hostile_guest_touches_no_memory() {
    for (lie, ranges) in lies() {
        // Sent in an answer to Inflate, then to List; a list has no limit to exceed.
        for listed in [false, true] {
            if listed && lie == "more than asked" {
                continue;
            }
            let mut driver = Driver::new();
            let ranges = ranges.clone();
            let mut vm = vm(move |message| match message {
                Message::Inflate(Resize { request, node, .. }) if !listed => {
                    let mut answers = parts(request, node, &ranges, Message::Inflated);
                    answers.push(done(request, node, Outcome::Ok));
                    answers
                }
                Message::List { request, node, .. } if listed && node == NodeId(0) => {
                    let mut answers = parts(request, node, &ranges, Message::Held);
                    answers.push(done(request, node, Outcome::Ok));
                    answers
                }
                message => driver.answer(&message),
            })
            .await;
            let error = vm
                .balloon
                .set(Tier::Fast, mib(7), deadline())
                .await
                .unwrap_err();
            assert!(
                matches!(error, ProvisionError::Hostile(_)),
                "{lie}: {error}"
            );
            assert!(vm.memory.is_untouched(), "{lie}");
        }
    }
}

#[tokio::test]
async fn held_pages_cannot_be_named_again() {
    let mut driver = Driver::new();
    let mut first: Option<Vec<Message>> = None;
    let mut vm = vm(move |message| match (&message, &first) {
        (Message::Inflate(resize), Some(replayed)) => {
            // The answer to an earlier request with the id of this one.
            let renamed = |message: &Message| match message.clone() {
                Message::Inflated(ranges) => Message::Inflated(Ranges {
                    request: resize.request,
                    ..ranges
                }),
                message => message,
            };
            replayed.iter().map(renamed).collect()
        }
        (Message::Inflate(_), None) => {
            let answers = driver.answer(&message);
            first = Some(answers.clone());
            answers
        }
        _ => driver.answer(&message),
    })
    .await;
    vm.balloon
        .set(Tier::Fast, mib(7), deadline())
        .await
        .unwrap();
    let before = vm.memory.bytes(Tier::Fast);
    let error = vm
        .balloon
        .set(Tier::Fast, mib(6), deadline())
        .await
        .unwrap_err();
    assert!(matches!(error, ProvisionError::Hostile(_)), "{error}");
    assert!(vm.memory.bytes(Tier::Fast) == before);
}

#[tokio::test]
async fn answers_to_other_requests_are_not_acted_upon() {
    let mut driver = Driver::new();
    let mut vm = vm(move |message| {
        let mut answers = driver.answer(&message);
        if let Message::Inflate(Resize { request, node, .. }) = message {
            for other in [request.0 - 1, request.0 + 1, 0, u64::MAX] {
                let foreign = parts(RequestId(other), node, &[range(0, MIB)], Message::Inflated);
                answers.splice(0..0, foreign.clone());
                answers.extend(foreign);
            }
        }
        answers
    })
    .await;
    let progress = vm
        .balloon
        .set(Tier::Fast, mib(7), deadline())
        .await
        .unwrap();
    assert_eq!(
        (progress.owned, progress.returned_to_host),
        (mib(7), mib(1))
    );
    let first = ..MIB as usize;
    assert!(vm.memory.bytes(Tier::Fast)[first] == untouched(Tier::Fast)[first]);
}

#[tokio::test]
async fn an_answer_without_end_ends_at_the_deadline() {
    for empty in [true, false] {
        let mut driver = Driver::new();
        let mut vm = vm(move |message| match message {
            Message::List { request, node, .. } => {
                let part = |i: u64| {
                    let pages = (0..50).map(|p| range((i * 50 + p) * PAGE_SIZE, PAGE_SIZE));
                    Message::Held(Ranges {
                        request,
                        node,
                        more: true,
                        ranges: if empty { vec![] } else { pages.collect() },
                    })
                };
                (0..10_000).map(part).collect()
            }
            message => driver.answer(&message),
        })
        .await;
        let short = Instant::now() + Duration::from_millis(500);
        let error = vm.balloon.actual(short).await.unwrap_err();
        match (empty, &error) {
            (true, ProvisionError::Timeout(_)) | (false, ProvisionError::Hostile(_)) => {}
            _ => panic!("{error}"),
        }
        assert!(vm.memory.is_untouched());
    }
}

#[tokio::test]
async fn one_hostile_guest_does_not_keep_another_from_its_work() {
    let mut silent = vm(|_| vec![]).await;
    let (mut vm, driver) = honest().await;
    let hostile = silent
        .balloon
        .actual(Instant::now() + Duration::from_millis(300));
    let honest = vm.balloon.set(Tier::Slow, mib(4), deadline());
    let (silent, progress) = tokio::join!(hostile, honest);
    assert!(
        matches!(silent, Err(ProvisionError::Timeout(_))),
        "{silent:?}"
    );
    assert_eq!(progress.unwrap().owned, mib(4));
    only_held_memory_is_gone(&vm.memory, &driver.lock().unwrap());
}
