//! One of our own programs as a workload: its command line, its events and the orders that it takes.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use demeter_policy::{GuestVirtAddr, NodeId, Pid, VirtRange};
use demeter_scenario::{System, Workload as Kind};
use demeter_workload::WorkloadEvent;

use super::placement::{fast_nodes, nearest_fast};
use super::testbed::{StopConditions, Testbed};
use crate::cpus;
use crate::fault::Fault;
use crate::link::{Job, LineReader};
use crate::program::cgroup::{OwnCgroup, join};
use crate::vm::dies_with_this_thread;

/// The cgroup of a copy that may not use all nodes.
const CPUSET: &str = "/sys/fs/cgroup/bounded";

/// The hot set of a process.
#[derive(Debug)]
pub struct HotSet {
    /// The process.
    pub pid: Pid,
    /// Its addresses.
    pub range: VirtRange,
    /// The nodes that count as fast for it.
    pub fast: Vec<NodeId>,
}

pub(super) fn out_of_turn(event: &WorkloadEvent) -> Fault {
    Fault::Workload(format!("sent {:?} at the wrong time", event.to_string()))
}

/// A running program of our own; dropping it kills it.
#[derive(Debug)]
pub struct OwnProgram<'a> {
    child: Child,
    stdin: ChildStdin,
    pub(super) verifies: bool,
    pub(super) socket: u32,
    /// The nodes that count as fast for it.
    fast: Vec<NodeId>,
    events: LineReader<Patient>,
    /// Its first event, if it was waited for at the start.
    pub(super) ready: Option<WorkloadEvent>,
    limits: StopConditions<'a>,
    started: Instant,
    /// Removed when the process has ended.
    _cgroup: Option<OwnCgroup>,
}

impl<'a> OwnProgram<'a> {
    /// Starts a copy of the job's workload, which first populates its memory. Copies run on the sockets in turn.
    pub fn start(bed: &Testbed<'a>, job: &Job, copy: u32) -> Result<Self, Fault> {
        let machine = &job.scenario.machine;
        let socket = copy % machine.sockets();
        let (program, args) = command_line(bed, job, copy, socket)?;
        let program = bed.programs.join(program);
        let mut command = Command::new(&program);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C must reach the measuring process only, which then ends the workload.
            .process_group(0);
        dies_with_this_thread(&mut command);
        if machine.sockets() > 1 {
            let cpus: Vec<u32> = machine.cpus_of(socket).collect();
            // SAFETY: one system call on memory that was allocated before the fork.
            unsafe { command.pre_exec(move || cpus::pin(&cpus)) };
        }
        let cgroup = cpuset(bed, job, copy)?;
        if let Some(cgroup) = &cgroup {
            let procs = cgroup.open()?;
            // SAFETY: one system call on a file that was opened before the fork.
            unsafe { command.pre_exec(move || join(&procs)) };
        }
        let started = Instant::now();
        let mut child = command.spawn().map_err(Fault::io("start", &program))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(stdin), Some(stdout)) => {
                let verifies = matches!(job.scenario.workload, Kind::Gups(_));
                Ok(Self {
                    child,
                    stdin,
                    verifies,
                    socket,
                    fast: fast_nodes(bed, machine, socket, job.scenario.workload.copies()),
                    events: LineReader::new(Patient {
                        output: stdout,
                        tick: bed.limits.tick(),
                    }),
                    ready: None,
                    limits: bed.limits,
                    started,
                    _cgroup: cgroup,
                })
            }
            _ => Err(Fault::Workload("has no pipes".into())),
        }
    }

    /// Its process id.
    pub fn pid(&self) -> Pid {
        Pid(self.child.id())
    }

    /// Waits for the hot set; none if the program has none.
    pub(super) fn fill(&mut self) -> Result<Option<HotSet>, Fault> {
        let ready = match self.ready.take() {
            Some(ready) => ready,
            None => self.next_event()?,
        };
        match ready {
            WorkloadEvent::Ready { hot_bytes: 0, .. } => Ok(None),
            WorkloadEvent::Ready {
                hot_start,
                hot_bytes,
                ..
            } => self.hot_set(hot_start, hot_bytes).map(Some),
            other => Err(out_of_turn(&other)),
        }
    }

    /// The hot set of an event.
    pub(super) fn hot_set(&self, start: u64, bytes: u64) -> Result<HotSet, Fault> {
        let end = start.checked_add(bytes).map(GuestVirtAddr);
        let range = end.and_then(|end| VirtRange::new(GuestVirtAddr(start), end));
        let range = range.ok_or_else(|| {
            Fault::Workload(format!(
                "announced an impossible hot set: {bytes} bytes at {start:#x}"
            ))
        });
        Ok(HotSet {
            pid: self.pid(),
            range: range?,
            fast: self.fast.clone(),
        })
    }

    pub(super) fn verify(&mut self) -> Result<(u64, u64), Fault> {
        self.go()?;
        match self.next_event()? {
            WorkloadEvent::Verified { words, errors } => Ok((words, errors)),
            other => Err(out_of_turn(&other)),
        }
    }

    /// Waits for its next event. The limits bound the wait; in a VM, the host does.
    pub fn next_event(&mut self) -> Result<WorkloadEvent, Fault> {
        let line = loop {
            self.limits.check(self.started)?;
            match self.events.next_line() {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                line => break line,
            }
        };
        match line.map_err(Fault::io("read from", "the workload"))? {
            Some(line) => serde_json::from_str(&line)
                .map_err(|e| Fault::Workload(format!("sent {line:?}, not an event: {e}"))),
            None => {
                let status = self
                    .child
                    .wait()
                    .map_err(Fault::io("wait for", "the workload"))?;
                Err(Fault::Workload(format!("ended early ({status})")))
            }
        }
    }

    /// Lets the workload continue from its wait.
    pub fn go(&mut self) -> Result<(), Fault> {
        self.stdin
            .write_all(b"go\n")
            .map_err(Fault::io("write to", "the workload"))
    }
}

/// A workload's output, read with a bounded wait.
#[derive(Debug)]
struct Patient {
    output: ChildStdout,
    tick: Option<Duration>,
}

impl Read for Patient {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if let Some(tick) = self.tick {
            let mut waited = libc::pollfd {
                fd: self.output.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: the kernel fills one structure of ours.
            match unsafe { libc::poll(&raw mut waited, 1, tick.as_millis() as libc::c_int) } {
                0 => return Err(io::ErrorKind::WouldBlock.into()),
                ready if ready < 0 => return Err(io::Error::last_os_error()),
                _ => {}
            }
        }
        self.output.read(bytes)
    }
}

impl Drop for OwnProgram<'_> {
    fn drop(&mut self) {
        // Both fail only if it has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether the first copy's memory has a policy.
pub(super) fn has_policy(workload: &Kind) -> bool {
    matches!(workload, Kind::Gups(gups) if !(gups.bind.is_empty() && gups.interleave.is_empty()))
}

/// The cgroup of a copy that may not use all nodes.
fn cpuset(bed: &Testbed<'_>, job: &Job, copy: u32) -> Result<Option<OwnCgroup>, Fault> {
    match &job.scenario.workload {
        Kind::Gups(gups) if copy == 0 && !gups.cpuset.is_empty() => {
            let fast = bed.tiers.fastest();
            let cgroup = OwnCgroup::make(&bed.root, Path::new(CPUSET), fast)?;
            cgroup.allow_nodes(&list(&gups.cpuset))?;
            Ok(Some(cgroup))
        }
        _ => Ok(None),
    }
}

/// Numbers as the kernel lists them.
fn list(numbers: &[u32]) -> String {
    let words: Vec<String> = numbers.iter().map(u32::to_string).collect();
    words.join(",")
}

fn command_line(
    bed: &Testbed<'_>,
    job: &Job,
    copy: u32,
    socket: u32,
) -> Result<(&'static str, Vec<String>), Fault> {
    let scenario = &job.scenario;
    let mut args: Vec<String> = Vec::new();
    let mut option = |name: &str, value: String| args.extend([format!("--{name}"), value]);
    option("duration", scenario.duration_s.to_string());
    option("seed", scenario.seed.wrapping_add(copy.into()).to_string());
    let keeps_its_place = match &scenario.workload {
        Kind::Gups(gups) => copy == 0 && !(gups.bind.is_empty() && gups.interleave.is_empty()),
        _ => false,
    };
    if job.settings.system == System::Oracle && !keeps_its_place {
        option(
            "place-hot",
            nearest_fast(bed, &scenario.machine, socket).to_string(),
        );
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
                let hot = match phase.is_idle() {
                    true => "idle".to_owned(),
                    false => format!("{}MiB", phase.hot_mib),
                };
                option("phase", format!("{}:{hot}", phase.at_s));
            }
            if gups.shared_by > 1 {
                option("shared-by", gups.shared_by.to_string());
            }
            if gups.reserve_mib > 0 {
                option("reserve", format!("{}MiB", gups.reserve_mib));
            }
            for (name, nodes) in [("bind", &gups.bind), ("interleave", &gups.interleave)] {
                if copy == 0 && !nodes.is_empty() {
                    option(name, list(nodes));
                }
            }
            if gups.reverse {
                args.push("--reverse".into());
            }
            args.push("--verify".into());
            "gups"
        }
        Kind::Memlat(memlat) => {
            option("size", format!("{}MiB", memlat.size_mib));
            option("cold", format!("{}MiB", memlat.cold_mib));
            "memlat"
        }
        Kind::Mix(mix) => {
            let parameters = toml::to_string(mix)
                .map_err(|e| Fault::Workload(format!("cannot get its parts as text: {e}")))?;
            option("workload", parameters);
            "mix"
        }
        other => {
            let kind = other.kind();
            return Err(Fault::Workload(format!("{kind} has no program here")));
        }
    };
    args.extend(["--json".into(), "--hold".into()]);
    Ok((program, args))
}
