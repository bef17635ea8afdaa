//! The workload of a job: one of our own programs, with its arguments, events and orders, or real programs, which have
//! no protocol.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use demeter_policy::{GuestVirtAddr, NodeId, Pid, VirtRange};
use demeter_scenario::{Machine, System, Workload as Kind};
use demeter_workload::{Rate, WorkloadEvent};

use super::fault::Fault;
use super::placement::{Placement, fast_nodes, nearest_fast};
use super::testbed::{StopConditions, Testbed};
use crate::here::cpus;
use crate::link::{Job, LineReader, ProgramFigure, ProgramLog};
use crate::program::cgroup::{OwnCgroup, join};
use crate::program::{Bounds, Programs, Step};
use crate::vm::dies_with_this_thread;

/// The cgroup of a copy that may not use all nodes.
const CPUSET: &str = "/sys/fs/cgroup/bounded";

/// The processes under management; dropping this ends them.
#[derive(Debug)]
pub enum Workload<'a> {
    /// Copies of one of our own programs.
    Own(Vec<OwnProgram<'a>>),
    /// Real programs.
    Programs(Programs<'a>),
}

/// Speed of a workload.
#[derive(Debug, Default)]
pub struct Speed {
    /// The speed that one of our own programs reports.
    pub rate: Option<Rate>,
    /// The figures of real programs.
    pub programs: Vec<ProgramFigure>,
}

/// The next event of the timed phase.
#[derive(Debug)]
pub enum Next {
    /// An interval has ended: seconds into the phase, and the speed.
    Interval(f64, Speed),
    /// The hot sets have moved: seconds into the phase, and their new ranges.
    Shift(f64, Vec<HotSet>),
    /// The phase has ended: its length in seconds, and the overall speed.
    Done(f64, Speed),
}

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

impl<'a> Workload<'a> {
    /// Prepares the job's workload. Only one of our own programs starts here.
    pub fn new(bed: &Testbed<'a>, job: &Job) -> Result<Self, Fault> {
        let Kind::Program(programs) = &job.scenario.workload else {
            let mut started = vec![];
            for copy in 0..job.scenario.workload.copies() {
                let mut program = OwnProgram::start(bed, job, copy)?;
                // The others would take memory of the nodes to which it is bound.
                if copy == 0 && has_policy(&job.scenario.workload) {
                    program.ready = Some(program.next_event()?);
                }
                started.push(program);
            }
            return Ok(Self::Own(started));
        };
        let bounds = Bounds {
            warm_up: Duration::from_secs(programs.warm_up_s),
            duration: Duration::from_secs(job.scenario.duration_s),
            stop: bed.limits.stop,
        };
        Ok(Self::Programs(Programs::new(
            &bed.root,
            &job.launches,
            bounds,
            bed.tiers.fastest(),
        )?))
    }

    /// Waits until memory is populated. Returns the hot sets, if all are known.
    pub fn fill(&mut self) -> Result<Option<Vec<HotSet>>, Fault> {
        match self {
            Self::Own(copies) => copies.iter_mut().map(OwnProgram::fill).collect(),
            Self::Programs(programs) => programs.fill().map(|()| None),
        }
    }

    /// The process that is, with its descendants, the workload. Real programs may come and go, and there may be several
    /// copies: for them it is this process, which starts them.
    pub fn target(&self) -> Pid {
        match self {
            Self::Own(copies) if copies.len() == 1 => copies[0].pid(),
            Self::Own(_) | Self::Programs(_) => Pid(std::process::id()),
        }
    }

    /// PIDs of the running processes.
    pub fn pids(&self) -> Vec<Pid> {
        match self {
            Self::Own(copies) => copies.iter().map(OwnProgram::pid).collect(),
            Self::Programs(programs) => programs.pids(),
        }
    }

    /// Starts the timed phase.
    pub fn go(&mut self) -> Result<(), Fault> {
        match self {
            Self::Own(copies) => copies.iter_mut().try_for_each(OwnProgram::go),
            Self::Programs(programs) => programs.go(),
        }
    }

    /// Waits for the next event of the timed phase.
    pub fn next(&mut self) -> Result<Next, Fault> {
        match self {
            Self::Own(copies) => next_of(copies),
            Self::Programs(programs) => Ok(match programs.next_step()? {
                Step::Interval(t_s, figures) => Next::Interval(t_s, Speed::of(figures)),
                Step::Done(t_s, figures) => Next::Done(t_s, Speed::of(figures)),
            }),
        }
    }

    /// Lets the workload verify its data, if it can; returns the words checked and the words found wrong.
    pub fn verify(&mut self) -> Result<Option<(u64, u64)>, Fault> {
        match self {
            Self::Own(copies) if copies.iter().all(|copy| copy.verifies) => {
                let mut sum = (0, 0);
                for copy in copies {
                    let (words, errors) = copy.verify()?;
                    sum = (sum.0 + words, sum.1 + errors);
                }
                Ok(Some(sum))
            }
            Self::Own(_) | Self::Programs(_) => Ok(None),
        }
    }

    /// The nodes on which the memory of each copy lies, as a log.
    pub fn placements(
        &self,
        bed: &Testbed<'_>,
        machine: &Machine,
    ) -> Result<Vec<ProgramLog>, Fault> {
        let Self::Own(copies) = self else {
            return Ok(vec![]);
        };
        let log = |(number, copy): (usize, &OwnProgram<'_>)| {
            let placement = Placement::read(&bed.root, copy.pid())?;
            Ok(ProgramLog {
                name: format!("copy {number}"),
                text: placement.describe(machine, copy.socket),
                is_why: false,
            })
        };
        copies.iter().enumerate().map(log).collect()
    }

    /// The last output of programs; `ended` is the job's result so far.
    pub fn logs(&self, ended: &Result<(), Fault>) -> Vec<ProgramLog> {
        let failed = match ended {
            Err(Fault::Program { name, .. }) => Some(name.as_str()),
            _ => None,
        };
        match self {
            Self::Own(_) => vec![],
            Self::Programs(programs) => programs.logs(failed),
        }
    }
}

impl Speed {
    fn of(programs: Vec<ProgramFigure>) -> Self {
        Self {
            rate: None,
            programs,
        }
    }
}

impl From<Rate> for Speed {
    fn from(rate: Rate) -> Self {
        Self {
            rate: Some(rate),
            programs: vec![],
        }
    }
}

/// The next event of all copies, which have the same schedule. The first copy's clock counts. Several copies have a figure
/// each.
fn next_of(copies: &mut [OwnProgram<'_>]) -> Result<Next, Fault> {
    let mut events = vec![];
    for copy in copies.iter_mut() {
        events.push(copy.next_event()?);
    }
    let rate_of = |event: &WorkloadEvent| match event {
        WorkloadEvent::Interval { rate, .. } | WorkloadEvent::Done { rate, .. } => Ok(*rate),
        other => Err(out_of_turn(other)),
    };
    let speed = || -> Result<Speed, Fault> {
        let rates: Vec<Rate> = events.iter().map(rate_of).collect::<Result<_, _>>()?;
        if let [rate] = rates[..] {
            return Ok(rate.into());
        }
        let figure = |(copy, rate): (usize, &Rate)| ProgramFigure {
            name: format!("copy {copy}"),
            unit: rate.unit().name().into(),
            value: Some(rate.value()),
            is_elapsed: false,
            fast_bytes: None,
        };
        Ok(Speed::of(rates.iter().enumerate().map(figure).collect()))
    };
    match &events[0] {
        WorkloadEvent::Interval { t_s, .. } => Ok(Next::Interval(*t_s, speed()?)),
        WorkloadEvent::Done { t_s, .. } => Ok(Next::Done(*t_s, speed()?)),
        WorkloadEvent::Shift { t_s, .. } => {
            let hot = |(copy, event): (&OwnProgram<'_>, &WorkloadEvent)| match event {
                WorkloadEvent::Shift {
                    hot_start,
                    hot_bytes,
                    ..
                } => copy.hot_set(*hot_start, *hot_bytes),
                other => Err(out_of_turn(other)),
            };
            let hot = copies.iter().zip(&events).map(hot);
            Ok(Next::Shift(*t_s, hot.collect::<Result<_, _>>()?))
        }
        other => Err(out_of_turn(other)),
    }
}

/// A running program of our own; dropping it kills it.
#[derive(Debug)]
pub struct OwnProgram<'a> {
    child: Child,
    stdin: ChildStdin,
    verifies: bool,
    socket: u32,
    /// The nodes that count as fast for it.
    fast: Vec<NodeId>,
    events: LineReader<Patient>,
    /// Its first event, if it was waited for at the start.
    ready: Option<WorkloadEvent>,
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
    fn fill(&mut self) -> Result<Option<HotSet>, Fault> {
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
    fn hot_set(&self, start: u64, bytes: u64) -> Result<HotSet, Fault> {
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

    fn verify(&mut self) -> Result<(u64, u64), Fault> {
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

fn out_of_turn(event: &WorkloadEvent) -> Fault {
    Fault::Workload(format!("sent {:?} at the wrong time", event.to_string()))
}

/// Whether the first copy's memory has a policy.
fn has_policy(workload: &Kind) -> bool {
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
