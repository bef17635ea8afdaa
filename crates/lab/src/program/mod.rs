//! Real programs as a workload: started in order, watched, measured, and gone at the end.
//!
//! The same code runs them inside a lab VM and on a machine that has two nodes of its own. A program
//! that ends early, never gets ready, prints no figure or leaves processes behind becomes one line
//! that names it; what it printed last is kept for the person.

mod ask;
pub(crate) mod cgroup;
mod family;
mod heard;
mod launch;
mod member;
mod meter;
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

pub use self::launch::Launch;
pub(crate) use self::{heard::Heard, meter::Meter, process::lock};

use self::cgroup::OwnCgroup;
use self::member::Member;
use self::process::Said;
use crate::inside::Fault;
use crate::link::{ProgramFigure, ProgramLog};

/// Time between two reports.
const INTERVAL: Duration = Duration::from_secs(1);
/// How often a wait looks at the stop flag, and at a port.
const TICK: Duration = Duration::from_millis(100);
/// How long programs may take to end once they are asked to.
const END_LIMIT: Duration = Duration::from_secs(3);
/// No interval is shorter, seconds.
const LENGTH_MIN_S: f64 = 1e-6;

/// What a run is bounded by.
#[derive(Debug, Clone, Copy)]
pub struct Bounds<'a> {
    /// Time between the last program's readiness and the timed phase.
    pub warm_up: Duration,
    /// Longest timed phase.
    pub duration: Duration,
    /// The person's wish to stop, where somebody hears of it.
    pub stop: Option<&'a AtomicBool>,
}

/// What comes next in the timed phase.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// An interval has ended: seconds into the phase, and its figures.
    Interval(f64, Vec<ProgramFigure>),
    /// The phase is over: its length in seconds, and the figures of all of it.
    Done(f64, Vec<ProgramFigure>),
}

/// The programs of a workload. They and all that they started are gone when this is dropped.
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
    /// Processes that the kernel had killed for lack of memory before any of these ran.
    killed_before: u64,
}

impl<'a> Programs<'a> {
    /// Nothing runs yet. The kernel's counters are read below `root`, and cgroups made there; `fast` are the nodes
    /// of the fast tier.
    ///
    /// # Errors
    /// When a regular expression is none, or the kernel refuses to let us adopt or to make a cgroup.
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

    /// Starts those that must be ready before the timed phase, one after the other, and lets them
    /// warm up.
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

    /// The timed phase begins: starts those that were not started yet.
    pub fn go(&mut self) -> Result<(), Fault> {
        self.start = Instant::now();
        self.last_s = 0.0;
        for member in &mut self.members {
            member.begin(self.start, &self.tell)?;
        }
        Ok(())
    }

    /// Waits for what comes next in the timed phase.
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

    /// The processes that run now.
    pub fn pids(&self) -> Vec<Pid> {
        self.members.iter().filter_map(Member::pid).collect()
    }

    /// What each of them has printed last. `failed` is the one that something is wrong with.
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
                    Ready::Port(port) => format!("nobody listens on port {port}"),
                    Ready::AfterS(_) => "its time was not over".into(),
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

    /// Waits for what a program tells, `until` then at most.
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
            // The other end is our own.
            Ok(Said::Ready) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Ok(())
            }
        }
    }

    /// A program's process has ended: as it should, or not.
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

    /// Whether nobody is measured any more.
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
            // Each end is told; what else is told no longer matters.
            let _ = self.said.recv_timeout(TICK);
        }
        for member in &mut self.members {
            member.kill();
        }
        family::kill_strays(&[]);
    }
}

/// Whether somebody accepts connections on this port of the loopback address.
fn accepts(port: u16) -> bool {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    TcpStream::connect_timeout(&address, TICK).is_ok()
}

/// Processes that the kernel has killed for lack of memory: `oom_kill` of /proc/vmstat.
fn killed_for_memory(root: &Path) -> u64 {
    let text = std::fs::read_to_string(root.join("proc/vmstat")).unwrap_or_default();
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count
        .and_then(|count| count.trim().parse().ok())
        .unwrap_or(0)
}
