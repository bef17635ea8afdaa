//! Tests the workload programs as a user or the lab's runner starts them.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};

use demeter_workload::{Rate, WorkloadEvent};

const FORKS: &str = env!("CARGO_BIN_EXE_forks");
const GUPS: &str = env!("CARGO_BIN_EXE_gups");
const GRAPH: &str = env!("CARGO_BIN_EXE_graph");
const KVLOAD: &str = env!("CARGO_BIN_EXE_kvload");
const MEMLAT: &str = env!("CARGO_BIN_EXE_memlat");
const SWEEP: &str = env!("CARGO_BIN_EXE_sweep");

fn run(program: &str, args: &[&str]) -> Output {
    Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn events(output: &Output) -> Vec<WorkloadEvent> {
    let text = std::str::from_utf8(&output.stdout).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).expect(line))
        .collect()
}

#[test]
fn every_program_is_listed() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bin");
    let sources = fs::read_dir(sources).unwrap();
    let mut names: Vec<_> = sources
        .map(|entry| entry.unwrap().path().with_extension(""))
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        .collect();
    names.sort();
    assert_eq!(names, demeter_workload::PROGRAMS);
}

#[test]
fn gups_resizes_its_hot_set_on_schedule() {
    let common = ["--size=16MiB", "--hot=2MiB", "--reverse", "--duration=0.3"];
    let phases = ["--phase=0.1:8MiB", "--phase=0.2:1MiB", "--verify", "--json"];
    let output = run(GUPS, &[&common[..], &phases[..]].concat());
    assert!(output.status.success(), "{output:?}");
    let hot_sizes: Vec<u64> = events(&output)
        .iter()
        .filter_map(|event| match event {
            WorkloadEvent::Ready { hot_bytes, .. } | WorkloadEvent::Shift { hot_bytes, .. } => {
                Some(*hot_bytes)
            }
            _ => None,
        })
        .collect();
    assert_eq!(hot_sizes, [2 << 20, 8 << 20, 1 << 20]);
    let idle = ["--phase=0.1:idle", "--phase=0.2:1MiB", "--verify", "--json"];
    let output = run(GUPS, &[&common[..], &idle[..]].concat());
    assert!(output.status.success(), "{output:?}");
    for (bad, why) in [
        (["--phase=0.2:1MiB", "--phase=0.1:1MiB"], "order of time"),
        (["--phase=0.1:1MiB", "--phase=0.3:1MiB"], "before the end"),
        (["--phase=0.1:1MiB", "--phase=0.2:17MiB"], "at most --size"),
        (["--phase=0.1:1MiB", "--phase=1MiB"], "S:SIZE"),
        (
            ["--phase=0.1:1MiB", "--shift-at=0.2"],
            "cannot be used with",
        ),
    ] {
        let output = run(GUPS, &[&common[..], &bad[..]].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(why) && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn gups_loses_no_update_with_threads_and_a_jump() {
    let output = run(
        GUPS,
        &[
            "--size=16MiB",
            "--hot=2MiB",
            "--reverse",
            "--threads=3",
            "--duration=0.3",
            "--interval=0.1",
            "--shift-at=0.15",
            "--verify",
            "--json",
        ],
    );
    assert!(output.status.success(), "{output:?}");
    let events = events(&output);
    let WorkloadEvent::Ready {
        start,
        bytes,
        hot_start,
        hot_bytes,
    } = events[0]
    else {
        panic!("{events:?}")
    };
    assert_eq!(
        (bytes, hot_bytes, hot_start - start),
        (16 << 20, 2 << 20, 14 << 20)
    );
    assert_eq!(start % (2 << 20), 0);
    let shifts: Vec<u64> = events
        .iter()
        .filter_map(|event| match event {
            WorkloadEvent::Shift { hot_start, .. } => Some(hot_start - start),
            _ => None,
        })
        .collect();
    assert_eq!(shifts, [6 << 20]);
    let [
        ..,
        WorkloadEvent::Done {
            ops,
            rate: Rate::Mops(mops),
            ..
        },
        WorkloadEvent::Verified { words, errors },
    ] = events[..]
    else {
        panic!("{events:?}")
    };
    assert!(ops > 0 && mops > 0.0);
    assert_eq!((words, errors), (2 << 20, 0));
}

#[test]
fn each_request_has_a_child_that_ends() {
    let sizes = ["--size=1MiB", "--child=64KiB", "--reads=100"];
    let output = run(
        FORKS,
        &[&sizes[..], &["--duration=0.3", "--interval=0.1", "--json"]].concat(),
    );
    assert!(output.status.success(), "{output:?}");
    let Some(&WorkloadEvent::Done {
        ops,
        rate: Rate::RequestsPerS(rate),
        ..
    }) = events(&output).last()
    else {
        panic!("{output:?}")
    };
    assert!(ops > 0 && rate > 0.0, "{ops} at {rate}");
    let empty = run(FORKS, &["--size=4", "--json"]);
    assert_eq!(empty.status.code(), Some(2), "{empty:?}");
}

#[test]
fn memlat_reports_latencies() {
    let output = run(
        MEMLAT,
        &[
            "--size=1MiB",
            "--cold=2MiB",
            "--duration=0.2",
            "--interval=0.1",
            "--json",
        ],
    );
    assert!(output.status.success(), "{output:?}");
    let events = events(&output);
    assert_eq!(events.len(), 4, "{events:?}");
    assert!(
        matches!(events[3], WorkloadEvent::Done { rate: Rate::LatencyNs(ns), ops, .. } if ns > 0.0 && ops > 0)
    );
}

#[test]
fn programs_that_count_operations_end_with_what_they_counted() {
    let common = ["--duration=0.3", "--interval=0.1", "--json"];
    for (program, args) in [
        (SWEEP, &["--size=3MiB", "--write"][..]),
        (GRAPH, &["bfs", "--scale=8"]),
        (GRAPH, &["pagerank", "--scale=8"]),
    ] {
        let output = run(program, &[args, &common[..]].concat());
        assert!(output.status.success(), "{output:?}");
        let events = events(&output);
        let counted: u64 = events
            .iter()
            .filter_map(|event| match event {
                WorkloadEvent::Interval { ops, .. } => Some(*ops),
                _ => None,
            })
            .sum();
        let [
            WorkloadEvent::Ready { bytes, .. },
            ..,
            WorkloadEvent::Done { ops, .. },
        ] = events[..]
        else {
            panic!("{events:?}")
        };
        assert!(bytes > 0 && counted > 0 && counted <= ops, "{events:?}");
    }
}

/// A store that keeps its data. With `garbled`, it returns that value for every get.
fn redis(garbled: Option<&'static str>) -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut answers = stream.try_clone().unwrap();
        let mut lines = BufReader::new(stream);
        let mut values = HashMap::new();
        let mut words = vec![];
        // Keys, commands and values have no line breaks here, so each is a line.
        let mut line = vec![];
        while lines
            .read_until(b'\n', &mut line)
            .is_ok_and(|read| read > 0)
        {
            let word = line[..line.len() - 2].to_vec();
            line.clear();
            match word.first() {
                Some(b'*') => words.clear(),
                Some(b'$') => {
                    let bytes: usize = String::from_utf8_lossy(&word[1..]).parse().unwrap();
                    let mut word = vec![0; bytes + 2];
                    lines.read_exact(&mut word).unwrap();
                    word.truncate(bytes);
                    words.push(word);
                }
                _ => panic!("{word:?}"),
            }
            let answer = match &words[..] {
                [set, key, value] if set == b"SET" => {
                    values.insert(key.clone(), value.clone());
                    b"+OK\r\n".to_vec()
                }
                [get, key] if get == b"GET" => match garbled {
                    Some(garbled) => garbled.into(),
                    None => [
                        format!("${}\r\n", values[key].len()).as_bytes(),
                        &values[key],
                        b"\r\n",
                    ]
                    .concat(),
                },
                _ => continue,
            };
            answers.write_all(&answer).unwrap();
        }
    });
    port
}

fn kvload(port: u16) -> Output {
    let port = format!("--port={port}");
    let args = ["--keys=100", "--value=1KiB", "--duration=0.3", "--json"];
    run(KVLOAD, &[&args[..], &[&port]].concat())
}

#[test]
fn kvload_checks_every_value() {
    let output = kvload(redis(None));
    assert!(output.status.success(), "{output:?}");
    let events = events(&output);
    assert!(matches!(
        events[0],
        WorkloadEvent::Loaded {
            keys: 100,
            value_bytes: 1024
        }
    ));
    assert!(matches!(events.last(), Some(WorkloadEvent::Done { ops, .. }) if *ops > 0));
    let wrong = format!("$1024\r\n{}\r\n", "x".repeat(1024));
    let wrong: &'static str = wrong.leak();
    for (answer, why) in [(wrong, "a wrong value"), ("$-1\r\n", "instead of")] {
        let output = kvload(redis(Some(answer)));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(why) && said.lines().count() == 1, "{said}");
    }
    let nobody = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr();
    let said = kvload(nobody.unwrap().port()).stderr;
    assert!(String::from_utf8_lossy(&said).contains("cannot connect to the store on port"));
}

/// A program that waits for a line, and both ends of its pipes.
struct Held {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Held {
    fn start() -> Self {
        let mut child = Command::new(GUPS)
            .args([
                "--size=4MiB",
                "--hot=1MiB",
                "--duration=0.1",
                "--interval=1",
            ])
            .args(["--verify", "--json", "--hold"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self {
            child,
            input,
            output: BufReader::new(output),
        }
    }

    fn event(&mut self) -> Option<WorkloadEvent> {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        (!line.is_empty()).then(|| serde_json::from_str(&line).expect(&line))
    }
}

#[test]
fn hold_waits_before_the_timed_phase_and_before_the_check() {
    let mut held = Held::start();
    assert!(matches!(held.event(), Some(WorkloadEvent::Ready { .. })));
    held.input.write_all(b"go\n").unwrap();
    assert!(matches!(held.event(), Some(WorkloadEvent::Interval { .. })));
    assert!(matches!(held.event(), Some(WorkloadEvent::Done { .. })));
    assert_eq!(held.child.try_wait().unwrap(), None);
    held.input.write_all(b"check\n").unwrap();
    assert!(matches!(
        held.event(),
        Some(WorkloadEvent::Verified { errors: 0, .. })
    ));
    assert!(held.child.wait().unwrap().success());
}

#[test]
fn a_signal_ends_a_held_program_cleanly() {
    let mut held = Held::start();
    assert!(matches!(held.event(), Some(WorkloadEvent::Ready { .. })));
    // SAFETY: signals a child that has not been waited for.
    unsafe { libc::kill(held.child.id() as libc::pid_t, libc::SIGTERM) };
    assert_eq!(held.event(), None);
    assert!(held.child.wait().unwrap().success());
}

#[test]
fn a_vanished_controller_ends_a_held_program_with_an_error() {
    let mut held = Held::start();
    assert!(matches!(held.event(), Some(WorkloadEvent::Ready { .. })));
    drop(held.input);
    assert_eq!(held.child.wait().unwrap().code(), Some(1));
}

#[test]
fn wrong_arguments_are_one_clear_line_and_exit_code_2() {
    let cases: [(&str, &[&str], &str); 9] = [
        (GUPS, &["--size=800MB"], "KiB, MiB or GiB"),
        (GUPS, &["--size=1MiB", "--hot=2MiB"], "at most --size"),
        (GUPS, &["--weight=1.5"], "from 0 to 1"),
        (GUPS, &["--threads=0"], "--threads"),
        (
            GUPS,
            &["--size=4MiB", "--hot=2MiB", "--shift-at=1"],
            "--shift-at",
        ),
        (GUPS, &["--shift-at=61"], "--duration"),
        (GUPS, &["--duration=0"], "seconds"),
        (GUPS, &["--nonsense"], "--nonsense"),
        (MEMLAT, &["--size=0KiB"], "--size"),
    ];
    for (program, args, expected) in cases {
        let output = run(program, args);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{args:?}: {message}");
        assert!(message.contains(expected), "{args:?}: {message}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}
