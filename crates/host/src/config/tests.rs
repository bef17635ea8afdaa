use proptest::prelude::*;

use super::*;

const EXAMPLE: &str = include_str!("../../../../packaging/host.toml");

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
