//! One program of a workload, over all its runs.

use std::process::ExitStatus;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use demeter_policy::Pid;
use demeter_scenario::{Figure, Ready};
use regex_lite::Regex;

use super::ask::Asker;
use super::cgroup::OwnCgroup;
use super::meter::Meter;
use super::output::OutputParser;
use super::process::{Process, Said, lock};
use crate::fault::Fault;
use crate::launch::Launch;
use crate::link::ProgramFigure;

/// Unit of figures that count runs.
const RUNS_UNIT: &str = "runs/s";

/// A program, running or not.
#[derive(Debug)]
pub struct Member {
    launch: Launch,
    cgroup: Option<OwnCgroup>,
    heard: Arc<Mutex<OutputParser>>,
    clock: Instant,
    process: Option<Process>,
    asker: Option<Asker>,
    /// Start of the timed phase, once it has begun.
    start: Option<Instant>,
    runs: Runs,
    has_ended: bool,
}

/// Completed runs in the timed phase.
#[derive(Debug, Default)]
struct Runs {
    in_interval: u32,
    in_all: u32,
    /// End of the last run, seconds into the phase.
    last_s: f64,
}

impl Member {
    /// A program that does not run yet. It will run in `cgroup`, if any; its numbers' times count from `clock`.
    pub fn new(launch: &Launch, cgroup: Option<OwnCgroup>, clock: Instant) -> Result<Self, Fault> {
        let ready = match &launch.ready {
            Some(Ready::Line(line)) => Some(regex(line)?),
            _ => None,
        };
        let number = match &launch.figure {
            Figure::Number(number) => Some(number),
            _ => None,
        };
        let own = number.filter(|number| number.command.is_empty());
        let own = own.map(|number| regex(&number.regex)).transpose()?;
        let meter = Meter::new(number.is_some_and(|number| number.counter));
        Ok(Self {
            launch: launch.clone(),
            cgroup,
            heard: Arc::new(Mutex::new(OutputParser::new(ready, own, meter))),
            clock,
            process: None,
            asker: None,
            start: None,
            runs: Runs::default(),
            has_ended: false,
        })
    }

    /// Its start parameters.
    pub fn launch(&self) -> &Launch {
        &self.launch
    }

    /// Starts it.
    pub fn start(&mut self, tell: &Sender<Said>) -> Result<(), Fault> {
        let cgroup = self.cgroup.as_ref();
        let process = Process::start(&self.launch, cgroup, &self.heard, self.clock, tell)?;
        self.process = Some(process);
        Ok(())
    }

    /// Starts the timed phase: its figure counts from now on, and the program starts unless it runs already.
    pub fn begin(&mut self, start: Instant, tell: &Sender<Said>) -> Result<(), Fault> {
        self.start = Some(start);
        self.runs = Runs::default();
        lock(&self.heard).meter.begin();
        if self.process.is_none() && !self.has_ended {
            self.start(tell)?;
        }
        if let Figure::Number(number) = &self.launch.figure
            && !number.command.is_empty()
        {
            let regex = regex(&number.regex)?;
            let asker = Asker::start(
                &self.launch,
                &number.command,
                regex,
                &self.heard,
                self.clock,
            );
            self.asker = Some(asker);
        }
        Ok(())
    }

    /// PID of the current process.
    pub fn pid(&self) -> Option<Pid> {
        self.process.as_ref().map(Process::pid)
    }

    /// Whether it has reported that it is ready.
    pub fn is_ready(&self) -> bool {
        lock(&self.heard).is_ready()
    }

    /// Whether its process runs.
    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(|p| p.status().is_none())
    }

    /// Whether it has completed for good, as expected.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Whether it may exit by itself now: not before its time is measured.
    pub fn may_end(&self) -> bool {
        match self.launch.figure {
            Figure::Time => self.start.is_some(),
            Figure::Runs => true,
            Figure::Number(_) | Figure::None => false,
        }
    }

    /// Takes the exit status of its process, if it has exited.
    pub fn take_status(&mut self) -> Option<ExitStatus> {
        let status = self.process.as_mut()?.status()?;
        self.process = None;
        Some(status)
    }

    /// Handles a completed run: counts it, and starts the program again if runs are counted.
    pub fn completed(&mut self, tell: &Sender<Said>) -> Result<(), Fault> {
        self.runs.in_interval += 1;
        self.runs.in_all += 1;
        self.runs.last_s = self
            .start
            .map_or(0.0, |start| start.elapsed().as_secs_f64());
        if self.launch.figure == Figure::Runs {
            return self.start(tell);
        }
        self.has_ended = true;
        Ok(())
    }

    /// Its figure for an interval of this length that ends now; none if there is none yet.
    pub fn end_interval(&mut self, length_s: f64) -> Option<ProgramFigure> {
        let runs = std::mem::take(&mut self.runs.in_interval);
        match &self.launch.figure {
            Figure::None => None,
            // Keeps each program's position in the list of figures.
            Figure::Time => Some(self.named(None)),
            Figure::Runs => Some(self.named(Some(f64::from(runs) / length_s))),
            Figure::Number(_) => {
                let value = lock(&self.heard).meter.end_interval();
                Some(self.named(value))
            }
        }
    }

    /// Its figure for the whole phase; none if it should not have one.
    ///
    /// # Errors
    /// When there is no data for it.
    pub fn figure(&self) -> Result<Option<ProgramFigure>, Fault> {
        let value = match &self.launch.figure {
            Figure::None => return Ok(None),
            // Taking longer than the phase is a valid result.
            Figure::Time => self.has_ended.then_some(self.runs.last_s),
            // Up to the end of a run, so that an interrupted run does not count as slow.
            Figure::Runs if self.runs.in_all == 0 => {
                return Err(self
                    .fault("did not run to its end in the timed phase: raise duration_s".into()));
            }
            Figure::Runs => Some(f64::from(self.runs.in_all) / self.runs.last_s),
            Figure::Number(number) => {
                let mean = lock(&self.heard).meter.mean();
                Some(mean.ok_or_else(|| {
                    let who = match number.command.first() {
                        Some(command) => format!("{command} printed"),
                        None => "printed".into(),
                    };
                    let regex = &number.regex;
                    self.fault(format!("{who} no figure: nothing matched {regex:?}"))
                })?)
            }
        };
        Ok(Some(self.named(value)))
    }

    fn named(&self, value: Option<f64>) -> ProgramFigure {
        let unit = match &self.launch.figure {
            Figure::Number(number) => &number.unit,
            Figure::Runs => RUNS_UNIT,
            Figure::Time | Figure::None => "s",
        };
        ProgramFigure {
            name: self.launch.name.clone(),
            unit: unit.into(),
            value,
            is_elapsed: self.launch.figure == Figure::Time,
            fast_bytes: self.cgroup.as_ref().and_then(OwnCgroup::fast_bytes),
        }
    }

    /// Its last lines of output.
    pub fn last_lines(&self) -> String {
        lock(&self.heard).last_lines()
    }

    /// An error of this program.
    pub fn fault(&self, what: String) -> Fault {
        Fault::Program {
            name: self.launch.name.clone(),
            what,
        }
    }

    /// Sends SIGTERM, and stops its figure's command.
    pub fn ask_to_end(&mut self) {
        self.asker = None;
        if let Some(process) = &mut self.process {
            process.ask_to_end();
        }
    }

    /// Kills it with all its descendants.
    pub fn kill(&mut self) {
        if let Some(process) = &mut self.process {
            process.kill();
        }
    }
}

fn regex(text: &str) -> Result<Regex, Fault> {
    Regex::new(text).map_err(|e| Fault::Workload(format!("has a wrong expression {text:?}: {e}")))
}
