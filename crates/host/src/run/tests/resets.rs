//! VMs that are reset, rebooted, stopped or loaded from a snapshot.

use super::*;

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
