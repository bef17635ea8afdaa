//! Tests of `demeter replay` with equal, different and damaged recordings.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use demeter_guest::recording::{Header, Recorded, RecordedTier, Recorder};
use demeter_policy::engine::{ByHeat, Config, Engine, Input, Request};
use demeter_policy::{ByteCount, Tuning};

/// Records 20 epochs of an agent without processes; the recording's epochs are `epoch_ms` long.
fn record(path: &Path, epoch_ms: u64) {
    let tier = |(latency_ns, node)| RecordedTier {
        nodes: vec![node],
        bytes: 1 << 30,
        latency_ns,
    };
    let header = Header {
        agent: "0.0.1".into(),
        tracker: "lab".into(),
        tuning: Tuning::default(),
        tiers: [80, 250].into_iter().zip(0..).map(tier).collect(),
        loads_per_sample: Some(4093),
        waits: 1.0,
        cpus: 4,
        collapses: true,
    };
    let tuning = Tuning {
        epoch_ms,
        ..Tuning::default()
    };
    let config = Config::new(&tuning, ByteCount(1 << 30));
    let mut engine = Recorded::new(Engine::new(ByHeat::new(header.gain()), config));
    engine.record(Recorder::start(path, 4, header, &engine).unwrap());
    while engine.epoch() < 20 {
        let input = match engine.request() {
            Request::Refresh => Input::Refreshed,
            Request::Samples { .. } => Input::SamplesEnd {
                is_repeat: false,
                lost: 0,
                rejected: 0,
            },
            Request::Sleep { .. } => Input::Epoch,
            other => panic!("{other:?}"),
        };
        engine.push(input).unwrap();
    }
    engine.finish().unwrap();
}

fn replay(path: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_demeter"));
    command.arg("replay").arg(path).args(args);
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_recording_is_replayed_for_people_and_for_programs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.rec");
    record(&path, 500);
    let output = replay(&path, &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(said.starts_with("recorded by demeter 0.0.1 with tracker lab;"));
    assert!(
        said.contains("epochs 0 to 20:") && said.contains("all as recorded"),
        "{said}"
    );

    let said = text(&replay(&path, &["--json"]).stdout);
    let last = said.lines().last().unwrap();
    let last: serde_json::Value = serde_json::from_str(last).unwrap();
    assert_eq!(last["last_epoch"], 20);
    assert!(last["divergence"].is_null());
    let sleeps = said
        .lines()
        .filter(|l| l.contains("\"decision\":\"sleep\""));
    assert_eq!(sleeps.count(), 20);
}

#[test]
fn a_decision_that_differs_is_told_and_fails() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.rec");
    // Refreshes are four times as far apart, counted in epochs.
    record(&path, 125);
    let output = replay(&path, &[]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains("the policy decides otherwise"), "{said}");
    assert!(
        said.contains("recorded was Samples") && said.contains("now it is Refresh"),
        "{said}"
    );
}

#[test]
fn a_damaged_recording_is_told_with_the_offset() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.rec");
    record(&path, 500);
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 12]).unwrap();
    let output = replay(&path, &[]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    let want = format!("byte {}: the recording is cut off here", bytes.len() - 12);
    assert!(said.contains(&want), "{said}");
}
