//! Tests with real VMs as domains of a real libvirtd. They check outcomes, never times, since the machine may be slow
//! or shared. Without libvirt (apt-get install libvirt-daemon libvirt-clients), the tests count as ignored.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use demeter_lab::{Lab, Repetition};
use demeter_outcome::Provisioning;
use demeter_policy::provision::ProvisionerKind;
use demeter_scenario::{Crashes, Provisioner, Scenario, Through};
use libtest_mimic::{Arguments, Trial};

fn main() {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<_> = std::env::split_paths(&path)
        .chain(["/usr/sbin".into()])
        .collect();
    let is_missing = |name: &&str| !folders.iter().any(|dir| dir.join(name).is_file());
    let missing = ["libvirtd", "virsh"].into_iter().find(is_missing);
    if let Some(name) = missing {
        eprintln!("skipped: there is no {name} here");
    }
    let tests: [(&str, fn()); 3] = [
        (
            "a_domain_is_sized_and_loses_no_data",
            a_domain_is_sized_and_loses_no_data,
        ),
        (
            "a_domain_is_sized_by_its_virtio_mem_devices",
            a_domain_is_sized_by_its_virtio_mem_devices,
        ),
        (
            "a_libvirtd_that_is_started_anew_loses_nothing",
            a_libvirtd_that_is_started_anew_loses_nothing,
        ),
    ];
    let trials = tests.map(|(name, test)| {
        let run = move || {
            test();
            Ok(())
        };
        Trial::test(name, run).with_ignored_flag(missing.is_some())
    });
    let mut arguments = Arguments::from_args();
    // One VM at a time.
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, trials.into()).exit();
}

/// Runs a shipped scenario through libvirt, with changes.
fn run(scenario: &str, change: impl FnOnce(&mut Scenario)) -> Provisioning {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut scenario = Scenario::load(&root.join("scenarios").join(scenario)).unwrap();
    scenario.provision.as_mut().unwrap().through = vec![Through::Libvirt];
    change(&mut scenario);
    let lab = Lab::of_tree(&root).unwrap();
    let stop = AtomicBool::new(false);
    let run = demeter_lab::run(
        &scenario,
        Repetition::default(),
        &lab,
        &stop,
        &mut |system, report| eprintln!("{system}: {report:?}"),
    );
    let mut result = run.whole().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(result.systems.len(), 1, "{result:?}");
    let system = result.systems.remove(0);
    assert_eq!(system.verify_errors, Some(0));
    system.provisioning.expect("memory was provisioned")
}

fn a_domain_is_sized_and_loses_no_data() {
    is_sized(ProvisionerKind::DemeterBalloon);
}

fn a_domain_is_sized_by_its_virtio_mem_devices() {
    is_sized(ProvisionerKind::VirtioMem);
}

fn is_sized(by: ProvisionerKind) {
    let provisioning = run("ci-balloon.toml", |scenario| {
        let provision = scenario.provision.as_mut().unwrap();
        provision.provisioners = vec![Provisioner::Sized(by)];
    });
    assert_eq!(provisioning.pool_violations, Some(0));
    let inflated = provisioning.bytes_inflated.expect("memory was taken");
    let returned = provisioning.host_bytes_returned.expect("and looked for");
    // Each node was booted with the memory of both: 280 MiB.
    assert!(inflated >= 250 << 20, "{inflated}");
    assert!(
        returned as f64 >= 0.99 * inflated as f64,
        "{returned} of {inflated}"
    );
    // Whether each resize completed before the next depends on timing.
    assert_eq!(provisioning.resizes.len(), 2);
}

/// Restarts libvirtd twice, 0.4 and 1.7 s after a resize request. Then the VM is killed, and then the controller.
fn a_libvirtd_that_is_started_anew_loses_nothing() {
    let provisioning = run("crash.toml", |scenario| {
        // The seed that produces these events.
        scenario.seed = 15;
        let provision = scenario.provision.as_mut().unwrap();
        provision.crashes = Some(Crashes {
            cycles: 4,
            recovery_s: 300,
        });
    });
    assert_eq!(provisioning.pool_violations, Some(0));
    let crashes = provisioning.crashes.expect("a crash matrix");
    assert_eq!(crashes.wrong_words, 0);
    assert_eq!(crashes.by_event["restart libvirt"], 2, "{crashes:?}");
}
