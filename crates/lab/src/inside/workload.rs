//! The workload's process: its arguments, its events, the words that let it go on.

use std::io::Write;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use demeter_policy::{GuestVirtAddr, Pid, VirtRange};
use demeter_scenario::{System, Workload as Kind};

use super::fault::Fault;
use crate::link::{Job, LineReader};
use crate::workload::Event;

/// A workload that was started and not yet waited for; killed when dropped.
#[derive(Debug)]
pub struct Workload {
    child: Child,
    stdin: ChildStdin,
    verifies: bool,
    events: LineReader<ChildStdout>,
}

impl Workload {
    /// Starts the job's workload, which first fills its memory.
    pub fn start(job: &Job) -> Result<Self, Fault> {
        let (program, args) = command_line(job);
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Fault::io("start", program))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(stdin), Some(stdout)) => {
                let verifies = matches!(job.scenario.workload, Kind::Gups(_));
                Ok(Self {
                    child,
                    stdin,
                    verifies,
                    events: LineReader::new(stdout),
                })
            }
            _ => Err(Fault::Workload("has no pipes".into())),
        }
    }

    /// Its process id.
    pub fn pid(&self) -> Pid {
        Pid(self.child.id())
    }

    /// Whether it checks its data once it may go on after the timed phase.
    pub fn verifies(&self) -> bool {
        self.verifies
    }

    /// Waits for its next event. The host's time limit bounds the wait.
    pub fn next_event(&mut self) -> Result<Event, Fault> {
        let line = self
            .events
            .next_line()
            .map_err(Fault::io("read from", "the workload"))?;
        match line {
            Some(line) => serde_json::from_str(&line)
                .map_err(|e| Fault::Workload(format!("said {line:?}, which is no event: {e}"))),
            None => {
                let status = self
                    .child
                    .wait()
                    .map_err(Fault::io("wait for", "the workload"))?;
                Err(Fault::Workload(format!(
                    "ended early ({status}); see console.log"
                )))
            }
        }
    }

    /// Lets it go on from where it holds.
    pub fn go(&mut self) -> Result<(), Fault> {
        self.stdin
            .write_all(b"go\n")
            .map_err(Fault::io("write to", "the workload"))
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        // Both fail only when it has ended already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The hot set that an event speaks of.
pub fn hot_range(start: u64, bytes: u64) -> Result<VirtRange, Fault> {
    start
        .checked_add(bytes)
        .and_then(|end| VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(end)))
        .ok_or_else(|| {
            Fault::Workload(format!(
                "announced an impossible hot set: {bytes} bytes at {start:#x}"
            ))
        })
}

fn command_line(job: &Job) -> (&'static str, Vec<String>) {
    let scenario = &job.scenario;
    let mut args: Vec<String> = Vec::new();
    let mut option = |name: &str, value: String| args.extend([format!("--{name}"), value]);
    option("duration", scenario.duration_s.to_string());
    option("seed", scenario.seed.to_string());
    if job.system == System::Oracle {
        option("place-hot", "0".into());
    }
    let program = match &scenario.workload {
        Kind::Gups(gups) => {
            option("size", format!("{}MiB", gups.size_mib));
            option("hot", format!("{}MiB", gups.hot_mib));
            option("weight", gups.hot_weight.to_string());
            option("threads", gups.threads.to_string());
            if let Some(at_s) = gups.shift_at_s {
                option("shift-at", at_s.to_string());
            }
            for phase in &gups.phases {
                option("phase", format!("{}:{}MiB", phase.at_s, phase.hot_mib));
            }
            if gups.reverse {
                args.push("--reverse".into());
            }
            args.push("--verify".into());
            "/bin/gups"
        }
        Kind::Memlat(memlat) => {
            option("size", format!("{}MiB", memlat.size_mib));
            option("cold", format!("{}MiB", memlat.cold_mib));
            "/bin/memlat"
        }
    };
    args.extend(["--json".into(), "--hold".into()]);
    (program, args)
}
