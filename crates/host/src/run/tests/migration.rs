//! Live migration: a VM leaves one host and arrives at another one with other pools.

use std::process::{Child, Command, Stdio};

use super::pools::two_pools;
use super::*;
use crate::view::VmState;

/// The test's own name: it starts itself in a child process.
const TEST: &str = "run::tests::migration::a_vm_that_leaves_gives_its_account_back";

/// Environment variable of the child process: its folder.
const FOLDER: &str = "DEMETER_MIGRATION_FOLDER";

/// A hypervisor in a process of its own, which ends when this is dropped.
struct Source(Child);

impl Source {
    fn start(folder: &std::path::Path) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", TEST, "--nocapture"])
            .env(FOLDER, folder)
            .stdout(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Is the VM that leaves, until its process is killed.
async fn be_the_source(folder: &std::path::Path) {
    // SAFETY: asks for a signal when the parent dies, and nothing else.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let vm = FakeVm::within(folder, SIZE);
    let _guest = guest(&vm);
    std::future::pending().await
}

#[tokio::test]
async fn a_vm_that_leaves_gives_its_account_back() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        return be_the_source(folder.as_ref()).await;
    }
    let sockets = tempfile::tempdir().unwrap();
    let path = sockets.path().display();
    let leaves = format!(
        "[vm.leaves]\nqmp = \"{path}/qmp\"\nagent = \"{path}/agent\"\noom_mib = 0\n\
         fast = {{ memdev = \"node0\", size_mib = 48 }}\nslow = {{ memdev = \"node1\", size_mib = 96 }}\n"
    );
    let stays = FakeVm::new(SIZE);
    let _guest = guest(&stays);
    let source = Source::start(sockets.path());
    let vms = leaves + &section("stays", &stays, "");
    let host = Host::start_with(80, "/".into(), folder(), &vms).await;
    host.until_owns("leaves", 48, 96).await;
    host.until_owns("stays", 32, 96).await;
    let grow = || host.ask("PUT /v1/vms/stays/tiers", "{\"fast_mib\": 64}");
    let refused = grow().await;
    assert!(refused.starts_with("409"), "{refused}");

    // The source's process ends once the destination runs.
    drop(source);
    let gone = |vm: &VmView| vm.state == VmState::Down && vm.may_hold == TierView::default();
    let left = host.until("leaves", "gone", gone).await;
    assert_eq!(left.owned, None);
    // Its wish stays until it is removed, so that it may come back. Its memory is free.
    assert_eq!(host.view().await.excess(), TierView::default());
    let removed = host.ask("DELETE /v1/vms/leaves", "").await;
    assert!(removed.starts_with("204"), "{removed}");
    let answer = grow().await;
    assert!(answer.starts_with("204"), "{answer}");
    host.until_owns("stays", 64, 96).await;
}

/// A VM arrives while its guest holds this much of each tier. At the end the host has at most this much
/// memory behind its fast tier, because the guest has not touched what it was given back. It has less
/// where the guest gave up more at first, because the other VM shrank later.
async fn arrives_holding(held: TierBytes, fast_mib: u64) {
    let (local, arrives) = (FakeVm::new(SIZE), FakeVm::new(SIZE));
    let _local = guest(&local);
    let root = FakeRoot::new();
    root.has_nodes(&[(0, "0"), (1, "1"), (2, ""), (3, "")]);
    let folder = folder();
    let vms =
        section("local", &local, "pool = \"s1\"") + &section("arrives", &arrives, "pool = \"s1\"");
    two_pools(&folder, "", &vms);
    let host = Host::start_configured(root.path().into(), folder).await;

    // Before the switch its hypervisor runs, and no agent speaks. All its memory counts.
    let whole = |vm: &VmView| vm.may_hold.fast_bytes == 64 * MIB;
    host.until("arrives", "seen", whole).await;
    host.until_owns("local", 64, 128).await;
    assert_eq!(host.view().await.excess().fast_bytes, 28 * MIB);

    // Pages of the balloon arrive as memory that is in use on this host.
    let carried = FakeGuest::holding(&arrives, &arrives.guest_ranges(), held);
    arrives.tell(Told::Event(Event::Changed));
    host.until_owns("arrives", 50, 128).await;
    host.until_owns("local", 50, 128).await;
    assert_eq!(carried.held_blocks(), 7, "14 MiB of 64");
    let returned = async {
        while backed(&arrives, Tier::Fast) > fast_mib * MIB {
            sleep(Duration::from_millis(5)).await;
        }
    };
    soon(returned).await;
    assert_eq!(backed(&arrives, Tier::Slow), 128 * MIB);
    assert_eq!(host.view().await.excess(), TierView::default());
}

#[tokio::test]
async fn a_vm_that_arrives_without_a_balloon_is_taken_over() {
    arrives_holding(TierBytes::default(), 50).await;
}

#[tokio::test]
async fn a_vm_that_arrives_with_a_balloon_is_taken_over() {
    // More of the fast tier than it shall hold here, and slow memory that it shall have.
    let held = TierBytes {
        fast: ByteCount(40 * MIB),
        slow: ByteCount(0),
    };
    arrives_holding(held, 24).await;
}
