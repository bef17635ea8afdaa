//! Tests of the whole controller over its API, with simulated VMs and real memory files.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use demeter_policy::provision::Policy;
use demeter_policy::{ByteCount, MIB, NodeId, Tier, TierBytes};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

mod abuse;
mod domains;
mod hard_limit;
mod hostile;
mod migration;
mod pools;
mod resets;
mod scale;
mod service;
mod settings;

use super::*;
use crate::api::tests::ask;
use crate::hard_limit::tests::FakeRoot;
use crate::hypervisor::Event;
use crate::testing::{FakeGuest, FakeVm, State, Told};
use crate::view::{EventView, TierView, VmView};

const SIZE: TierBytes = TierBytes {
    fast: ByteCount(64 * MIB),
    slow: ByteCount(128 * MIB),
};

/// A controller and its folder. Dropping it aborts the controller, like kill -9.
struct Host {
    folder: Arc<tempfile::TempDir>,
    task: JoinHandle<Result<(), RunError>>,
    hangup: mpsc::Sender<()>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
}

impl Host {
    /// `vms` are the sections of VMs.
    async fn start(folder: Arc<tempfile::TempDir>, vms: &str) -> Self {
        Self::start_below("/".into(), folder, vms).await
    }

    /// `root` is the parent of /proc and /sys.
    async fn start_below(root: PathBuf, folder: Arc<tempfile::TempDir>, vms: &str) -> Self {
        Self::start_with(200, root, folder, vms).await
    }

    /// `fast_mib` is the pool of fast memory.
    async fn start_with(
        fast_mib: u64,
        root: PathBuf,
        folder: Arc<tempfile::TempDir>,
        vms: &str,
    ) -> Self {
        Self::configure(fast_mib, &folder, vms);
        Self::start_configured(root, folder).await
    }

    /// Starts it with the configuration in its folder.
    async fn start_configured(root: PathBuf, folder: Arc<tempfile::TempDir>) -> Self {
        let path = folder.path().join("host.toml");
        let config = Config::load(&path).unwrap();
        let (hangup, hangups) = mpsc::channel(1);
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let task = tokio::spawn(async move {
            let stop = async { drop(stopped.await) };
            serve(&config, &path, &root, hangups, stop).await
        });
        let host = Self {
            folder,
            task,
            hangup,
            stop: Some(stop),
        };
        let up = async {
            while UnixStream::connect(host.socket()).await.is_err() {
                assert!(!host.task.is_finished(), "it does not start");
                sleep(Duration::from_millis(5)).await;
            }
        };
        soon(up).await;
        host
    }

    /// Writes the configuration file.
    fn configure(fast_mib: u64, folder: &tempfile::TempDir, vms: &str) {
        let text = format!(
            "socket = \"{0}/host.sock\"\nstate = \"{0}/state.json\"\n\
             pool = {{ fast_mib = {fast_mib}, slow_mib = 500 }}\n{vms}",
            folder.path().display()
        );
        std::fs::write(folder.path().join("host.toml"), text).unwrap();
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("host.sock")
    }

    async fn ask(&self, request: &str, body: &str) -> String {
        ask(
            UnixStream::connect(self.socket()).await.unwrap(),
            request,
            body,
        )
        .await
    }

    async fn view(&self) -> HostView {
        let answer = self.ask("GET /v1/vms", "").await;
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        serde_json::from_str(body).unwrap()
    }

    async fn events(&self) -> Vec<EventView> {
        let answer = self.ask("GET /v1/events", "").await;
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        serde_json::from_str(body).unwrap()
    }

    /// Waits until a VM is as described. Fails if more is ever committed than the pool has.
    async fn until(&self, vm: &str, what: &str, is: impl Fn(&VmView) -> bool) -> VmView {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let view = self.view().await;
            assert_eq!(view.violations, 0);
            let found = view.vms.into_iter().find(|of| of.name == vm).unwrap();
            if is(&found) {
                return found;
            }
            let events = self.events().await;
            assert!(
                Instant::now() < end,
                "{vm} is never {what}: {found:?} {events:#?}"
            );
            sleep(Duration::from_millis(10)).await;
        }
    }

    async fn until_owns(&self, vm: &str, fast_mib: u64, slow_mib: u64) -> VmView {
        let want = Some(TierView {
            fast_bytes: fast_mib * MIB,
            slow_bytes: slow_mib * MIB,
        });
        let what = format!("at {fast_mib} and {slow_mib} MiB");
        self.until(vm, &what, |vm| vm.owned == want).await
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), future)
        .await
        .expect("in time")
}

fn folder() -> Arc<tempfile::TempDir> {
    Arc::new(tempfile::tempdir().unwrap())
}

/// A VM's section: initially 32 of 64 MiB fast and 96 of 128 MiB slow memory.
fn section(name: &str, vm: &FakeVm, more: &str) -> String {
    let folder = vm.folder().display();
    format!(
        "[vm.{name}]\nqmp = \"{folder}/qmp\"\nagent = \"{folder}/agent\"\noom_mib = 0\n{more}\n\
         fast = {{ memdev = \"node0\", size_mib = 32, guarantee_mib = 16 }}\n\
         slow = {{ memdev = \"node1\", size_mib = 96, limit_mib = 128 }}\n"
    )
}

fn guest(vm: &FakeVm) -> FakeGuest {
    FakeGuest::new(vm, &vm.guest_ranges())
}

fn backed(vm: &FakeVm, tier: Tier) -> u64 {
    vm.file(tier).metadata().unwrap().blocks() * 512
}

#[tokio::test]
async fn a_vm_gets_what_is_wished_and_its_memory_really_returns() {
    let vm = FakeVm::new(SIZE);
    let _guest = guest(&vm);
    let host = Host::start(folder(), &section("db", &vm, "")).await;
    let db = host.until_owns("db", 32, 96).await;
    assert_eq!(db.returned_bytes, 64 * MIB);
    assert_eq!(backed(&vm, Tier::Fast), 32 * MIB);
    assert_eq!(backed(&vm, Tier::Slow), 96 * MIB);
    host.until("db", "heard of", |vm| vm.fast_hit == Some(0.9))
        .await;

    let set = |body: &'static str| host.ask("PUT /v1/vms/db/tiers", body);
    assert!(set("{\"fast_mib\": 64}").await.starts_with("204"));
    host.until_owns("db", 64, 96).await;
    assert!(
        set("{\"fast_mib\": 16, \"slow_mib\": 64}")
            .await
            .starts_with("204")
    );
    host.until_owns("db", 16, 64).await;
    assert_eq!(backed(&vm, Tier::Fast), 16 * MIB);
    for (body, why) in [
        ("{\"fast_mib\": 65}", "limit of 64 MiB"),
        ("{\"fast_mib\": 15}", "guarantee of 16 MiB"),
        ("{\"slow_mib\": 129}", "limit of 128 MiB"),
    ] {
        let refused = set(body).await;
        assert!(
            refused.starts_with("409") && refused.contains(why),
            "{refused}"
        );
    }
    host.until_owns("db", 16, 64).await;
}

#[tokio::test]
async fn what_was_wished_outlives_a_kill_and_an_end_is_clean() {
    let vm = FakeVm::new(SIZE);
    let _guest = guest(&vm);
    let folder = folder();
    let section = section("db", &vm, "");
    let host = Host::start(folder.clone(), &section).await;
    let answer = host.ask("PUT /v1/vms/db/tiers", "{\"fast_mib\": 48}").await;
    assert!(answer.starts_with("204"), "{answer}");
    // Like kill -9: no message is sent, and only the system cleans up.
    drop(host);
    let mut host = Host::start(folder, &section).await;
    host.until_owns("db", 48, 96).await;
    host.stop.take().unwrap().send(()).unwrap();
    soon(&mut host.task).await.unwrap().unwrap();
    assert!(!host.socket().exists());
}

#[tokio::test]
async fn a_silent_vm_delays_no_other() {
    let (silent, lively) = (FakeVm::new(SIZE), FakeVm::new(SIZE));
    let (quiet_guest, _guest) = (guest(&silent), guest(&lively));
    let vms = section("silent", &silent, "") + &section("lively", &lively, "");
    let host = Host::start(folder(), &vms).await;
    host.until_owns("silent", 32, 96).await;
    host.until_owns("lively", 32, 96).await;
    quiet_guest.fall_silent();
    let set = |vm: &'static str| host.ask(vm, "{\"fast_mib\": 16}");
    assert!(set("PUT /v1/vms/silent/tiers").await.starts_with("204"));
    let begun = Instant::now();
    assert!(set("PUT /v1/vms/lively/tiers").await.starts_with("204"));
    host.until_owns("lively", 16, 96).await;
    assert!(begun.elapsed() < Duration::from_secs(2));
    let silent = host
        .until("silent", "in trouble", |vm| vm.problem.is_some())
        .await;
    // Memory that it may still hold counts.
    assert_eq!(silent.committed.fast_bytes, 32 * MIB);
}

#[tokio::test]
async fn a_vm_whose_files_hang_delays_nobody_and_not_the_end() {
    let root = tempfile::tempdir().unwrap();
    let proc = root.path().join(format!("proc/{}", std::process::id()));
    std::fs::create_dir_all(&proc).unwrap();
    // Opening a fifo waits for a writer, like a file on hung storage.
    let maps = proc.join("maps");
    let fifo = rustix::fs::FileType::Fifo;
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &maps, fifo, mode, 0).unwrap();
    // Unblocks a controller that waits on its only thread, so that it fails instead of hanging.
    let rescuer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(8));
        drop(std::fs::File::options().write(true).open(maps));
    });
    let (hung, lively) = (FakeVm::new(SIZE), FakeVm::new(SIZE));
    let _guest = guest(&hung);
    let elastic = "provisioner = \"virtio-mem\"";
    let vms =
        section("hung", &hung, "") + &section("lively", &lively, elastic).replace("agent", "#");
    let begun = Instant::now();
    let mut host = Host::start_below(root.path().into(), folder(), &vms).await;
    host.until_owns("lively", 64, 128).await;
    let answer = host
        .ask("PUT /v1/vms/lively/tiers", "{\"fast_mib\": 80}")
        .await;
    assert!(answer.starts_with("204"), "{answer}");
    host.until_owns("lively", 80, 128).await;
    let said = |vm: &VmView| {
        vm.problem
            .as_ref()
            .is_some_and(|p| p.contains("no answer within"))
    };
    host.until("hung", "said to hang", said).await;
    host.stop.take().unwrap().send(()).unwrap();
    soon(&mut host.task).await.unwrap().unwrap();
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(7), "{took:?}");
    rescuer.join().unwrap();
}

#[tokio::test]
async fn vms_that_cannot_be_managed_say_why() {
    let (one, two, three) = (FakeVm::new(SIZE), FakeVm::new(SIZE), FakeVm::new(SIZE));
    one.state().private = true;
    two.state().pinned = true;
    let absent = section("absent", &three, "").replace("/qmp", "/nothing");
    let vms = section("private", &one, "") + &section("pinned", &two, "") + &absent;
    let vms = vms.replace("size_mib = 96", "size_mib = 64");
    let host = Host::start(folder(), &vms).await;
    for (name, why) in [
        ("private", "share=on"),
        ("pinned", "\"gpu0\""),
        ("absent", "start the VM with -qmp"),
    ] {
        let in_trouble = |vm: &VmView| vm.problem.as_ref().is_some_and(|p| p.contains(why));
        host.until(name, why, in_trouble).await;
    }
}

#[tokio::test]
async fn an_agent_of_the_version_before_is_spoken_to() {
    let vm = FakeVm::new(SIZE);
    let host = Host::start(folder(), &section("db", &vm, "")).await;
    // A silent VM may be using all its boot memory.
    let all = TierView {
        fast_bytes: 64 * MIB,
        slow_bytes: 128 * MIB,
    };
    host.until("db", "counted whole", |vm| vm.may_hold == all)
        .await;
    let ranges = vm.guest_ranges();
    let guest = FakeGuest::speaking(demeter_proto::VERSION_MIN, &vm, &vm, &ranges);
    host.until_owns("db", 32, 96).await;
    host.until("db", "heard of", |vm| vm.fast_hit == Some(0.9))
        .await;
    let answer = host.ask("PUT /v1/vms/db/tiers", "{\"fast_mib\": 48}").await;
    assert!(answer.starts_with("204"), "{answer}");
    host.until_owns("db", 48, 96).await;
    assert_eq!(guest.held_blocks(), 24);
}

#[tokio::test]
async fn what_changed_in_the_file_is_taken_over_by_a_hangup_and_by_the_api() {
    let (one, two) = (FakeVm::new(SIZE), FakeVm::new(SIZE));
    let (_one, _two) = (guest(&one), guest(&two));
    let folder = folder();
    let first = section("one", &one, "");
    let host = Host::start(folder.clone(), &first).await;
    host.until_owns("one", 32, 96).await;

    // A faulty file changes nothing.
    Host::configure(200, &folder, &first.replace("oom_mib", "oom"));
    let refused = host.ask("POST /v1/reload", "").await;
    assert!(
        refused.starts_with("409") && refused.contains("oom"),
        "{refused}"
    );
    host.until_owns("one", 32, 96).await;

    let smaller = first.replace("size_mib = 32", "size_mib = 24");
    Host::configure(80, &folder, &(smaller.clone() + &section("two", &two, "")));
    host.hangup.send(()).await.unwrap();
    let added = async {
        while host.view().await.vms.len() != 2 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    soon(added).await;
    host.until_owns("one", 24, 96).await;
    host.until_owns("two", 32, 96).await;
    assert_eq!(host.view().await.pool.fast_bytes, 80 * MIB);
    let told = |event: &EventView| event.text.contains("vm.one.fast.size_mib: 32 -> 24");
    assert!(host.events().await.iter().any(told));

    Host::configure(80, &folder, &smaller);
    let answer = host.ask("POST /v1/reload", "").await;
    assert!(
        answer.starts_with("200") && answer.contains("vm.two.qmp"),
        "{answer}"
    );
    let view = host.view().await;
    assert_eq!(view.vms.len(), 1);
    assert_eq!(view.committed.fast_bytes, 24 * MIB);
}

#[tokio::test]
async fn a_second_controller_does_not_get_the_state_file() {
    let vm = FakeVm::new(SIZE);
    let folder = folder();
    let _first = Host::start(folder.clone(), &section("db", &vm, "")).await;
    let path = folder.path().join("host.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("host.sock", "other.sock")).unwrap();
    let config = Config::load(&path).unwrap();
    let (_hangup, hangups) = mpsc::channel(1);
    let stop = std::future::pending::<()>();
    let second = serve(&config, &path, "/".as_ref(), hangups, stop);
    let refused = soon(second).await.unwrap_err().to_string();
    assert!(refused.contains("another controller's"), "{refused}");
}
