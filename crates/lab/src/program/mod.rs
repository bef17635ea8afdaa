//! Real programs as a workload: starts them in order, monitors, measures and stops them.
//!
//! This code runs them inside a lab VM and on a machine with two nodes. It is an error if a program exits early, never
//! gets ready, prints no figure or leaves processes behind. The error is one line that names the program; its last
//! output is kept.

mod ask;
pub(crate) mod cgroup;
mod family;
mod member;
mod meter;
mod output;
mod process;
#[cfg(test)]
mod tests;

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use demeter_policy::{NodeId, Pid};
use demeter_scenario::{Figure, Ready};

pub(crate) use self::{meter::Meter, output::OutputParser, process::lock};

use self::cgroup::OwnCgroup;
use self::member::Member;
use self::process::Said;
use crate::fault::Fault;
use crate::launch::Launch;
use crate::link::{ProgramFigure, ProgramLog};

/// Time between two reports.
const INTERVAL: Duration = Duration::from_secs(1);
/// Interval between checks of the stop flag, and of a port.
const TICK: Duration = Duration::from_millis(100);
/// Time limit for programs to exit after SIGTERM.
const END_LIMIT: Duration = Duration::from_secs(3);
/// Minimum length of an interval, seconds.
const LENGTH_MIN_S: f64 = 1e-6;

/// Limits of a run.
#[derive(Debug, Clone, Copy)]
pub struct Bounds<'a> {
    /// Time between the last program's readiness and the timed phase.
    pub warm_up: Duration,
    /// Longest timed phase.
    pub duration: Duration,
    /// The user's stop flag, if there is one.
    pub stop: Option<&'a AtomicBool>,
}

/// The next event of the timed phase.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// An interval has ended: seconds into the phase, and its figures.
    Interval(f64, Vec<ProgramFigure>),
    /// The phase has ended: its length in seconds, and the overall figures.
    Done(f64, Vec<ProgramFigure>),
}

/// The programs of a workload. Dropping this ends them and all their descendants.
#[derive(Debug)]
pub struct Programs<'a> {
    root: PathBuf,
    members: Vec<Member>,
    bounds: Bounds<'a>,
    said: Receiver<Said>,
    tell: Sender<Said>,
    start: Instant,
    last_s: f64,
    is_over: bool,
    /// Processes that the OOM killer had ended before any of these ran.
    killed_before: u64,
}

impl<'a> Programs<'a> {
    /// Programs that do not run yet. Kernel counters are read and cgroups created below `root`; `fast` are the nodes
    /// of the fast tier.
    ///
    /// # Errors
    /// When a regular expression is invalid, or adopting processes or creating a cgroup fails.
    pub fn new(
        root: &Path,
        launches: &[Launch],
        bounds: Bounds<'a>,
        fast: &[NodeId],
    ) -> Result<Self, Fault> {
        family::adopt().map_err(Fault::io("adopt", "the programs' descendants"))?;
        let (tell, said) = mpsc::channel();
        let start = Instant::now();
        let member = |launch: &Launch| {
            let cgroup = launch.cgroup.as_ref();
            let cgroup = cgroup.map(|cgroup| OwnCgroup::make(root, &cgroup.path, fast));
            Member::new(launch, cgroup.transpose()?, start)
        };
        let members = launches.iter().map(member);
        Ok(Self {
            members: members.collect::<Result<_, _>>()?,
            bounds,
            said,
            tell,
            start,
            last_s: 0.0,
            is_over: false,
            killed_before: killed_for_memory(root),
            root: root.into(),
        })
    }

    /// Starts programs that must be ready before the timed phase. Starts them one at a time, then lets them warm up.
    pub fn fill(&mut self) -> Result<(), Fault> {
        for index in 0..self.members.len() {
            let launch = self.members[index].launch();
            let (Some(ready), within) = (launch.ready.clone(), launch.ready_within) else {
                continue;
            };
            self.members[index].start(&self.tell)?;
            self.wait_until_ready(index, &ready, within)?;
        }
        let warm = Instant::now() + self.bounds.warm_up;
        while Instant::now() < warm {
            self.hear(warm)?;
        }
        Ok(())
    }

    /// Starts the timed phase, and the programs that start with it.
    pub fn go(&mut self) -> Result<(), Fault> {
        self.start = Instant::now();
        self.last_s = 0.0;
        for member in &mut self.members {
            member.begin(self.start, &self.tell)?;
        }
        Ok(())
    }

    /// Waits for the next event of the timed phase.
    pub fn next_step(&mut self) -> Result<Step, Fault> {
        if self.is_over {
            let figures = self.members.iter().filter_map(|m| m.figure().transpose());
            return Ok(Step::Done(self.last_s, figures.collect::<Result<_, _>>()?));
        }
        let end = self.start + self.bounds.duration;
        let due = (self.start + Duration::from_secs_f64(self.last_s.round()) + INTERVAL).min(end);
        while !self.is_over && Instant::now() < due {
            self.hear(due)?;
            self.is_over = self.has_done_its_work();
        }
        self.is_over |= Instant::now() >= end;
        let t_s = self.start.elapsed().as_secs_f64();
        let length_s = (t_s - self.last_s).max(LENGTH_MIN_S);
        self.last_s += length_s;
        let figures = self.members.iter_mut();
        let figures = figures.filter_map(|member| member.end_interval(length_s));
        Ok(Step::Interval(self.last_s, figures.collect()))
    }

    /// PIDs of the running processes.
    pub fn pids(&self) -> Vec<Pid> {
        self.members.iter().filter_map(Member::pid).collect()
    }

    /// The last output of each program. `failed` names a program with an error.
    pub fn logs(&self, failed: Option<&str>) -> Vec<ProgramLog> {
        let log = |member: &Member| ProgramLog {
            name: member.launch().name.clone(),
            text: member.last_lines(),
            is_why: failed == Some(&member.launch().name),
        };
        self.members.iter().map(log).collect()
    }

    fn wait_until_ready(
        &mut self,
        index: usize,
        ready: &Ready,
        within: Duration,
    ) -> Result<(), Fault> {
        let start = Instant::now();
        let is_ready = |programs: &Self| match ready {
            Ready::Line(_) => programs.members[index].is_ready(),
            Ready::Port(port) => accepts(*port),
            Ready::AfterS(s) => start.elapsed() >= Duration::from_secs(*s),
        };
        while !is_ready(self) {
            if start.elapsed() >= within {
                let awaited = match ready {
                    Ready::Line(regex) => format!("no line matched {regex:?}"),
                    Ready::Port(port) => format!("no server listens on port {port}"),
                    Ready::AfterS(_) => "its time was not up".into(),
                };
                let s = within.as_secs();
                return Err(self.members[index].fault(format!(
                    "was not ready within ready_within_s = {s}: {awaited}"
                )));
            }
            self.hear(Instant::now() + TICK)?;
        }
        Ok(())
    }

    /// Waits for an event of a program, until `until` at most.
    fn hear(&mut self, until: Instant) -> Result<(), Fault> {
        let mut wait = until.saturating_duration_since(Instant::now());
        if let Some(stop) = self.bounds.stop {
            if stop.load(Ordering::Relaxed) {
                return Err(Fault::Interrupted);
            }
            wait = wait.min(TICK);
        }
        match self.said.recv_timeout(wait) {
            Ok(Said::Ended(pid)) => self.ended(pid),
            // We hold the other end ourselves.
            Ok(Said::Ready) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Ok(())
            }
        }
    }

    /// Handles the exit of a program's process, expected or not.
    fn ended(&mut self, pid: Pid) -> Result<(), Fault> {
        let Some(index) = self.members.iter().position(|m| m.pid() == Some(pid)) else {
            return Ok(());
        };
        let leaves_some = family::leaves_strays(&self.pids());
        let killed = killed_for_memory(&self.root) > self.killed_before;
        let member = &mut self.members[index];
        let Some(status) = member.take_status() else {
            return Ok(());
        };
        if killed && !status.success() {
            return Err(member.fault(
                "was killed because memory ran out: raise machine.slow.usable_mib, or have it \
                 use less"
                    .into(),
            ));
        }
        if leaves_some {
            return Err(member.fault(format!(
                "has left processes behind and ended ({status}): have it stay in the foreground"
            )));
        }
        if !status.success() || !member.may_end() {
            return Err(member.fault(format!("ended early ({status})")));
        }
        member.completed(&self.tell)
    }

    /// Whether all measurements are complete.
    fn has_done_its_work(&self) -> bool {
        let measured = |member: &&Member| member.launch().figure != Figure::None;
        self.members.iter().filter(measured).all(Member::has_ended)
    }
}

impl Drop for Programs<'_> {
    fn drop(&mut self) {
        for member in &mut self.members {
            member.ask_to_end();
        }
        let deadline = Instant::now() + END_LIMIT;
        while self.members.iter_mut().any(Member::is_running) && Instant::now() < deadline {
            // Every exit sends an event; other events no longer matter.
            let _ = self.said.recv_timeout(TICK);
        }
        for member in &mut self.members {
            member.kill();
        }
        family::kill_strays(&[]);
    }
}

/// Whether a server accepts connections on this port of the loopback address.
fn accepts(port: u16) -> bool {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    TcpStream::connect_timeout(&address, TICK).is_ok()
}

/// Number of OOM kills: `oom_kill` of /proc/vmstat.
fn killed_for_memory(root: &Path) -> u64 {
    let text = std::fs::read_to_string(root.join("proc/vmstat")).unwrap_or_default();
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count
        .and_then(|count| count.trim().parse().ok())
        .unwrap_or(0)
}
