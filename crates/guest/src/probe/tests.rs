use super::*;
use crate::tracker::Choice;

/// A fake root with two nodes, the second without CPUs, and a process with all rights.
pub(crate) fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let node = "sys/devices/system/node/node";
    let usual = [
        (
            format!("{node}0/meminfo"),
            "Node 0 MemTotal: 2048 kB\nNode 0 MemFree: 1024 kB\n",
        ),
        (format!("{node}0/cpulist"), "0"),
        (format!("{node}0/distance"), "10 20"),
        (
            format!("{node}1/meminfo"),
            "Node 1 MemTotal: 8192 kB\nNode 1 MemFree: 8192 kB\n",
        ),
        (format!("{node}1/cpulist"), ""),
        (format!("{node}1/distance"), "20 10"),
        (
            "proc/self/status".into(),
            "Name:\tx\nCapEff:\t000001ffffffffff\n",
        ),
        ("proc/sys/kernel/numa_balancing".into(), "0"),
        (
            "sys/kernel/mm/transparent_hugepage/enabled".into(),
            "always [madvise] never",
        ),
    ];
    let given = files.iter().map(|&(path, text)| (path.to_string(), text));
    for (path, text) in usual.into_iter().chain(given) {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

fn problems(report: &ProbeReport) -> String {
    report
        .advice
        .iter()
        .map(|advice| format!("{} -> {}\n", advice.what, advice.hint))
        .collect()
}

#[test]
fn a_machine_with_two_tiers_is_described() {
    let root = machine(&[]);
    let report = probe(root.path());
    let order = report.order.as_ref().unwrap();
    assert_eq!(order.tiers, "0/1");
    assert_eq!(report.thp.as_deref(), Some("madvise"));
    assert!(report.permissions.sys_nice && report.permissions.perfmon);
    // The lack of a tracker is the only problem.
    assert_eq!(problems(&report).lines().count(), 1);
    assert!(problems(&report).starts_with("no tracker works"));
    let text = report.to_string();
    let line =
        "tiers          0/1 (nodes, the fastest first; by their distance from the nearest CPUs)\n";
    assert!(text.contains(line), "{text}");
    assert!(text.contains("PROBLEM") && !text.contains("Demeter can work here"));
    assert!(!text.contains("tracker lab"), "{text}");
}

#[test]
fn trackers_come_with_reason_and_hint() {
    let root = machine(&[]);
    crate::tracker::lab::tests::FakeDevice::new(root.path(), 1);
    let report = probe(root.path());
    let works: Vec<_> = report
        .trackers
        .iter()
        .map(|it| (it.name, it.works))
        .collect();
    assert_eq!(works, [("perf", false), ("lab", true), ("damon", false)]);
    assert!(report.trackers[0].why_not.is_some() && report.trackers[0].hint.is_some());
    assert_eq!(report.advice, []);
    assert!(report.to_string().contains("Demeter can work here."));
}

#[test]
fn a_tracker_that_a_running_agent_has_is_no_problem() {
    let root = machine(&[]);
    crate::tracker::lab::tests::FakeDevice::new(root.path(), 1);
    let settings = Settings {
        root: root.path().into(),
        ..Settings::default()
    };
    let (agents, _) = crate::tracker::choose(Choice::Lab, &settings).unwrap();
    let report = probe(root.path());
    let lab = &report.trackers[1];
    assert!(!lab.works && lab.is_taken && lab.hint.is_none());
    assert_eq!(report.advice, []);
    let text = report.to_string();
    assert!(
        text.contains("tracker lab    taken: a running Demeter uses it"),
        "{text}"
    );
    assert!(text.contains("Demeter can work here."));
    drop(agents);
    assert!(probe(root.path()).trackers[1].works);
}

#[test]
fn who_has_damon_is_named_and_left_alone() {
    const STAT: &str = "sys/module/damon_stat/parameters/enabled";
    let root = machine(&[(STAT, "Y\n")]);
    crate::tracker::damon::tests::FakeDamon::new(root.path());
    let report = probe(root.path());
    let damon = &report.trackers[2];
    assert!(!damon.works && damon.waits_for_statistic);
    assert_eq!(report.advice, [], "the agent sees to it");
    let text = report.to_string();
    assert!(text.contains("DAMON yes, in use by DAMON_STAT"), "{text}");
    assert!(
        text.contains("tracker damon  can work: DAMON is in use by DAMON_STAT"),
        "{text}"
    );
    let stat = fs::read_to_string(root.path().join(STAT)).unwrap();
    assert_eq!(stat, "Y\n", "a probe turns nothing off");

    const RECLAIM: &str = "sys/module/damon_reclaim/parameters/enabled";
    let root = machine(&[(STAT, "N\n"), (RECLAIM, "Y\n")]);
    crate::tracker::damon::tests::FakeDamon::new(root.path());
    let report = probe(root.path());
    assert!(!report.trackers[2].waits_for_statistic);
    let text = report.to_string();
    assert!(
        text.contains("in use by DAMON_RECLAIM") && text.contains(&format!("echo N > /{RECLAIM}")),
        "{text}"
    );
    assert!(report.advice[0].blocks, "no other tracker works");
}

#[test]
fn the_kernels_own_tiering_is_a_conflict() {
    let root = machine(&[("proc/sys/kernel/numa_balancing", "2")]);
    let problems = problems(&probe(root.path()));
    assert!(
        problems.contains("sysctl kernel.numa_balancing=0"),
        "{problems}"
    );
}

#[test]
fn one_kernel_tier_is_said_but_does_not_block() {
    let tier = "sys/devices/virtual/memory_tiering/memory_tier4/nodelist";
    let root = machine(&[(tier, "0-1")]);
    let report = probe(root.path());
    assert!(report.one_kernel_tier);
    let advice = report
        .advice
        .iter()
        .find(|advice| advice.what.contains("one memory tier"));
    assert!(!advice.unwrap().blocks);
}

#[test]
fn a_port_without_a_driver_is_said_but_does_not_block() {
    let root = machine(&[("sys/class/virtio-ports/vport0p1/name", "org.demeter.0\n")]);
    let report = probe(root.path());
    assert!(report.balloon.port);
    let advice = report
        .advice
        .iter()
        .find(|advice| advice.what.contains("cannot take memory back"));
    assert!(advice.is_some_and(|it| !it.blocks && it.hint.contains("virtio-mem")));
    assert!(!probe(machine(&[]).path()).balloon.port);
}

#[test]
fn one_node_and_no_slower_node_block() {
    let root = machine(&[]);
    fs::remove_dir_all(root.path().join("sys/devices/system/node/node1")).unwrap();
    assert!(problems(&probe(root.path())).contains("nothing to tier -> give the VM a second node"));

    let root = machine(&[("sys/devices/system/node/node1/cpulist", "1")]);
    assert!(problems(&probe(root.path())).contains("no node is slower than node 0"));
}

#[test]
fn large_base_pages_block_and_the_lack_of_x86_does_not() {
    let entry = [6usize, 64 << 10].map(usize::to_ne_bytes).concat();
    let root = machine(&[]);
    fs::write(root.path().join("proc/self/auxv"), entry).unwrap();
    let report = probe(root.path());
    let said = problems(&report);
    assert!(said.contains("pages of 64 KiB"), "{said}");
    assert!(report.to_string().contains("pages of 64 KiB\n"), "{report}");
    let of_arm = not_x86("aarch64").unwrap();
    assert!(!of_arm.blocks && of_arm.what.contains("tracker perf"));
    assert_eq!(not_x86("x86_64"), None);
}

#[test]
fn an_unprivileged_process_is_told_what_it_needs() {
    let root = machine(&[("proc/self/status", "CapEff:\t0000000000000000\n")]);
    let problems = problems(&probe(root.path()));
    for capability in ["CAP_SYS_NICE", "CAP_SYS_PTRACE"] {
        assert!(problems.contains(capability), "{problems}");
    }
}

#[test]
fn an_empty_root_is_reported_not_a_panic() {
    let root = tempfile::tempdir().unwrap();
    let report = probe(root.path());
    assert!(report.advice[0].blocks);
    assert!(
        serde_json::to_string(&report)
            .unwrap()
            .contains("\"trackers\"")
    );
}
