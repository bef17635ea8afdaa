mod keys;

use demeter_policy::provision::ProvisionerKind;
use demeter_policy::{ByteCount, MIB, NodeId, Tier, TierBytes};
use proptest::prelude::*;

use super::bounds::mib;
use super::*;

const EXAMPLE: &str = include_str!("../../../../packaging/host.toml");

fn parse(text: &str) -> Result<Config, FileError> {
    Config::parse(&TomlFile::from_text(&KIND, "host.toml", text))
}

fn checked(text: &str) -> Result<Config, String> {
    let config: Config = toml::from_str(text).map_err(|e| e.to_string())?;
    config.check().map_err(|e| e.to_string())?;
    Ok(config)
}

#[test]
fn the_example_is_short_and_complete() {
    let config = checked(EXAMPLE).unwrap();
    assert_eq!(config.policy, Policy::Wss);
    let vm = config.vms.values().next().unwrap();
    assert_eq!(vm.provisioner, ProvisionerKind::DemeterBalloon);
    assert_eq!(vm.nodes().slow, NodeId(1));
    assert_eq!(vm.sizes().fast, mib(vm.fast.size_mib));
    assert_eq!(vm.limits().slow, vm.slow.limit_mib.map(mib));
}

const GOOD: &str = r#"
    pool = { fast_mib = 1000, slow_mib = 4000 }
    [vm.a]
    qmp = "/run/a.qmp"
    agent = "/run/a.agent"
    fast = { memdev = "m0", size_mib = 400 }
    slow = { memdev = "m1", size_mib = 1600, guarantee_mib = 100, limit_mib = 2000 }
    [vm.b]
    qmp = "/run/b.qmp"
    provisioner = "virtio-mem"
    fast = { size_mib = 600 }
    slow = { memdev = "m1", size_mib = 1600, node = 2 }
"#;

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn bad_values_are_named_with_the_hint() {
    checked(GOOD).unwrap();
    for (good, bad, want) in [
        ("[vm.a]", "[vm.\"a b\"]", "'a b' is no name"),
        (
            "qmp = \"/run/b.qmp\"",
            "cloud_hypervisor = \"/run/b.sock\"",
            "take demeter-balloon",
        ),
        (
            "qmp = \"/run/a.qmp\"",
            "cloud_hypervisor = \"/run/a.sock\"",
            "agent is set beside cloud_hypervisor",
        ),
        (
            "qmp = \"/run/b.qmp\"",
            "qmp = \"/run/b.qmp\"\ncloud_hypervisor = \"/run/b.sock\"",
            "either qmp or libvirt or cloud_hypervisor",
        ),
        (
            "provisioner = \"virtio-mem\"",
            "manage = \"auto\"",
            "no agent socket",
        ),
        (
            "provisioner = \"virtio-mem\"",
            "manage = \"by magic\"",
            "`agent`, `history`, `auto`",
        ),
        (
            "provisioner = \"virtio-mem\"",
            "manage = \"history\"\nhistory = { hot_ones = 33 }",
            "hot_ones is 1 to 32",
        ),
        (
            "pool =",
            "policy = \"magic\"\npool =",
            "`static`, `shares`, `wss`",
        ),
        (
            "pool =",
            "listen = \"[::1]:80\"\npool =",
            "without token_file",
        ),
        ("pool =", "pol =", "unknown field `pol`"),
        ("agent = \"/run/a.agent\"", "", "no agent socket"),
        (
            "agent = \"/run/a.agent\"",
            "agent = \"/run/a.agent\"\noom_mib = 1601",
            "guarantee of 1601",
        ),
        ("/run/b.qmp", "/run/a.agent", "/run/a.agent is used twice"),
        ("node = 2", "node = 0", "both tiers are node 0"),
        ("\"m0\"", "\"m1\"", "both tiers have the same memdev"),
        ("memdev = \"m0\", ", "", "vm.a.fast.memdev is missing"),
        (
            "size_mib = 600",
            "size_mib = 601",
            "fast.size_mib add up to 1001",
        ),
        (
            "guarantee_mib = 100",
            "guarantee_mib = 1601",
            "vm.a.slow.size_mib = 1600",
        ),
        (
            "slow_mib = 4000",
            "slow_mib = 4000, x = 1",
            "unknown field `x`",
        ),
        (
            "limit_mib = 2000",
            "limit_mib = 1599",
            "vm.a.slow.size_mib = 1600",
        ),
        (
            "fast_mib = 1000",
            "fast_mib = 9223372036854775807",
            "any machine",
        ),
        ("qmp = \"/run/b.qmp\"", "", "either qmp or libvirt"),
        (
            "qmp = \"/run/b.qmp\"",
            "qmp = \"/run/b.qmp\"\nlibvirt = \"b\"",
            "either qmp or libvirt",
        ),
        (
            "qmp = \"/run/a.qmp\"",
            "libvirt = \"a\"",
            "libvirt knows the socket",
        ),
        ("pool =", "discover = \"xen\"\npool =", "`libvirt`"),
        (
            "provisioner = \"virtio-mem\"",
            "manage = \"history\"\nhard_limit_extra_mib = 256",
            "vm.b has hard_limit_extra_mib",
        ),
        ("provisioner = \"virtio-mem\"", "share = 0", "vm.b"),
        (
            "provisioner = \"virtio-mem\"",
            "provisioner = \"hope\"",
            "hope",
        ),
    ] {
        assert!(GOOD.contains(good), "{good}");
        let said = checked(&GOOD.replace(good, bad)).unwrap_err();
        assert!(said.contains(want), "{bad}: {said}");
    }
    assert!(checked("pool = { fast_mib = 1, slow_mib = 1 }\nvm = {}").is_err());
    let lacks = parse("policy = \"wss\"\n").unwrap_err().to_string();
    assert_eq!(lacks, "host.toml:1: pool is missing; add it");
}

const POOLS: &str = r#"
    [[pool]]
    name = "s0"
    fast_nodes = "0"
    slow_nodes = "2"
    fast_all_but_mib = 24
    slow_mib = 400
    [[pool]]
    name = "s1"
    fast_nodes = "1"
    slow_nodes = "3"
    fast_mib = 100
    slow_all_but_mib = 0
    [vm.a]
    qmp = "/run/a.qmp"
    agent = "/run/a.agent"
    pool = "s0"
    fast = { memdev = "m0", size_mib = 100 }
    slow = { memdev = "m1", size_mib = 400 }
"#;

/// A machine of nodes 0 to 3, with 1024 MiB each.
fn machine() -> Topology {
    let node = |id| demeter_linux::nodes::Node {
        id: NodeId(id),
        total: ByteCount(1024 * MIB),
        free: ByteCount(0),
        has_cpus: id < 2,
        cpus: vec![],
        distances: vec![],
        tier: None,
        read_latency_ns: None,
        measured_ns: None,
    };
    Topology {
        nodes: (0..4).map(node).collect(),
    }
}

#[test]
fn two_sockets_are_two_pools() {
    let config = checked(POOLS).unwrap();
    let pools = config.pools(Some(&machine())).unwrap();
    let pool = |name: &str| &pools[&PoolName(name.into())];
    assert_eq!(pool("s0").sizes.fast, mib(1000));
    assert_eq!(pool("s1").sizes.slow, mib(1024));
    assert_eq!(pool("s1").nodes.slow, [NodeId(3)]);
    // A client reads what the API shows.
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<Config>(&json).unwrap(), config);
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn bad_pools_are_named_with_line_and_hint() {
    for (good, bad, want) in [
        (
            "name = \"s1\"",
            "name = \"s0\"",
            "bad.toml:9: pool.1.name = \"s0\" is taken",
        ),
        ("name = \"s1\"", "", "pool.1.name = \"\" is no name"),
        ("name = \"s1\"", "name = \"s 1\"", "bad.toml:9: pool.1.name"),
        ("fast_nodes = \"1\"", "", "pool.1.fast_nodes is missing"),
        (
            "fast_nodes = \"1\"",
            "fast_nodes = \"x\"",
            "pool.1.fast_nodes is no list",
        ),
        (
            "fast_nodes = \"1\"",
            "fast_nodes = \"\"",
            "pool.1.fast_nodes is no list",
        ),
        (
            "fast_nodes = \"1\"",
            "fast_nodes = \"2\"",
            "bad.toml:10: pool.1.fast_nodes: node 2 is named twice",
        ),
        (
            "fast_nodes = \"1\"",
            "fast_nodes = \"3\"",
            "pool.1.slow_nodes: node 3 is named twice",
        ),
        (
            "fast_nodes = \"1\"",
            "fast_nodes = \"9\"",
            "bad.toml:10: pool.1.fast_nodes names node 9",
        ),
        (
            "fast_mib = 100",
            "fast_mib = 1025",
            "bad.toml:12: pool.1.fast_mib = 1025 is more than the 1024 MiB",
        ),
        ("fast_mib = 100", "", "pool.1.fast_mib is missing"),
        (
            "fast_mib = 100",
            "fast_mib = 1\nfast_all_but_mib = 1",
            "set beside fast_mib",
        ),
        (
            "fast_all_but_mib = 24",
            "fast_all_but_mib = 1024",
            "pool.0.fast_all_but_mib = 1024 leaves nothing",
        ),
        (
            "fast_all_but_mib = 24",
            "fast_all_but_mib = 925",
            "add up to 100, pool.fast_mib is 99",
        ),
        (
            "slow_mib = 400",
            "slow_mib = 399",
            "of pool s0 add up to 400",
        ),
        (
            "pool = \"s0\"",
            "",
            "bad.toml:14: vm.a names none of the 2 pools",
        ),
        (
            "pool = \"s0\"",
            "pool = \"s2\"",
            "bad.toml:17: vm.a.pool = \"s2\" is not there",
        ),
    ] {
        assert!(POOLS.contains(good), "{good}");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bad.toml");
        let text = POOLS.replacen(good, bad, 1);
        std::fs::write(&path, &text).unwrap();
        let found = Config::load(&path).and_then(|config| {
            let pools = config.pools(Some(&machine()));
            pools.map_err(|error| error.located(&path, &text))
        });
        let said = found.unwrap_err().to_string();
        assert!(said.contains(want) && !said.contains('\n'), "{bad}: {said}");
    }
    let discovered = format!("discover = \"libvirt\"\n{POOLS}");
    checked(&discovered).unwrap();
    let absent = checked(&format!("{discovered}[defaults]\npool = \"s9\"\n")).unwrap_err();
    assert!(
        absent.contains("defaults.pool = \"s9\" is not there"),
        "{absent}"
    );
    let nameless = GOOD.replace("slow_mib = 4000", "slow_all_but_mib = 1");
    assert!(checked(&nameless).unwrap_err().contains("without nodes"));
    assert!(
        checked("pool = []\ndiscover = \"libvirt\"")
            .unwrap_err()
            .contains("pool is empty")
    );
}

#[test]
fn a_vm_takes_defaults_for_what_it_does_not_set() {
    let text = "[defaults]\nshare = 7\nfast = { guarantee_mib = 50, limit_mib = 800 }\n\
                slow = { guarantee_mib = 64 }\n";
    let config = parse(&(text.to_owned() + GOOD)).unwrap_err();
    assert!(
        config.to_string().contains("pool"),
        "keys after a table are its own: {config}"
    );
    let config = parse(&(GOOD.to_owned() + text)).unwrap();
    config.check().unwrap();
    let vm = |name: &str| &config.vms[&name.parse::<VmName>().unwrap()];
    assert_eq!((vm("a").share, vm("b").share), (7, 7));
    assert_eq!(vm("a").slow.guarantee_mib, 100, "its own");
    assert_eq!(
        (vm("b").slow.guarantee_mib, vm("b").fast.limit_mib),
        (64, Some(800))
    );
    let own = GOOD.replace("provisioner =", "share = 9\nprovisioner =") + text;
    let config = parse(&own).unwrap();
    assert_eq!(config.vms[&"b".parse::<VmName>().unwrap()].share, 9);

    let unknown = parse(&(GOOD.to_owned() + "[defaults]\nqmp = \"/q\"\n"));
    assert!(
        unknown
            .unwrap_err()
            .to_string()
            .contains("defaults.qmp is no key of this table")
    );
    let found = VmConfig::of_domain(
        &"d".parse().unwrap(),
        ProvisionerKind::default(),
        TierBytes {
            fast: mib(40),
            slow: mib(80),
        },
    );
    let found = config.defaults.apply(found);
    assert_eq!(
        (
            found.share,
            found.fast.guarantee_mib,
            found.slow.guarantee_mib
        ),
        (7, 40, 64)
    );
    // The pool to whose nodes it is bound takes precedence.
    let named = |name: &str| Some(PoolName(name.into()));
    let defaults = Defaults {
        pool: named("s0"),
        ..Defaults::default()
    };
    let bound = VmConfig {
        pool: named("s1"),
        ..found.clone()
    };
    assert_eq!(defaults.apply(found).pool, named("s0"));
    assert_eq!(defaults.apply(bound).pool, named("s1"));
}

#[test]
fn a_domain_needs_little_more_than_its_name() {
    let vm = |name: &str| {
        format!(
            "[vm.{name}]\nlibvirt = \"db\"\nfast = {{ size_mib = 4 }}\nslow = {{ size_mib = 16 }}\n"
        )
    };
    let pool = "pool = { fast_mib = 100, slow_mib = 100 }\n";
    let config = checked(&(pool.to_owned() + &vm("a"))).unwrap();
    let a = config.vms.values().next().unwrap();
    assert_eq!(a.memdev(Tier::Fast).as_deref(), Some("ram-node0"));
    let twice = checked(&(pool.to_owned() + &vm("a") + &vm("b"))).unwrap_err();
    assert!(twice.contains("named twice"), "{twice}");
    assert!(checked(pool).unwrap_err().contains("0 VMs"));
    let config = checked(&format!("discover = \"libvirt\"\n{pool}")).unwrap();
    assert_eq!(config.discover, Some(Discover::Libvirt));
}

proptest! {
    #[test]
    fn any_text_is_survived(text in "\\PC{0,200}", number in any::<u64>()) {
        let _ = checked(&text);
        let _ = checked(&GOOD.replace("400", &number.to_string()));
    }
}
