//! A stress test of the controller, with reduced privileges, against many hostile VMs.
//!
//! Each VM is a process with its own memory. Only the guest's own pages may be lost. Honest VMs get
//! their desired sizes. The controller stays small and reports the reason for each problem.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use demeter_policy::{ByteCount, GuestPhysAddr, MIB, NodeId, PAGE_SIZE, Tier, TierBytes};
use demeter_proto::{Done, GpaRange, Message, Nonce, Outcome, Ranges, RequestId, Resize};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{Instant, sleep, timeout};

use crate::agent::tests::{Pipe, hello};
use crate::api::tests::ask;
use crate::config::Config;
use crate::hypervisor::Event;
use crate::testing::{FakeGuest, FakeVm, Told};
use crate::view::{EventView, HostView, TierView, VmState, VmView};

const SIZE: TierBytes = TierBytes {
    fast: ByteCount(16 * MIB),
    slow: ByteCount(32 * MIB),
};

/// Target size of each VM.
const TARGET: TierView = TierView {
    fast_bytes: 8 * MIB,
    slow_bytes: 24 * MIB,
};

/// Limit of the controller's resident memory.
const RESIDENT_MAX_KIB: u64 = 32 << 10;

/// The test's own name: it starts itself in child processes.
const TEST: &str = "run::world::nobody_is_hurt_by_vms_that_lie";

/// Environment variables of a child process: its role and its folder.
const ROLE: &str = "DEMETER_WORLD_ROLE";
const FOLDER: &str = "DEMETER_WORLD_FOLDER";

/// Roles of VMs: two honest ones, two with swapped agent sockets, two whose processes proxy each
/// other's agent connections, and hostile ones.
const VMS: [&str; 14] = [
    "honest",
    "also-honest",
    "swapped",
    "also-swapped",
    "crossed",
    "also-crossed",
    "elsewhere",
    "silent",
    "outside",
    "giant",
    "escapes",
    "resets",
    "touches",
    "fragments",
];

struct Inhabitant(Child);

impl Inhabitant {
    fn new(role: &str, folder: &Path) -> Self {
        let program = std::env::current_exe().unwrap();
        let child = Command::new(program)
            .args(["--exact", TEST, "--nocapture"])
            .env(ROLE, role)
            .env(FOLDER, folder)
            .stdout(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    /// A VM's memory of a tier, opened through /proc.
    fn memory(&self, tier: Tier) -> fs::File {
        let folder = format!("/proc/{}/fd", self.0.id());
        let mut found: Vec<u32> = fs::read_dir(&folder)
            .unwrap()
            .filter_map(|entry| {
                let path = entry.unwrap().path();
                let link = fs::read_link(&path).ok()?;
                let is = link.to_string_lossy().contains("demeter-test");
                is.then(|| path.file_name()?.to_str()?.parse().ok())?
            })
            .collect();
        found.sort_unstable();
        let fd = found[usize::from(tier == Tier::Slow)];
        fs::File::open(format!("{folder}/{fd}")).unwrap()
    }

    /// Number of lost pages in both tiers.
    fn lost_pages(&self) -> usize {
        let lost = |tier: Tier| {
            let mut bytes = vec![0; SIZE.get(tier).0 as usize];
            self.memory(tier).read_exact_at(&mut bytes, 0).unwrap();
            let pages = bytes.chunks(PAGE_SIZE as usize);
            pages
                .filter(|page| page.iter().all(|&byte| byte == 0))
                .count()
        };
        Tier::ALL.into_iter().map(lost).sum()
    }

    fn backed(&self, tier: Tier) -> u64 {
        self.memory(tier).metadata().unwrap().blocks() * 512
    }

    /// Peak resident memory.
    fn resident_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let number = line.unwrap().split_whitespace().next().unwrap();
        number.parse().unwrap()
    }
}

impl Drop for Inhabitant {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Plays a role of the test, in a process of its own.
fn play(role: &str, folder: &Path) {
    // SAFETY: asks for a signal when the parent dies, and nothing else.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if role == "host" {
        let config = Config::load(&folder.join("host.toml")).unwrap();
        return super::run(&config, &folder.join("host.toml")).unwrap();
    }
    runtime().block_on(be_a_vm(role, folder));
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}

async fn be_a_vm(role: &str, folder: &Path) {
    let vm = FakeVm::within(folder, SIZE);
    match role {
        "crossed" | "also-crossed" => {
            let _guest = FakeGuest::new(&vm, &vm.guest_ranges());
            fs::rename(folder.join("agent"), folder.join(ITS_AGENT)).unwrap();
            let other = folder.with_file_name(other_of(role)).join(ITS_AGENT);
            hand_on(&folder.join("agent"), &other).await;
        }
        "honest" | "also-honest" | "swapped" | "also-swapped" | "resets" | "touches" => {
            let _guest = FakeGuest::new(&vm, &vm.guest_ranges());
            let pause = match role {
                // Once each time it is reclaimed.
                "touches" => Duration::from_millis(1500),
                _ => Duration::from_millis(20),
            };
            loop {
                sleep(pause).await;
                match role {
                    "resets" => vm.tell_if_heard(Told::Event(Event::Reset)),
                    "touches" => {
                        // The driver holds blocks from the first one on.
                        let file = vm.file(Tier::Fast);
                        file.write_all_at(&[9; PAGE_SIZE as usize], 0).unwrap();
                    }
                    _ => {}
                }
            }
        }
        _ => lie(role, &vm).await,
    }
}

/// The agent of a VM whose socket another VM serves.
const ITS_AGENT: &str = "its-agent";

/// The other VM of a pair.
fn other_of(role: &str) -> String {
    match role.strip_prefix("also-") {
        Some(other) => other.into(),
        None => format!("also-{role}"),
    }
}

/// Forwards connections on `socket` to `other`.
async fn hand_on(socket: &Path, other: &Path) {
    let listener = UnixListener::bind(socket).unwrap();
    loop {
        let (mut asked, _) = listener.accept().await.unwrap();
        there(other).await;
        let mut answers = UnixStream::connect(other).await.unwrap();
        // Either side may hang up at any time.
        let _ = tokio::io::copy_bidirectional(&mut asked, &mut answers).await;
    }
}

/// Serves a hostile guest's agent.
async fn lie(role: &str, vm: &FakeVm) {
    let listener = UnixListener::bind(vm.folder().join("agent")).unwrap();
    loop {
        let mut pipe = Pipe::accept(&listener).await;
        let shows = role != "elsewhere";
        let state = vm.shared_state();
        pipe.prove_by(Box::new(move |node: NodeId, nonce: Nonce| match shows {
            true => state.lock().unwrap().show(node, nonce),
            // Memory of this VM without the nonce.
            false => Some(GuestPhysAddr(0)),
        }));
        pipe.say(&Message::Hello(hello(1, 1))).await;
        loop {
            let message = match timeout(Duration::from_secs(1), pipe.hear()).await {
                Ok(Some(message)) => message,
                Ok(None) => break,
                Err(_) => {
                    // Keep the session alive.
                    pipe.say(&Message::Ping { nonce: 0 }).await;
                    continue;
                }
            };
            if role == "giant" && matches!(message, Message::List { .. }) {
                // No valid frame has this many bytes without a zero.
                for _ in 0..512 {
                    pipe.say_raw(&[b'x'; 64 << 10]).await;
                }
            }
            for answer in answers(role, &message) {
                pipe.say(&answer).await;
            }
        }
    }
}

fn answers(role: &str, message: &Message) -> Vec<Message> {
    let (request, node, bytes) = match *message {
        Message::Ping { nonce } if role != "silent" => return vec![Message::Pong { nonce }],
        Message::List { request, node, .. } => (request, node, ByteCount(0)),
        Message::Inflate(Resize {
            request,
            node,
            bytes,
        }) => (request, node, bytes),
        _ => return vec![],
    };
    let is_list = bytes == ByteCount(0);
    let ranges = match role {
        "silent" if !is_list => vec![range(first(node), bytes.0)],
        "outside" => vec![range(first(node), MIB), range(1 << 45, PAGE_SIZE)],
        "giant" => (0..4000).map(|_| range(first(node), PAGE_SIZE)).collect(),
        // Every second page, each in a range of its own.
        "fragments" if is_list => (0..8 * MIB / PAGE_SIZE)
            .map(|page| range(first(node) + page * 2 * PAGE_SIZE, PAGE_SIZE))
            .collect(),
        _ => vec![],
    };
    let (outcome, reason) = match role {
        "escapes" => (Outcome::Refused, "\u{1b}[2J\u{1b}]0;root\u{7}\nall is well"),
        _ => (Outcome::Ok, ""),
    };
    let kind = if is_list {
        Message::Held
    } else {
        Message::Inflated
    };
    let mut answers = parts(request, node, &ranges, kind);
    answers.push(Message::Done(Done {
        request,
        node,
        moved: ByteCount(0),
        held: ByteCount(0),
        outcome,
        reason: reason.into(),
    }));
    answers
}

/// First address of a node's memory.
fn first(node: NodeId) -> u64 {
    match node {
        NodeId(0) => 0,
        _ => SIZE.fast.0,
    }
}

fn range(start: u64, bytes: u64) -> GpaRange {
    GpaRange {
        start: GuestPhysAddr(start),
        bytes: ByteCount(bytes),
    }
}

fn parts(
    request: RequestId,
    node: NodeId,
    ranges: &[GpaRange],
    kind: fn(Ranges) -> Message,
) -> Vec<Message> {
    let count = ranges.chunks(4000).count();
    let part = |(i, part): (usize, &[GpaRange])| {
        kind(Ranges {
            request,
            node,
            more: i + 1 < count,
            ranges: part.to_vec(),
        })
    };
    ranges.chunks(4000).enumerate().map(part).collect()
}

/// The controller of this world, seen through its socket.
struct Seen(PathBuf);

impl Seen {
    async fn get(&self, path: &str) -> String {
        let stream = UnixStream::connect(&self.0).await.unwrap();
        let answer = ask(stream, &format!("GET {path}"), "").await;
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        body.to_owned()
    }

    async fn until(&self, vm: &str, what: &str, is: impl Fn(&VmView) -> bool) -> VmView {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let view: HostView = serde_json::from_str(&self.get("/v1/vms").await).unwrap();
            assert_eq!(view.violations, 0);
            let found = view.vms.into_iter().find(|of| of.name == vm).unwrap();
            if is(&found) {
                return found;
            }
            assert!(Instant::now() < end, "{vm} is never {what}: {found:?}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn until_in_trouble(&self, vm: &str, why: &str) -> VmView {
        let is = |vm: &VmView| vm.problem.as_ref().is_some_and(|p| p.contains(why));
        self.until(vm, why, is).await
    }
}

fn config(folder: &Path) -> String {
    let mut text = format!(
        "socket = \"{0}/host.sock\"\nstate = \"{0}/state.json\"\n\
         pool = {{ fast_mib = 200, slow_mib = 500 }}\n",
        folder.display()
    );
    for name in VMS {
        let own = folder.join(name);
        let agent = match name {
            "swapped" | "also-swapped" => folder.join(other_of(name)),
            _ => own.clone(),
        };
        text += &format!(
            "[vm.{name}]\nqmp = \"{}/qmp\"\nagent = \"{}/agent\"\noom_mib = 0\n\
             fast = {{ memdev = \"node0\", size_mib = 8 }}\n\
             slow = {{ memdev = \"node1\", size_mib = 24 }}\n",
            own.display(),
            agent.display()
        );
    }
    text
}

async fn there(path: &Path) {
    let end = Instant::now() + Duration::from_secs(60);
    while UnixStream::connect(path).await.is_err() {
        assert!(Instant::now() < end, "nobody serves {}", path.display());
        sleep(Duration::from_millis(20)).await;
    }
}

#[test]
fn nobody_is_hurt_by_vms_that_lie() {
    match (std::env::var(ROLE), std::env::var_os(FOLDER)) {
        (Ok(role), Some(folder)) => play(&role, Path::new(&folder)),
        _ => runtime().block_on(live_among_liars()),
    }
}

#[expect(
    clippy::too_many_lines,
    reason = "one life of a controller, from start to end"
)]
async fn live_among_liars() {
    let folder = tempfile::tempdir().unwrap();
    let start = |name: &&str| {
        let own = folder.path().join(name);
        fs::create_dir(&own).unwrap();
        Inhabitant::new(name, &own)
    };
    let vms: Vec<_> = VMS.iter().map(start).collect();
    for name in VMS {
        let path = folder.path().join(name).join("qmp");
        let end = Instant::now() + Duration::from_secs(60);
        while !path.exists() {
            assert!(Instant::now() < end, "{name} does not start");
            sleep(Duration::from_millis(20)).await;
        }
    }
    let vm = |name| &vms[VMS.iter().position(|of| *of == name).unwrap()];
    fs::write(folder.path().join("host.toml"), config(folder.path())).unwrap();
    let host = Inhabitant::new("host", folder.path());
    let seen = Seen(folder.path().join("host.sock"));
    there(&seen.0).await;

    let owns = |vm: &VmView| vm.owned == Some(TARGET);
    for name in ["honest", "also-honest"] {
        seen.until(name, "at its size", owns).await;
    }
    // Every second page makes 4096 ranges.
    seen.until("fragments", "known", owns).await;
    // Detected by the process behind the socket, or else by the missing nonce.
    for name in ["swapped", "also-swapped"] {
        let vm = seen.until_in_trouble(name, "belongs to process").await;
        assert_eq!(vm.owned, None, "{name}");
    }
    for name in ["elsewhere", "crossed", "also-crossed"] {
        let vm = seen
            .until_in_trouble(name, "does not speak for this VM")
            .await;
        assert_eq!(
            (vm.state, vm.owned),
            (VmState::Up, None),
            "{name} has not lied"
        );
    }
    seen.until_in_trouble("outside", "is not in the VM's").await;
    let marked = |vm: &VmView| vm.state == VmState::Marked;
    seen.until("outside", "marked", marked).await;
    seen.until("giant", "marked", marked).await;
    let silent = |vm: &VmView| vm.problem.is_some();
    seen.until("silent", "in trouble", silent).await;
    let said = seen.until_in_trouble("escapes", "all is well").await;
    let said = said.problem.unwrap();
    assert!(!said.chars().any(char::is_control), "{said:?}");
    seen.until("touches", "seen", |vm| vm.overruns > 1).await;
    let events: Vec<EventView> = serde_json::from_str(&seen.get("/v1/events").await).unwrap();
    let is_reset =
        |event: &EventView| event.vm.as_deref() == Some("resets") && event.text.contains("reset");
    assert!(events.iter().any(is_reset));
    let metrics = seen.get("/metrics").await;
    let counts = |line: &str| {
        line.starts_with("demeter_host_vm_overruns_total{vm=\"touches\"}") && !line.ends_with(" 0")
    };
    assert!(metrics.lines().any(counts), "{metrics}");

    // Meanwhile, an order for an honest VM must be fast.
    let begun = Instant::now();
    let stream = UnixStream::connect(&seen.0).await.unwrap();
    let answer = ask(stream, "PUT /v1/vms/honest/tiers", "{\"fast_mib\": 4}").await;
    assert!(answer.starts_with("204"), "{answer}");
    let less = |vm: &VmView| vm.owned.is_some_and(|owned| owned.fast_bytes == 4 * MIB);
    seen.until("honest", "smaller", less).await;
    eprintln!("an honest VM's order took {:?}", begun.elapsed());

    for name in [
        "swapped",
        "also-swapped",
        "crossed",
        "also-crossed",
        "elsewhere",
        "silent",
        "outside",
        "giant",
        "escapes",
    ] {
        assert_eq!(vm(name).lost_pages(), 0, "{name}");
    }
    assert_eq!(vm("honest").backed(Tier::Fast), 4 * MIB);
    assert_eq!(vm("also-honest").backed(Tier::Fast), TARGET.fast_bytes);
    assert_eq!(vm("fragments").lost_pages() as u64, 16 * MIB / PAGE_SIZE);
    let resident = host.resident_kib();
    eprintln!("the host had {resident} KiB at most");
    assert!(resident <= RESIDENT_MAX_KIB, "{resident} KiB");
}
