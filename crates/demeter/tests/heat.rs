//! Tests of `demeter guest heat` with an agent that answers on its socket.

use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use demeter_guest::agent::Control;
use demeter_guest::heat::{Heat, ProcessHeat, RangeHeat};
use demeter_guest::server::Server;
use demeter_guest::status::StatusCell;

/// Time limit of every test.
const LIMIT: Duration = Duration::from_secs(60);

/// The answer of an agent with one process, the first MiB of which is hot.
fn heat() -> Heat {
    let range = |mib: u64, samples| RangeHeat {
        start: mib << 20,
        end: (mib + 1) << 20,
        samples,
        ..RangeHeat::default()
    };
    Heat {
        processes: vec![ProcessHeat {
            pid: 4711,
            ranges: vec![range(1, 9.0), range(2, 0.0)],
        }],
        ..Heat::default()
    }
}

/// Runs `demeter guest heat` with a fake agent. Returns its output, and the number of requests.
fn beside_an_agent(args: &[&str]) -> (String, usize) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("guest.sock");
    let (controls, received) = mpsc::channel();
    let status = StatusCell::default();
    let _server = Server::start(&socket, None, status.clone(), controls.clone()).unwrap();
    let agent = thread::spawn(move || {
        let deadline = Instant::now() + LIMIT;
        let mut looks = 0;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match received.recv_timeout(left) {
                Ok(Control::Look) => status.heat.tell(heat()),
                Ok(Control::Stop) => return looks,
                Ok(other) => panic!("{other:?} was not asked for"),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("nobody ends it")
                }
            }
            looks += 1;
        }
    });
    let mut command = Command::new(env!("CARGO_BIN_EXE_demeter"));
    command.args(["guest", "heat", "--seconds", "1", "--socket"]);
    let done = command.arg(&socket).args(args).output().unwrap();
    controls.send(Control::Stop).unwrap();
    let looks = agent.join().unwrap();
    assert!(done.status.success(), "{done:?}");
    (String::from_utf8(done.stdout).unwrap(), looks)
}

#[test]
fn a_running_agents_heat_is_drawn() {
    let (picture, looks) = beside_an_agent(&[]);
    assert!(looks >= 1);
    assert!(picture.contains("process 4711"), "{picture}");
    // The left half is at maximum heat, the right half is cold.
    let line = format!("|{}{}|", "@".repeat(36), " ".repeat(36));
    let lines = picture.lines().filter(|text| text.contains(&line));
    assert!(lines.count() >= 1, "{picture}");
}

#[test]
fn each_look_is_a_line_of_json() {
    let (lines, looks) = beside_an_agent(&["--json"]);
    let told: Vec<Heat> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(looks >= 1 && told.len() == looks, "{looks}: {lines}");
    assert!(told.iter().all(|told| *told == heat()));
}
