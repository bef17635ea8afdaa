//! Tests with real processes: correct programs, and every way to fail.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use demeter_scenario::{Figure, Number, Ready};

use super::*;

/// Orphans are detected among this process's children, so tests run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// A folder for programs and their files.
struct Place {
    folder: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Place {
    fn new() -> Self {
        Self {
            _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner),
            folder: tempfile::tempdir().unwrap(),
        }
    }

    /// A shell that runs this script.
    fn sh(&self, script: &str) -> Launch {
        Launch {
            name: "sh".into(),
            file: "/bin/sh".into(),
            args: vec!["-c".into(), script.into()],
            env: BTreeMap::from([("PATH".into(), "/usr/bin:/bin".into())]),
            folder: self.folder.path().into(),
            ready: None,
            ready_within: Duration::from_secs(20),
            figure: Figure::Time,
            cgroup: None,
        }
    }

    /// Waits until a process has written its PID to a file of this name; returns the PID.
    fn pid_in(&self, name: &str) -> u32 {
        let file = self.folder.path().join(name);
        let start = Instant::now();
        loop {
            let text = fs::read_to_string(&file).unwrap_or_default();
            if let Ok(pid) = text.trim().parse() {
                return pid;
            }
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "no pid in {name}"
            );
            std::thread::yield_now();
        }
    }
}

fn bounds(duration_s: u64) -> Bounds<'static> {
    Bounds {
        warm_up: Duration::ZERO,
        duration: Duration::from_secs(duration_s),
        stop: None,
    }
}

/// Runs programs; returns each program's figures, by interval and then for the whole phase.
fn run(launches: &[Launch], duration_s: u64) -> Result<Vec<Vec<ProgramFigure>>, (Fault, String)> {
    let mut programs =
        Programs::new(Path::new("/"), launches, bounds(duration_s), &[NodeId(0)]).unwrap();
    let mut figures = vec![];
    let mut course = || {
        programs.fill()?;
        programs.go()?;
        loop {
            match programs.next_step()? {
                Step::Interval(_, interval) => figures.push(interval),
                Step::Done(_, all) => {
                    figures.push(all);
                    return Ok(());
                }
            }
        }
    };
    match course() {
        Ok(()) => Ok(figures),
        Err(fault) => {
            let name = match &fault {
                Fault::Program { name, .. } => Some(name.as_str()),
                _ => None,
            };
            let why = programs.logs(name).into_iter().find(|log| log.is_why);
            let text = why.map_or(String::new(), |log| log.text);
            Err((fault, text))
        }
    }
}

/// The error of a failing program, and its last output.
fn refused(launch: Launch, duration_s: u64) -> (String, String) {
    let (fault, text) = run(&[launch], duration_s).unwrap_err();
    let said = fault.to_string();
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.starts_with("sh: the program "), "{said}");
    (said, text)
}

fn number(regex: &str) -> Figure {
    Figure::Number(Number {
        command: vec![],
        regex: regex.into(),
        unit: "things/s".into(),
        counter: false,
    })
}

fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(") ").next().unwrap_or_default();
    !state.is_empty() && !state.starts_with('Z')
}

#[test]
fn time_to_completion_ends_the_phase_early() {
    let place = Place::new();
    let start = Instant::now();
    let figures = run(&[place.sh("sleep 0.2")], 60).unwrap();
    assert!(start.elapsed() < Duration::from_secs(30));
    let all = &figures.last().unwrap()[0];
    assert_eq!((all.name.as_str(), all.unit.as_str()), ("sh", "s"));
    let took_s = all.value.unwrap();
    assert!((0.2..30.0).contains(&took_s), "{took_s}");
}

#[test]
fn work_that_does_not_end_in_time_has_no_figure() {
    let place = Place::new();
    let figures = run(&[place.sh("exec sleep 60")], 1).unwrap();
    assert_eq!(figures.last().unwrap()[0].value, None);
}

#[test]
fn a_server_is_ready_before_its_client_starts_and_need_not_end() {
    let place = Place::new();
    let mut server = place.sh("sleep 0.3; touch up; echo serving; exec sleep 60");
    server.name = "server".into();
    server.ready = Some(Ready::Line("^serving$".into()));
    server.figure = Figure::None;
    let client =
        place.sh("test -e up || exit 1; for i in 1 2 3; do echo rate=$i; done; exec sleep 9");
    let figures = run(
        &[
            server,
            Launch {
                figure: number("rate=([0-9]+)"),
                ..client
            },
        ],
        1,
    )
    .unwrap();
    let all = figures.last().unwrap();
    assert_eq!(all.len(), 1, "the server has no figure: {all:?}");
    assert_eq!((all[0].name.as_str(), all[0].value), ("sh", Some(2.0)));
}

#[test]
fn runs_are_counted() {
    let place = Place::new();
    let launch = Launch {
        figure: Figure::Runs,
        ..place.sh("echo >>runs; sleep 0.05")
    };
    let figures = run(&[launch], 2).unwrap();
    let started = fs::read_to_string(place.folder.path().join("runs"))
        .unwrap()
        .len();
    let per_s = figures.last().unwrap()[0].value.unwrap();
    assert!(per_s > 0.0 && per_s <= started as f64, "{per_s} {started}");
    assert!(per_s < 20.0, "each takes 50 ms: {per_s}");
}

#[test]
fn a_timed_program_has_its_place_among_the_figures_of_an_interval() {
    let place = Place::new();
    let counted = Launch {
        name: "counted".into(),
        figure: number("n=([0-9]+)"),
        ..place.sh("while :; do echo n=1; sleep 0.1; done")
    };
    let figures = run(&[place.sh("sleep 60"), counted], 2).unwrap();
    assert!(figures.len() >= 2, "{figures:?}");
    for interval in figures {
        let names: Vec<_> = interval.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(names, ["sh", "counted"]);
        assert!(interval[0].is_elapsed && interval[0].value.is_none());
    }
}

#[test]
fn another_command_tells_the_figure() {
    let place = Place::new();
    let counter = Number {
        command: vec!["/bin/sh".into(), "-c".into(), "wc -c <ticks".into()],
        regex: "([0-9]+)".into(),
        unit: "ticks/s".into(),
        counter: true,
    };
    let launch = Launch {
        figure: Figure::Number(counter),
        ..place.sh(": >ticks; while sleep 0.05; do echo >>ticks; done")
    };
    let figures = run(&[launch], 4).unwrap();
    let per_s = figures.last().unwrap()[0].value.unwrap();
    assert!(per_s > 0.0 && per_s <= 20.0, "{per_s}");
}

#[test]
fn a_program_that_does_not_exist_is_named() {
    let place = Place::new();
    let launch = Launch {
        file: "/nowhere/x".into(),
        ..place.sh("")
    };
    let (said, _) = refused(launch, 5);
    assert!(said.contains("cannot be started from /nowhere/x"), "{said}");
}

#[test]
fn a_program_that_ends_early_is_named_with_its_last_lines() {
    let place = Place::new();
    let (said, text) = refused(place.sh("echo out; echo 'cannot bind' >&2; exit 3"), 20);
    assert!(said.contains("ended early (exit status: 3)"), "{said}");
    assert_eq!(text, "out\ncannot bind");
    // Even success is too early if a figure was expected.
    let launch = Launch {
        figure: number("(x)"),
        ..place.sh("exit 0")
    };
    assert!(refused(launch, 20).0.contains("ended early"));
    // An exit before the phase is also too early if the program's time is measured.
    let launch = Launch {
        ready: Some(Ready::AfterS(9)),
        ..place.sh("exit 0")
    };
    assert!(refused(launch, 20).0.contains("ended early"));
}

#[test]
fn a_program_that_never_gets_ready_is_named_with_what_was_awaited() {
    let place = Place::new();
    for (ready, awaited) in [
        (Ready::Line("^up$".into()), "no line matched \"^up$\""),
        // No server uses the first port.
        (Ready::Port(1), "port 1"),
    ] {
        let launch = Launch {
            ready: Some(ready),
            ready_within: Duration::from_millis(300),
            ..place.sh("echo starting; exec sleep 60")
        };
        let (said, text) = refused(launch, 20);
        assert!(
            said.contains("was not ready within") && said.contains(awaited),
            "{said}"
        );
        assert_eq!(text, "starting");
    }
}

#[test]
fn a_program_that_prints_no_figure_is_named() {
    let place = Place::new();
    let launch = Launch {
        figure: number("ops=([0-9]+)"),
        ..place.sh("echo ops=many; exec sleep 60")
    };
    let (said, text) = refused(launch, 1);
    assert!(
        said.contains("printed no figure") && said.contains("ops="),
        "{said}"
    );
    assert_eq!(text, "ops=many");
}

#[test]
fn a_program_that_forks_away_is_named_and_what_it_left_is_gone() {
    let place = Place::new();
    let (said, _) = refused(
        place.sh("setsid sh -c 'echo $$ >left; exec sleep 60' >/dev/null 2>&1 & while ! test -s left; do :; done"),
        20,
    );
    assert!(
        said.contains("left processes behind") && said.contains("foreground"),
        "{said}"
    );
    assert!(!is_running(place.pid_in("left")));
}

#[test]
fn nothing_is_left_of_programs_that_will_not_end() {
    let place = Place::new();
    let stubborn = "trap '' TERM; echo $$ >first; \
        setsid sh -c 'trap \"\" TERM; echo $$ >second; while :; do sleep 1; done' & \
        while :; do sleep 1; done";
    let figures = run(&[place.sh(stubborn)], 1).unwrap();
    assert_eq!(figures.last().unwrap()[0].value, None);
    for name in ["first", "second"] {
        assert!(!is_running(place.pid_in(name)), "{name}");
    }
}

#[test]
fn a_program_that_memory_ran_out_for_says_so() {
    let place = Place::new();
    // The kernel's counter of OOM kills rises while the program runs.
    let proc = place.folder.path().join("proc");
    fs::create_dir(&proc).unwrap();
    fs::write(proc.join("vmstat"), "nr_free_pages 1\noom_kill 7\n").unwrap();
    let script = "echo 'oom_kill 8' >proc/vmstat; kill -KILL $$";
    let launches = [place.sh(script)];
    let mut programs =
        Programs::new(place.folder.path(), &launches, bounds(20), &[NodeId(0)]).unwrap();
    programs.fill().unwrap();
    programs.go().unwrap();
    let said = programs.next_step().unwrap_err().to_string();
    assert!(
        said.starts_with("sh: the program was killed because memory ran out"),
        "{said}"
    );
}

#[test]
fn a_person_can_stop_it_at_any_time() {
    let place = Place::new();
    let stop = AtomicBool::new(false);
    let bounds = Bounds {
        stop: Some(&stop),
        ..bounds(60)
    };
    let mut waiting = place.sh("echo $$ >first; exec sleep 60");
    waiting.ready = Some(Ready::AfterS(60));
    waiting.ready_within = Duration::from_secs(60);
    let launches = [waiting];
    let mut programs = Programs::new(Path::new("/"), &launches, bounds, &[NodeId(0)]).unwrap();
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            place.pid_in("first");
            stop.store(true, Ordering::Relaxed);
        });
        programs.fill()
    });
    assert!(matches!(outcome, Err(Fault::Interrupted)), "{outcome:?}");
    drop(programs);
    assert!(!is_running(place.pid_in("first")));
}
