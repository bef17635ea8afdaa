//! Tests of whole runs with other programs: scattered hot sets, several processes, growing memory, and reserved address
//! space.

use std::collections::BTreeSet;

use demeter_policy::benefit::Benefit;
use demeter_policy::{BLOCK_SIZE, MIB, Pid};
use demeter_scenario::{Scenario, System};

use super::topologies::topology;
use super::*;

/// Runs at a scale at which a page stands for 32 real ones.
fn scenario(workload: &str, sim: &str) -> Scenario {
    let text = format!(
        r#"
        name = "shapes"
        duration_s = 8
        systems = ["none"]
        [machine]
        vcpus = 4
        fast = {{ usable_mib = 64, latency_ns = 80, bandwidth_gbps = 100 }}
        slow = {{ usable_mib = 512, latency_ns = 250, bandwidth_gbps = 20 }}
        [workload]
        {workload}
        [sim]
        scale_bits = 5
        {sim}
        "#
    );
    let scenario: Scenario = toml::from_str(&text).unwrap();
    scenario.check().unwrap();
    scenario
}

fn ran(scenario: &Scenario, system: System) -> SystemResult {
    run(scenario, system, 1, &|_| Ok(())).unwrap()
}

const GUPS: &str =
    "kind = \"gups\"\nsize_mib = 256\nhot_mib = 32\nhot_weight = 0.9\nreverse = true";

#[test]
fn a_scattered_hot_set_is_found_and_the_oracle_has_it() {
    let scenario = scenario(&format!("{GUPS}\nscattered = true"), "");
    let [none, oracle, demeter] =
        [System::None, System::Oracle, System::Demeter].map(|system| ran(&scenario, system));
    assert_eq!(oracle.hot_in_fast_final, Some(1.0));
    // The first blocks are fast. A scattered hot set lies in them in proportion.
    let share = none.hot_in_fast_final.unwrap();
    assert!((0.05..0.6).contains(&share), "{share}");
    assert!(
        demeter.hot_in_fast_final > Some(0.9),
        "{:?}",
        demeter.hot_in_fast_final
    );
}

#[test]
fn a_server_that_computes_waits_for_memory_as_little_as_it_says() {
    let waits = |compute_ns: u64| {
        let scenario = scenario(&format!("{GUPS}\ncompute_ns = {compute_ns}"), "");
        let result = ran(&scenario, System::None);
        let busy = ["compute", "walk", "cache", "fast", "slow"].map(|cause| result.cpu_s[cause]);
        1.0 - busy[0] / busy.iter().sum::<f64>()
    };
    let (always, seldom) = (waits(0), waits(6_000));
    assert!(
        always > 0.9 && (0.02..0.1).contains(&seldom),
        "{always} and {seldom}"
    );
}

#[test]
fn an_agent_manages_the_hot_memory_of_each_process() {
    let process = |threads: u32| {
        format!(
            "{{ threads = {threads}, parts = [{{ size_mib = 200, hot_mib = 28, hot_weight = 0.9, stores = 0.5 }}] }}"
        )
    };
    let processes = format!(
        "kind = \"several\"\nprocesses = [{}, {}]",
        process(3),
        process(1)
    );
    let scenario = scenario(&processes, "");
    let mut seen = BTreeSet::new();
    let settings = Settings::new(System::Demeter, "");
    let look = &mut |_, ranking: &[RankedRange], _: &dyn Fn() -> Option<Benefit>| {
        seen.extend(ranking.iter().map(|r| r.pid));
    };
    let demeter = run_looking(&scenario, &settings, 1, &|_| Ok(()), look).unwrap();
    assert_eq!(seen, [1, 2].map(Pid).into());
    assert!(
        demeter.hot_in_fast_final > Some(0.9),
        "{:?}",
        demeter.hot_in_fast_final
    );
    assert_eq!(ran(&scenario, System::Oracle).hot_in_fast_final, Some(1.0));
    assert!(ran(&scenario, System::None).hot_in_fast_final < Some(0.6));
}

/// Fills fast memory with cold data first; memory that grows later is hot.
const GROWS: &str = "kind = \"mix\"\nthreads = 2\nparts = [{ size_mib = 150, share = 0.1 }, \
                     { size_mib = 41, start_mib = 1, grows_s = 4 }]";

#[test]
fn memory_grows_while_the_program_runs_whoever_manages_it() {
    let scenario = scenario(GROWS, "");
    let setup = WorldSetup::new(&scenario).unwrap();
    for system in [
        System::None,
        System::Linux,
        System::Memtis,
        System::Hemem,
        System::Demeter,
        System::DemeterDamon,
    ] {
        let program = Workload::new(&scenario.workload, 1, setup.k).unwrap();
        let mut world = setup.world(system::build(system), vec![program]);
        world.start(false).unwrap();
        let mut mapped_mib = |s: u64| {
            world.run_until(s * PS_PER_S).unwrap();
            let guest = &mut world.vms[0].guest;
            let vma = guest.vmas()[1];
            let there: u64 = guest.spread(&vma).resident().0;
            // The program may not have touched all of its last block.
            assert!(
                there <= vma.len().0 && there + BLOCK_SIZE > vma.len().0,
                "{system}"
            );
            vma.len().0 / MIB
        };
        assert_eq!(mapped_mib(0), 1, "{system}");
        assert!((16..=22).contains(&mapped_mib(2)), "{system}");
        assert_eq!(mapped_mib(5), 41, "{system}");
        assert!(world.is_conserved());
        world.vms[0].guest.check_frames();
    }
    let [none, demeter] = [System::None, System::Demeter].map(|system| ran(&scenario, system));
    assert!(demeter.steady() > none.steady().map(|speed| speed * 1.15));
}

#[test]
fn reserved_address_space_changes_where_memory_lies_and_nothing_else() {
    let [dense, sparse] = ["", "reserve_mib = 65536"].map(|sim| scenario(GUPS, sim));
    for system in [System::None, System::Demeter] {
        let [dense, sparse] = [&dense, &sparse].map(|scenario| ran(scenario, system));
        let ratio = sparse.mean().unwrap() / dense.mean().unwrap();
        assert!((0.97..1.03).contains(&ratio), "{system}: {ratio}");
        let [dense, sparse] = [dense, sparse].map(|result| result.hot_in_fast_final);
        assert_eq!(dense > Some(0.9), sparse > Some(0.9), "{system}");
    }
}

#[test]
fn what_page_tables_cannot_hold_is_refused_in_one_line() {
    let mut large = scenario(GUPS, "");
    large.sim.scale_bits = Some(9);
    large.machine.slow.usable_mib = 5 << 20;
    let wide = scenario(
        &format!(
            "kind = \"several\"\nprocesses = [{}]",
            vec![
                format!(
                    "{{ parts = [{}] }}",
                    vec!["{ size_mib = 1 }"; 16].join(", ")
                );
                8
            ]
            .join(", ")
        ),
        "reserve_mib = 262144",
    );
    for (scenario, key) in [
        (large, "machine.slow.usable_mib"),
        (wide, "sim.reserve_mib"),
    ] {
        let said = run(&scenario, System::None, 1, &|_| Ok(()))
            .unwrap_err()
            .to_string();
        assert!(
            said.contains(key) && said.contains("GiB") && !said.contains('\n'),
            "{said}"
        );
    }
}

#[test]
fn machines_and_programs_that_only_the_lab_has_are_refused_in_one_line() {
    let shared = scenario(&format!("{GUPS}\nshared_by = 2"), "");
    let mut several = topology("topo-three-tiers");
    several.sim.vms = 2;
    for (scenario, key) in [(shared, "workload.shared_by"), (several, "several VMs")] {
        let said = run(&scenario, System::None, 1, &|_| Ok(()))
            .unwrap_err()
            .to_string();
        assert!(
            said.contains(key) && said.contains("--on lab") && !said.contains('\n'),
            "{said}"
        );
    }
}
