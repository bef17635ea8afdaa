//! The workload of a job: one of our own programs, or real programs, which have no protocol.

use std::time::Duration;

use demeter_policy::Pid;
use demeter_scenario::{Machine, Workload as Kind};
use demeter_workload::{Rate, WorkloadEvent};

pub use super::own_program::HotSet;
use super::own_program::{OwnProgram, has_policy, out_of_turn};
use super::placement::Placement;
use super::testbed::Testbed;
use crate::fault::Fault;
use crate::link::{Job, ProgramFigure, ProgramLog};
use crate::program::{Bounds, Programs, Step};

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
