//! VMs that lie, or speak for others.

use super::*;

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
