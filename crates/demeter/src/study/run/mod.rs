//! `demeter run`: runs scenarios under several systems, with progress and a result file.

mod cases;
mod random;

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::bail;
use clap::ValueEnum;
use demeter_lab::link::{ProgramFigure, VmMessage};
use demeter_lab::{Lab, Repetition};
use demeter_outcome::RunResult;
use demeter_scenario::{Scenario, System};
use demeter_workload::Rate;

use self::cases::Cases;
use super::progress::{Progress, Work};
use super::systems;
use super::trace;
use crate::output;
use crate::signals;

/// Bytes in a mebibyte, for people.
const MIB: f64 = (1u64 << 20) as f64;

/// The place where a scenario runs.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum RunOn {
    /// In real VMs with emulated slow memory.
    Lab,
    /// On the simulator.
    Sim,
    /// On this machine's own fast and slow node, as root, with their own latency and bandwidth. It occupies fast memory
    /// so that the scenario's `usable_mib` stays free, and restores the kernel's settings at the end.
    Here,
}

/// Which emulator runs the lab's VMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum EmulatorKind {
    /// The distribution's, or that of `DEMETER_QEMU`. The agent gets samples from the lab's own unit
    Packaged,
    /// That of `cargo xtask emulator`, whose CPUs have AMD's IBS or Intel's PEBS: the agent gets samples from the kernel
    Exact,
}

impl RunOn {
    /// Its name in result files.
    fn name(self) -> &'static str {
        match self {
            Self::Lab => "lab",
            Self::Sim => "sim",
            Self::Here => "here",
        }
    }

    /// Its name in the catalogue.
    fn of_catalogue(self) -> demeter_scenario::Place {
        match self {
            Self::Lab => demeter_scenario::Place::Lab,
            Self::Sim => demeter_scenario::Place::Sim,
            Self::Here => demeter_scenario::Place::Here,
        }
    }
}

/// Options of `demeter run`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Scenario files, or folders of them; several give a table with the worst first
    #[arg(value_name = "SCENARIO")]
    scenarios: Vec<PathBuf>,
    /// Run N random scenarios instead, on the simulator, under none, demeter and demeter-damon: 256 MiB to 64 GiB with
    /// hot sets, Zipf popularity and sweeps. Each seed gives new ones
    #[arg(long, value_name = "N")]
    random: Option<u64>,
    /// Write the random scenarios to this folder, to run them again
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Where to run it
    #[arg(long, value_enum, default_value = "lab")]
    on: RunOn,
    /// Which emulator runs the lab's VMs
    #[arg(long, value_enum, default_value = "packaged")]
    emulator: EmulatorKind,
    /// Write the result to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Run only this system (see `demeter systems`); may be repeated
    #[arg(long = "system", value_name = "NAME", value_parser = systems::parser())]
    systems: Vec<System>,
    /// Seed of the workload instead of the scenario's. With --random it is the seed of the scenarios; by default it is
    /// random, and printed
    #[arg(long)]
    seed: Option<u64>,
    /// Length of the timed phase instead of the scenario's, seconds
    #[arg(long, value_name = "S")]
    duration: Option<u64>,
    /// Run each system with N seeds, counted up from the scenario's, and show the median run. In the lab all systems
    /// run once before any runs again
    #[arg(long, value_name = "N", default_value = "1")]
    repeat: NonZeroU32,
    /// In the lab, repeat a disturbed run up to N times; the least disturbed run counts
    #[arg(long, value_name = "N", default_value = "1")]
    retries: u32,
    /// In the lab, run N systems side by side, so that the host slows all alike. Each needs a core for each virtual CPU
    #[arg(long, value_name = "N", default_value = "1")]
    at_once: NonZeroUsize,
    /// Keep the logs of all VMs, not only of failed ones, and the agent's recording for `demeter replay`, in this
    /// folder
    #[arg(long, value_name = "DIR")]
    keep_logs: Option<PathBuf>,
    #[command(flatten)]
    work: Work,
}

/// Runs the scenario, or several, or random ones.
pub fn run(args: Args) -> anyhow::Result<()> {
    args.check()?;
    let stop = signals::stop_flag()?;
    let adapt = |scenario: &mut Scenario| args.adapt(scenario);
    let cases = match (&args.scenarios[..], args.random) {
        (_, Some(count)) => random::cases(count, args.seed, args.keep.as_deref(), adapt)?,
        ([path], None) if !path.is_dir() => return run_one(&args, path, &stop),
        (paths, None) => Cases::load(paths, adapt)?,
    };
    let result = cases.run(args.on.name(), args.json.as_deref(), |scenario| {
        let (result, ended) = measure(&args, scenario, &stop)?;
        ended?;
        Ok(result.systems)
    })?;
    output::print(demeter_report::worst_first(&result))?;
    if args.random.is_some() {
        output::print(format!("\n{}", demeter_report::harm(&result)))?;
    }
    Ok(())
}

fn run_one(args: &Args, path: &Path, stop: &AtomicBool) -> anyhow::Result<()> {
    let mut scenario = Scenario::load(path)?;
    args.adapt(&mut scenario);
    scenario.check()?;
    let (result, ended) = measure(args, &scenario, stop)?;
    // Results from before a VM failed are kept.
    if !result.systems.is_empty() || !result.cases.is_empty() {
        if let Some(path) = &args.json {
            result.save(path)?;
        }
        output::print(demeter_report::table(&result))?;
    }
    Ok(ended?)
}

/// The result of a run, and the error that ended it early, if any.
type Measured = (RunResult, Result<(), demeter_lab::Error>);

/// Runs one scenario in its place.
fn measure(args: &Args, scenario: &Scenario, stop: &AtomicBool) -> anyhow::Result<Measured> {
    let lab = || {
        let lab = Lab {
            keep_logs: args.keep_logs.clone(),
            ..Lab::from_env()?
        };
        match args.emulator {
            EmulatorKind::Packaged => Ok(lab),
            EmulatorKind::Exact => lab.exact(),
        }
    };
    if args.emulator == EmulatorKind::Exact && !matches!(args.on, RunOn::Lab) {
        bail!("--emulator is for the lab: nothing else is emulated");
    }
    if args.at_once.get() > 1 && !matches!(args.on, RunOn::Lab) {
        bail!(
            "--at-once is for the lab: this machine is one, and runs of the simulator do not disturb each other"
        );
    }
    let run = match args.on {
        RunOn::Lab => {
            if scenario.provision.is_some() {
                if args.repeat.get() > 1 {
                    bail!(
                        "--repeat is not for VMs side by side; run them several times with --seed"
                    );
                }
                if args.at_once.get() > 1 {
                    bail!("--at-once is not for scenarios that run VMs side by side themselves");
                }
            }
            let repetition = Repetition {
                repeat: args.repeat,
                retries: args.retries,
                at_once: args.at_once,
            };
            demeter_lab::run(scenario, repetition, &lab()?, stop, &mut show)
        }
        RunOn::Here => {
            if args.repeat.get() > 1 {
                bail!(
                    "--repeat is for the lab and the simulator; run it several times with --seed"
                );
            }
            demeter_lab::run_here(scenario, &lab()?, stop, &mut show)
        }
        RunOn::Sim => {
            let mut scenario = scenario.clone();
            trace::stand_in(&mut scenario, stop)?;
            let (progress, limits) = (Progress::new(), args.work.limits(stop));
            let show = |event: demeter_sim::RunProgress<'_>| progress.show(event);
            let result = demeter_sim::run_all(&scenario, args.repeat, limits, &show)?;
            return Ok((result, Ok(())));
        }
    };
    Ok((run.result, run.ended))
}

impl Args {
    /// Rejects contradicting options.
    fn check(&self) -> anyhow::Result<()> {
        let is_random = self.random.is_some();
        if self.scenarios.is_empty() && !is_random {
            bail!("no scenario: give a path such as scenarios/gups.toml, or --random N --on sim");
        }
        if is_random && !self.scenarios.is_empty() {
            bail!("--random makes its own scenarios: leave out the path, or --random");
        }
        if is_random && !matches!(self.on, RunOn::Sim) {
            bail!("--random is for the simulator: add --on sim, or give the path of a scenario");
        }
        if self.keep.is_some() && !is_random {
            bail!("--keep is for random scenarios: add --random N, or leave it out");
        }
        Ok(())
    }

    /// Applies the command line to a scenario.
    fn adapt(&self, scenario: &mut Scenario) {
        if !self.systems.is_empty() {
            scenario.systems = self.systems.clone();
        }
        if self.random.is_none() {
            scenario.seed = self.seed.unwrap_or(scenario.seed);
        }
        scenario.duration_s = self.duration.unwrap_or(scenario.duration_s);
        if self.systems.is_empty() || matches!(self.on, RunOn::Sim) {
            let place = match self.on {
                RunOn::Lab => scenario.machine.place.in_lab(),
                on => on.of_catalogue(),
            };
            for system in scenario.leave_out_what_cannot_run_on(place) {
                output::say(format_args!(
                    "{:17} left out: it does not run on {}",
                    system.to_string(),
                    self.on.name()
                ));
            }
        }
    }
}

/// Prints a line of progress on standard error.
pub(crate) fn show(run: &str, report: &VmMessage) {
    let line = match report {
        VmMessage::Booted {
            kernel,
            fast_free_mib,
            slow_free_mib,
        } => format!(
            "Linux {kernel}, {fast_free_mib} MiB of fast and {slow_free_mib} MiB of slow memory free"
        ),
        VmMessage::Sized {
            fast_free_mib,
            slow_free_mib,
        } => format!(
            "resized to {fast_free_mib} MiB of fast and {slow_free_mib} MiB of slow memory free"
        ),
        VmMessage::Start { hot_in_fast, .. } => format!("memory filled{}", hot(*hot_in_fast)),
        VmMessage::Interval(interval) => {
            let mib = |bytes: Option<u64>| {
                bytes.map_or("?".into(), |bytes| format!("{:.0}", bytes as f64 / MIB))
            };
            format!(
                "{:4.0} s{}{}  promoted {} MiB  demoted {} MiB",
                interval.t_s,
                speed(interval.rate, &interval.programs),
                hot(interval.hot_in_fast),
                mib(interval.totals.promoted_bytes),
                mib(interval.totals.demoted_bytes),
            )
        }
        VmMessage::Shift { t_s } => format!("{t_s:4.0} s  the hot set changes"),
        VmMessage::Done { rate, programs, .. } => format!("done, mean{}", speed(*rate, programs)),
        VmMessage::Program(log) => {
            if log.is_why {
                for line in log.text.lines() {
                    output::say(format_args!("{run:13} {}| {line}", log.name));
                }
            }
            return;
        }
        VmMessage::Verified { words, errors } => format!("{words} words verified, {errors} wrong"),
        VmMessage::Filled
        | VmMessage::Uses { .. }
        | VmMessage::AgentLog { .. }
        | VmMessage::AgentRecording { .. }
        | VmMessage::Failed { .. }
        | VmMessage::Finished => return,
    };
    output::say(format_args!("{run:13} {line}"));
}

/// Speed of the workload, or of its programs.
fn speed(rate: Option<Rate>, programs: &[ProgramFigure]) -> String {
    let of_program = |program: &ProgramFigure| {
        let value = match program.value {
            Some(value) if value.abs() < 100.0 => format!("{value:.3}"),
            Some(value) => format!("{value:.0}"),
            None => "-".into(),
        };
        format!("  {} {value} {}", program.name, program.unit)
    };
    let rate = rate.iter().map(|rate| format!("  {rate}"));
    rate.chain(programs.iter().map(of_program)).collect()
}

/// Share of the hot set in fast memory, if known.
fn hot(in_fast: Option<f64>) -> String {
    in_fast.map_or(String::new(), |share| {
        format!("  hot set {:3.0} % fast", share * 100.0)
    })
}
