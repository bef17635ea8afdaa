//! How pools are divided, and evacuated.

use super::*;

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

/// Pools of two sockets, with 100 MiB of fast memory each. `head` are further keys.
pub(super) fn two_pools(folder: &tempfile::TempDir, head: &str, vms: &str) {
    let pool = |name: &str, fast: u32, slow: u32| {
        format!(
            "[[pool]]\nname = \"{name}\"\nfast_nodes = \"{fast}\"\nslow_nodes = \"{slow}\"\n\
             fast_mib = 100\nslow_all_but_mib = 3596\n"
        )
    };
    let text = format!(
        "socket = \"{0}/host.sock\"\nstate = \"{0}/state.json\"\npolicy = \"shares\"\n{head}{1}{2}{vms}",
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
        "",
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
        "",
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
