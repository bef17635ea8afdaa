//! Tests the recorder on a real program. It needs a qemu-user with plugins (xtask/setup.sh installs the
//! distribution's); without plugins, the tests count as ignored.
//!
//! The recorded program is this file, too: called `gups` it is that workload.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

use demeter_lab::{Error, Recorder};
use demeter_scenario::{Scenario, Workload};
use libtest_mimic::{Arguments, Trial};

/// A stop flag that is never set.
static GOES_ON: AtomicBool = AtomicBool::new(false);

fn main() -> ExitCode {
    let program = std::env::args_os().next().unwrap_or_default();
    if Path::new(&program).ends_with("gups") {
        return demeter_workload::run_program(demeter_workload::gups::run);
    }
    let can_record = match recorder().plugin() {
        Err(error @ Error::NoPlugins { .. }) => {
            eprintln!("skipped: {error}");
            false
        }
        // The tests detect other errors.
        _ => true,
    };
    let tests: [(&str, fn()); 4] = [
        (
            "every_word_that_a_program_fills_is_recorded_and_its_threads_apart",
            every_word_that_a_program_fills_is_recorded_and_its_threads_apart,
        ),
        (
            "a_recording_that_is_broken_off_ends_the_program",
            a_recording_that_is_broken_off_ends_the_program,
        ),
        (
            "what_cannot_be_recorded_is_named",
            what_cannot_be_recorded_is_named,
        ),
        (
            "a_scenarios_program_is_recorded_from_when_it_is_ready",
            a_scenarios_program_is_recorded_from_when_it_is_ready,
        ),
    ];
    let trials = tests.map(|(name, test)| {
        let run = move || {
            test();
            Ok(())
        };
        Trial::test(name, run).with_ignored_flag(!can_record)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit_code()
}

/// This program, called `gups`.
static GUPS: LazyLock<PathBuf> = LazyLock::new(|| {
    let gups = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gups");
    match fs::remove_file(&gups) {
        Err(error) if error.kind() != ErrorKind::NotFound => panic!("{error}"),
        _ => {}
    }
    fs::copy(std::env::current_exe().unwrap(), &gups).unwrap();
    gups
});

fn recorder() -> Recorder {
    let mut recorder = Recorder::from_env().unwrap();
    recorder.lab.cache = env!("CARGO_TARGET_TMPDIR").into();
    recorder.lab.programs = GUPS.with_file_name("");
    recorder
}

fn args(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

fn every_word_that_a_program_fills_is_recorded_and_its_threads_apart() {
    let two_threads = args(&["--size", "128KiB", "--hot", "8KiB", "--threads", "2"]);
    let args = [two_threads, args(&["--duration", "1"])].concat();
    let mut stored = BTreeSet::new();
    let mut threads = BTreeMap::<u32, u64>::new();
    let status = recorder()
        .start(&GUPS, &args)
        .unwrap()
        .run(&GOES_ON, |recorded| {
            *threads.entry(recorded.thread).or_default() += recorded.instructions;
            let stores = recorded.accesses().filter(|(_, is_store)| *is_store);
            stored.extend(stores.map(|(gva, _)| gva.0 / 8));
            ControlFlow::Continue(())
        });
    assert!(status.unwrap().status.success());
    // The first thread waits for two workers.
    assert_eq!(threads.len(), 3, "{threads:?}");
    assert!(threads.values().all(|&instructions| instructions > 1000));
    let (mut longest, mut run, mut last) = (0, 0, 0);
    for word in stored {
        run = if word == last + 1 { run + 1 } else { 1 };
        longest = longest.max(run);
        last = word;
    }
    assert!(longest >= (128 << 10) / 8, "{longest} words in a row");
}

fn a_recording_that_is_broken_off_ends_the_program() {
    let args = args(&["--size", "1MiB", "--hot", "64KiB", "--duration", "1000"]);
    let mut calls = 0;
    let status = recorder().start(&GUPS, &args).unwrap().run(&GOES_ON, |_| {
        calls += 1;
        ControlFlow::Break(())
    });
    assert!(!status.unwrap().status.success());
    assert_eq!(calls, 1);
}

fn what_cannot_be_recorded_is_named() {
    let no_program = recorder().start(Path::new("no-such-program"), &[]);
    assert!(
        no_program
            .unwrap_err()
            .to_string()
            .contains("no-such-program")
    );
    let no_emulator = Recorder {
        qemu: "/no/qemu".into(),
        ..recorder()
    };
    let error = no_emulator.start(Path::new("true"), &[]).unwrap_err();
    assert!(
        error.to_string().contains("/no/qemu is not installed"),
        "{error}"
    );
    let script = tempfile::Builder::new().suffix(".sh").tempfile().unwrap();
    fs::write(script.path(), "#!/bin/sh\n").unwrap();
    let recording = recorder().start(script.path(), &[]).unwrap();
    let error = recording
        .run(&GOES_ON, |_| ControlFlow::Continue(()))
        .unwrap_err();
    assert!(matches!(error, Error::Tool { .. }), "{error}");
    assert!(error.to_string().contains("no script"), "{error}");
}

fn a_scenarios_program_is_recorded_from_when_it_is_ready() {
    let text = r#"
        name = "x"
        duration_s = 9
        systems = ["none"]
        [machine]
        vcpus = 1
        fast = { usable_mib = 100, latency_ns = 80, bandwidth_gbps = 50 }
        slow = { usable_mib = 100, latency_ns = 250, bandwidth_gbps = 20 }
        [workload]
        kind = "program"
        [[workload.program]]
        command = ["gups", "--size", "1MiB", "--hot", "64KiB", "--duration", "1", "--seed", "{seed}", "--json"]
    "#;
    let recorded = |ready: &str| {
        let scenario: Scenario = toml::from_str(&format!("{text}\n{ready}")).unwrap();
        let Workload::Program(programs) = &scenario.workload else {
            panic!("{scenario:?}")
        };
        let (recorder, folder) = (recorder(), tempfile::tempdir().unwrap());
        let launch = recorder.launch(&scenario, programs, folder.path()).unwrap();
        let kept = recorder.kept_at(&scenario, &launch).unwrap();
        let mut accesses = 0;
        let recording = recorder.start_launch(&launch).unwrap();
        let end = recording.run(&GOES_ON, |recorded| {
            accesses += recorded.accesses().count();
            ControlFlow::Continue(())
        });
        (kept, accesses, end.unwrap())
    };
    let (kept, _, end) = recorded("");
    assert!(end.status.success() && end.was_ready, "{end:?}");
    assert!(end.last_lines.contains("\"event\":\"done\""), "{end:?}");
    // Populating a MiB takes at least a store per word.
    let (kept_ready, accesses, end) = recorded("ready = { line = '\"event\":\"ready\"' }");
    assert!(end.was_ready && accesses > 0, "{end:?}");
    assert_ne!(kept, kept_ready);
    let (_, accesses, end) = recorded("ready = { line = 'never' }");
    assert!(!end.was_ready, "{end:?}");
    assert_eq!(accesses, 0);
}
