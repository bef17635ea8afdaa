//! The workload of a job: one of our own programs, with its arguments, events and orders, or real programs, which have
//! no protocol.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use demeter_policy::{GuestVirtAddr, Pid, VirtRange};
use demeter_scenario::{System, Workload as Kind};

use super::fault::Fault;
use super::testbed::{Limits, Testbed};
use crate::link::{Job, LineReader, ProgramFigure, ProgramLog};
use crate::program::{Bounds, Programs, Step};
use crate::vm::dies_with_this_thread;
use crate::workload::{Event, Rate};

/// The processes under management; dropping this ends them.
#[derive(Debug)]
pub enum Workload<'a> {
    /// One of our own programs.
    Own(OwnProgram<'a>),
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
    /// The hot set has moved: seconds into the phase, and its new range.
    Shift(f64, VirtRange),
    /// The phase has ended: its length in seconds, and the overall speed.
    Done(f64, Speed),
}

impl<'a> Workload<'a> {
    /// Prepares the job's workload. Only one of our own programs starts here.
    pub fn new(bed: &Testbed<'a>, job: &Job) -> Result<Self, Fault> {
        let Kind::Program(programs) = &job.scenario.workload else {
            return Ok(Self::Own(OwnProgram::start(bed, job)?));
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
            bed.fast,
        )?))
    }

    /// Waits until memory is populated. Returns the hot set, if known.
    pub fn fill(&mut self) -> Result<Option<VirtRange>, Fault> {
        match self {
            Self::Own(program) => program.fill(),
            Self::Programs(programs) => programs.fill().map(|()| None),
        }
    }

    /// The process that is, with its descendants, the workload. Real programs may come and go, so for them it is this
    /// process, which starts them.
    pub fn target(&self) -> Pid {
        match self {
            Self::Own(program) => program.pid(),
            Self::Programs(_) => Pid(std::process::id()),
        }
    }

    /// PIDs of the running processes.
    pub fn pids(&self) -> Vec<Pid> {
        match self {
            Self::Own(program) => vec![program.pid()],
            Self::Programs(programs) => programs.pids(),
        }
    }

    /// Starts the timed phase.
    pub fn go(&mut self) -> Result<(), Fault> {
        match self {
            Self::Own(program) => program.go(),
            Self::Programs(programs) => programs.go(),
        }
    }

    /// Waits for the next event of the timed phase.
    pub fn next(&mut self) -> Result<Next, Fault> {
        match self {
            Self::Own(program) => program.next(),
            Self::Programs(programs) => Ok(match programs.next_step()? {
                Step::Interval(t_s, figures) => Next::Interval(t_s, Speed::of(figures)),
                Step::Done(t_s, figures) => Next::Done(t_s, Speed::of(figures)),
            }),
        }
    }

    /// Lets the workload verify its data, if it can; returns the words checked and the words found wrong.
    pub fn verify(&mut self) -> Result<Option<(u64, u64)>, Fault> {
        match self {
            Self::Own(program) if program.verifies => program.verify().map(Some),
            Self::Own(_) | Self::Programs(_) => Ok(None),
        }
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

/// A running program of our own; dropping it kills it.
#[derive(Debug)]
pub struct OwnProgram<'a> {
    child: Child,
    stdin: ChildStdin,
    verifies: bool,
    events: LineReader<Patient>,
    limits: Limits<'a>,
    started: Instant,
}

impl<'a> OwnProgram<'a> {
    /// Starts the job's workload, which first populates its memory.
    pub fn start(bed: &Testbed<'a>, job: &Job) -> Result<Self, Fault> {
        let (program, args) = command_line(bed, job)?;
        let program = bed.programs.join(program);
        let mut command = Command::new(&program);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C must reach the measuring process only, which then ends the workload.
            .process_group(0);
        dies_with_this_thread(&mut command);
        let started = Instant::now();
        let mut child = command.spawn().map_err(Fault::io("start", &program))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(stdin), Some(stdout)) => {
                let verifies = matches!(job.scenario.workload, Kind::Gups(_));
                Ok(Self {
                    child,
                    stdin,
                    verifies,
                    events: LineReader::new(Patient {
                        output: stdout,
                        tick: bed.limits.tick(),
                    }),
                    limits: bed.limits,
                    started,
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
    fn fill(&mut self) -> Result<Option<VirtRange>, Fault> {
        match self.next_event()? {
            Event::Ready { hot_bytes: 0, .. } => Ok(None),
            Event::Ready {
                hot_start,
                hot_bytes,
                ..
            } => hot_range(hot_start, hot_bytes).map(Some),
            other => Err(out_of_turn(&other)),
        }
    }

    fn next(&mut self) -> Result<Next, Fault> {
        Ok(match self.next_event()? {
            Event::Interval { t_s, rate, .. } => Next::Interval(t_s, rate.into()),
            Event::Shift {
                t_s,
                hot_start,
                hot_bytes,
            } => Next::Shift(t_s, hot_range(hot_start, hot_bytes)?),
            Event::Done { t_s, rate, .. } => Next::Done(t_s, rate.into()),
            other => return Err(out_of_turn(&other)),
        })
    }

    fn verify(&mut self) -> Result<(u64, u64), Fault> {
        self.go()?;
        match self.next_event()? {
            Event::Verified { words, errors } => Ok((words, errors)),
            other => Err(out_of_turn(&other)),
        }
    }

    /// Waits for its next event. The limits bound the wait; in a VM, the host does.
    pub fn next_event(&mut self) -> Result<Event, Fault> {
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

fn out_of_turn(event: &Event) -> Fault {
    Fault::Workload(format!("sent {:?} at the wrong time", event.to_string()))
}

/// The hot set of an event.
fn hot_range(start: u64, bytes: u64) -> Result<VirtRange, Fault> {
    start
        .checked_add(bytes)
        .and_then(|end| VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(end)))
        .ok_or_else(|| {
            Fault::Workload(format!(
                "announced an impossible hot set: {bytes} bytes at {start:#x}"
            ))
        })
}

fn command_line(bed: &Testbed<'_>, job: &Job) -> Result<(&'static str, Vec<String>), Fault> {
    let scenario = &job.scenario;
    let mut args: Vec<String> = Vec::new();
    let mut option = |name: &str, value: String| args.extend([format!("--{name}"), value]);
    option("duration", scenario.duration_s.to_string());
    option("seed", scenario.seed.to_string());
    if job.settings.system == System::Oracle {
        option("place-hot", bed.fast.to_string());
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
