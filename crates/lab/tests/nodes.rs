//! Machines of any nodes, and memory that its owner has bound, in real VMs. Tests check where memory lies at the end, never
//! times, since the machine may be shared. They need minutes on a quiet machine, as a slow VM accesses too little:
//! `cargo test -p demeter-lab --test nodes -- --ignored --test-threads 1`, after `make`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use demeter_lab::{Lab, Repetition};
use demeter_outcome::SystemResult;
use demeter_scenario::{Gups, Scenario, System, Workload};

const MIB: u64 = 1 << 20;

/// The result of one system in one VM.
struct Ran {
    result: SystemResult,
    agent_log: String,
    /// MiB of each copy on each node, before the timed phase.
    lay: Vec<BTreeMap<u32, u64>>,
    /// MiB of each copy on each node, after the timed phase.
    lies: Vec<BTreeMap<u32, u64>>,
}

/// Runs a scenario under the agent.
fn run(mut scenario: Scenario, system: System) -> Ran {
    scenario.systems = vec![system];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let logs = tempfile::tempdir().unwrap();
    let lab = Lab {
        keep_logs: Some(logs.path().into()),
        ..Lab::of_tree(&root).unwrap()
    };
    let stop = AtomicBool::new(false);
    let ran = demeter_lab::run(
        &scenario,
        Repetition::default(),
        &lab,
        &stop,
        &mut |_, _| (),
    );
    let result = ran.whole().unwrap_or_else(|e| panic!("{e}"));
    let log = |name: &str| {
        let file = logs
            .path()
            .join(format!("{}-{system}-{name}.log", scenario.name));
        fs::read_to_string(file).unwrap_or_default()
    };
    let (agent_log, programs) = (log("agent"), log("programs"));
    eprintln!("{agent_log}\n{programs}");
    let [result] = &result.systems[..] else {
        panic!("{result:?}")
    };
    // Where a move takes a hundred times as long, the agent rightly moves little.
    let noise = 100.0 * result.metadata.noise();
    eprintln!("the host took {noise:.0} % of the VM's time for something else");
    assert_eq!(result.verify_errors, Some(0));
    let [lay, lies] = places(&programs);
    Ran {
        result: result.clone(),
        agent_log,
        lay,
        lies,
    }
}

/// The first and the last line of each copy: `node 0 40 MiB, node 1 2 MiB; on other sockets 2 MiB`.
fn places(programs: &str) -> [Vec<BTreeMap<u32, u64>>; 2] {
    let (mut first, mut last) = (BTreeMap::new(), BTreeMap::new());
    let mut copy = "";
    for line in programs.lines() {
        match line.strip_prefix("== ") {
            Some(name) => copy = name,
            None if line.starts_with("node ") => {
                let (nodes, _) = line.split_once(';').unwrap();
                let node = |words: &str| {
                    let words: Vec<&str> = words.split_whitespace().collect();
                    (words[1].parse().unwrap(), words[2].parse().unwrap())
                };
                let place: BTreeMap<u32, u64> = nodes.split(", ").map(node).collect();
                first.entry(copy).or_insert(place.clone());
                last.insert(copy, place);
            }
            None => {}
        }
    }
    [first, last].map(|places| places.into_values().collect())
}

/// A shipped machine of nodes, with a shorter timed phase.
fn machine(name: &str, duration_s: u64) -> Scenario {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
    let mut scenario = Scenario::load(&folder.join(format!("{name}.toml"))).unwrap();
    scenario.duration_s = duration_s;
    scenario
}

fn gups(scenario: &mut Scenario) -> &mut Gups {
    match &mut scenario.workload {
        Workload::Gups(gups) => gups,
        other => panic!("{other:?}"),
    }
}

/// Length of the phase of two programs on two sockets. The first demotions only fill the CPUs' own lists of free pages, and
/// a busy machine moves dearly: the budget at first pays for little more.
const TWO_SOCKETS_S: u64 = 60;

/// Checks that the agent found these tiers, and that hot memory ended in the fastest one.
fn serves(name: &str, tiers: &str, duration_s: u64) -> Ran {
    let ran = run(machine(name, duration_s), System::Demeter);
    let line = format!("memory: tiers {tiers} (");
    assert!(ran.agent_log.contains(&line), "{name}: {}", ran.agent_log);
    assert!(
        !ran.agent_log.contains("is in a faster tier than"),
        "{name}: a contradiction"
    );
    let hot = ran.result.hot_in_fast_final;
    assert!(
        hot >= Some(0.9),
        "{name}: {hot:?} of the hot set in fast memory"
    );
    ran
}

#[test]
#[ignore = "minutes on a quiet machine, see the top"]
fn programs_of_two_sockets_are_served_by_their_own_dram() {
    let ran = serves("topo-two-sockets", "0,1/2,3", TWO_SOCKETS_S);
    assert_eq!(ran.lies.len(), 2);
}

#[test]
#[ignore = "minutes on a quiet machine, see the top"]
fn firmware_that_tells_distances_only_suffices() {
    serves("topo-no-hmat", "0,1/2,3", TWO_SOCKETS_S);
}

#[test]
#[ignore = "minutes on a quiet machine, see the top"]
fn the_other_sockets_free_dram_is_used_before_cxl_memory() {
    serves("topo-two-dram-one-cxl", "0,1/2", TWO_SOCKETS_S);
}

#[test]
#[ignore = "minutes on a quiet machine, see the top"]
fn hot_memory_of_the_third_tier_comes_to_the_first() {
    serves("topo-three-tiers", "0/1/2", 25);
}

#[test]
#[ignore = "minutes on a quiet machine, see the top"]
fn memory_on_the_package_is_faster_than_the_cpus_own_node() {
    serves("topo-hbm", "1/0/2", 25);
}

#[test]
#[ignore = "minutes on a quiet machine, see the top"]
fn a_node_with_cpus_alone_is_no_tier() {
    serves("topo-cpu-only-node", "1/2", 25);
}

#[test]
#[ignore = "minutes on a quiet machine, see the top"]
fn a_node_that_comes_online_is_managed_within_seconds() {
    let mut scenario = machine("topo-late-node", 25);
    scenario.machine.node[2].comes_at_s = Some(5);
    let ran = run(scenario, System::Demeter);
    let log = &ran.agent_log;
    // Linux 6.12 puts the new node into the memory tier of DRAM, and HMAT tells it apart.
    let found = ["memory: tiers 0/2/1 (", "the nodes by tier are 0/1,2 now"];
    assert!(found.iter().any(|line| log.contains(line)), "{log}");
    assert!(
        ran.result.hot_in_fast_final >= Some(0.9),
        "{:?}",
        ran.result
    );
}

#[test]
#[ignore = "minutes on a quiet machine, see the top"]
fn a_node_that_goes_offline_is_not_filled_again() {
    let mut scenario = machine("topo-node-removed", 25);
    scenario.machine.node[2].goes_at_s = Some(12);
    let ran = run(scenario, System::Demeter);
    // The VM fails if the node does not go offline.
    assert!(!ran.lies[0].contains_key(&2), "{:?}", ran.lies);
    assert!(
        ran.result.hot_in_fast_final >= Some(0.9),
        "{:?}",
        ran.result
    );
}

/// Two nodes with room for two small copies. Copy 0 has the contract, copy 1 is its rival.
fn two_copies() -> Scenario {
    let mut scenario = machine("topo-three-tiers", 20);
    scenario.machine.node.remove(1);
    let [fast, slow] = &mut scenario.machine.node[..] else {
        panic!("two nodes are left")
    };
    (fast.usable_mib, slow.usable_mib, slow.tier) = (80, 160, 2);
    let gups = gups(&mut scenario);
    (gups.size_mib, gups.hot_mib, gups.copies) = (60, 16, 2);
    scenario
}

#[test]
#[ignore = "minutes on a quiet machine, see the top"]
fn memory_bound_to_fast_memory_stays_beside_a_hot_rival() {
    let mut scenario = two_copies();
    gups(&mut scenario).bind = vec![0];
    let ran = run(scenario, System::Demeter);
    // The program's own memory, not the array, may move.
    let on_slow = ran.lies[0].get(&1).copied().unwrap_or(0);
    assert!(on_slow <= 2 && ran.lies[0][&0] >= 60, "{:?}", ran.lies);
    // The rival's hot memory has displaced cold memory of its own.
    assert!(
        ran.result.bytes_promoted >= Some(12 * MIB),
        "{:?}",
        ran.result
    );
    assert!(
        ran.agent_log.contains("bound by its owner"),
        "{}",
        ran.agent_log
    );
}

#[test]
#[ignore = "minutes on a quiet machine, see the top"]
fn memory_bound_to_slow_memory_and_interleaved_memory_stay_though_hot() {
    for (bind, interleave, why) in [
        (vec![1], vec![], "bound by its owner"),
        (vec![], vec![0, 1], "interleaved by its owner"),
    ] {
        let mut scenario = two_copies();
        let gups = gups(&mut scenario);
        (gups.bind, gups.interleave) = (bind, interleave.clone());
        let ran = run(scenario, System::Demeter);
        let bound = if interleave.is_empty() { 60 } else { 30 };
        let lay = [&ran.lay, &ran.lies].map(|at| at[0][&1].abs_diff(bound));
        assert!(
            lay.iter().all(|by| *by <= 3),
            "{why}: {:?}, {:?}",
            ran.lay,
            ran.lies
        );
        assert!(ran.agent_log.contains(why), "{}", ran.agent_log);
    }
}

#[test]
#[ignore = "minutes on a quiet machine, see the top"]
fn a_cpuset_without_fast_memory_concerns_its_process_alone() {
    let mut scenario = two_copies();
    gups(&mut scenario).cpuset = vec![1];
    let ran = run(scenario, System::Demeter);
    assert!(
        ran.lies[0].get(&0).is_none_or(|&mib| mib < 2),
        "{:?}",
        ran.lies
    );
    assert!(
        ran.result.bytes_promoted > Some(0),
        "the other process moves"
    );
    // The status at the end has the reason, too.
    let log = &ran.agent_log;
    let said = (log.lines()).filter(|line| {
        line.contains("leaving alone") && line.contains("whose cpuset excludes a node")
    });
    assert_eq!(said.count(), 1, "{log}");
}

#[test]
#[ignore = "minutes on a quiet machine, see the top"]
fn shared_memory_of_six_processes_is_moved_and_counted_once() {
    let mut scenario = two_copies();
    let gups = gups(&mut scenario);
    (gups.copies, gups.shared_by, gups.size_mib) = (1, 6, 140);
    let ran = run(scenario, System::Demeter);
    let result = &ran.result;
    assert!(result.hot_in_fast_final >= Some(0.9), "{result:?}");
    let told = result.bytes_promoted.unwrap() + result.bytes_demoted.unwrap();
    let kernels = result.counters["pgmigrate_success"] * 4096;
    assert!(told.abs_diff(kernels) <= told / 20, "{told} of {kernels}");
}

#[test]
#[ignore = "minutes on a quiet machine, see the top"]
fn a_large_reserve_without_access_hides_nothing_from_damon() {
    let mut scenario = two_copies();
    let gups = gups(&mut scenario);
    (gups.copies, gups.reserve_mib, gups.size_mib) = (1, 32 << 10, 140);
    scenario.duration_s = 45;
    let ran = run(scenario, System::DemeterDamon);
    let hot = ran.result.hot_in_fast_final;
    assert!(hot >= Some(0.5), "{hot:?}");
}
