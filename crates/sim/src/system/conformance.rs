//! Conformance suite for all simulated systems, selected by the catalogue.

use demeter_policy::{MIB, PAGE_SIZE};
use demeter_scenario::{Place, Scenario, System};

use super::build;
use crate::machine::cost::PS_PER_S;
use crate::machine::ledger::Cause;
use crate::run::run;
use crate::setup::WorldSetup;
use crate::workload::Workload;
use crate::world::World;

/// Time limit to find the hot set, in seconds. The slowest system is `demeter-paper`. It halves 64 TiB every half
/// second, so it takes eight seconds to reach 1 GiB.
const SECONDS: u64 = 12;

/// Time limit of one system, in seconds. RAMinate exchanges 4 MB every 5 s, and 128 MiB are hot. Nomad's candidates
/// need three accesses, and other promotions slow its scans down. HeteroOS scans a part of memory at a time, and
/// requires ten ones. HybridTier counts 100,000 samples at a time. DAMON's quota for demotion begins at one byte and doubles
/// each second. pghot promotes in the order of frames, and the hot set has the last frames.
fn seconds(system: System) -> u64 {
    match system {
        System::Raminate => 260,
        System::Nomad => 180,
        System::HeteroOs => 90,
        System::HybridTier | System::LinuxDamonAuto => 60,
        System::LinuxPghot => 30,
        _ => SECONDS,
    }
}

/// A page of the model stands for 256 real ones.
const SCALE_BITS: u32 = 8;

/// Size of a program that leaves memory free.
const COMFORTABLE_MIB: u64 = 1600;

/// Size of a program that leaves none free. It fills 1024 MiB of slow memory, 1024 of fast memory, and 2 % of the
/// latter that only an allocation of last resort gets.
const FULL_MIB: u64 = 2070;

/// Two CPUs and 1 GiB of each tier. The program's last 128 MiB are hot and begin in slow memory. This is easy for all
/// systems. The hot set exceeds the caches, so it is sampled. It is an eighth of fast memory, the most that reclaim
/// frees at a time. Each cold page is accessed less than once a second, so Linux does not classify it as hot.
fn scenario(size_mib: u64, sim: &str) -> Scenario {
    let text = format!(
        r#"
        name = "conformance"
        duration_s = {SECONDS}
        systems = []
        [machine]
        vcpus = 2
        fast = {{ usable_mib = 1024, latency_ns = 80, bandwidth_gbps = 100 }}
        slow = {{ usable_mib = 1024, latency_ns = 250, bandwidth_gbps = 20 }}
        [workload]
        kind = "gups"
        size_mib = {size_mib}
        hot_mib = 128
        hot_weight = 0.99
        reverse = true
        [sim]
        scale_bits = {SCALE_BITS}
        {sim}
        "#
    );
    toml::from_str(&text).unwrap()
}

/// All systems that the simulator runs; systems of a host are excluded.
fn simulated() -> impl Iterator<Item = System> {
    System::ALL
        .iter()
        .copied()
        .filter(|s| s.runs_on(Place::Sim))
}

#[test]
fn the_catalogue_says_that_all_but_a_hosts_are_simulated() {
    let mut others = System::ALL.iter().filter(|s| !s.runs_on(Place::Sim));
    assert!(others.all(|system| system.row().runs_on == [Place::Host]));
}

/// A world whose program has populated its memory.
fn world(system: System, size_mib: u64) -> World<Workload> {
    world_at(system, size_mib, SCALE_BITS)
}

/// A world at another scale.
fn world_at(system: System, size_mib: u64, scale_bits: u32) -> World<Workload> {
    let mut scenario = scenario(size_mib, "");
    scenario.sim.scale_bits = Some(scale_bits);
    let setup = WorldSetup::new(&scenario).unwrap();
    let program = Workload::new(&scenario.workload, 1, setup.k).unwrap();
    let mut world = setup.world(build(system), vec![program]);
    setup.pair(&mut world).unwrap();
    world.start(false).unwrap();
    world
}

/// Runs a world for some seconds, then checks conservation. All program memory must exist, every frame must be free or
/// hold one page, and every picosecond must be on a bill.
fn run_and_check(world: &mut World<Workload>, system: System, size_mib: u64, seconds: u64) {
    world.wait_until(0);
    let before = world.bill();
    world.run_until(seconds * PS_PER_S).unwrap();
    world.wait_until(seconds * PS_PER_S);
    let spent = world.bill().since(&before);
    assert!(world.is_conserved(), "{system}");
    // Two virtual CPUs; the last slice may end slightly later.
    let share = spent.total() as f64 / (2 * seconds * PS_PER_S) as f64;
    assert!((1.0..1.05).contains(&share), "{system}: {share}");
    assert!(spent.of(Cause::Compute) > 0, "{system} stops the program");
    let vm = &mut world.vms[0];
    assert_eq!(vm.guest.check_frames(), size_mib * MIB, "{system}");
    world.host.hypervisor.check_frames(&mut [&mut vm.backing]);
}

/// `none` and `linux-interleave`, which promote nothing, must fail.
#[test]
fn finds_an_easy_hot_set_and_conserves_pages_and_time() {
    let mut wrong = vec![];
    for system in simulated() {
        let mut world = world(system, COMFORTABLE_MIB);
        let at_start = world.hot_in_fast(0);
        let seconds = seconds(system);
        run_and_check(&mut world, system, COMFORTABLE_MIB, seconds);
        let at_end = world.hot_in_fast(seconds * PS_PER_S);
        let found = [at_start, at_end].map(|share| share.is_some_and(|s| s >= 0.9));
        let expected = match system {
            System::None | System::LinuxInterleave => [false, false],
            // Slow memory is filled first, so later memory lies in the fast tier.
            System::Oracle | System::XenHistory => [true, true],
            _ => [false, true],
        };
        if found != expected {
            wrong.push((system, at_start, at_end));
        }
    }
    assert_eq!(wrong, []);
}

/// A system's own metadata, in bytes per real page of the program.
fn overhead(world: &World<Workload>) -> f64 {
    let vm = &world.vms[0];
    let bytes = vm.manager.memory_overhead(&vm.guest).0;
    bytes as f64 / (COMFORTABLE_MIB * MIB / PAGE_SIZE) as f64
}

/// Metadata must scale with a real machine's memory, not with the model's scale. Some systems keep their state in
/// existing page metadata of the kernel.
#[test]
fn what_a_system_has_for_itself_is_told_and_does_not_depend_on_the_scale() {
    let mut wrong = vec![];
    for system in simulated() {
        let at_scale = |bits: u32| {
            let mut world = world_at(system, COMFORTABLE_MIB, bits);
            // DAMON's regions are made as blocks are looked at; after three seconds some were not as yet.
            let seconds = match system {
                System::DemeterDamon => 12,
                _ => 3,
            };
            run_and_check(&mut world, system, COMFORTABLE_MIB, seconds);
            overhead(&world)
        };
        let [coarse, fine] = [8, 6].map(at_scale);
        let is_as_expected = match system {
            System::None | System::Oracle | System::FlatMode => coarse == 0.0,
            System::LinuxInterleave | System::AltoLinux | System::AltoTpp => coarse == 0.0,
            // It keeps 25 bytes of each page that was sampled.
            System::Pact => 0.0 < coarse && coarse <= 25.0,
            System::Linux | System::GTpp | System::ColloidTpp | System::Nimble => coarse == 0.0,
            System::HTpp | System::HTpp613 | System::HTpp615 | System::HLinux => coarse == 0.0,
            // Shadows are whole pages.
            System::Nomad => (0.0..=PAGE_SIZE as f64).contains(&coarse),
            _ => 0.0 < coarse && coarse <= 16.0,
        };
        let is_same = (coarse - fine).abs() <= 0.25 * coarse.max(fine);
        // A larger page is sampled sooner. PACT knows those that were, and DAMON's tuned interval makes other regions.
        let depends_on_scale = matches!(
            system,
            System::Nomad | System::Pact | System::LinuxDamonAuto
        );
        if !is_as_expected || !(is_same || depends_on_scale) {
            wrong.push((system, coarse, fine));
        }
    }
    let hint = "memory_overhead in bytes a page, at two scales; a system without memory of its own is listed above";
    assert_eq!(wrong, [], "{hint}");
}

#[test]
fn survives_a_guest_without_free_memory() {
    for system in simulated() {
        let mut world = world(system, FULL_MIB);
        assert_eq!(world.vms[0].guest.free_bytes().0, 0, "{system}");
        run_and_check(&mut world, system, FULL_MIB, 4);
    }
}

/// Without a limit, Memtis never finds that a program has too much fast memory.
#[test]
fn memtis_without_a_limit_demotes_nothing() {
    let demoted = |sim| {
        let scenario = scenario(COMFORTABLE_MIB, sim);
        let result = run(&scenario, System::Memtis, 1, &|_| Ok(())).unwrap();
        result.bytes_demoted.unwrap()
    };
    assert!(demoted("") > 0);
    assert_eq!(demoted("memtis_unlimited = true"), 0);
}

#[test]
fn is_deterministic() {
    let scenario = scenario(COMFORTABLE_MIB, "");
    for system in simulated() {
        let result = |seed| run(&scenario, system, seed, &|_| Ok(())).unwrap();
        let one = result(1);
        assert_eq!(one, result(1), "{system}");
        assert_ne!(one, result(2), "{system}: a seed must matter");
    }
}

/// The manager works while memory is populated, on dedicated and on shared cores. Lost or invented time would show.
#[test]
fn filling_and_sharing_cores_take_time() {
    let elapsed = |system, sim: &str| {
        let mut scenario = scenario(COMFORTABLE_MIB, &format!("operations = 4_000_000\n{sim}"));
        scenario.machine.thp = demeter_scenario::Thp::Never;
        // HeMem's thread spins on a core that three VMs share.
        scenario.duration_s = 2 * SECONDS;
        let result = run(&scenario, system, 1, &|_| Ok(())).unwrap();
        let is_timed = sim.contains("timed_fill");
        assert_eq!(result.counters["page_faults"] > 0, is_timed, "{system}");
        result.elapsed_s.unwrap()
    };
    let small = "host_thp = \"never\"\ntimed_fill = true";
    for system in simulated() {
        let (untimed, timed) = (elapsed(system, ""), elapsed(system, "timed_fill = true"));
        assert!(timed > untimed, "{system}: {timed} and {untimed}");
        let shared = elapsed(system, &format!("vms = 3\ncores = 2\n{small}"));
        assert!(shared > elapsed(system, small), "{system}");
    }
}
