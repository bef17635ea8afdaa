//! Tests of the whole controller over its API, with simulated VMs and real memory files.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use demeter_policy::provision::Policy;
use demeter_policy::{ByteCount, MIB, NodeId, Tier, TierBytes};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

mod scale;
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

/// The section of a libvirt daemon.
fn daemon(vm: &FakeVm, runs: bool) -> String {
    let socket = vm.libvirt(runs).socket.unwrap();
    format!("libvirt = {{ socket = {socket:?} }}\n")
}

#[tokio::test]
async fn a_domain_is_sized_and_a_daemon_that_is_started_anew_loses_nothing() {
    let vm = FakeVm::new(SIZE);
    let _guest = guest(&vm);
    let section = section("db", &vm, "");
    let (_, sizes) = section.split_once("oom_mib").unwrap();
    let section = format!("[vm.db]\nlibvirt = \"db\"\noom_mib{sizes}");
    let host = Host::start(folder(), &(daemon(&vm, true) + &section)).await;
    host.until_owns("db", 32, 96).await;
    assert_eq!(backed(&vm, Tier::Fast), 32 * MIB);

    vm.libvirt(true);
    let answer = host.ask("PUT /v1/vms/db/tiers", "{\"fast_mib\": 16}").await;
    assert!(answer.starts_with("204"), "{answer}");
    host.until_owns("db", 16, 96).await;
    assert_eq!(backed(&vm, Tier::Fast), 16 * MIB);
}

#[tokio::test]
#[cfg_attr(
    not(target_arch = "x86_64"),
    ignore = "where Cloud Hypervisor puts memory is known for x86-64 only"
)]
async fn a_vm_of_cloud_hypervisor_is_sized_and_after_a_reset_again() {
    let vm = FakeVm::new(SIZE);
    let socket = vm.cloud_hypervisor();
    let guest = guest(&vm);
    let section = section("db", &vm, "");
    let (_, sizes) = section.split_once("oom_mib").unwrap();
    let section = format!("[vm.db]\ncloud_hypervisor = {socket:?}\noom_mib{sizes}");
    let root = vm.folder().to_owned();
    let host = Host::start_below(root, folder(), &section).await;
    let db = host.until_owns("db", 32, 96).await;
    assert_eq!(db.returned_bytes, 64 * MIB);
    assert_eq!(backed(&vm, Tier::Fast), 32 * MIB);
    assert_eq!(backed(&vm, Tier::Slow), 96 * MIB);
    let answer = host.ask("PUT /v1/vms/db/tiers", "{\"fast_mib\": 48}").await;
    assert!(answer.starts_with("204"), "{answer}");
    host.until_owns("db", 48, 96).await;

    // All its memory is new and full, and its driver holds nothing.
    guest.forget();
    let before = vm.file(Tier::Fast).metadata().unwrap().ino();
    vm.tell(Told::Event(Event::Reset));
    soon(async {
        while vm.file(Tier::Fast).metadata().unwrap().ino() == before {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    guest.reboot();
    soon(async {
        while (backed(&vm, Tier::Fast), backed(&vm, Tier::Slow)) != (48 * MIB, 96 * MIB) {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    host.until_owns("db", 48, 96).await;
}

#[tokio::test]
async fn domains_are_found_and_forgotten() {
    let vm = FakeVm::new(SIZE);
    let folder = folder();
    let config = format!("discover = \"libvirt\"\n{}", daemon(&vm, true));
    let there = async |host: &Host, count| {
        while host.view().await.vms.len() != count {
            sleep(Duration::from_millis(10)).await;
        }
    };
    let host = Host::start(folder.clone(), &config).await;
    soon(there(&host, 1)).await;
    let db = host
        .until("db", "described", |vm| vm.problem.is_some())
        .await;
    let has = TierView {
        fast_bytes: 64 * MIB,
        slow_bytes: 128 * MIB,
    };
    assert_eq!(
        (db.desired, db.committed),
        (has, has),
        "it begins with what it has"
    );
    drop(host);

    // Committed memory counts from the start, and only while the VM runs.
    let host = Host::start(folder, &config).await;
    assert_eq!(host.view().await.committed, has);
    vm.libvirt(false);
    soon(there(&host, 0)).await;
    assert_eq!(host.view().await.committed, TierView::default());
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
async fn a_link_to_another_vms_sockets_leads_nowhere() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root makes links of others");
        return;
    }
    let vm = FakeVm::new(SIZE);
    let _guest = guest(&vm);
    let theirs = tempfile::tempdir().unwrap();
    for socket in ["qmp", "agent"] {
        let link = theirs.path().join(socket);
        std::os::unix::fs::symlink(vm.folder().join(socket), &link).unwrap();
        std::os::unix::fs::lchown(link, Some(4711), None).unwrap();
    }
    let folder_of_thief = theirs.path().display();
    let thief = format!(
        "[vm.thief]\nqmp = \"{folder_of_thief}/qmp\"\nagent = \"{folder_of_thief}/agent\"\noom_mib = 0\n\
         fast = {{ memdev = \"node0\", size_mib = 2 }}\nslow = {{ memdev = \"node1\", size_mib = 2 }}\n"
    );
    let host = Host::start(folder(), &(thief + &section("victim", &vm, ""))).await;
    let refused = |vm: &VmView| {
        let problem = vm.problem.as_ref();
        problem.is_some_and(|p| p.contains("symbolic link of user 4711"))
    };
    host.until("thief", "refused", refused).await;
    host.until_owns("victim", 32, 96).await;
    assert_eq!(backed(&vm, Tier::Fast), 32 * MIB);
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
async fn while_a_vm_keeps_its_boot_memory_nobody_grows() {
    let (keeps, other) = (FakeVm::new(SIZE), FakeVm::new(SIZE));
    let (hoarder, _guest) = (guest(&keeps), guest(&other));
    hoarder.use_memory(NodeId(0), SIZE.fast);
    let vms = section("keeps", &keeps, "") + &section("other", &other, "");
    let host = Host::start_with(90, "/".into(), folder(), &vms).await;
    host.until_owns("other", 32, 96).await;
    host.until("keeps", "short", |vm| vm.problem.is_some())
        .await;
    let view = host.view().await;
    assert_eq!(
        view.committed.fast_bytes,
        64 * MIB,
        "that is all that was promised"
    );
    assert_eq!(view.excess().fast_bytes, 6 * MIB, "{view:?}");
    let metrics = host.ask("GET /metrics", "").await;
    let line = format!("demeter_host_excess_bytes{{tier=\"fast\"}} {}", 6 * MIB);
    assert!(metrics.lines().any(|of| of == line), "{metrics}");
    let told = |event: &EventView| event.text.contains("none grows until");
    assert!(host.events().await.iter().any(told));

    let answer = host
        .ask("PUT /v1/vms/other/tiers", "{\"fast_mib\": 58}")
        .await;
    assert!(answer.starts_with("204"), "{answer}");
    let asked_again = |vm: &VmView| vm.desired.fast_bytes == 58 * MIB;
    host.until("other", "wished more", asked_again).await;
    let tried = host.events().await.len();
    let again = async {
        while host.events().await.len() == tried {
            sleep(Duration::from_millis(10)).await;
        }
    };
    soon(again).await;
    let other_now = host.until("other", "as it was", |_| true).await;
    assert_eq!(other_now.owned.unwrap().fast_bytes, 32 * MIB);
    hoarder.use_memory(NodeId(0), ByteCount(0));
    host.until_owns("keeps", 32, 96).await;
    host.until_owns("other", 58, 96).await;
    assert_eq!(host.view().await.excess().fast_bytes, 0);
}

#[tokio::test]
async fn with_a_smaller_pool_or_one_vm_more_the_controller_starts_and_shrinks_first() {
    let (one, two) = (FakeVm::new(SIZE), FakeVm::new(SIZE));
    let (_guest, folder) = (guest(&one), folder());
    let first = section("one", &one, "");
    let host = Host::start_with(64, "/".into(), folder.clone(), &first).await;
    let answer = host
        .ask("PUT /v1/vms/one/tiers", "{\"fast_mib\": 64}")
        .await;
    assert!(answer.starts_with("204"), "{answer}");
    host.until_owns("one", 64, 96).await;
    drop(host);
    let host = Host::start_with(48, "/".into(), folder.clone(), &first).await;
    host.until_owns("one", 48, 96).await;
    drop(host);
    let _other = guest(&two);
    let both = first + &section("two", &two, "");
    let host = Host::start_with(64, "/".into(), folder.clone(), &both).await;
    host.until_owns("one", 32, 96).await;
    host.until_owns("two", 32, 96).await;
    assert!(host.view().await.committed.fast_bytes <= 64 * MIB);
}

#[tokio::test]
async fn shares_give_no_vm_more_than_its_backend() {
    let (large, small) = (FakeVm::new(SIZE), FakeVm::new(SIZE));
    let (_one, _two) = (guest(&large), guest(&small));
    // From a pool of 110 MiB, the shares give 100 to the VM that has 64.
    let vms = section("large", &large, "share = 1000") + &section("small", &small, "share = 1");
    let host = Host::start_with(110, "/".into(), folder(), &vms).await;
    host.until_owns("large", 32, 96).await;
    let answer = host.ask("PUT /v1/policy", "{\"policy\": \"shares\"}").await;
    assert!(answer.starts_with("204"), "{answer}");
    let all = |vm: &VmView| vm.owned.is_some_and(|owned| owned.fast_bytes == 64 * MIB);
    let large = host.until("large", "at its size", all).await;
    assert_eq!(large.target.fast_bytes, 64 * MIB);
    assert_eq!(large.limit.fast_bytes, 64 * MIB);
    let rest = |vm: &VmView| vm.owned.is_some_and(|owned| owned.fast_bytes == 46 * MIB);
    host.until("small", "given the rest", rest).await;
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
async fn a_reset_empties_the_balloon_and_an_end_frees_the_pool() {
    let vm = FakeVm::new(SIZE);
    let _guest = guest(&vm);
    let host = Host::start(folder(), &section("db", &vm, "")).await;
    host.until_owns("db", 32, 96).await;
    vm.tell(Told::Event(Event::Reset));
    let told = async {
        while !host
            .events()
            .await
            .iter()
            .any(|event| event.text.contains("reset"))
        {
            sleep(Duration::from_millis(5)).await;
        }
    };
    soon(told).await;
    host.until_owns("db", 32, 96).await;
    vm.kill();
    host.until("db", "down", |vm| vm.state == crate::view::VmState::Down)
        .await;
}

#[tokio::test]
async fn a_reboot_is_seen_by_the_agents_word_too() {
    let vm = FakeVm::new(SIZE);
    let section = section("db", &vm, "");
    let host = Host::start(folder(), &section).await;
    let missed = |vm: &VmView| vm.problem.as_ref().is_some_and(|p| p.contains("agent"));
    host.until("db", "without agent", missed).await;
    let guest = guest(&vm);
    host.until_owns("db", 32, 96).await;
    assert_eq!(guest.held_blocks(), 32);
    guest.reboot();
    assert_eq!(guest.held_blocks(), 0);
    let again = async {
        while guest.held_blocks() != 32 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    soon(again).await;
    host.until_owns("db", 32, 96).await;
    assert!(
        host.events()
            .await
            .iter()
            .any(|event| event.text.contains("reset"))
    );
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
async fn a_policy_divides_and_is_remembered() {
    let vm = FakeVm::new(SIZE);
    let folder = folder();
    let section =
        section("db", &vm, "provisioner = \"virtio-mem\"\nshare = 5").replace("agent", "#");
    let host = Host::start(folder.clone(), &section).await;
    let answer = host.ask("PUT /v1/policy", "{\"policy\": \"shares\"}").await;
    assert!(answer.starts_with("204"), "{answer}");
    // The whole pool, as far as limits and devices allow.
    host.until_owns("db", 128, 128).await;
    let refused = host.ask("PUT /v1/vms/db/tiers", "{\"fast_mib\": 16}").await;
    assert!(refused.contains("policy shares decides"), "{refused}");
    drop(host);
    let host = Host::start(folder, &section).await;
    assert_eq!(host.view().await.policy, Policy::Shares);
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

#[tokio::test]
async fn a_domain_that_its_section_calls_otherwise_is_managed_once() {
    let vm = FakeVm::new(SIZE);
    let _guest = guest(&vm);
    let section = section("database", &vm, "");
    let (_, sizes) = section.split_once("oom_mib").unwrap();
    let section = format!("[vm.database]\nlibvirt = \"db\"\noom_mib{sizes}");
    let text = format!("discover = \"libvirt\"\n{}{section}", daemon(&vm, true));
    let host = Host::start(folder(), &text).await;
    host.until_owns("database", 32, 96).await;
    // libvirt has listed its domains by then, or does so within this time.
    sleep(Duration::from_millis(300)).await;
    let names: Vec<_> = host
        .view()
        .await
        .vms
        .into_iter()
        .map(|vm| vm.name)
        .collect();
    assert_eq!(names, ["database"]);
}

#[tokio::test]
async fn a_domain_that_found_no_room_is_told_and_taken_on_once_there_is() {
    let (vm, other) = (FakeVm::new(SIZE), FakeVm::new(SIZE));
    let _guest = guest(&other);
    let section = section("other", &other, "");
    let text = format!("discover = \"libvirt\"\n{}{section}", daemon(&vm, true));
    // The VM has 64 MiB, and 48 are left.
    let host = Host::start_with(80, "/".into(), folder(), &text).await;
    host.until_owns("other", 32, 96).await;
    let told = async {
        while host.view().await.left_alone.is_empty() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    soon(told).await;
    let view = host.view().await;
    assert_eq!(
        (view.left_alone[0].name.as_str(), view.vms.len()),
        ("db", 1)
    );
    assert_eq!(view.left_alone[0].memory_bytes, 192 * MIB);
    assert!(view.left_alone[0].why.contains("48 MiB"), "{view:?}");
    let answer = host
        .ask("PUT /v1/vms/other/tiers", "{\"fast_mib\": 16}")
        .await;
    assert!(answer.starts_with("204"), "{answer}");
    let taken_on = async {
        while host.view().await.vms.len() != 2 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    soon(taken_on).await;
    assert_eq!(host.view().await.left_alone, []);
}

#[tokio::test]
async fn after_a_resume_all_is_found_anew() {
    let vm = FakeVm::new(SIZE);
    let guest = guest(&vm);
    let host = Host::start(folder(), &section("db", &vm, "")).await;
    host.until_owns("db", 32, 96).await;
    // A snapshot without a balloon was loaded: the memory is back, and nothing is held.
    guest.forget();
    vm.tell(Told::Event(Event::Changed));
    let again = async {
        while guest.held_blocks() != 32 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    soon(again).await;
    host.until_owns("db", 32, 96).await;
    // Memory that could be managed before may become read-only.
    vm.state().protect(Tier::Fast);
    vm.tell(Told::Event(Event::Changed));
    let refused = |vm: &VmView| vm.problem.as_ref().is_some_and(|p| p.contains("only read"));
    host.until("db", "looked at again", refused).await;
}

fn is_untouched(vm: &FakeVm) -> bool {
    backed(vm, Tier::Fast) == 64 * MIB && backed(vm, Tier::Slow) == 128 * MIB
}

#[tokio::test]
async fn a_snapshot_that_is_loaded_between_ping_and_punch_loses_nothing() {
    let vm = FakeVm::new(SIZE);
    let guest = guest(&vm);
    // A device that forbids punching is added.
    vm.state().upon_status = Some(|vm| {
        vm.pinned = true;
        Event::Changed
    });
    let host = Host::start(folder(), &section("db", &vm, "")).await;
    let refused = |vm: &VmView| vm.problem.as_ref().is_some_and(|p| p.contains("gpu0"));
    host.until("db", "refused", refused).await;
    assert!(guest.held_blocks() > 0, "there was something to punch");
    assert!(is_untouched(&vm));
}

#[tokio::test]
async fn a_reset_between_ping_and_punch_loses_nothing() {
    fn resets_always(vm: &mut State) -> Event {
        vm.upon_status = Some(resets_always);
        Event::Reset
    }
    let vm = FakeVm::new(SIZE);
    let guest = guest(&vm);
    vm.state().upon_status = Some(resets_always);
    let host = Host::start(folder(), &section("db", &vm, "")).await;
    let reset_twice = async {
        let is_reset = |event: &&EventView| event.text.contains("reset");
        while host.events().await.iter().filter(is_reset).count() < 2 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    soon(reset_twice).await;
    assert!(guest.held_blocks() > 0, "there was something to punch");
    assert!(is_untouched(&vm));
}

#[tokio::test]
async fn a_liar_is_looked_at_twice_and_marked_once() {
    let vm = FakeVm::new(SIZE);
    let mut ranges = vm.guest_ranges();
    ranges[0].1.start.0 += 1 << 40;
    let _liar = FakeGuest::new(&vm, &ranges);
    let host = Host::start(folder(), &section("db", &vm, "")).await;
    let db = host
        .until("db", "marked", |vm| {
            vm.state == crate::view::VmState::Marked
        })
        .await;
    assert!(
        db.problem
            .unwrap()
            .contains("is not in the VM's fast memory")
    );
    assert_eq!(backed(&vm, Tier::Fast), 64 * MIB);
    let events = host.events().await;
    let count = |what| {
        events
            .iter()
            .filter(|event| event.text.contains(what))
            .count()
    };
    assert_eq!(
        (count("left alone"), count("is here")),
        (1, 2),
        "{events:#?}"
    );
}

#[tokio::test]
async fn an_agent_in_another_vm_is_not_believed_whatever_serves_its_socket() {
    // The kernel sees the same process behind both ports.
    let (one, other) = (FakeVm::new(SIZE), FakeVm::new(SIZE));
    let _in_other = FakeGuest::proving(&one, &other, &one.guest_ranges());
    let _in_one = FakeGuest::proving(&other, &one, &other.guest_ranges());
    let vms = section("one", &one, "") + &section("other", &other, "");
    let host = Host::start(folder(), &vms).await;
    for name in ["one", "other"] {
        let refused = |vm: &VmView| {
            let problem = vm.problem.as_deref();
            problem.is_some_and(|p| p.contains("does not speak for this VM"))
        };
        let vm = host.until(name, "refused", refused).await;
        assert_eq!(vm.state, crate::view::VmState::Up, "nobody has lied");
        assert_eq!(vm.owned, None);
    }
    for vm in [&one, &other] {
        assert_eq!(backed(vm, Tier::Fast), 64 * MIB, "nothing is punched");
        assert_eq!(backed(vm, Tier::Slow), 128 * MIB);
    }
}

#[tokio::test]
async fn a_mark_survives_the_controller_until_it_is_forgiven() {
    let vm = FakeVm::new(SIZE);
    let mut ranges = vm.guest_ranges();
    ranges[0].1.start.0 += 1 << 40;
    let liar = FakeGuest::new(&vm, &ranges);
    let folder = folder();
    let marked = |vm: &VmView| vm.state == crate::view::VmState::Marked;
    let host = Host::start(folder.clone(), &section("db", &vm, "")).await;
    let why = host.until("db", "marked", marked).await.problem;
    drop(host);
    drop(liar);
    std::fs::remove_file(vm.folder().join("agent")).unwrap();

    // The guest is honest now, but the controller cannot know.
    let _guest = guest(&vm);
    let host = Host::start(folder.clone(), &section("db", &vm, "")).await;
    let still = host.until("db", "marked", marked).await;
    assert_eq!(still.problem, why, "and for the same reason");
    assert_eq!(backed(&vm, Tier::Fast), 64 * MIB);
    let refused = host.ask("POST /v1/vms/nobody/forgive", "").await;
    assert!(refused.starts_with("404"), "{refused}");
    // After its first report, it is managed as soon as it is forgiven.
    let forgiven = host.ask("POST /v1/vms/db/forgive", "").await;
    assert!(forgiven.starts_with("204"), "{forgiven}");
    host.until_owns("db", 32, 96).await;
    let again = host.ask("POST /v1/vms/db/forgive", "").await;
    assert!(again.starts_with("409"), "{again}");
    drop(host);
    let host = Host::start(folder, &section("db", &vm, "")).await;
    host.until_owns("db", 32, 96).await;
}

#[tokio::test]
async fn memory_that_is_touched_after_it_was_returned_is_taken_back_and_counted() {
    use std::os::unix::fs::FileExt;
    let vm = FakeVm::new(SIZE);
    let _guest = guest(&vm);
    let host = Host::start(folder(), &section("db", &vm, "")).await;
    let before = host.until_owns("db", 32, 96).await;
    assert_eq!(before.overruns, 0);
    assert_eq!(backed(&vm, Tier::Fast), 32 * MIB);
    // The guest's driver holds blocks from the first one on.
    vm.file(Tier::Fast)
        .write_all_at(&[1; MIB as usize], 0)
        .unwrap();
    let since = Instant::now();
    let seen = host.until("db", "seen", |vm| vm.overruns > 0).await;
    assert!(
        since.elapsed() < Duration::from_secs(5),
        "by the clock of a busy machine"
    );
    assert_eq!(seen.overrun.fast_bytes, MIB);
    assert_eq!(seen.state, crate::view::VmState::Up);
    let taken_back = async {
        while backed(&vm, Tier::Fast) > 32 * MIB {
            sleep(Duration::from_millis(5)).await;
        }
    };
    soon(taken_back).await;
    let after = host.until_owns("db", 32, 96).await;
    assert_eq!(after.overruns, 1, "once is told once");
}

#[tokio::test]
async fn a_hard_limit_follows_what_a_vm_owns_and_ends_with_the_controller() {
    let root = FakeRoot::new();
    let vm = FakeVm::new(SIZE);
    let _guest = guest(&vm);
    let section = section("db", &vm, "hard_limit_extra_mib = 10");
    let mut host = Host::start_below(root.path().into(), folder(), &section).await;
    let limited = async |mib: &str| {
        while root.limit() != mib {
            sleep(Duration::from_millis(5)).await;
        }
    };
    host.until_owns("db", 32, 96).await;
    soon(limited("138")).await;
    let answer = host.ask("PUT /v1/vms/db/tiers", "{\"fast_mib\": 48}").await;
    assert!(answer.starts_with("204"), "{answer}");
    host.until_owns("db", 48, 96).await;
    soon(limited("154")).await;
    host.stop.take().unwrap().send(()).unwrap();
    soon(&mut host.task).await.unwrap().unwrap();
    soon(limited("max")).await;
}

#[tokio::test]
async fn no_memory_is_given_where_the_hard_limit_cannot_be_raised() {
    let root = FakeRoot::new();
    let vm = FakeVm::new(SIZE);
    let guest = guest(&vm);
    let section = section("db", &vm, "hard_limit_extra_mib = 10");
    let host = Host::start_below(root.path().into(), folder(), &section).await;
    host.until_owns("db", 32, 96).await;
    root.break_limit();
    let answer = host.ask("PUT /v1/vms/db/tiers", "{\"fast_mib\": 48}").await;
    assert!(answer.starts_with("204"), "{answer}");
    let refused = |vm: &VmView| {
        vm.problem
            .as_ref()
            .is_some_and(|p| p.contains("memory.max"))
    };
    host.until("db", "refused", refused).await;
    assert_eq!(guest.held_blocks(), 32, "what is held stays held");
}

#[tokio::test]
async fn memory_on_a_node_of_another_tier_is_told() {
    let vm = FakeVm::new(SIZE);
    let _guest = guest(&vm);
    let root = FakeRoot::new();
    // The addresses of the VM's memory, as QEMU tells them.
    let address = |tier| {
        let memory = vm.state().host_address(tier);
        format!("{memory:x}")
    };
    let (fast, slow) = (address(Tier::Fast), address(Tier::Slow));
    root.has_nodes(&[(0, "0-3"), (2, "")]);
    let mut pages = [
        format!("{fast} default file=/memfd:m dirty=9 N0=4096 N2=4096 kernelpagesize_kB=4"),
        format!("{slow} bind:2 file=/memfd:m dirty=9 N2=24576 kernelpagesize_kB=4"),
    ];
    pages.sort();
    root.has_pages(&pages);
    let host = Host::start_below(root.path().into(), folder(), &section("db", &vm, "")).await;
    let told = |vm: &VmView| {
        let problem = vm.problem.as_ref();
        problem.is_some_and(|p| p.contains("16 of 32 MiB of its fast memory lie on node 2"))
    };
    let db = host.until("db", "told of", told).await;
    let elsewhere = db.places.unwrap().elsewhere.unwrap();
    assert_eq!(
        elsewhere,
        TierView {
            fast_bytes: 16 * MIB,
            slow_bytes: 0
        }
    );
    let metrics = host.ask("GET /metrics", "").await;
    let line = format!(
        "demeter_host_vm_elsewhere_bytes{{vm=\"db\",tier=\"fast\"}} {}",
        16 * MIB
    );
    assert!(metrics.lines().any(|of| of == line), "{metrics}");
}

/// Pools of two sockets, with 100 MiB of fast memory each.
fn two_pools(folder: &tempfile::TempDir, vms: &str) {
    let pool = |name: &str, fast: u32, slow: u32| {
        format!(
            "[[pool]]\nname = \"{name}\"\nfast_nodes = \"{fast}\"\nslow_nodes = \"{slow}\"\n\
             fast_mib = 100\nslow_all_but_mib = 3596\n"
        )
    };
    let text = format!(
        "socket = \"{0}/host.sock\"\nstate = \"{0}/state.json\"\npolicy = \"shares\"\n{1}{2}{vms}",
        folder.path().display(),
        pool("s0", 0, 2),
        pool("s1", 1, 3)
    );
    std::fs::write(folder.path().join("host.toml"), text).unwrap();
}

#[tokio::test]
async fn two_sockets_are_divided_each_for_itself() {
    let (left, right) = (FakeVm::new(SIZE), FakeVm::new(SIZE));
    let (_left, _right) = (guest(&left), guest(&right));
    let root = FakeRoot::new();
    root.has_nodes(&[(0, "0"), (1, "1"), (2, ""), (3, "")]);
    let folder = folder();
    let alone = section("left", &left, "pool = \"s0\"");
    two_pools(
        &folder,
        &(alone.clone() + &section("right", &right, "pool = \"s1\"")),
    );
    let host = Host::start_configured(root.path().into(), folder.clone()).await;
    // Each is the only one of its pool, so it gets all that it can have.
    host.until_owns("left", 64, 128).await;
    host.until_owns("right", 64, 128).await;
    let view = host.view().await;
    let committed: Vec<_> = view
        .pools
        .iter()
        .map(|pool| pool.committed.fast_bytes)
        .collect();
    assert_eq!(committed, [64 * MIB, 64 * MIB]);
    assert_eq!(view.pool.fast_bytes, 200 * MIB);
    let metrics = host.ask("GET /metrics", "").await;
    let line = "demeter_host_pool_bytes{tier=\"slow\",pool=\"s1\"} 524288000";
    assert!(metrics.lines().any(|of| of == line), "{metrics}");

    // A VM of another pool shares that pool from now on.
    two_pools(
        &folder,
        &(alone + &section("right", &right, "pool = \"s0\"")),
    );
    assert!(host.ask("POST /v1/reload", "").await.starts_with("200"));
    host.until_owns("left", 50, 128).await;
    host.until_owns("right", 50, 128).await;
    let view = host.view().await;
    assert_eq!(view.pools[1].committed, TierView::default());
    assert_eq!(view.vms[1].pool, "s0");

    // A node that has gone is no node: the file is refused, and everything stays.
    root.lose_node(3);
    let refused = host.ask("POST /v1/reload", "").await;
    assert!(
        refused.starts_with("409") && refused.contains("slow_nodes names node 3"),
        "{refused}"
    );
    host.until_owns("right", 50, 128).await;
}

#[tokio::test]
async fn an_evacuation_returns_all_memory_or_says_what_is_missing() {
    let (one, two) = (FakeVm::new(SIZE), FakeVm::new(SIZE));
    let (_one, _two) = (guest(&one), guest(&two));
    let folder = folder();
    let vms = section("one", &one, "") + &section("two", &two, "");
    let host = Host::start_with(100, "/".into(), folder.clone(), &vms).await;
    host.until_owns("one", 32, 96).await;
    host.until_owns("two", 32, 96).await;
    let refused = host.ask("POST /v1/evacuate", "").await;
    assert!(
        refused.starts_with("409")
            && refused.contains("28 MiB of fast and 0 MiB of slow memory are missing"),
        "{refused}"
    );
    host.until_owns("one", 32, 96).await;

    Host::configure(
        128,
        &folder,
        &vms.replace("limit_mib = 128", "limit_mib = 100"),
    );
    assert!(host.ask("POST /v1/reload", "").await.starts_with("200"));
    let answer = host.ask("POST /v1/evacuate", "").await;
    assert!(answer.starts_with("204"), "{answer}");
    // More than its limit.
    host.until_owns("one", 64, 128).await;
    host.until_owns("two", 64, 128).await;
    assert!(host.view().await.evacuates);
    let refused = host
        .ask("PUT /v1/vms/one/tiers", "{\"fast_mib\": 32}")
        .await;
    assert!(refused.starts_with("409"), "{refused}");

    // A policy ends it, and limits hold again.
    assert!(
        host.ask("PUT /v1/policy", "{\"policy\": \"static\"}")
            .await
            .starts_with("204")
    );
    host.until_owns("one", 64, 100).await;
    assert!(!host.view().await.evacuates);
}

#[tokio::test]
async fn a_vm_that_is_not_heard_is_not_evacuated() {
    let vm = FakeVm::new(SIZE);
    let host = Host::start(folder(), &section("db", &vm, "")).await;
    host.until("db", "seen", |vm| vm.may_hold.fast_bytes == 64 * MIB)
        .await;
    let refused = host.ask("POST /v1/evacuate", "").await;
    assert!(
        refused.starts_with("409")
            && refused.contains("VM db runs, and its agent is not connected"),
        "{refused}"
    );
}
