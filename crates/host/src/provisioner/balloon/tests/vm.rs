//! A simulated VM: memory files, and a guest with the balloon driver.

use super::*;

/// Guest-physical start, length, tier, offset in its file; all in MiB. The first node has a hole.
pub(super) const LAYOUT: [(u64, u64, Tier, u64); 3] = [
    (0, 4, Tier::Fast, 0),
    (8, 4, Tier::Fast, 4),
    (16, 16, Tier::Slow, 0),
];

pub(super) const NODES: PerTier<NodeId> = PerTier {
    fast: NodeId(0),
    slow: NodeId(1),
};

/// Plugged memory of the first node, MiB, right behind its boot memory.
pub(super) const PLUGGED: (u64, u64) = (12, 2);

/// A VM's memory: a file per tier, full of data.
pub(super) struct TestBacking(pub(super) PerTier<File>);

impl TestBacking {
    pub(super) fn new() -> Self {
        let memory = Self(PerTier::from_fn(|_| memfd()));
        for tier in Tier::ALL {
            let data = untouched(tier);
            memory.0.get(tier).write_all_at(data, 0).unwrap();
        }
        memory
    }

    pub(super) fn another(&self) -> Self {
        Self(PerTier::from_fn(|tier| {
            self.0.get(tier).try_clone().unwrap()
        }))
    }

    pub(super) fn bytes(&self, tier: Tier) -> Vec<u8> {
        let mut bytes = vec![0; untouched(tier).len()];
        self.0.get(tier).read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    pub(super) fn is_untouched(&self) -> bool {
        Tier::ALL
            .into_iter()
            .all(|tier| self.bytes(tier) == untouched(tier))
    }
}

/// The initial content of a tier's memory: no zero bytes.
pub(super) fn untouched(tier: Tier) -> &'static [u8] {
    static DATA: LazyLock<Vec<u8>> =
        LazyLock::new(|| (0..16 * MIB).map(|i| (i % 251) as u8 + 1).collect());
    let mib: u64 = LAYOUT
        .iter()
        .filter(|part| part.2 == tier)
        .map(|part| part.1)
        .sum();
    &DATA[..(mib * MIB) as usize]
}

pub(super) fn memfd() -> File {
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

pub(super) fn range(start: u64, bytes: u64) -> GpaRange {
    GpaRange {
        start: GuestPhysAddr(start),
        bytes: ByteCount(bytes),
    }
}

/// The driver of an honest guest, in pieces of 64 KiB.
pub(super) struct Driver {
    pub(super) free: BTreeMap<NodeId, Vec<GpaRange>>,
    pub(super) held: BTreeMap<NodeId, Vec<GpaRange>>,
    /// The last allowance.
    pub(super) allowed: ByteCount,
}

pub(super) const PIECE: u64 = 64 << 10;

impl Driver {
    pub(super) fn new() -> Self {
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

    pub(super) fn answer(&mut self, message: &Message) -> Vec<Message> {
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
pub(super) fn parts(
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

pub(super) fn done(request: RequestId, node: NodeId, outcome: Outcome) -> Message {
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
pub(super) struct Vm {
    pub(super) memory: TestBacking,
    pub(super) balloon: Balloon<TestBacking>,
    pub(super) guest: JoinHandle<()>,
    pub(super) dir: tempfile::TempDir,
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.guest.abort();
    }
}

/// Boots a guest that answers every message by `answer`, on every connection of the host.
pub(super) async fn vm(mut answer: impl FnMut(Message) -> Vec<Message> + Send + 'static) -> Vm {
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

pub(super) const OOM: ByteCount = ByteCount(MIB);

pub(super) async fn balloon(
    memory: &TestBacking,
    socket: &std::path::Path,
) -> Balloon<TestBacking> {
    let agent = AgentClient::connect(socket.into(), Opener::only(own_process()), RequestId(0));
    soon(agent.peer().wait_for(Option::is_some)).await.unwrap();
    Balloon::new(agent, memory.another(), NODES, OOM)
}

pub(super) fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

pub(super) fn mib(n: u64) -> ByteCount {
    ByteCount(n * MIB)
}

/// An honest guest and its driver.
pub(super) async fn honest() -> (Vm, Arc<Mutex<Driver>>) {
    let driver = Arc::new(Mutex::new(Driver::new()));
    let answering = Arc::clone(&driver);
    let vm = vm(move |message| answering.lock().unwrap().answer(&message)).await;
    (vm, driver)
}

/// Asserts that exactly the driver's held memory is gone and all other memory is unchanged.
pub(super) fn only_held_memory_is_gone(memory: &TestBacking, driver: &Driver) {
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
