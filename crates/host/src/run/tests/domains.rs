//! VMs of libvirt and of Cloud Hypervisor.

use super::pools::two_pools;
use super::*;
use crate::view::LeftAloneView;

/// The section of a libvirt daemon.
pub(super) fn daemon(vm: &FakeVm, runs: bool) -> String {
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
async fn the_owner_of_a_domain_sets_values_in_its_xml() {
    let own = |share: &str| {
        format!(
            "<d:vm xmlns:d='urn:demeter:vm:1' share='{share}'><d:fast guarantee_mib='16' limit_mib='48'/></d:vm>"
        )
    };
    let vm = FakeVm::new(SIZE);
    vm.state().metadata = own("300");
    let text = format!(
        "discover = \"libvirt\"\npolicy = \"shares\"\n{}[defaults]\nshare = 7\noom_mib = 0\n",
        daemon(&vm, true)
    );
    let host = Host::start(folder(), &text).await;
    let there = async {
        while host.view().await.vms.is_empty() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    soon(there).await;
    // All that the limit allows.
    let desires = async |fast_mib: u64| {
        let desired = |vm: &VmView| vm.desired.fast_bytes == fast_mib * MIB;
        host.until("db", "desired", desired).await
    };
    let db = desires(48).await;
    assert_eq!(db.guarantee.fast_bytes, 16 * MIB);
    let told = async |what: &str| {
        let is = |event: &EventView| event.text.contains(what);
        while !host.events().await.iter().any(is) {
            sleep(Duration::from_millis(20)).await;
        }
    };
    // A command takes precedence over the XML, and the XML over the defaults.
    let asked = host.ask("PUT /v1/vms/db/settings", "{\"fast\": {\"limit_mib\": 32}}");
    assert!(asked.await.starts_with("204"));
    desires(32).await;
    vm.state().metadata = own("400");
    soon(told("changed in its XML: vm.db.share: 300 -> 400")).await;
    desires(32).await;
}

#[tokio::test]
async fn a_domain_whose_xml_is_not_understood_is_left_alone() {
    let vm = FakeVm::new(SIZE);
    vm.state().metadata = "<d:vm xmlns:d='urn:demeter:vm:1' prio='1'/>".into();
    let text = format!("discover = \"libvirt\"\n{}", daemon(&vm, true));
    let host = Host::start(folder(), &text).await;
    let left = async {
        loop {
            if let [left] = &host.view().await.left_alone[..] {
                return left.why.clone();
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    let why = soon(left).await;
    assert!(
        why.contains("its metadata has \"prio\"; give share"),
        "{why}"
    );
}

/// A root whose host has a fast and a slow node on each of two sockets.
fn two_sockets() -> FakeRoot {
    let root = FakeRoot::new();
    root.has_nodes(&[(0, "0"), (1, "1"), (2, ""), (3, "")]);
    root
}

/// Binds a domain's cells to nodes of the host.
fn bind(vm: &FakeVm, fast: u32, slow: u32) {
    let bound = [(0, fast), (1, slow)]
        .map(|(cell, node)| format!("<memnode cellid='{cell}' mode='strict' nodeset='{node}'/>"));
    vm.state().numatune = bound.concat();
}

/// The only managed VM, once it is in this pool.
async fn in_pool(host: &Host, pool: &str) -> VmView {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let view = host.view().await;
        if let [vm] = &view.vms[..]
            && vm.pool == pool
        {
            return vm.clone();
        }
        assert!(Instant::now() < end, "not in {pool}: {view:#?}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Memory committed to each pool.
async fn committed(host: &Host) -> Vec<TierView> {
    let pools = host.view().await.pools;
    pools.into_iter().map(|pool| pool.committed).collect()
}

#[tokio::test]
async fn a_domain_is_in_the_pool_to_whose_nodes_it_is_bound() {
    let (vm, root, folder) = (FakeVm::new(SIZE), two_sockets(), folder());
    bind(&vm, 1, 3);
    let head = |daemon: &str| format!("discover = \"libvirt\"\n{daemon}");
    two_pools(&folder, &head(&daemon(&vm, true)), "");
    let host = Host::start_configured(root.path().into(), folder.clone()).await;
    in_pool(&host, "s1").await;
    let (has, none) = (
        TierView {
            fast_bytes: 64 * MIB,
            slow_bytes: 128 * MIB,
        },
        TierView::default(),
    );
    assert_eq!(committed(&host).await, [none, has]);

    // A command takes precedence over the nodes, and the account moves along.
    let set = host.ask("PUT /v1/vms/db/settings", "{\"pool\": \"s0\"}");
    assert!(set.await.starts_with("204"));
    in_pool(&host, "s0").await;
    assert_eq!(committed(&host).await, [has, none]);
    let set = host.ask("PUT /v1/vms/db/settings", "{\"pool\": \"s9\"}");
    let refused = set.await;
    assert!(
        refused.starts_with("409") && refused.contains("pool \\\"s9\\\" is not there"),
        "{refused}"
    );
    let reset = host.ask("DELETE /v1/vms/db/settings", "").await;
    assert!(reset.starts_with("204"), "{reset}");
    in_pool(&host, "s1").await;
    drop(host);

    // Its memory counts in its pool before libvirt answers.
    two_pools(&folder, &head("libvirt = { socket = \"/nobody\" }\n"), "");
    let host = Host::start_configured(root.path().into(), folder.clone()).await;
    assert_eq!(committed(&host).await, [none, has]);
    // A pool in use is not taken away.
    let path = folder.path().join("host.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"s1\"", "\"s2\"")).unwrap();
    let refused = host.ask("POST /v1/reload", "").await;
    assert!(
        refused.starts_with("409") && refused.contains("discovered VM db is in pool"),
        "{refused}"
    );
}

#[tokio::test]
async fn a_domain_whose_pool_is_unknown_is_told_and_taken_on_once_it_is_named() {
    let (vm, root, folder) = (FakeVm::new(SIZE), two_sockets(), folder());
    // One of each socket.
    bind(&vm, 0, 3);
    let head = format!("discover = \"libvirt\"\n{}", daemon(&vm, true));
    two_pools(&folder, &head, "");
    let host = Host::start_configured(root.path().into(), folder.clone()).await;
    let left = async || loop {
        if let [left] = &host.view().await.left_alone[..] {
            return left.clone();
        }
        sleep(Duration::from_millis(5)).await;
    };
    let LeftAloneView {
        name,
        why,
        memory_bytes,
    } = soon(left()).await;
    assert_eq!((name.as_str(), memory_bytes), ("db", 192 * MIB));
    assert!(
        why.starts_with(
            "its pool is unknown, because its fast memory is bound to node 0 and its slow memory to node 3; bind"
        ),
        "{why}"
    );
    vm.state().metadata = "<d:vm xmlns:d='urn:demeter:vm:1' pool='s1'/>".into();
    in_pool(&host, "s1").await;
    assert_eq!(host.view().await.left_alone, []);
    // It stays where it is while its metadata names no pool that is there.
    vm.state().metadata = "<d:vm xmlns:d='urn:demeter:vm:1' pool='s9'/>".into();
    let why = soon(left()).await.why;
    assert!(why.contains("its pool \"s9\" is not there"), "{why}");
    in_pool(&host, "s1").await;
}
