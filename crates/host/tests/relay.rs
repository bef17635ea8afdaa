//! A test of the host's balloon against the guest's own relay, over a pipe.
//!
//! A guest writes to every page as soon as it owns the page again. Meanwhile requests are cut off,
//! agents and controllers restart, and the driver gives memory back by itself. No page in use may
//! lose a byte.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use demeter_guest::balloon::link::RunningRelay;
use demeter_guest::balloon::port::Port;
use demeter_guest::balloon::{
    self, BalloonError, Cursor, Deflated, Inflated, Listed, NodeBalloon, Stop,
};
use demeter_host::agent::AgentClient;
use demeter_host::backing::{Backing, Extent, FileOffset, NotInTier};
use demeter_host::outside::MayWait;
use demeter_host::process::{Opener, PeerProcess};
use demeter_host::provisioner::balloon::Balloon;
use demeter_host::provisioner::{ProvisionError, Provisioner};
use demeter_policy::{
    ByteCount, GuestPhysAddr, MIB, NodeId, PAGE_SIZE, PerTier, PhysRange, Tier, TierBytes,
};
use demeter_proto::{GpaRange, Nonce, RequestId};
use tokio::time::Instant;

/// Pages of each node.
const PAGES: u64 = 2048;
const SIZE: ByteCount = ByteCount(PAGES * PAGE_SIZE);
const OOM: ByteCount = ByteCount(MIB);

/// First guest-physical address of a tier's memory.
fn base(tier: Tier) -> u64 {
    match tier {
        Tier::Fast => 0,
        Tier::Slow => 1 << 32,
    }
}

/// The memory of a VM for host and guest: a file per tier.
#[derive(Clone)]
struct Memory {
    files: Arc<PerTier<File>>,
    /// Nonces in the driver's own pages. These lie in no file, so that the files occupy exactly the
    /// guest's pages in use.
    own_pages: Arc<Mutex<PerTier<Nonce>>>,
}

impl Memory {
    fn new() -> Self {
        let files = Arc::new(PerTier::from_fn(|_| {
            // SAFETY: the name is a C string; the new descriptor is ours alone.
            let file = unsafe {
                let fd = libc::memfd_create(c"memory".as_ptr(), libc::MFD_CLOEXEC);
                assert!(fd >= 0, "{}", io::Error::last_os_error());
                File::from_raw_fd(fd)
            };
            file.set_len(SIZE.0).unwrap();
            file
        }));
        Self {
            files,
            own_pages: Arc::new(Mutex::new(PerTier::from_fn(|_| Nonce([0; 16])))),
        }
    }

    /// Content of a page in use: its number, so that all pages differ.
    fn stamp(tier: Tier, page: u64) -> [u8; 8] {
        (base(tier) + page + 1).to_le_bytes()
    }

    fn write(&self, tier: Tier, page: u64) {
        let file = self.files.get(tier);
        file.write_all_at(&Self::stamp(tier, page), page * PAGE_SIZE)
            .unwrap();
    }

    fn read(&self, tier: Tier, page: u64) -> [u8; 8] {
        let mut bytes = [0; 8];
        let file = self.files.get(tier);
        file.read_exact_at(&mut bytes, page * PAGE_SIZE).unwrap();
        bytes
    }
}

impl Backing for Memory {
    fn size(&self, _: Tier) -> ByteCount {
        SIZE
    }

    fn resolve(&self, tier: Tier, range: PhysRange) -> Result<Extent, NotInTier> {
        let with_own = ByteCount(SIZE.0 + PAGE_SIZE);
        let all = PhysRange::new(GuestPhysAddr(base(tier)), with_own).unwrap();
        let extent = Extent {
            tier,
            offset: FileOffset(range.start().0.wrapping_sub(base(tier))),
            len: range.len(),
        };
        let inside = all.covers(&range);
        inside.then_some(extent).ok_or(NotInTier { range, tier })
    }

    fn punch(&self, extent: Extent, _: &MayWait) -> io::Result<()> {
        let fd = self.files.get(extent.tier).as_raw_fd();
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: changes the file only, which nobody has mapped.
        match unsafe { libc::fallocate(fd, mode, extent.offset.0 as i64, extent.len.0 as i64) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn read(&self, extent: Extent, into: &mut [u8], _: &MayWait) -> io::Result<()> {
        assert_eq!(extent.offset.0, SIZE.0, "nothing else is to be read");
        into.copy_from_slice(&self.own_pages.lock().unwrap().get(extent.tier).0);
        Ok(())
    }

    fn pinned_by(&self, _: &MayWait) -> io::Result<Option<String>> {
        Ok(None)
    }

    fn backed(&self, tier: Tier, _: &MayWait) -> io::Result<ByteCount> {
        Ok(ByteCount(self.files.get(tier).metadata()?.blocks() * 512))
    }
}

/// The guest's driver. The guest uses returned pages at once.
struct Driver {
    memory: Memory,
    held: PerTier<BTreeSet<u64>>,
    allowed: ByteCount,
    oom_returned: ByteCount,
}

impl Driver {
    fn new(memory: &Memory) -> Self {
        for tier in Tier::ALL {
            (0..PAGES).for_each(|page| memory.write(tier, page));
        }
        Self {
            memory: memory.clone(),
            held: PerTier::default(),
            allowed: ByteCount(0),
            oom_returned: ByteCount(0),
        }
    }

    fn give_back(&mut self, tier: Tier, count: u64) -> u64 {
        let held = self.held.get_mut(tier);
        let mut moved = 0;
        while moved < count
            && let Some(page) = held.pop_last()
        {
            self.memory.write(tier, page);
            moved += 1;
        }
        moved
    }

    fn run_out_of_memory(&mut self, pages: u64) {
        let moved = self.give_back(Tier::Slow, pages.min(self.allowed.0 / PAGE_SIZE));
        self.allowed.0 -= moved * PAGE_SIZE;
        self.oom_returned.0 += moved * PAGE_SIZE;
    }

    /// Pages in use that do not hold what was written to them.
    fn wrong(&self) -> Vec<(Tier, u64)> {
        let pages = |tier| (0..PAGES).map(move |page| (tier, page));
        let in_use = |&(tier, page): &(Tier, u64)| !self.held.get(tier).contains(&page);
        let damaged =
            |&(tier, page): &(Tier, u64)| self.memory.read(tier, page) != Memory::stamp(tier, page);
        let all = Tier::ALL.into_iter().flat_map(pages);
        all.filter(in_use).filter(damaged).collect()
    }
}

/// The driver as the relay opens it.
struct Opened(Arc<Mutex<Driver>>);

fn tier(node: NodeId) -> Result<Tier, BalloonError> {
    match node.0 {
        0 => Ok(Tier::Fast),
        1 => Ok(Tier::Slow),
        _ => Err(BalloonError::Nonsense(format!("node {node}"))),
    }
}

fn ranges(tier: Tier, pages: &[u64]) -> Vec<GpaRange> {
    let range = |page: &u64| GpaRange {
        start: GuestPhysAddr(base(tier) + page * PAGE_SIZE),
        bytes: ByteCount(PAGE_SIZE),
    };
    pages.iter().map(range).collect()
}

/// Maximum number of pages for one call of the driver.
const CALL_PAGES_MAX: usize = 200;

impl balloon::Balloon for Opened {
    fn inflate(
        &mut self,
        node: NodeId,
        bytes: ByteCount,
        _: bool,
    ) -> Result<Inflated, BalloonError> {
        let tier = tier(node)?;
        let mut driver = self.0.lock().unwrap();
        let held = driver.held.get_mut(tier);
        let wanted = (bytes.0 / PAGE_SIZE) as usize;
        let free = (0..PAGES).filter(|page| !held.contains(page));
        let taken: Vec<_> = free.take(wanted.min(CALL_PAGES_MAX)).collect();
        held.extend(&taken);
        let stop = match taken.len() {
            n if n == wanted => Stop::Done,
            CALL_PAGES_MAX => Stop::Again,
            _ => Stop::NoMemory,
        };
        let ranges = ranges(tier, &taken);
        Ok(Inflated { ranges, stop })
    }

    fn deflate(&mut self, node: NodeId, bytes: ByteCount) -> Result<Deflated, BalloonError> {
        let mut driver = self.0.lock().unwrap();
        let wanted = bytes.0 / PAGE_SIZE;
        let moved = driver.give_back(tier(node)?, wanted);
        let whole = moved == wanted;
        Ok(Deflated {
            moved: ByteCount(moved * PAGE_SIZE),
            stop: if whole { Stop::Done } else { Stop::Empty },
        })
    }

    fn list(&mut self, node: NodeId, _: Cursor) -> Result<Listed, BalloonError> {
        let tier = tier(node)?;
        let driver = self.0.lock().unwrap();
        let held: Vec<_> = driver.held.get(tier).iter().copied().collect();
        let ranges = ranges(tier, &held);
        Ok(Listed { ranges, next: None })
    }

    fn allow_oom(&mut self, _: NodeId, bytes: ByteCount) -> Result<(), BalloonError> {
        self.0.lock().unwrap().allowed = bytes;
        Ok(())
    }

    fn prove(&mut self, node: NodeId, nonce: Nonce) -> Result<GuestPhysAddr, BalloonError> {
        let tier = tier(node)?;
        let driver = self.0.lock().unwrap();
        *driver.memory.own_pages.lock().unwrap().get_mut(tier) = nonce;
        Ok(GuestPhysAddr(base(tier) + SIZE.0))
    }

    fn stats(&mut self, node: NodeId) -> Result<NodeBalloon, BalloonError> {
        let (driver, tier) = (self.0.lock().unwrap(), tier(node)?);
        Ok(NodeBalloon {
            held: ByteCount(driver.held.get(tier).len() as u64 * PAGE_SIZE),
            oom_returned: match tier {
                Tier::Fast => ByteCount(0),
                Tier::Slow => driver.oom_returned,
            },
        })
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn take_event(&mut self) -> Result<bool, BalloonError> {
        Ok(false)
    }
}

/// Files that the relay reads, of a guest with two nodes.
fn guest_root() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    for (node, cpus) in [(0, "0\n"), (1, "\n")] {
        let dir = format!("sys/devices/system/node/node{node}");
        let kib = SIZE.0 / 1024;
        let meminfo = format!("Node {node} MemTotal: {kib} kB\nNode {node} MemFree: {kib} kB\n");
        write(&format!("{dir}/meminfo"), &meminfo);
        write(&format!("{dir}/distance"), "10 20\n");
        write(&format!("{dir}/cpulist"), cpus);
    }
    let boot_id = "0d9a4c3e-5b1f-4e0c-9a77-2f6d1c8b3e50\n";
    write("proc/sys/kernel/random/boot_id", boot_id);
    root
}

/// A VM: the hypervisor's end of its port, and the agent that runs in it.
struct Vm {
    root: tempfile::TempDir,
    listener: UnixListener,
    driver: Arc<Mutex<Driver>>,
    pipe: Option<UnixStream>,
    relay: Option<RunningRelay>,
}

impl Vm {
    fn new(memory: &Memory) -> Self {
        let root = guest_root();
        let listener = UnixListener::bind(root.path().join("agent.sock")).unwrap();
        Self {
            root,
            listener,
            driver: Arc::new(Mutex::new(Driver::new(memory))),
            pipe: None,
            relay: None,
        }
    }

    /// Kills the agent and restarts it on the same pipe, with the pipe's content.
    fn restart_agent(&mut self) {
        self.relay = None;
        let pipe = self.pipe.as_ref().unwrap().try_clone().unwrap();
        pipe.set_nonblocking(true).unwrap();
        let driver = Arc::clone(&self.driver);
        let open = Box::new(move || {
            let opened: Box<dyn balloon::Balloon> = Box::new(Opened(Arc::clone(&driver)));
            Ok(opened)
        });
        let port = Port::from(OwnedFd::from(pipe));
        self.relay = Some(RunningRelay::over(port, self.root.path(), open, None).unwrap());
    }

    /// Starts the only controller.
    async fn host(&mut self, memory: &Memory, first: u64) -> Balloon<Memory> {
        let socket = self.root.path().join("agent.sock");
        let (own, _) = UnixStream::pair().unwrap();
        let server = PeerProcess::of(own).unwrap();
        let agent = AgentClient::connect(socket, Opener::only(server), RequestId(first));
        let mut peer = agent.peer();
        let listener = self.listener.try_clone().unwrap();
        let accepted = tokio::task::spawn_blocking(move || listener.accept());
        self.pipe = Some(soon(accepted).await.unwrap().unwrap().0);
        self.restart_agent();
        soon(peer.wait_for(Option::is_some)).await.unwrap();
        let nodes = PerTier {
            fast: NodeId(0),
            slow: NodeId(1),
        };
        Balloon::new(agent, memory.clone(), nodes, OOM)
    }
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    let limit = Duration::from_secs(20);
    tokio::time::timeout(limit, future).await.expect("in time")
}

fn within(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

/// Runs the guest out of memory again and again until this is dropped.
struct Shortage {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Shortage {
    fn of(driver: &Arc<Mutex<Driver>>) -> Self {
        let (driver, stop) = (Arc::clone(driver), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                driver.lock().unwrap().run_out_of_memory(3);
                thread::yield_now();
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Shortage {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Brings the VM to `target`, with as many calls as needed.
async fn converge(host: &mut Balloon<Memory>, target: TierBytes) {
    for tier in Tier::ALL {
        let due = *target.get(tier);
        let reached = async {
            loop {
                match host.set(tier, due, within(5000)).await {
                    Ok(progress) if progress.owned == due => return,
                    Ok(_) => {}
                    Err(ProvisionError::Hostile(why)) => panic!("an honest guest: {why}"),
                    // The agent must introduce itself again, or a listing is due.
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        soon(reached).await;
    }
}

#[tokio::test]
async fn no_page_in_use_loses_a_byte() {
    let memory = Memory::new();
    let mut vm = Vm::new(&memory);
    let mut host = vm.host(&memory, 1 << 20).await;
    let shortage = Shortage::of(&vm.driver);
    let mut reached = 0;
    for round in 0..120u64 {
        // Walks through sizes, tiers, time limits and disturbances with a long period.
        let tier = Tier::ALL[(round % 2) as usize];
        let target = ByteCount(round * 977 % PAGES * PAGE_SIZE);
        let cut_off_ms = [2, 5000, 5, 5000, 1][(round % 5) as usize];
        let result = host.set(tier, target, within(cut_off_ms)).await;
        reached += u32::from(result.as_ref().is_ok_and(|p| p.owned == target));
        let hostile = matches!(result, Err(ProvisionError::Hostile(_)));
        assert!(!hostile, "round {round}: {result:?}");
        match round % 11 {
            3 => vm.restart_agent(),
            7 => {
                drop(host);
                host = vm.host(&memory, round << 32).await;
            }
            _ => {}
        }
        let wrong = vm.driver.lock().unwrap().wrong();
        assert_eq!(wrong, [], "round {round}");
    }
    drop(shortage);
    assert!(
        reached >= 20,
        "only {reached} of 120 requests did something"
    );
    let target = TierBytes {
        fast: ByteCount(2 * MIB),
        slow: ByteCount(5 * MIB),
    };
    converge(&mut host, target).await;
    let driver = vm.driver.lock().unwrap();
    assert_eq!(driver.wrong(), []);
    for tier in Tier::ALL {
        let owned = (PAGES - driver.held.get(tier).len() as u64) * PAGE_SIZE;
        assert_eq!(ByteCount(owned), *target.get(tier));
        let blocks = memory.files.get(tier).metadata().unwrap().blocks();
        assert_eq!(ByteCount(blocks * 512), *target.get(tier));
    }
}
