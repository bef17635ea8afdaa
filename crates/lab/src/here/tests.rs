//! Complete runs of a workload on this machine, with a script in place of gups.

use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::*;

/// A folder with a fake gups.
struct Fake {
    folder: tempfile::TempDir,
    job: Job,
}

impl Fake {
    fn new(script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let gups = folder.path().join("gups");
        let pid = folder.path().join("pid");
        fs::write(
            &gups,
            format!("#!/bin/sh\necho $$ >{}\n{script}\n", pid.display()),
        )
        .unwrap();
        fs::set_permissions(&gups, fs::Permissions::from_mode(0o755)).unwrap();
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/ci.toml");
        let job = Job {
            settings: Settings::new(System::None, ""),
            scenario: Scenario::load(&shipped).unwrap(),
            provisioner: None,
            rounds: false,
            launches: vec![],
            level: Nesting::Alone,
        };
        Self { folder, job }
    }

    fn measure(&self, limits: StopConditions<'_>) -> (Result<(), Fault>, Vec<VmMessage>) {
        let bed = Testbed {
            root: "/".into(),
            tiers: Testbed::vm().tiers,
            plugs: vec![],
            programs: self.folder.path().into(),
            agent_config: "/nowhere".into(),
            agent_has_targets: false,
            agent_socket: "/nowhere".into(),
            agent_log: "/nowhere".into(),
            limits,
        };
        let mut reports = vec![];
        let outcome = measure(&bed, &self.job, &mut |report| {
            reports.push(report);
            Ok(())
        });
        (outcome, reports)
    }

    /// PID of the workload, once it runs.
    fn pid(&self) -> Option<u32> {
        let text = fs::read_to_string(self.folder.path().join("pid")).ok()?;
        text.trim().parse().ok()
    }

    fn is_gone(&self) -> bool {
        let pid = self.pid().expect("it ran");
        !Path::new(&format!("/proc/{pid}")).exists()
    }
}

const READY: &str =
    r#"echo '{"event":"ready","start":4096,"bytes":8192,"hot_start":4096,"hot_bytes":4096}'"#;

#[test]
fn a_workload_is_measured_to_its_verified_end() {
    let fake = Fake::new(&format!(
        "{READY}; read go\n\
         echo '{{\"event\":\"interval\",\"t_s\":1.0,\"ops\":5,\"mops\":2.0}}'\n\
         echo '{{\"event\":\"done\",\"t_s\":1.0,\"ops\":5,\"mops\":3.0}}'; read go\n\
         echo '{{\"event\":\"verified\",\"words\":7,\"errors\":1}}'"
    ));
    let stop = AtomicBool::new(false);
    let (outcome, reports) = fake.measure(StopConditions {
        stop: Some(&stop),
        workload: Some(Duration::from_secs(60)),
    });
    outcome.unwrap();
    let [
        VmMessage::Start {
            hot_in_fast: Some(share),
            ..
        },
        VmMessage::Interval(interval),
        VmMessage::Done { t_s, .. },
        VmMessage::Verified { words, errors },
    ] = &reports[..]
    else {
        panic!("{reports:?}")
    };
    // The first pages of a process are never mapped.
    assert_eq!((*share, interval.hot_in_fast), (0.0, Some(0.0)));
    assert_eq!((*t_s, *words, *errors), (1.0, 7, 1));
    assert!(fake.is_gone());
}

#[test]
fn a_person_can_stop_a_workload_that_says_nothing() {
    let fake = Fake::new("exec sleep 60");
    let stop = AtomicBool::new(false);
    let start = Instant::now();
    let (outcome, _) = std::thread::scope(|scope| {
        scope.spawn(|| {
            while fake.pid().is_none() && start.elapsed() < Duration::from_secs(30) {
                std::thread::yield_now();
            }
            stop.store(true, Ordering::Relaxed);
        });
        fake.measure(StopConditions {
            stop: Some(&stop),
            workload: None,
        })
    });
    assert!(matches!(outcome, Err(Fault::Interrupted)), "{outcome:?}");
    assert!(fake.is_gone() && start.elapsed() < Duration::from_secs(50));
}

#[test]
fn a_workload_that_hangs_is_ended_in_time() {
    let fake = Fake::new(&format!("{READY}; exec sleep 60"));
    let (outcome, _) = fake.measure(StopConditions {
        stop: None,
        workload: Some(Duration::from_millis(1500)),
    });
    let said = outcome.unwrap_err().to_string();
    assert!(said.contains("did not end within 1 s"), "{said}");
    assert!(fake.is_gone());
}
