use demeter_scenario::System;

use super::*;
use crate::machine::cost::PS_PER_NS;
use crate::run::run;
use crate::system::build;
use crate::workload::Workload;

const PS_PER_S: u64 = 1_000_000_000 * PS_PER_NS;

/// Two VMs that need most of the pool in turn.
fn scenario(policy: &str, thp: &str) -> Scenario {
    let text = format!(
        r#"
        name = "test"
        duration_s = 30
        systems = ["demeter"]
        [machine]
        vcpus = 1
        thp = "{thp}"
        fast = {{ usable_mib = 64, latency_ns = 80, bandwidth_gbps = 100 }}
        slow = {{ usable_mib = 192, latency_ns = 250, bandwidth_gbps = 20 }}
        [workload]
        kind = "gups"
        size_mib = 160
        hot_mib = 8
        hot_weight = 0.98
        reverse = true
        [agent]
        sample_period = 2047
        [provision]
        provisioners = ["demeter-balloon"]
        policies = ["{policy}"]
        vms = [
            {{ name = "a", share = 3, hot_mib = 80, phases = [{{ at_s = 15, hot_mib = 8 }}] }},
            {{ name = "b", hot_mib = 8, phases = [{{ at_s = 15, hot_mib = 80 }}] }},
        ]
        [sim]
        cpu = "lab"
        "#
    );
    let scenario: Scenario = toml::from_str(&text).unwrap();
    scenario.check().unwrap();
    scenario
}

/// Runs a scenario with one variant; `see` gets the world and its provisioner every second.
fn each_second(scenario: &Scenario, mut see: impl FnMut(u64, &mut World<Workload>, &Provisioner)) {
    let setup = WorldSetup::new(scenario).unwrap();
    let vms = scenario.vms();
    let program =
        |(_, own): &(String, Scenario)| Workload::new(&own.workload, own.seed, setup.k).unwrap();
    let programs = vms.iter().map(program).collect();
    let mut world = setup.world(build(System::Demeter), programs);
    world.start(false).unwrap();
    let mut provisioner = Provisioner::new(scenario, &setup).unwrap();
    for second in 1..=scenario.duration_s {
        world.run_until(second * PS_PER_S).unwrap();
        provisioner.step(second, &mut world);
        see(second, &mut world, &provisioner);
    }
}

#[test]
fn the_pool_is_never_exceeded_and_no_page_is_lost_or_doubled() {
    let cases = [
        ("wss", "always"),
        ("wss", "never"),
        ("benefit", "always"),
        ("shares", "always"),
    ];
    for (policy, thp) in cases {
        let mut sizes = vec![];
        each_second(&scenario(policy, thp), |_, world, provisioner| {
            assert!(owned(world) <= provisioner.pool.fast);
            assert_eq!(provisioner.violations, 0);
            for vm in &mut world.vms {
                // All of the program's memory is mapped exactly once.
                assert_eq!(vm.guest.check_frames(), 160 * MIB, "{policy} {thp}");
            }
            let mut backings: Vec<_> = world.vms.iter_mut().map(|vm| &mut vm.backing).collect();
            world.host.hypervisor.check_frames(&mut backings);
            sizes.push(world.vms[0].guest.owned_fast());
        });
        sizes.dedup();
        // Static shares stay constant from the first second on.
        assert_eq!(
            sizes.len() > 1,
            policy != "shares",
            "{policy} {thp}: {sizes:?}"
        );
    }
}

#[test]
fn memory_follows_the_working_set_and_the_benefit() {
    for policy in ["wss", "benefit"] {
        let mut sizes = vec![];
        let mut scenario = scenario(policy, "always");
        // Estimates of benefit forget within half a minute.
        scenario.duration_s = 75;
        each_second(&scenario, |_, world, _| {
            let [a, b] = [0, 1].map(|vm| world.vms[vm].guest.owned_fast());
            sizes.push((a, b));
        });
        let (a, b) = sizes[13];
        assert!(a > b, "{policy}: {sizes:?}");
        let (a, b) = sizes[74];
        assert!(a < b, "{policy}: {sizes:?}");
    }
}

#[test]
fn shares_divide_the_pool() {
    each_second(
        &scenario("shares", "always"),
        |second, world, provisioner| {
            if second == 5 {
                let [a, b] = [0, 1].map(|vm| world.vms[vm].guest.owned_fast().0);
                assert!(a.abs_diff(3 * b) <= 4 * BLOCK_SIZE, "{a} {b}");
                assert!(provisioner.pool.fast.0 - a - b < 2 * BLOCK_SIZE);
            }
        },
    );
}

#[test]
fn the_same_run_gives_the_same_result() {
    let scenario = scenario("wss", "always");
    let once = || run(&scenario, System::Demeter, 7, &|_| Ok(())).unwrap();
    assert_eq!(once(), once());
}

#[test]
fn what_has_no_model_is_refused() {
    let mut other = scenario("static", "always");
    other.systems = vec![System::Linux];
    let said = WorldSetup::new(&other).unwrap_err().to_string();
    assert!(said.contains("Demeter's agent"), "{said}");
}

/// A single VM whose fast memory grows and shrinks.
fn sized(mechanism: &str) -> Scenario {
    let mut sized = scenario("static", "always");
    let provision = sized.provision.as_mut().unwrap();
    provision.vms = vec![];
    provision.provisioners = vec![mechanism.to_owned().try_into().unwrap()];
    provision.resize_cycle = Some(ResizeCycle {
        fast_mib: 16,
        from_s: 5,
        every_s: 5,
    });
    sized.check().unwrap();
    sized
}

#[test]
fn a_single_vm_is_resized_by_each_mechanism_as_far_as_that_knows_tiers() {
    for (mechanism, follows) in [
        ("static", false),
        ("virtio-balloon", false),
        ("virtio-mem", true),
        ("demeter-balloon", true),
    ] {
        let mut sizes = vec![];
        each_second(&sized(mechanism), |_, world, provisioner| {
            assert_eq!(provisioner.violations, 0);
            assert!(owned(world) <= provisioner.pool.fast);
            let vm = &mut world.vms[0];
            assert_eq!(vm.guest.check_frames(), 160 * MIB, "{mechanism}");
            world.host.hypervisor.check_frames(&mut [&mut vm.backing]);
            sizes.push(vm.guest.owned_fast().0);
        });
        let [first, more, less] = [sizes[3], sizes[7], sizes[12]];
        let grown = if follows { 16 * MIB } else { 0 };
        assert_eq!((more, less), (first + grown, first), "{mechanism}");
        // The standard balloon has taken all memory of programs in the fast node.
        assert_eq!(first < 8 * MIB, mechanism == "virtio-balloon", "{first}");
    }
}

/// The last growth is skipped, as there is no time to shrink back. No other memory shrinks instead.
#[test]
fn what_did_not_grow_does_not_shrink() {
    let mut sized = sized("virtio-mem");
    // Growth is due at 5, 15 and 25 s, shrinking at 10, 20 and 30 s.
    sized.duration_s = 30;
    let (mut sizes, mut resizes) = (vec![], 0);
    each_second(&sized, |_, world, provisioner| {
        sizes.push(world.vms[0].guest.owned_fast());
        resizes = provisioner.resizes.len();
    });
    assert_eq!((resizes, sizes[29]), (4, sizes[3]));
}
