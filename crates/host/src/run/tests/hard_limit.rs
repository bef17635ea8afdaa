//! Memory that a VM takes without owning it, and hard limits against that.

use super::*;

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
