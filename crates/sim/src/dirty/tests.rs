use super::*;

/// Runs a VM with 16 MiB for each virtual CPU, with some `sim.dirty_logging` keys.
fn run_with(vcpus: u32, stores: f64, logging: &str) -> SystemResult {
    let text = format!(
        "name = \"x\"\nduration_s = 60\nsystems = [\"none\"]\n\
         machine = {{ vcpus = {vcpus}, fast = {{ usable_mib = 4096, latency_ns = 100, \
         bandwidth_gbps = 50 }}, slow = {{ usable_mib = 16, latency_ns = 100, bandwidth_gbps = 50 }} }}\n\
         workload = {{ kind = \"mix\", parts = [{{ size_mib = {}, pattern = \"sweep\", stores = {stores} }}] }}\n\
         sim = {{ dirty_logging = {{ from_s = 1, {logging} }} }}",
        vcpus * 16
    );
    let scenario: Scenario = toml::from_str(&text).unwrap();
    scenario.check().unwrap();
    let logging = scenario.sim.dirty_logging.unwrap();
    run(&scenario, &logging, System::None, &|_| Ok(())).unwrap()
}

fn counter(result: &SystemResult, name: &str) -> u64 {
    result.counters[name]
}

/// Pages of one virtual CPU's 16 MiB.
const PAGES: u64 = 4096;

#[test]
fn each_page_faults_once_in_a_pass_and_each_block_is_split_once() {
    let lazy = run_with(4, 1.0, "split = \"lazy\"");
    assert_eq!(counter(&lazy, "stage2_faults"), 4 * PAGES);
    assert_eq!(counter(&lazy, "blocks_split"), 32);
    // Two for each block, and two for the initial protection.
    assert_eq!(counter(&lazy, "tlb_broadcasts"), 66);
    let eager = run_with(4, 1.0, "split = \"eager\"");
    assert_eq!(counter(&eager, "stage2_faults"), 4 * PAGES);
    assert_eq!(counter(&eager, "blocks_split"), 32);
    assert!(eager.elapsed_s < lazy.elapsed_s);
    assert!(counter(&eager, "enable_ms") >= counter(&lazy, "enable_ms"));
}

#[test]
fn reads_fault_where_a_fault_has_split_their_block_and_only_there() {
    let lazy = run_with(1, 0.5, "split = \"lazy\"");
    let eager = run_with(1, 0.5, "split = \"eager\"");
    let [lazy, eager] = [&lazy, &eager].map(|result| counter(result, "stage2_faults"));
    // A read or two come before the first store to a block.
    assert!(lazy > PAGES * 98 / 100 && lazy <= PAGES, "{lazy}");
    assert!(
        eager > PAGES * 45 / 100 && eager < PAGES * 55 / 100,
        "{eager}"
    );
}

#[test]
fn processors_do_what_their_features_promise() {
    let slow = run_with(8, 1.0, "stride_kib = 2048");
    let bbm2 = run_with(8, 1.0, "stride_kib = 2048, bbm2 = true");
    assert_eq!(
        counter(&bbm2, "blocks_split"),
        counter(&slow, "blocks_split")
    );
    assert!(bbm2.elapsed_s < slow.elapsed_s);
    let buffer = run_with(8, 1.0, "split = \"eager\", hardware_buffer = true");
    assert_eq!(counter(&buffer, "stage2_faults"), 0);
    let x86 = run_with(8, 1.0, "isa = \"x86\"");
    assert_eq!(counter(&x86, "stage2_faults"), 8 * PAGES);
    // Only the broadcasts that protect all memory.
    assert_eq!(counter(&x86, "tlb_broadcasts"), 2);
    let [one, range] = ["false", "true"]
        .map(|range| run_with(1, 1.0, &format!("task = \"unmap\", tlbi_range = {range}")));
    assert_eq!(counter(&one, "tlb_broadcasts"), 2 * PAGES);
    assert_eq!(counter(&range, "tlb_broadcasts"), 2);
    assert!(range.elapsed_s < one.elapsed_s);
}

#[test]
fn a_lock_that_is_shared_more_costs_less() {
    let times = ["spinlock", "read-for-permissions", "read-for-all"].map(|lock| {
        let lazy = run_with(16, 1.0, &format!("lock = \"{lock}\""))
            .elapsed_s
            .unwrap();
        let eager = format!("lock = \"{lock}\", split = \"eager\"");
        [lazy, run_with(16, 1.0, &eager).elapsed_s.unwrap()]
    });
    let [spin, permissions, all] = times;
    // Pages that a split left unmapped need the exclusive lock; write-protected pages do not.
    assert_eq!(spin[0], permissions[0]);
    assert!(all[0] < 0.5 * spin[0]);
    assert!(permissions[1] < 0.5 * spin[1]);
    assert_eq!(all[1], permissions[1]);
}

#[test]
fn a_migration_sends_all_and_what_is_written_meanwhile() {
    let migrate = |more: &str, stores: f64| {
        run_with(
            2,
            stores,
            &format!("task = \"migrate\", chunk_mib = 4, {more}"),
        )
    };
    // Without stores, one pass sends everything.
    let idle = migrate("passes_max = 5", 0.0);
    assert_eq!(counter(&idle, "log_passes"), 1);
    assert_eq!(counter(&idle, "pages_sent"), 2 * PAGES);
    assert_eq!(counter(&idle, "downtime_ms"), 0);
    // If all pages are written constantly, passes end at the limit.
    let busy = migrate("passes_max = 3, downtime_ms = 0, bandwidth_gbps = 1", 1.0);
    assert_eq!(counter(&busy, "log_passes"), 3);
    let sent = counter(&busy, "pages_sent");
    assert!(sent > 6 * PAGES && sent <= 8 * PAGES, "{sent}");
    assert!(busy.elapsed_s > idle.elapsed_s);
    // With protection chunk by chunk, no CPU waits for all memory at once.
    let gradual = migrate(
        "passes_max = 1, initially_set = true, split = \"eager\"",
        1.0,
    );
    assert_eq!(counter(&gradual, "enable_ms"), 0);
    assert_eq!(counter(&gradual, "blocks_split"), 16);
}

#[test]
fn the_same_scenario_gives_the_same_result() {
    let logging = "task = \"migrate\", lock = \"spinlock\", local_invalidation = false";
    assert_eq!(run_with(3, 0.7, logging), run_with(3, 0.7, logging));
}
