//! Tests of whole runs on machines of nodes: the shipped scenarios, and a machine of two nodes in both notations.

use demeter_policy::{MIB, VirtRange};
use demeter_scenario::{Scenario, System};

use super::*;
use crate::guest::Guest;

/// A shipped scenario.
pub(super) fn topology(name: &str) -> Scenario {
    let shipped = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
    Scenario::load(&shipped.join(format!("{name}.toml"))).unwrap()
}

fn ran(scenario: &Scenario, system: System) -> SystemResult {
    run(scenario, system, 1, &|_| Ok(())).unwrap()
}

/// The speed of each program at the end of a run.
fn speeds(result: &SystemResult) -> Vec<f64> {
    match &result.workloads[..] {
        [] => vec![result.steady().unwrap()],
        copies => copies
            .iter()
            .map(|copy| copy.speed.as_ref().unwrap().steady.unwrap())
            .collect(),
    }
}

/// Checks that each program comes to a share of the oracle under both agents, and that first touch does not.
fn serves(name: &str, least: f64) {
    let scenario = topology(name);
    let [none, oracle] = [System::None, System::Oracle].map(|system| ran(&scenario, system));
    assert_eq!(oracle.hot_in_fast_final, Some(1.0), "{name}");
    let share = |result: &SystemResult| {
        let pairs = speeds(result).into_iter().zip(speeds(&oracle));
        pairs.map(|(speed, best)| speed / best).fold(1.0, f64::min)
    };
    assert!(share(&none) < 0.8, "{name}: {}", share(&none));
    for system in [System::Demeter, System::DemeterDamon] {
        let agent = ran(&scenario, system);
        let (share, hot) = (share(&agent), agent.hot_in_fast_final);
        eprintln!("{name} {system}: {share:.3} of the oracle, hot {hot:?}");
        assert!(share >= least, "{name} {system}: {share}");
        assert!(hot >= Some(0.9), "{name} {system}: {hot:?}");
    }
}

#[test]
fn programs_of_two_sockets_are_served_by_their_own_dram() {
    let scenario = topology("topo-two-sockets");
    assert_eq!(speeds(&ran(&scenario, System::None)).len(), 2);
    serves("topo-two-sockets", 0.95);
    serves("topo-no-hmat", 0.95);
}

#[test]
fn the_other_sockets_free_dram_is_used_before_cxl_memory() {
    serves("topo-two-dram-one-cxl", 0.95);
}

#[test]
fn hot_memory_of_the_third_tier_comes_to_the_first() {
    serves("topo-three-tiers", 0.95);
}

#[test]
fn memory_on_the_package_is_faster_than_the_cpus_own_node() {
    serves("topo-hbm", 0.95);
}

/// Memory of the last node in MiB, each second, and the share of the hot set that is fast at the end.
fn of_last_node(scenario: &Scenario) -> (Vec<u64>, Option<f64>) {
    let setup = WorldSetup::new(scenario).unwrap();
    let program = Workload::new(&scenario.workload, 1, setup.k).unwrap();
    let mut world = setup.world(system::build(System::Demeter), vec![program]);
    world.start(false).unwrap();
    let mut used = vec![];
    for second in 1..=scenario.duration_s {
        world.run_until(second * PS_PER_S).unwrap();
        for plug in &setup.plugs {
            world.plug(plug, second).unwrap();
        }
        let guest = &mut world.vms[0].guest;
        guest.check_frames();
        let vma = guest.vmas()[0];
        used.push(by_node(guest, &vma)[2]);
    }
    assert!(world.is_conserved());
    let now_ps = scenario.duration_s * PS_PER_S;
    (used, world.hot_in_fast(now_ps))
}

#[test]
fn a_node_that_goes_is_emptied_and_not_filled_again() {
    let scenario = topology("topo-node-removed");
    let goes_at_s = scenario.machine.node[2].goes_at_s.unwrap() as usize;
    let (used, hot) = of_last_node(&scenario);
    assert!(used[0] > 40, "{used:?}");
    assert!(
        used[goes_at_s - 1..].iter().all(|&mib| mib == 0),
        "{used:?}"
    );
    assert!(hot >= Some(0.9), "{hot:?}");
}

#[test]
fn a_node_that_comes_takes_memory_from_then_on() {
    let mut scenario = topology("topo-late-node");
    // Only there demoted memory finds room.
    scenario.machine.node[1].usable_mib = 182;
    let comes_at_s = scenario.machine.node[2].comes_at_s.unwrap() as usize;
    let (used, hot) = of_last_node(&scenario);
    assert!(used[..comes_at_s].iter().all(|&mib| mib == 0), "{used:?}");
    assert!(hot >= Some(0.9), "{hot:?}");
}

#[test]
fn a_node_with_cpus_alone_is_no_tier() {
    serves("topo-cpu-only-node", 0.95);
}

/// A machine of a fast and a slow node runs alike in both notations, under systems that know two nodes, too.
#[test]
fn two_nodes_are_a_fast_and_a_slow_tier() {
    let mut listed = topology("topo-three-tiers");
    listed.duration_s = 5;
    listed.machine.node.truncate(2);
    listed.machine.node[1].usable_mib = 240;
    let mut tiers = listed.clone();
    let [fast, slow] = [0, 1].map(|node| {
        let node = &tiers.machine.node[node];
        demeter_scenario::Tier {
            usable_mib: node.usable_mib,
            latency_ns: node.latency_ns[0],
            bandwidth_gbps: node.bandwidth_gbps[0],
        }
    });
    (tiers.machine.fast, tiers.machine.slow) = (fast, slow);
    tiers.machine.node.clear();
    for system in [System::Oracle, System::Linux, System::Demeter] {
        assert_eq!(ran(&listed, system), ran(&tiers, system), "{system}");
    }
}

#[test]
fn systems_that_know_two_nodes_are_refused_on_other_machines() {
    let mut upside_down = topology("topo-hbm");
    upside_down.machine.node.pop();
    for scenario in [topology("topo-three-tiers"), upside_down] {
        for system in [System::Linux, System::HTpp, System::DemeterPaper] {
            let said = run(&scenario, system, 1, &|_| Ok(())).unwrap_err();
            let said = said.to_string();
            assert!(
                said.starts_with(&format!("{system} knows machines of one socket")),
                "{said}"
            );
            assert!(!said.contains('\n'), "{said}");
        }
    }
}

#[test]
fn a_socket_has_a_virtual_cpu_for_each_of_its_threads() {
    let mut scenario = topology("topo-two-dram-one-cxl");
    let demeter_scenario::Workload::Gups(gups) = &mut scenario.workload else {
        panic!("gups")
    };
    gups.threads = 2;
    let said = run(&scenario, System::None, 1, &|_| Ok(())).unwrap_err();
    assert!(said.to_string().contains("machine.vcpus"), "{said}");
    scenario.machine.vcpus = 4;
    scenario.duration_s = 2;
    assert!(ran(&scenario, System::None).mean() > Some(0.0));
}

/// MiB of each process on each node, right after first touch.
fn placed(name: &str, system: System) -> Vec<Vec<u64>> {
    let scenario = topology(name);
    let setup = WorldSetup::new(&scenario).unwrap();
    let program = Workload::new(&scenario.workload, 1, setup.k).unwrap();
    let mut world = setup.world(system::build(system), vec![program]);
    world.start(false).unwrap();
    let guest = &mut world.vms[0].guest;
    guest.check_frames();
    let vmas = guest.vmas().to_vec();
    vmas.iter().map(|vma| by_node(guest, vma)).collect()
}

/// MiB of a mapping on each node.
fn by_node(guest: &mut Guest, vma: &VirtRange) -> Vec<u64> {
    let mut frames = vec![];
    let all = vma.start()..vma.end();
    guest
        .tables
        .for_each(all, |_, entry, size| frames.push((entry.index(), size)));
    let mut bytes = vec![0; guest.all_nodes().count()];
    for (frame, size) in frames {
        bytes[guest.node_of(frame).0] += guest.bytes(size);
    }
    bytes.into_iter().map(|bytes| bytes / MIB).collect()
}

/// First touch takes the nearest node with room: own DRAM, the other socket's, then slower memory.
#[test]
fn first_touches_take_the_nearest_memory() {
    for system in [System::None, System::Oracle] {
        let all = placed("topo-two-sockets", system);
        for (own, on) in all.iter().enumerate() {
            let [dram, cxl] = [on[own], on[own + 2]];
            assert!(dram.abs_diff(80) <= 2 && dram + cxl >= 239, "{all:?}");
        }
    }
    let all = placed("topo-two-dram-one-cxl", System::None);
    let near = all[0].iter().zip([60, 100, 100]);
    assert!(
        near.clone().all(|(mib, all)| mib.abs_diff(all) <= 4),
        "{all:?}"
    );
}
