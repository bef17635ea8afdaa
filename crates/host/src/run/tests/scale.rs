//! A benchmark of the controller with 1,000 VMs, each a process with its own memory and agent.
//!
//! The memory is sparse, so the time that the kernel takes to free pages is not part of it. The
//! controller is a process of its own: its time, memory and descriptors are read from /proc.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use demeter_policy::{ByteCount, MIB, TierBytes};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::api::tests::ask;
use crate::config::Config;
use crate::hypervisor::Event;
use crate::testing::{FakeGuest, FakeVm, Told};
use crate::view::{HostView, VmState};

const VMS: usize = 1000;

const SIZE: TierBytes = TierBytes {
    fast: ByteCount(64 * MIB),
    slow: ByteCount(128 * MIB),
};

/// Limit of the controller's resident memory.
const RESIDENT_MAX_MIB: u64 = 150;

/// Limit of CPU time at rest, percent of one CPU.
const REST_CPU_MAX_PERCENT: u128 = 5;

/// Time limits: of the start, and of each other part.
const START_MAX: Duration = Duration::from_secs(10);
const PART_MAX: Duration = Duration::from_secs(30);

/// Time at rest that is measured: each VM's pages are counted once a minute.
const REST: Duration = Duration::from_secs(60);

/// VMs whose agents are restarted at once, and the time between such waves.
const WAVE: usize = 100;
const WAVE_EVERY: Duration = Duration::from_secs(1);

/// Unit of times in /proc/PID/stat (USER_HZ).
const TICKS_PER_SECOND: u64 = 100;

/// The test's own name: it starts itself in child processes.
const TEST: &str = "run::tests::scale::a_thousand_vms_are_managed";

/// Environment variables of a child process: its role and its folder.
const ROLE: &str = "DEMETER_SCALE_ROLE";
const FOLDER: &str = "DEMETER_SCALE_FOLDER";

/// Plays a role of the test, in a process of its own.
fn play(role: &str, folder: &Path) {
    die_with_parent();
    if role == "host" {
        let config = Config::load(&folder.join("host.toml")).unwrap();
        return crate::run(&config, &folder.join("host.toml")).unwrap();
    }
    for number in 0..VMS {
        // SAFETY: the child uses this thread and its memory only. glibc keeps its allocator sound
        // over a fork. No other thread of this test holds a lock that the child takes.
        if unsafe { libc::fork() } == 0 {
            die_with_parent();
            be_a_vm(&folder.join(number.to_string()));
            std::process::exit(0);
        }
    }
    loop {
        std::thread::park();
    }
}

fn die_with_parent() {
    // SAFETY: asks for a signal when the parent dies, and nothing else.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// A VM that resets on SIGUSR1, and restarts its agent with another protocol version on SIGUSR2.
fn be_a_vm(folder: &Path) {
    fs::create_dir(folder).unwrap();
    let (signal_in, mut signals) = mpsc::channel(4);
    let mut caught = Signals::new([SIGUSR1, SIGUSR2]).unwrap();
    std::thread::spawn(move || {
        for signal in caught.forever() {
            // The receiver ends with the program.
            let _ = signal_in.blocking_send(signal);
        }
    });
    runtime().block_on(async {
        let vm = FakeVm::sparse(folder, SIZE);
        let ranges = vm.guest_ranges();
        let mut guest = FakeGuest::new(&vm, &ranges);
        fs::write(folder.join("pid"), std::process::id().to_string()).unwrap();
        let mut version = demeter_proto::VERSION;
        while let Some(signal) = signals.recv().await {
            if signal == SIGUSR1 {
                guest.forget();
                vm.tell_if_heard(Told::Event(Event::Reset));
                guest.reboot();
                continue;
            }
            version = match version {
                demeter_proto::VERSION => demeter_proto::VERSION_MIN,
                _ => demeter_proto::VERSION,
            };
            guest.restart_agent(&vm, version);
        }
    });
}

/// A child process, killed when dropped.
struct Participant(Child);

impl Participant {
    fn start(role: &str, folder: &Path) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", TEST, "--nocapture"])
            .env(ROLE, role)
            .env(FOLDER, folder)
            .stdout(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    /// CPU time so far.
    fn cpu(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        let fields: Vec<&str> = fields.split(' ').collect();
        let ticks: u64 = [11, 12]
            .map(|at: usize| fields[at].parse::<u64>().unwrap())
            .iter()
            .sum();
        Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND)
    }

    /// Peak resident memory.
    fn resident_mib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let number = line.unwrap().split_whitespace().next().unwrap();
        number.parse::<u64>().unwrap() >> 10
    }

    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.0.id()))
            .unwrap()
            .count()
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn config(folder: &Path) -> String {
    let mut text = format!(
        "socket = \"{0}/host.sock\"\nstate = \"{0}/state.json\"\n\
         pool = {{ fast_mib = {1}, slow_mib = {2} }}\n",
        folder.display(),
        32 * VMS,
        96 * VMS
    );
    for number in 0..VMS {
        let share = [100, 300][number % 2];
        text += &format!(
            "[vm.v{number}]\nqmp = \"{0}/{number}/qmp\"\nagent = \"{0}/{number}/agent\"\noom_mib = 0\n\
             share = {share}\nfast = {{ memdev = \"node0\", size_mib = 32 }}\n\
             slow = {{ memdev = \"node1\", size_mib = 96 }}\n",
            folder.display()
        );
    }
    text
}

/// A request's answer, and how long it took.
async fn timed(socket: &Path, request: &str, body: &str) -> (String, Duration) {
    let begun = Instant::now();
    let stream = UnixStream::connect(socket).await.unwrap();
    let answer = ask(stream, request, body).await;
    (answer, begun.elapsed())
}

/// Asks until every VM owns its target. Returns how long the requests took.
async fn until_settled(socket: &Path) -> Vec<Duration> {
    let (end, mut times) = (Instant::now() + PART_MAX, vec![]);
    loop {
        let (answer, time) = timed(socket, "GET /v1/vms", "").await;
        times.push(time);
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let view: HostView = serde_json::from_str(body).unwrap();
        assert_eq!(view.violations, 0);
        let settled = view
            .vms
            .iter()
            .filter(|vm| vm.state == VmState::Up && vm.owned == Some(vm.target));
        let settled = settled.count();
        if settled == VMS {
            return times;
        }
        assert!(Instant::now() < end, "{settled} of {VMS} settled");
        sleep(Duration::from_millis(20)).await;
    }
}

fn p99(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[(times.len() * 99 / 100).min(times.len() - 1)]
}

/// One row of the table.
fn row(part: &str, host: &Participant, begun: Instant, cpu: Duration, times: Vec<Duration>) {
    let p99 = match times.is_empty() {
        true => "-".into(),
        false => format!("{} ms", p99(times).as_millis()),
    };
    println!(
        "| {part} | {:.1} s | {:.1} s | {} MiB, {} | {p99} |",
        begun.elapsed().as_secs_f64(),
        (host.cpu() - cpu).as_secs_f64(),
        host.resident_mib(),
        host.descriptors()
    );
}

async fn there(socket: &Path) {
    let end = Instant::now() + PART_MAX;
    while UnixStream::connect(socket).await.is_err() {
        assert!(Instant::now() < end, "the controller does not start");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Processes of the VMs, once all run.
async fn pids(folder: &Path) -> Vec<Pid> {
    let (end, mut pids) = (Instant::now() + PART_MAX, vec![]);
    while pids.len() < VMS {
        assert!(Instant::now() < end, "{} of {VMS} VMs run", pids.len());
        let file = folder.join(pids.len().to_string()).join("pid");
        let text = fs::read_to_string(file).unwrap_or_default();
        match text.parse().ok().and_then(Pid::from_raw) {
            Some(pid) => pids.push(pid),
            None => sleep(Duration::from_millis(20)).await,
        }
    }
    pids
}

#[test]
#[ignore = "starts 1,000 processes; cargo xtask test-long runs it"]
fn a_thousand_vms_are_managed() {
    match (std::env::var(ROLE), std::env::var_os(FOLDER)) {
        (Ok(role), Some(folder)) => play(&role, Path::new(&folder)),
        _ => runtime().block_on(manage_a_thousand()),
    }
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}

async fn manage_a_thousand() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("host.sock");
    fs::write(folder.path().join("host.toml"), config(folder.path())).unwrap();
    let _vms = Participant::start("vms", folder.path());
    let pids = pids(folder.path()).await;
    println!("| part | time | CPU | memory, descriptors | API p99 |\n|---|---|---|---|---|");

    let (begun, none) = (Instant::now(), Duration::ZERO);
    let host = Participant::start("host", folder.path());
    there(&socket).await;
    row("start", &host, begun, none, until_settled(&socket).await);
    assert!(begun.elapsed() <= START_MAX);

    let (begun, cpu) = (Instant::now(), host.cpu());
    sleep(REST).await;
    row("rest", &host, begun, cpu, vec![]);
    let spent = host.cpu() - cpu;
    assert!(spent.as_millis() * 100 <= REST.as_millis() * REST_CPU_MAX_PERCENT);

    let (begun, cpu) = (Instant::now(), host.cpu());
    let (answer, _) = timed(&socket, "PUT /v1/policy", "{\"policy\": \"shares\"}").await;
    assert!(answer.starts_with("204"), "{answer}");
    let times = until_settled(&socket).await;
    row("redistribution", &host, begun, cpu, times);

    let begun = Instant::now();
    drop(host);
    let host = Participant::start("host", folder.path());
    there(&socket).await;
    row("restart", &host, begun, none, until_settled(&socket).await);

    let (begun, cpu) = (Instant::now(), host.cpu());
    for pid in &pids {
        kill_process(*pid, Signal::USR1).unwrap();
    }
    // Each VM has lost its balloon, and is seen with all its memory.
    until_counted_whole(&socket).await;
    row("resets", &host, begun, cpu, until_settled(&socket).await);

    let (begun, cpu) = (Instant::now(), host.cpu());
    for wave in pids.chunks(WAVE) {
        for pid in wave {
            kill_process(*pid, Signal::USR2).unwrap();
        }
        sleep(WAVE_EVERY).await;
    }
    row(
        "agents upgraded",
        &host,
        begun,
        cpu,
        until_settled(&socket).await,
    );
    assert!(host.resident_mib() <= RESIDENT_MAX_MIB);
}

/// Waits until some VM counts with more than it was given.
async fn until_counted_whole(socket: &Path) {
    let end = Instant::now() + PART_MAX;
    loop {
        let (answer, _) = timed(socket, "GET /v1/vms", "").await;
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let view: HostView = serde_json::from_str(body).unwrap();
        if view.excess().sum() > 0 {
            return;
        }
        assert!(Instant::now() < end, "no reset was seen");
    }
}
