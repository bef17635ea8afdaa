use super::*;

fn host(files: &[(&str, &str)]) -> HostReport {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    probe(root.path())
}

const DAMON: &str = "sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds";

fn blocking(report: &HostReport) -> Vec<&str> {
    let blocking = report.advice.iter().filter(|advice| advice.blocks);
    blocking.map(|advice| advice.what.as_str()).collect()
}

#[test]
fn a_kernel_that_keeps_perf_events_to_itself_is_told_of() {
    for (level, is_told) in [("3", true), ("2", false), ("-1", false)] {
        let report = host(&[
            (DAMON, "0\n"),
            ("proc/sys/kernel/perf_event_paranoid", level),
        ]);
        let tells = blocking(&report)
            .iter()
            .any(|what| what.contains("paranoid is 3"));
        assert_eq!(tells, is_told, "{level}");
    }
}

#[test]
fn a_host_that_has_everything() {
    let meminfo =
        |node: u32| format!("Node {node} MemTotal: 1048576 kB\nNode {node} MemFree: 524288 kB\n");
    let report = host(&[
        ("proc/sys/kernel/osrelease", "6.13.2-generic\n"),
        ("proc/cpuinfo", "flags\t\t: fpu svm sse\n"),
        ("sys/module/kvm_amd/parameters/npt", "Y\n"),
        ("sys/module/kvm_amd/parameters/nested", "1\n"),
        (DAMON, "0\n"),
        (
            "sys/kernel/mm/transparent_hugepage/enabled",
            "always [madvise] never\n",
        ),
        (
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
            "8\n",
        ),
        (
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
            "3\n",
        ),
        ("sys/devices/system/node/node0/meminfo", &meminfo(0)),
        ("sys/devices/system/node/node0/cpulist", "0-3\n"),
        ("sys/devices/system/node/node0/distance", "10 20\n"),
        ("sys/devices/system/node/node1/meminfo", &meminfo(1)),
        ("sys/devices/system/node/node1/cpulist", "\n"),
        ("sys/devices/system/node/node1/distance", "20 10\n"),
    ]);
    assert_eq!(report.advice, []);
    assert_eq!(report.ageing_flushes, Some(false));
    assert_eq!(report.kvm.access_bits, Some(true));
    let hugetlb = HugetlbReport {
        size_kib: 2048,
        total: 8,
        free: 3,
    };
    assert_eq!(report.hugetlb, [hugetlb]);
    let tiers = report.tiers.as_ref().unwrap();
    assert_eq!((tiers.fast, tiers.slow), (0, 1));
    let text = report.to_string();
    assert!(text.contains("can be managed from this host"), "{text}");
    assert!(text.contains("8 of 2048 KiB reserved, 3 free"), "{text}");
}

#[test]
fn what_is_missing_is_named_with_its_hint() {
    let report = host(&[
        ("proc/sys/kernel/osrelease", "6.12.94+deb12-cloud-amd64\n"),
        ("proc/cpuinfo", "flags : vmx\n"),
        ("sys/module/kvm_intel/parameters/eptad", "N\n"),
        (DAMON, "2\n"),
    ]);
    assert_eq!(report.ageing_flushes, Some(true));
    assert_eq!(report.kvm.access_bits, Some(false));
    let blocking = blocking(&report);
    assert_eq!(blocking.len(), 2, "{blocking:?}");
    assert!(blocking[1].contains("DAMON is in use (2 kdamonds)"));
    let warned = report.to_string();
    assert!(warned.contains("eptad=1") && warned.contains("Linux 6.13"));
    assert!(!warned.contains("can be managed"));
}

#[test]
fn tiers_beyond_two_are_told() {
    let tiers = |text: &str| text.parse::<Tiers>().unwrap();
    assert_eq!(merged(&tiers("0,1/2,3")), None);
    let told = merged(&tiers("0/1,2/3")).unwrap().what;
    assert!(
        told.contains("3 tiers") && told.contains("nodes 1, 2, 3 are one"),
        "{told}"
    );
}

#[test]
fn nothing_at_all_is_no_reason_to_fall_over() {
    let report = host(&[("proc/sys/kernel/osrelease", "no number")]);
    assert_eq!(report.ageing_flushes, None);
    assert_eq!(report.damon, DamonReport::Missing);
    assert!(blocking(&report).contains(&"the kernel has no DAMON"));
    assert!(report.to_string().contains("access bits unknown"));
}
