//! Tests with misbehaving emulators, each a shell script in place of QEMU. For any misbehaviour, the run reports it and
//! leaves nothing behind.

use std::fs;
use std::num::{NonZeroU32, NonZeroUsize};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use demeter_lab::link::VmMessage;
use demeter_lab::{Error, Lab, LabRun, Repetition, VmFault};
use demeter_outcome::RunResult;
use demeter_scenario::{Clock, SamplingUnit, Scenario, System, Workload};

/// A lab whose emulator is a script.
struct Fake {
    folder: tempfile::TempDir,
    lab: Lab,
    scenario: Scenario,
}

impl Fake {
    /// Runs `body` in place of the emulator. `$console` is the console's log, and `say TEXT` sends a line over the
    /// link.
    fn new(body: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        write_program(
            &path("qemu"),
            &format!(
                "if [ \"$1\" = --version ]; then echo 'QEMU emulator version 7.2.0'; exit; fi\n\
                 for arg; do case $arg in\n\
                 file=*,check=on) exit;;\n\
                 file,*console.log) console=${{arg##*path=}};;\n\
                 file=*,shm=*) shared=${{arg#*,shm=}}; shared=${{shared%%,*}};;\n\
                 esac; done\n\
                 echo $$ >{pid}\n\
                 truncate -s 4M \"$shared\"\n\
                 echo \"$console\" >{console}\n\
                 say() {{ echo \"$1\" >&0; }}\n\
                 {body}\n",
                pid = path("pid").display(),
                console = path("console").display(),
            ),
        );
        fs::create_dir(path("programs")).unwrap();
        for name in ["demeter", "gups", "memlat", "mix"] {
            write_program(&path("programs").join(name), "exit 1\n");
        }
        fs::write(path("vmlinuz"), "").unwrap();
        let lab = Lab {
            qemu: path("qemu"),
            kernel: Some(path("vmlinuz")),
            // Shared by all tests, so that the plugin is compiled once.
            cache: PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("cache"),
            programs: path("programs"),
            cpu_properties: vec![],
            keep_logs: Some(path("logs")),
        };
        let scenarios = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
        let mut scenario = Scenario::load(&scenarios.join("ci.toml")).unwrap();
        scenario.systems = vec![System::None];
        Self {
            folder,
            lab,
            scenario,
        }
    }

    fn run(&self) -> Result<RunResult, Error> {
        let outcome = self.run_as(Repetition::default());
        self.assert_nothing_is_left();
        outcome.whole()
    }

    fn run_two_at_once(&self) -> LabRun {
        self.run_as(Repetition {
            at_once: NonZeroUsize::new(2).unwrap(),
            ..Repetition::default()
        })
    }

    fn run_as(&self, repetition: Repetition) -> LabRun {
        demeter_lab::run(
            &self.scenario,
            repetition,
            &self.lab,
            &AtomicBool::new(false),
            &mut |_, _| {},
        )
    }

    fn fault(&self) -> VmFault {
        match self.run() {
            Err(Error::Vm { fault, logs, run }) => {
                assert_eq!(run, "none");
                assert_eq!(logs, self.folder.path().join("logs"));
                assert!(logs.join("ci-none-qemu.log").exists());
                fault
            }
            other => panic!("{other:?}"),
        }
    }

    fn assert_nothing_is_left(&self) {
        let read = |name: &str| fs::read_to_string(self.folder.path().join(name)).unwrap();
        let process = Path::new("/proc").join(read("pid").trim());
        assert!(!process.exists(), "the emulator still runs");
        let vm_folder = PathBuf::from(read("console").trim())
            .parent()
            .unwrap()
            .to_owned();
        assert!(
            vm_folder.is_absolute() && !vm_folder.exists(),
            "{vm_folder:?} is still there"
        );
    }
}

fn write_program(path: &Path, body: &str) {
    fs::write(path, format!("#!/bin/sh\n{body}")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

const BOOTED: &str =
    r#"say '{"report":"booted","kernel":"6.12","fast_free_mib":60,"slow_free_mib":220}'"#;

#[test]
fn what_only_our_emulator_has_is_refused_on_another() {
    let said = |change: &dyn Fn(&mut Fake)| {
        let mut fake = Fake::new("exit 1");
        change(&mut fake);
        let error = fake.run_as(Repetition::default()).whole().unwrap_err();
        assert!(!fake.folder.path().join("pid").exists(), "it was started");
        error.to_string()
    };
    let clock = said(&|fake| fake.scenario.lab.clock = Clock::Model);
    assert!(clock.contains("has no clock of the model's own"), "{clock}");
    let unit = said(&|fake| fake.scenario.lab.unit = SamplingUnit::Pebs);
    assert!(unit.contains("have no PEBS"), "{unit}");
    assert!(unit.contains("--emulator exact"), "{unit}");
}

#[test]
fn a_vm_that_hangs_is_killed_in_time() {
    let mut fake = Fake::new("exec sleep 1000");
    (fake.scenario.duration_s, fake.scenario.lab.timeout_s) = (1, 1);
    let said = fake.fault().to_string();
    assert!(
        said.contains("within 2 s (duration_s and lab.timeout_s)") && said.contains("did not boot"),
        "{said}"
    );
}

#[test]
fn the_logs_of_a_failed_run_are_there_though_nobody_asked_for_them() {
    let mut fake = Fake::new(r#"say '{"report":"failed","what":"no"}'; exec sleep 1000"#);
    fake.lab.keep_logs = None;
    match fake.run() {
        Err(Error::Vm { logs, .. }) => {
            assert!(logs.join("ci-none-qemu.log").exists(), "{logs:?}");
            fs::remove_dir_all(logs).unwrap();
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_vm_that_hangs_later_says_where() {
    let mut fake = Fake::new(&format!("{BOOTED}\nexec sleep 1000"));
    (fake.scenario.duration_s, fake.scenario.lab.timeout_s) = (1, 2);
    let said = fake.fault().to_string();
    assert!(said.contains("was filling memory"), "{said}");
}

#[test]
fn a_vm_that_cannot_open_its_link_says_why_on_its_console() {
    let fake = Fake::new(
        "printf '[ 1.0] tsc: x\\r\\nlab-init: no port; mend it\\r\\n[ 7.8] Power down\\n' >\"$console\"",
    );
    assert!(matches!(fake.fault(), VmFault::Job(said) if said == "no port; mend it"));
}

#[test]
fn an_emulator_that_exits_is_quoted() {
    let said = Fake::new("echo 'qemu: unsupported machine' >&2; exit 3")
        .fault()
        .to_string();
    assert!(said.contains("exit status: 3"), "{said}");
    assert!(said.contains("unsupported machine"), "{said}");
}

#[test]
fn a_panic_is_named_and_its_console_kept() {
    let fake =
        Fake::new("echo '[ 1.0] Kernel panic - not syncing: VFS' >$console; echo more >>$console");
    match fake.fault() {
        VmFault::Panicked(line) => assert!(line.contains("not syncing: VFS")),
        other => panic!("{other:?}"),
    }
    let kept = fs::read_to_string(fake.folder.path().join("logs/ci-none-console.log")).unwrap();
    assert!(kept.contains("VFS"));
}

#[test]
fn nonsense_on_the_link_is_refused() {
    for line in ["garbage", r#"{"report":"no such report"}"#] {
        let fake = Fake::new(&format!("say '{line}'\nexec sleep 1000"));
        assert!(matches!(fake.fault(), VmFault::Nonsense(_)));
    }
    let endless = Fake::new("exec cat /dev/zero >&0");
    assert!(matches!(endless.fault(), VmFault::Nonsense(_)));
}

#[test]
fn a_failed_job_brings_its_reason_and_the_agents_log() {
    let fake = Fake::new(&format!(
        "{BOOTED}\nsay '{}'\nsay '{}'\nexec sleep 1000",
        r#"{"report":"agentlog","text":"no tracker works"}"#,
        r#"{"report":"failed","what":"the agent ended early"}"#,
    ));
    assert!(matches!(fake.fault(), VmFault::Job(what) if what == "the agent ended early"));
    let log = fs::read_to_string(fake.folder.path().join("logs/ci-none-agent.log")).unwrap();
    assert_eq!(log, "no tracker works");
}

#[test]
fn a_stop_kills_the_vm() {
    let fake = Fake::new(&format!("{BOOTED}\nexec sleep 1000"));
    let stop = AtomicBool::new(false);
    let outcome = demeter_lab::run(
        &fake.scenario,
        Repetition::default(),
        &fake.lab,
        &stop,
        &mut |_, report| {
            assert!(matches!(report, VmMessage::Booted { .. }));
            stop.store(true, Ordering::Relaxed);
        },
    );
    assert!(
        matches!(outcome.ended, Err(Error::Interrupted)),
        "{outcome:?}"
    );
    fake.assert_nothing_is_left();
}

#[test]
fn figures_of_a_plugin_that_lost_its_way_are_no_result() {
    // A million misses of the first vCPU, 42 % of them outside both tiers.
    let counts = r"'\100\102\17\0\0\0\0\0\240\150\6\0\0\0\0\0'";
    let write =
        format!("printf {counts} | dd of=\"$shared\" bs=8 seek=515 conv=notrunc 2>/dev/null");
    let fake = Fake::new(&format!("{write}\n{}", full_report()));
    let said = fake.fault().to_string();
    assert!(said.contains("420000 of 1000000 cache misses"), "{said}");
}

#[test]
fn an_emulator_that_does_not_load_the_plugin_is_told_before_the_kernel_is_sought() {
    let fake = Fake::new("");
    let says = "requires API version 7, but this QEMU supports only a minimum version of 9";
    write_program(
        &fake.lab.qemu,
        &format!(
            "[ \"$1\" = --version ] && echo 'QEMU version 13.0.0' && exit\necho '{says}' >&2\nexit 1\n"
        ),
    );
    let lab = Lab {
        kernel: Some("/nonexistent/vmlinuz".into()),
        ..fake.lab.clone()
    };
    let stop = AtomicBool::new(false);
    let outcome = demeter_lab::run(
        &fake.scenario,
        Repetition::default(),
        &lab,
        &stop,
        &mut |_, _| {},
    );
    let said = outcome.ended.unwrap_err().to_string();
    assert!(
        said.contains(says) && said.contains("DEMETER_QEMU"),
        "{said}"
    );
}

/// All reports of a successful VM.
fn full_report() -> String {
    let totals = |system_s: u32| format!(r#"{{"system_s":{system_s},"cpu_s":{{}},"vmstat":{{}}}}"#);
    let lines = [
        format!(
            r#"{{"report":"start","hot_in_fast":0,"totals":{}}}"#,
            totals(1)
        ),
        format!(
            r#"{{"report":"interval","t_s":12,"rate":{{"mops":3}},"hot_in_fast":1,"totals":{}}}"#,
            totals(2)
        ),
        format!(
            r#"{{"report":"done","t_s":12,"rate":{{"mops":3}},"totals":{}}}"#,
            totals(2)
        ),
        r#"{"report":"verified","words":7,"errors":0}"#.into(),
        r#"{"report":"finished"}"#.into(),
    ];
    lines.iter().map(|line| format!("say '{line}'\n")).collect()
}

#[test]
fn a_full_report_becomes_a_result() {
    let result = Fake::new(&full_report()).run().unwrap();
    assert_eq!(
        (result.scenario.as_str(), result.on.as_str()),
        ("ci", "lab")
    );
    assert_eq!(result.systems[0].mean(), Some(3.0));
    assert_eq!(result.systems[0].verify_errors, Some(0));
    // A VM that finishes without these reports is not accepted.
    let outcome = Fake::new(r#"say '{"report":"finished"}'"#).run();
    assert!(
        matches!(&outcome, Err(Error::Incomplete(run)) if run == "none"),
        "{outcome:?}"
    );
}

#[test]
fn what_was_measured_before_a_vm_failed_is_kept() {
    let second_dies = format!(
        "[ -e \"$0.ran\" ] && exit 1\ntouch \"$0.ran\"\n{}",
        full_report()
    );
    let mut fake = Fake::new(&second_dies);
    fake.scenario.systems = vec![System::None, System::Oracle];
    let outcome = demeter_lab::run(
        &fake.scenario,
        Repetition::default(),
        &fake.lab,
        &AtomicBool::new(false),
        &mut |_, _| {},
    );
    let names: Vec<_> = outcome.result.systems.iter().map(|s| &s.name).collect();
    assert_eq!(names, ["none"]);
    assert!(
        matches!(&outcome.ended, Err(Error::Vm { run, .. }) if run == "oracle"),
        "{:?}",
        outcome.ended
    );
}

#[test]
fn what_is_missing_is_named_before_anything_starts() {
    let said = |change: fn(&mut Fake)| {
        let mut fake = Fake::new("exit 1");
        change(&mut fake);
        let outcome = demeter_lab::run(
            &fake.scenario,
            Repetition::default(),
            &fake.lab,
            &AtomicBool::new(false),
            &mut |_, _| {},
        );
        assert!(
            !fake.folder.path().join("pid").exists(),
            "the emulator was started"
        );
        outcome.ended.unwrap_err().to_string()
    };
    let missing = said(|fake| fs::remove_file(fake.lab.programs.join("gups")).unwrap());
    assert!(
        missing.contains("gups is missing") && missing.contains("build all of them"),
        "{missing}"
    );
    let missing = said(|fake| fake.lab.kernel = Some("/nonexistent/vmlinuz".into()));
    assert!(missing.contains("/nonexistent/vmlinuz"), "{missing}");
    let missing = said(|fake| fake.lab.qemu = "/nonexistent/qemu".into());
    assert!(
        missing.contains("apt-get install qemu-system-x86"),
        "{missing}"
    );
    let old = said(|fake| {
        write_program(&fake.lab.qemu, "echo 'QEMU emulator version 5.2.0'\n");
    });
    assert!(old.contains("version 5.2"), "{old}");
    let huge = said(|fake| fake.scenario.machine.slow.usable_mib = 1 << 24);
    assert!(huge.contains("MiB available"), "{huge}");
}

/// A full report. In its first run, the host takes six of the first vCPU's twelve seconds, by the plugin's counts.
fn disturbed_once() -> String {
    let report = full_report();
    let (start, rest) = report.split_once('\n').unwrap();
    // 6,000,000,000 ns.
    let lag = r"'\0\274\240\145\1\0\0\0'";
    format!(
        "{start}\n\
         if [ ! -e \"$0.ran\" ]; then\n\
         touch \"$0.ran\"\n\
         until grep -q start \"${{shared%/*}}/reports.jsonl\"; do :; done\n\
         printf {lag} | dd of=\"$shared\" bs=8 seek=517 conv=notrunc 2>/dev/null\n\
         fi\n\
         {rest}"
    )
}

#[test]
fn all_systems_run_in_turn_and_a_disturbed_run_is_made_again() {
    let mut fake = Fake::new(&disturbed_once());
    fake.scenario.systems = vec![System::None, System::Oracle];
    let repetition = Repetition {
        repeat: NonZeroU32::new(2).unwrap(),
        retries: 1,
        ..Repetition::default()
    };
    let mut order = vec![];
    let outcome = demeter_lab::run(
        &fake.scenario,
        repetition,
        &fake.lab,
        &AtomicBool::new(false),
        &mut |run, report| {
            if let VmMessage::Start { .. } = report {
                order.push(run.to_owned());
            }
        },
    );
    let result = outcome.whole().unwrap();
    assert_eq!(order, ["none", "none", "oracle", "none", "oracle"]);
    for system in &result.systems {
        assert_eq!(system.repeats.map(|repeats| repeats.runs), Some(2));
        assert_eq!(system.metadata.host_noise, Some(0.0));
    }
}

/// A full report of an emulator that waits until another one runs beside it, at most half a minute.
fn beside_another() -> String {
    format!(
        "touch \"$0.started.$$\"; turns=0\n\
         until [ $(ls \"$0\".started.* | wc -l) = 2 ]; do\n\
         turns=$((turns + 1)); [ $turns -lt 3000 ] || exit 1\n\
         sleep 0.01\n\
         done\n\
         {}",
        full_report()
    )
}

#[test]
fn systems_run_at_the_same_time_if_asked() {
    let mut fake = Fake::new(&beside_another());
    fake.scenario.systems = vec![System::None, System::Oracle];
    let outcome = fake.run_two_at_once();
    let result = outcome.whole().unwrap();
    let names: Vec<_> = result.systems.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(names, ["none", "oracle"]);
}

#[test]
fn one_that_fails_ends_the_run_when_those_beside_it_have_ended() {
    let body = format!(
        "mkdir \"$0.first\" 2>/dev/null || exit 1\n{}",
        full_report()
    );
    let mut fake = Fake::new(&body);
    fake.scenario.systems = vec![System::None, System::Oracle, System::Linux];
    let outcome = fake.run_two_at_once();
    assert!(matches!(outcome.ended, Err(Error::Vm { .. })));
    assert_eq!(outcome.result.systems.len(), 1);
}

#[test]
fn a_run_that_stays_disturbed_says_so() {
    let result = Fake::new(&disturbed_once()).run().unwrap();
    let metadata = &result.systems[0].metadata;
    assert_eq!(metadata.host_noise, Some(0.5));
    assert!(metadata.is_disturbed());
}

#[test]
fn a_program_that_misses_a_library_is_named_before_anything_boots() {
    let mut fake = Fake::new("exit 1");
    let folder = fake.folder.path();
    fs::write(folder.join("gone.c"), "int gone(void) { return 0; }").unwrap();
    fs::write(
        folder.join("reader.c"),
        "int gone(void); int main(void) { return gone(); }",
    )
    .unwrap();
    let cc = |args: &[&str]| {
        let made = Command::new("cc").args(args).current_dir(folder).status();
        assert!(made.unwrap().success(), "cc {args:?}");
    };
    cc(&["-shared", "-fPIC", "-o", "libgone.so", "gone.c"]);
    cc(&["-o", "reader", "reader.c", "-L.", "-lgone"]);
    fs::remove_file(folder.join("libgone.so")).unwrap();
    let programs = format!(
        "[[program]]\ncommand = [{:?}]\n",
        folder.join("reader").display().to_string()
    );
    fake.scenario.workload = Workload::Program(toml::from_str(&programs).unwrap());
    let stop = AtomicBool::new(false);
    let outcome = demeter_lab::run(
        &fake.scenario,
        Repetition::default(),
        &fake.lab,
        &stop,
        &mut |_, _| {},
    );
    let said = outcome.whole().unwrap_err().to_string();
    assert!(
        said.starts_with("program reader: ") && said.contains("needs libgone.so"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(!fake.folder.path().join("pid").exists(), "a VM was booted");
}
