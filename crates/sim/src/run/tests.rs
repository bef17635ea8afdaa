use demeter_outcome::{COUNTERS, Unit, role};
use demeter_policy::{BLOCK_SIZE, ByteCount, GuestVirtAddr, MIB, PAGE_SIZE, VirtRange};

use super::*;
use crate::machine::ledger::Cause;
use crate::program::{Access, Batch, Region};
use crate::system::build;

/// A program of random updates, nine of ten to the last eighth of the memory.
struct Updates {
    bytes: u64,
    base: u64,
    touched: u64,
    states: Vec<u64>,
}

impl Updates {
    fn new(mib: u64, threads: u64) -> Self {
        Self {
            bytes: mib * MIB,
            base: 0,
            touched: 0,
            states: (1..=threads).map(|t| t << 20).collect(),
        }
    }
}

impl Program for Updates {
    fn regions(&self) -> Vec<Region> {
        vec![Region {
            name: "array".into(),
            bytes: ByteCount(self.bytes),
            start: ByteCount(self.bytes),
            process: 0,
        }]
    }

    fn place(&mut self, bases: &[GuestVirtAddr]) {
        self.base = bases[0].0;
    }

    fn threads(&self) -> usize {
        self.states.len()
    }

    fn populate(&mut self, page_bytes: u64, out: &mut Batch) -> bool {
        while out.room() > 0 && self.touched < self.bytes {
            out.push(Access::store(GuestVirtAddr(self.base + self.touched)));
            self.touched += page_bytes;
        }
        !out.accesses().is_empty()
    }

    fn next(&mut self, thread: usize, _now_ns: u64, out: &mut Batch) {
        let hot = self.bytes / 8;
        while out.room() >= 2 {
            let state = &mut self.states[thread];
            *state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let random = *state >> 24;
            let offset = if *state % 100 < 90 {
                self.bytes - hot + random % hot
            } else {
                random % (self.bytes - hot)
            };
            let gva = GuestVirtAddr(self.base + offset / 8 * 8);
            out.push(Access::load(gva));
            out.push(Access::store(gva));
            out.ops += 1;
        }
    }

    fn hot(&self, _now_ns: u64) -> Vec<VirtRange> {
        let end = self.base + self.bytes;
        let hot = VirtRange::new(GuestVirtAddr(end - self.bytes / 8), GuestVirtAddr(end));
        hot.into_iter().collect()
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        1000
    }
}

fn scenario(duration_s: u64, sim: &str) -> Scenario {
    let text = format!(
        r#"
        name = "test"
        duration_s = {duration_s}
        systems = ["none", "oracle", "linux", "demeter"]
        [machine]
        vcpus = 2
        fast = {{ usable_mib = 64, latency_ns = 80, bandwidth_gbps = 100 }}
        slow = {{ usable_mib = 256, latency_ns = 250, bandwidth_gbps = 20 }}
        [workload]
        kind = "gups"
        size_mib = 256
        hot_mib = 32
        hot_weight = 0.9
        [sim]
        {sim}
        "#
    );
    toml::from_str(&text).unwrap()
}

/// The scenario's machine, with a cache much smaller than the hot set.
fn setup(scenario: &Scenario) -> WorldSetup {
    let mut setup = WorldSetup::new(scenario).unwrap();
    setup.cpu.caches[2].geometry.sets = 1024;
    setup
}

fn simulated(scenario: &Scenario, system: System) -> SystemResult {
    let setup = setup(scenario);
    let programs = (0..setup.vms).map(|_| Updates::new(256, 2)).collect();
    unseen(scenario, &setup, system, programs).unwrap()
}

/// Runs a scenario without observers.
fn unseen<P: Program>(
    scenario: &Scenario,
    setup: &WorldSetup,
    system: System,
    programs: Vec<P>,
) -> Result<SystemResult, SimError> {
    simulate(
        scenario,
        setup,
        system,
        programs,
        &|_| Ok(()),
        &mut |_, _, _| {},
    )
}

#[test]
fn who_looks_sees_the_hot_set_and_changes_nothing() {
    let scenario = scenario(6, "scale_bits = 5");
    let programs = || vec![Updates::new(256, 2)];
    let mut seen = vec![];
    let looked = simulate(
        &scenario,
        &setup(&scenario),
        System::Demeter,
        programs(),
        &|_| Ok(()),
        &mut |t_s, ranking, _| seen.push((t_s, ranking.to_vec())),
    );
    assert_eq!(looked.unwrap(), simulated(&scenario, System::Demeter));
    let times: Vec<f64> = seen.iter().map(|(t_s, _)| *t_s).collect();
    assert_eq!(times, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let (_, last) = seen.pop().unwrap();
    let end = last.iter().map(|r| r.range.end()).max().unwrap();
    let hot_from = end.0 - 40 * MIB;
    assert!(last[0].range.start().0 >= hot_from, "{:?}", last[0]);

    let mut ranges = 0;
    let system = System::Linux;
    let (setup, all) = (setup(&scenario), programs());
    simulate(
        &scenario,
        &setup,
        system,
        all,
        &|_| Ok(()),
        &mut |_, r, _| ranges += r.len(),
    )
    .unwrap();
    assert_eq!(ranges, 0, "Linux knows none");
}

#[test]
fn demeter_comes_near_the_oracle_and_none_does_not() {
    let scenario = scenario(8, "scale_bits = 5");
    let steady = |system| simulated(&scenario, system).steady().unwrap();
    let (none, demeter, oracle) = (
        steady(System::None),
        steady(System::Demeter),
        steady(System::Oracle),
    );
    assert!(none < 0.7 * oracle, "{none} of {oracle}");
    assert!(demeter > 0.9 * oracle, "{demeter} of {oracle}");
}

#[test]
fn demeter_settles_and_the_oracle_moves_nothing() {
    let scenario = scenario(9, "scale_bits = 5");
    let demeter = simulated(&scenario, System::Demeter);
    assert!(demeter.t90_s.unwrap() <= 4.0, "{:?}", demeter.t90_s);
    assert_eq!(demeter.moved_steady_bytes_per_s, Some(0.0));
    let oracle = simulated(&scenario, System::Oracle);
    assert_eq!(
        (oracle.hot_in_fast_final, oracle.bytes_promoted),
        (Some(1.0), Some(0))
    );
}

#[test]
fn scale_leaves_figures_as_they_are() {
    let speed = |bits: u32| {
        let scenario = scenario(1, &format!("scale_bits = {bits}"));
        simulated(&scenario, System::None).mean().unwrap()
    };
    let (small, large) = (speed(2), speed(5));
    assert!((large / small - 1.0).abs() < 0.05, "{small} and {large}");
}

/// vTMM scans first after a second. Until then, its guest is unmanaged. Pages are small, since a guest allocates huge
/// pages from its fast node only.
#[test]
fn a_hypervisor_that_tiers_has_no_more_fast_memory_than_a_guest() {
    let text = r#"
        name = "uniform"
        duration_s = 1
        systems = ["none", "vtmm"]
        machine = { vcpus = 1, thp = "never", fast = { usable_mib = 128, latency_ns = 80, bandwidth_gbps = 100 }, slow = { usable_mib = 512, latency_ns = 400, bandwidth_gbps = 20 } }
        workload = { kind = "mix", parts = [{ size_mib = 512 }] }
        sim = { scale_bits = 3, host_thp = "never" }
    "#;
    let scenario: Scenario = toml::from_str(text).unwrap();
    let speed = |system| {
        let result = run(&scenario, system, 1, &|_| Ok(()));
        result.unwrap().mean().unwrap()
    };
    let (guest, hypervisor) = (speed(System::None), speed(System::Vtmm));
    let more = hypervisor / guest - 1.0;
    assert!(more.abs() < 0.02, "{more}");
}

/// Linux unmaps a whole range of the second-level tables with one flush. Pages demoted later have no entry to flush,
/// since they were not accessed. TPP flushes for each cleared accessed bit, and for each demoted page.
#[test]
fn a_host_flushes_for_ranges_under_linux_and_for_pages_under_tpp() {
    let text = r#"
        name = "idle and hot"
        duration_s = 20
        systems = ["h-linux", "h-tpp"]
        machine = { vcpus = 1, thp = "never", fast = { usable_mib = 128, latency_ns = 80, bandwidth_gbps = 100 }, slow = { usable_mib = 512, latency_ns = 250, bandwidth_gbps = 20 } }
        workload = { kind = "mix", cold_mib = 128, parts = [{ size_mib = 64 }] }
        sim = { scale_bits = 2, host_thp = "never" }
    "#;
    let scenario: Scenario = toml::from_str(text).unwrap();
    let flushes_and_moved = |system| {
        let result = run(&scenario, system, 1, &|_| Ok(())).unwrap();
        let moved = result.bytes_promoted.unwrap() + result.bytes_demoted.unwrap();
        let pages = moved / PAGE_SIZE;
        assert!(pages > 64 * MIB / PAGE_SIZE, "{system} moved {pages}");
        (result.counters["flush_host_invept"], pages)
    };
    let (flushes, _) = flushes_and_moved(System::HLinux);
    assert!(
        (1..=2 * scenario.duration_s).contains(&flushes),
        "{flushes}"
    );
    let (flushes, pages) = flushes_and_moved(System::HTpp);
    assert!(flushes > pages / 2, "{flushes} for {pages}");
}

#[test]
fn vms_side_by_side_share_bandwidth_only() {
    let one = simulated(&scenario(1, "scale_bits = 6"), System::None);
    let three = simulated(&scenario(1, "scale_bits = 6\nvms = 3"), System::None);
    let speedup = three.mean().unwrap() / one.mean().unwrap();
    assert!((2.5..=3.05).contains(&speedup), "{speedup}");
}

#[test]
fn twice_the_work_takes_twice_the_time() {
    let elapsed = |operations: u64| {
        let scenario = scenario(60, &format!("scale_bits = 5\noperations = {operations}"));
        let result = simulated(&scenario, System::None);
        let elapsed_s = result.elapsed_s.unwrap();
        let last_s = result.series.last().unwrap().t_s;
        assert!((last_s - elapsed_s).abs() < 1e-9, "{last_s}");
        let done = result.mean().unwrap() * 1e6 * elapsed_s;
        assert!((done / operations as f64 - 1.0).abs() < 0.01, "{done}");
        elapsed_s
    };
    let (once, twice) = (elapsed(20_000_000), elapsed(40_000_000));
    assert!((twice / once - 2.0).abs() < 0.02, "{once} and {twice}");
}

#[test]
fn memory_is_idle_when_the_timed_phase_begins() {
    let mut scenario = scenario(2, "scale_bits = 5");
    scenario.machine.slow.bandwidth_gbps = 1;
    let programs = vec![Updates::new(256, 2)];
    let mut world = setup(&scenario).world(build(System::None), programs);
    let state = |world: &crate::world::World<Updates>| {
        let tiers = world.host.machine.memory.paths.iter();
        tiers
            .map(|t| (t.latency_ps, t.stream_ps, t.lines_read, t.lines_written))
            .collect::<Vec<_>>()
    };
    let idle = state(&world);
    world.start(false).unwrap();
    assert_eq!(state(&world), idle);
    world.run_until(PS_PER_S).unwrap();
    assert_ne!(state(&world), idle);
}

#[test]
fn a_result_tells_by_known_names_and_counts_what_it_shall() {
    let scenario = scenario(1, "scale_bits = 6");
    let build = system::build(System::Linux);
    let mut world = setup(&scenario).world(build, vec![Updates::new(256, 2)]);
    world.start(false).unwrap();
    let start = world.moment(0, &Unit::MOPS);
    world.run_until(PS_PER_S).unwrap();
    // Wall-clock time, and the time of both threads.
    let time_ps = [Unit::MOPS, Unit::NS].map(|unit| world.moment(PS_PER_S, &unit).work[0].time_ps);
    assert_eq!(time_ps, [PS_PER_S, 2 * PS_PER_S]);
    let end = world.moment(PS_PER_S, &Unit::MOPS);
    assert!(
        end.counters
            .keys()
            .eq(&std::collections::BTreeSet::from(COUNTERS))
    );
    assert!(end.cpu_ps.keys().all(|cause| role(cause).is_some()));
    // Faults count in the timed phase only; invalidations also in first touch.
    let (first, all) = (start.counters.clone(), end.counters.clone());
    let timeline = timeline(vec![start, end], Unit::MOPS, None, None);
    let counters = timeline.summarise("linux").unwrap().counters;
    let faults = all["page_faults"] - first["page_faults"];
    assert!(first["page_faults"] > 0 && first["flush_total"] > 0);
    assert_eq!(
        (counters["page_faults"], counters["flush_total"]),
        (faults, all["flush_total"])
    );
}

#[test]
fn work_that_does_not_end_has_no_elapsed_time() {
    let scenario = scenario(2, "scale_bits = 6\noperations = 1_000_000_000_000");
    let result = simulated(&scenario, System::None);
    assert_eq!((result.elapsed_s, result.series.len()), (None, 2));
}

#[test]
fn a_vm_that_finishes_first_idles() {
    let scenario = scenario(60, "scale_bits = 5\nvms = 2\noperations = 20_000_000");
    for system in [System::Demeter, System::Linux, System::HTpp] {
        let programs = vec![Updates::new(256, 1), Updates::new(256, 2)];
        let mut world = setup(&scenario).world(build(system), programs);
        world.start(false).unwrap();
        let before = world.bill();
        world.run_until(60 * PS_PER_S).unwrap();
        let [slow, quick] = world.elapsed_ps().unwrap()[..] else {
            panic!("two VMs");
        };
        assert!(quick < slow / 10 * 7, "{system}: {quick} and {slow}");
        world.wait_until(slow);
        let spent = world.bill().since(&before);
        let quick_idle: u64 = world.vms[1].hardware.vcpus.iter().map(idle_ps).sum();
        assert!(quick_idle >= 2 * (slow - quick) / 100 * 99, "{system}");
        // Four virtual CPUs until the end; the last slices may end slightly later.
        let share = spent.total() as f64 / (4 * slow) as f64;
        assert!((0.999..1.01).contains(&share), "{system}: {share}");
        assert!(world.is_conserved());
    }
}

fn idle_ps(vcpu: &crate::machine::actor::Vcpu) -> u64 {
    vcpu.bill.of(Cause::Idle)
}

#[test]
fn machines_that_are_too_large_are_refused() {
    let mut large = scenario(1, "");
    large.machine.slow.usable_mib = 1 << 24;
    large.sim.scale_bits = Some(0);
    assert!(
        WorldSetup::new(&large)
            .unwrap_err()
            .to_string()
            .contains("sim.scale_bits")
    );
}

#[test]
fn a_program_that_does_not_fit_is_told_of() {
    let scenario = scenario(1, "scale_bits = 4");
    let setup = WorldSetup::new(&scenario).unwrap();
    let too_much = Updates::new(256 + 64 + 2 * BLOCK_SIZE / MIB, 1);
    let refused = unseen(&scenario, &setup, System::None, vec![too_much]);
    assert!(refused.unwrap_err().to_string().contains("memory is full"));
}

#[test]
fn a_mapped_page_takes_at_most_24_bytes() {
    let mut scenario = scenario(1, "scale_bits = 0");
    scenario.machine.thp = demeter_scenario::Thp::Never;
    let setup = setup(&scenario);
    let mut world = setup.world(build(System::Linux), vec![Updates::new(300, 1)]);
    world.start(false).unwrap();
    let vm = &world.vms[0];
    let bytes = vm.guest.state_bytes() + vm.backing.tree.state_bytes();
    let pages = (300 * MIB / PAGE_SIZE) as usize;
    assert!(bytes <= 24 * pages, "{} bytes a page", bytes / pages);
    assert!(world.is_conserved());
}

#[test]
fn single_operations_take_as_long_at_any_scale() {
    let tail = |bits: u32, system: System| {
        let mut scenario = scenario(2, &format!("scale_bits = {bits}"));
        let silo = "kind = \"silo\"\nsize_mib = 200\nmix = \"ycsb\"\nthreads = 2";
        scenario.workload = toml::from_str(silo).unwrap();
        let programs = vec![Workload::new(&scenario.workload, 1, bits).unwrap()];
        let result = unseen(&scenario, &setup(&scenario), system, programs);
        let result = result.unwrap();
        let tail = result.tail.unwrap();
        // Two threads that do nothing else.
        let mean_ns = 2e3 / result.mean().unwrap();
        let off = tail.mean_ns / mean_ns - 1.0;
        assert!(off.abs() < 0.01, "{system}: {} and {mean_ns}", tail.mean_ns);
        tail
    };
    // A tick affects one operation in a thousand, and so does reclaim. The 99.9 % percentile lies on that edge.
    for (system, edge) in [(System::None, 0.4), (System::Linux, 0.7)] {
        let (small, large) = (tail(1, system), tail(4, system));
        for (name, small, large, off) in [
            ("p50", small.p50_ns, large.p50_ns, 0.05),
            ("p90", small.p90_ns, large.p90_ns, 0.05),
            ("p99", small.p99_ns, large.p99_ns, 0.1),
            ("p99.9", small.p999_ns, large.p999_ns, edge),
        ] {
            let ratio = large / small;
            assert!(
                (ratio - 1.0).abs() < off,
                "{system}: {name} {small} and {large}"
            );
        }
    }
    assert_eq!(
        simulated(&scenario(1, "scale_bits = 6"), System::None).tail,
        None
    );
}

#[test]
fn a_core_for_each_virtual_cpu_is_what_there_is_without_saying() {
    for system in [System::Demeter, System::HTpp] {
        let result = |cores: &str| {
            let scenario = scenario(2, &format!("scale_bits = 6\nvms = 2\n{cores}"));
            simulated(&scenario, system)
        };
        assert_eq!(result(""), result("cores = 4"), "{system}");
        assert_eq!(result(""), result("cores = 5"), "{system}");
    }
}

#[test]
fn the_whole_hot_set_of_many_vms_is_all_and_not_more() {
    let result = simulated(&scenario(1, "scale_bits = 6\nvms = 9"), System::Oracle);
    assert_eq!(result.hot_in_fast_final, Some(1.0));
}

/// Two VMs with their own programs: each runs its own at the speed that it has alone, whichever comes first.
#[test]
fn neighbours_run_their_own_programs() {
    let gups = "{ name = \"gups\", hot_mib = 16 }";
    let btree = "{ name = \"btree\", workload = { kind = \"btree\", size_mib = 128 } }";
    let run = |vms: [&str; 2], system| {
        let mut scenario = scenario(1, "scale_bits = 6");
        let text = format!("provisioners = [\"static\"]\nvms = [{}]", vms.join(", "));
        scenario.provision = Some(toml::from_str(&text).unwrap());
        scenario.check().unwrap();
        super::run(&scenario, system, 1, &|_| Ok(())).unwrap()
    };
    let rate = |result: &SystemResult, name: &str| {
        let vm = result.workloads.iter().find(|vm| vm.name == name);
        vm.unwrap().speed.as_ref().unwrap().mean.unwrap()
    };
    let (one, other) = (
        run([gups, btree], System::None),
        run([btree, gups], System::None),
    );
    let twice = run([btree, &btree.replacen("btree", "again", 1)], System::None);
    for name in ["gups", "btree"] {
        let ratio = rate(&one, name) / rate(&other, name);
        assert!((0.98..1.02).contains(&ratio), "{name}: {ratio}");
    }
    let beside = rate(&one, "btree") / rate(&twice, "btree");
    assert!((0.95..1.05).contains(&beside), "{beside}");
    assert!(rate(&one, "gups") > 1.5 * rate(&one, "btree"), "{one:?}");
    // The oracle knows each program's hot set.
    let gups_twice = gups.replace("\"gups\"", "\"again\"");
    let oracle = run([gups, &gups_twice], System::Oracle);
    assert_eq!(oracle.hot_in_fast_final, Some(1.0));
}

#[test]
fn equal_vms_share_cores_evenly() {
    let throughput = |sim: &str| {
        let scenario = scenario(2, &format!("scale_bits = 5\n{sim}"));
        simulated(&scenario, System::None).mean().unwrap()
    };
    let alone = throughput("vms = 1");
    for (vms, cores) in [(2, 2), (3, 2), (2, 1)] {
        let shared = throughput(&format!("vms = {vms}\ncores = {cores}"));
        // A single VM uses two cores.
        let ratio = shared / (alone * f64::from(cores) / 2.0);
        assert!((0.94..1.02).contains(&ratio), "{vms} on {cores}: {ratio}");
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(12))]

    #[test]
    fn shared_cores_lose_and_invent_no_time(
        vms in 1usize..5, vcpus in 1u32..4, cores in 1u32..5, threads in 1u64..5,
        system in proptest::sample::select(
            vec![System::None, System::DemeterWorker, System::Linux, System::HTpp],
        ),
    ) {
        let mut scenario = scenario(1, &format!("scale_bits = 6\nvms = {vms}\ncores = {cores}"));
        scenario.machine.vcpus = vcpus;
        let programs = (0..vms).map(|_| Updates::new(256, threads)).collect();
        let mut world = setup(&scenario).world(build(system), programs);
        world.start(false).unwrap();
        let before = world.bill();
        world.run_until(PS_PER_S).unwrap();
        world.wait_until(PS_PER_S);
        let bill = world.bill().since(&before);
        assert!(world.is_conserved());
        let all = vms as f64 * f64::from(vcpus);
        let seconds = |ps: u64| ps as f64 / PS_PER_S as f64;
        assert!((all - 0.01..all * 1.02).contains(&seconds(bill.total())), "{bill:?}");
        // Each core is always busy while there are enough threads.
        let waited = bill.of(Cause::Idle) + bill.of(Cause::Steal);
        let worked = seconds(bill.total() - waited);
        let cores = f64::from(cores.min(vcpus * vms as u32));
        assert!(worked < cores * 1.02 + 0.02, "{worked} of {cores}: {bill:?}");
        if u64::from(vcpus) <= threads {
            assert!(worked > cores * 0.99, "{worked} of {cores}: {bill:?}");
        }
    }
}
