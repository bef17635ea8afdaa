//! The recorder on a real program. Needs a qemu-user with plugins (xtask/setup.sh installs the
//! distribution's); where that has none, the tests count as ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::Path;

use demeter_lab::{Error, Recorder};
use libtest_mimic::{Arguments, Trial};

fn main() {
    let can_record = match recorder().plugin() {
        Err(error @ Error::NoPlugins { .. }) => {
            eprintln!("skipped: {error}");
            false
        }
        // What else is wrong the tests find out.
        _ => true,
    };
    let tests: [(&str, fn()); 3] = [
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
    ];
    let trials = tests.map(|(name, test)| {
        let run = move || {
            test();
            Ok(())
        };
        Trial::test(name, run).with_ignored_flag(!can_record)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit();
}

fn recorder() -> Recorder {
    Recorder {
        cache: env!("CARGO_TARGET_TMPDIR").into(),
        ..Recorder::from_env().unwrap()
    }
}

fn args(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

fn every_word_that_a_program_fills_is_recorded_and_its_threads_apart() {
    let gups = Path::new(env!("CARGO_BIN_EXE_gups"));
    let two_threads = args(&["--size", "128KiB", "--hot", "8KiB", "--threads", "2"]);
    let args = [two_threads, args(&["--duration", "1"])].concat();
    let mut stored = BTreeSet::new();
    let mut threads = BTreeMap::<u32, u64>::new();
    let status = recorder().start(gups, &args).unwrap().run(|recorded| {
        *threads.entry(recorded.thread).or_default() += recorded.instructions;
        let stores = recorded.accesses().filter(|(_, is_store)| *is_store);
        stored.extend(stores.map(|(gva, _)| gva.0 / 8));
        ControlFlow::Continue(())
    });
    assert!(status.unwrap().success());
    // The first thread waits for two that work.
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
    let gups = Path::new(env!("CARGO_BIN_EXE_gups"));
    let args = args(&["--size", "1MiB", "--hot", "64KiB", "--duration", "1000"]);
    let mut calls = 0;
    let status = recorder().start(gups, &args).unwrap().run(|_| {
        calls += 1;
        ControlFlow::Break(())
    });
    assert!(!status.unwrap().success());
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
    std::fs::write(script.path(), "#!/bin/sh\n").unwrap();
    let recording = recorder().start(script.path(), &[]).unwrap();
    let error = recording.run(|_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(error, Error::Tool { .. }), "{error}");
    assert!(error.to_string().contains("no script"), "{error}");
}
