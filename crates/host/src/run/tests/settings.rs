//! VMs that a person adds, changes and removes while the controller runs.

use super::domains::daemon;
use super::*;

/// The JSON of a VM's section.
fn json(section: &str) -> String {
    let document: toml::Table = toml::from_str(section).unwrap();
    let (_, vm) = document["vm"].as_table().unwrap().iter().next().unwrap();
    serde_json::to_string(vm).unwrap()
}

async fn names(host: &Host) -> Vec<String> {
    let view = host.view().await;
    view.vms.into_iter().map(|vm| vm.name).collect()
}

fn refused(answer: &str, why: &str) {
    assert!(
        answer.starts_with("409") && answer.contains(why),
        "{why}: {answer}"
    );
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(!body.contains("\\n"), "one line: {body}");
}

fn done(answer: &str) {
    assert!(answer.starts_with("204"), "{answer}");
}

#[tokio::test]
#[expect(
    clippy::too_many_lines,
    reason = "one life of a setting, over restarts"
)]
async fn vms_are_added_changed_and_removed_and_that_outlives_a_kill() {
    let (one, two) = (FakeVm::new(SIZE), FakeVm::new(SIZE));
    let (_one, _two) = (guest(&one), guest(&two));
    let folder = folder();
    let first = section("one", &one, "");
    let host = Host::start_with(100, "/".into(), folder.clone(), &first).await;
    host.until_owns("one", 32, 96).await;

    let second = json(&section("two", &two, ""));
    let large = second.replace("\"size_mib\":32", "\"size_mib\":69");
    refused(
        &host.ask("PUT /v1/vms/two", &large).await,
        "VM two does not fit: 1 MiB of fast memory are missing",
    );
    for (body, why) in [
        (second.replace("agent", "agents"), "unknown field `agents`"),
        ("{}".into(), "missing field"),
    ] {
        let answer = host.ask("PUT /v1/vms/two", &body).await;
        assert!(
            answer.starts_with("422") && answer.contains(why),
            "{answer}"
        );
    }
    let same = json(&first);
    refused(&host.ask("PUT /v1/vms/two", &same).await, "is used twice");
    refused(&host.ask("PUT /v1/vms/one", &same).await, "managed already");
    assert_eq!(names(&host).await, ["one"]);

    done(&host.ask("PUT /v1/vms/two", &second).await);
    host.until_owns("two", 32, 96).await;
    done(
        &host
            .ask(
                "PUT /v1/vms/one/settings",
                "{\"share\": 300, \"fast\": {\"guarantee_mib\": 40}}",
            )
            .await,
    );
    let view = host.until_owns("one", 40, 96).await;
    assert_eq!(view.guarantee.fast_bytes, 40 * MIB);
    for (body, why) in [
        ("{\"fast\": {\"guarantee_mib\": 85}}", "does not fit"),
        (
            "{\"fast\": {\"limit_mib\": 39}}",
            "guarantee_mib = 40 is over its limit_mib = 39",
        ),
        (
            "{\"pool\": \"s9\"}",
            "vm.one.pool = \\\"s9\\\" is not there",
        ),
    ] {
        refused(&host.ask("PUT /v1/vms/one/settings", body).await, why);
    }
    drop(host);

    // After a kill, the file still says otherwise.
    let host = Host::start_with(100, "/".into(), folder.clone(), &first).await;
    host.until_owns("two", 32, 96).await;
    let view = host.view().await;
    let set: Vec<_> = view
        .settings
        .iter()
        .map(|of| (of.key.as_str(), of.file.as_deref(), of.value.as_str()))
        .collect();
    assert_eq!(
        set,
        [
            ("vm.one.fast.guarantee_mib", Some("16"), "40"),
            ("vm.one.fast.size_mib", Some("32"), "40"),
            ("vm.one.share", Some("100"), "300"),
            ("vm.two", None, "added"),
        ]
    );

    refused(
        &host.ask("DELETE /v1/vms/two", "").await,
        "VM two runs with up to 128 MiB, which would no longer count",
    );
    done(&host.ask("DELETE /v1/vms/two?running=true", "").await);
    assert_eq!(names(&host).await, ["one"]);
    done(&host.ask("DELETE /v1/vms/one?running=true", "").await);
    assert_eq!(names(&host).await, [""; 0]);
    refused(&host.ask("PUT /v1/vms/one", &same).await, "reset one");
    done(&host.ask("DELETE /v1/vms/one/settings", "").await);
    assert_eq!(
        host.until_owns("one", 32, 96).await.guarantee.fast_bytes,
        16 * MIB
    );
    assert_eq!(host.view().await.settings, []);
    refused(
        &host.ask("DELETE /v1/vms/one/settings", "").await,
        "nothing is set",
    );
}

#[tokio::test]
async fn a_file_that_contradicts_what_is_set_is_told_or_refused() {
    let (one, two) = (FakeVm::new(SIZE), FakeVm::new(SIZE));
    let (_one, _two) = (guest(&one), guest(&two));
    let folder = folder();
    let first = section("one", &one, "share = 100");
    let host = Host::start_with(100, "/".into(), folder.clone(), &first).await;
    done(
        &host
            .ask("PUT /v1/vms/one/settings", "{\"share\": 300}")
            .await,
    );
    let second = section("two", &two, "");
    done(&host.ask("PUT /v1/vms/two", &json(&second)).await);
    done(&host.ask("PUT /v1/policy", "{\"policy\": \"shares\"}").await);

    Host::configure(100, &folder, &first.replace("share = 100", "share = 200"));
    let answer = host.ask("POST /v1/reload", "").await;
    assert!(
        answer.starts_with("200")
            && answer.contains("\"to\":\"200\",\"at_start\":false,\"is_overridden\":true"),
        "{answer}"
    );
    let told = |event: &EventView| {
        event
            .text
            .contains("vm.one.share: 100 -> 200 (no effect while another value is set)")
    };
    assert!(host.events().await.iter().any(told));
    let settings = host.view().await.settings;
    assert_eq!(
        (settings[0].key.as_str(), settings[0].file.as_deref()),
        ("policy", Some("static"))
    );
    assert_eq!(
        (settings[1].file.as_deref(), settings[1].value.as_str()),
        (Some("200"), "300")
    );

    // The same sockets under another name.
    let other = second.replace("vm.two", "vm.three");
    Host::configure(100, &folder, &(first.clone() + &other));
    refused(
        &host.ask("POST /v1/reload", "").await,
        "what was set for VM two by command does not fit this file",
    );
    assert_eq!(names(&host).await, ["one", "two"]);
    drop(host);
    // A start uses the file, and says what it does not use.
    let host = Host::start_with(100, "/".into(), folder.clone(), &(first + &other)).await;
    assert_eq!(names(&host).await, ["one", "three"]);
    let settings = host.view().await.settings;
    let unused = settings.iter().find(|of| of.key == "vm.two").unwrap();
    assert!(unused.problem.as_ref().unwrap().contains("is used twice"));

    done(&host.ask("DELETE /v1/policy", "").await);
    assert_eq!(host.view().await.policy, Policy::Static);
}

#[tokio::test]
async fn a_discovered_domain_is_changed_and_left_alone_on_request() {
    let vm = FakeVm::new(SIZE);
    let _guest = guest(&vm);
    let config = format!("discover = \"libvirt\"\n{}", daemon(&vm, true));
    let folder = folder();
    let host = Host::start(folder.clone(), &config).await;
    let there = async |host: &Host, count| {
        while names(host).await.len() != count {
            sleep(Duration::from_millis(10)).await;
        }
    };
    soon(there(&host, 1)).await;
    let wished = TierView {
        fast_bytes: 48 * MIB,
        slow_bytes: 128 * MIB,
    };
    let body = "{\"fast\": {\"limit_mib\": 48, \"guarantee_mib\": 20}}";
    done(&host.ask("PUT /v1/vms/db/settings", body).await);
    let is_wished = |vm: &VmView| (vm.desired, vm.guarantee.fast_bytes) == (wished, 20 * MIB);
    host.until("db", "limited", is_wished).await;
    drop(host);
    let host = Host::start(folder, &config).await;
    soon(there(&host, 1)).await;
    host.until("db", "limited after a restart", is_wished).await;

    done(&host.ask("DELETE /v1/vms/db?running=true", "").await);
    let left = host.view().await.left_alone;
    assert!(left[0].why.contains("demeter host vm reset db"), "{left:?}");
    assert_eq!(names(&host).await, [""; 0]);
    done(&host.ask("DELETE /v1/vms/db/settings", "").await);
    soon(there(&host, 1)).await;
}
