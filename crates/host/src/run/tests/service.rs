//! Service levels: VMs get the fast memory that their agents' estimates need.

use super::*;

/// A program that always waits, is half as fast without fast memory, and uses 64 MiB evenly.
const ESTIMATE: &str = "{\"points\": [[0, 0], [67108864, 1000]], \"fast_latency_ns\": 100, \
                        \"slow_latency_ns\": 200, \"running_ms\": 1000, \"waits_min_permille\": 0, \
                        \"waits_max_permille\": 1000}";

fn unmet(vm: &VmView) -> &str {
    let service = vm.service.as_ref();
    service.and_then(|of| of.unmet.as_deref()).unwrap_or("")
}

#[tokio::test]
async fn a_vm_gets_what_its_level_needs_or_the_reason_is_shown() {
    let (db, web) = (FakeVm::new(SIZE), FakeVm::new(SIZE));
    let (mut db_guest, _web) = (guest(&db), guest(&web));
    let vms = section("db", &db, "slowdown_max_percent = 25") + &section("web", &web, "");
    let host = Host::start_with(70, "/".into(), folder(), &vms).await;
    let is_unknown = |vm: &VmView| unmet(vm).contains("has not seen enough memory accesses yet");
    host.until("db", "without an estimate", is_unknown).await;
    db_guest.report_benefit(serde_json::from_str(ESTIMATE).unwrap());
    let is_static = |vm: &VmView| unmet(vm).contains("it needs 48 MiB fast");
    host.until("db", "told what it needs", is_static).await;
    let answer = host.ask("PUT /v1/policy", "{\"policy\": \"shares\"}").await;
    assert!(answer.starts_with("204"), "{answer}");
    host.until_owns("db", 48, 128).await;
    host.until_owns("web", 22, 128).await;
    let met = host.until("db", "served", |vm| unmet(vm).is_empty()).await;
    assert_eq!(met.service.unwrap().needs_bytes, Some(48 * MIB));

    // More than the pool has beside the other's guarantee.
    let body = "{\"slowdown_max_percent\": 5}";
    let answer = host.ask("PUT /v1/vms/db/settings", body).await;
    assert!(answer.starts_with("204"), "{answer}");
    host.until_owns("db", 54, 128).await;
    let is_short = |vm: &VmView| unmet(vm).contains("10 MiB are missing");
    host.until("db", "short of memory", is_short).await;
    host.until_owns("web", 16, 128).await;
    let metrics = host.ask("GET /metrics", "").await;
    let line = "demeter_host_vm_service_unmet{vm=\"db\"} 1.0";
    assert!(metrics.lines().any(|of| of == line), "{metrics}");

    db_guest.restart_agent(&db, demeter_proto::BENEFIT_TOLD - 1);
    let is_old = |vm: &VmView| unmet(vm).contains("speaks protocol 3");
    host.until("db", "without an estimate again", is_old).await;
}

#[test]
fn levels_beyond_reason_are_refused() {
    for (percent, is_sound) in [(0, false), (1, true), (1000, true), (1001, false)] {
        let text = format!(
            "pool = {{ fast_mib = 9, slow_mib = 99 }}\n[vm.a]\nlibvirt = \"a\"\nslowdown_max_percent = {percent}\n\
             fast = {{ size_mib = 1 }}\nslow = {{ size_mib = 16 }}\n"
        );
        let config: Config = toml::from_str(&text).unwrap();
        let checked = config.check().map_err(|error| error.to_string());
        assert_eq!(checked.is_ok(), is_sound, "{checked:?}");
        let key = format!("vm.a.slowdown_max_percent = {percent}");
        assert!(is_sound || checked.unwrap_err().contains(&key));
    }
}
