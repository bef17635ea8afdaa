//! `demeter run`: a scenario under several systems, with live progress and a result file.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};
use demeter_lab::link::Report;
use demeter_lab::{Lab, stop_on_signals};
use demeter_report::RunResult;
use demeter_scenario::{Scenario, System};

/// Bytes in a mebibyte, for people.
const MIB: f64 = (1u64 << 20) as f64;

/// Where a scenario runs.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Place {
    /// In real VMs with emulated slow memory.
    Lab,
}

/// Options of `demeter run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Scenario file
    scenario: PathBuf,
    /// Where to run it
    #[arg(long, value_enum, default_value = "lab")]
    on: Place,
    /// Write the result to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Run only this system; may be given several times
    #[arg(long = "system", value_name = "NAME")]
    systems: Vec<System>,
    /// Seed of the workload instead of the scenario's
    #[arg(long)]
    seed: Option<u64>,
    /// Seconds of the timed phase instead of the scenario's
    #[arg(long, value_name = "S")]
    duration: Option<u64>,
    /// Keep the logs of every VM here, not only those of failed ones
    #[arg(long, value_name = "DIR")]
    keep_logs: Option<PathBuf>,
}

/// Runs the scenario.
pub fn run(args: RunArgs) -> anyhow::Result<()> {
    let mut scenario = Scenario::load(&args.scenario)?;
    if !args.systems.is_empty() {
        scenario.systems = args.systems;
    }
    scenario.seed = args.seed.unwrap_or(scenario.seed);
    scenario.duration_s = args.duration.unwrap_or(scenario.duration_s);
    scenario.check()?;
    let result = match args.on {
        Place::Lab => {
            let lab = Lab {
                keep_logs: args.keep_logs,
                ..Lab::from_env()?
            };
            let stop = stop_on_signals().context("cannot catch signals")?;
            demeter_lab::run(&scenario, &lab, &stop, &mut show)?
        }
    };
    if let Some(path) = &args.json {
        write_atomically(path, &result)?;
    }
    print!("{}", list(&result));
    Ok(())
}

/// One line of progress on standard error.
fn show(system: System, report: &Report) {
    let line = match report {
        Report::Booted {
            kernel,
            fast_free_mib,
            slow_free_mib,
        } => format!(
            "Linux {kernel}, {fast_free_mib} MiB of fast and {slow_free_mib} MiB of slow memory free"
        ),
        Report::Start { hot_in_fast, .. } => {
            format!(
                "memory filled, {:.0} % of the hot set in fast memory",
                hot_in_fast * 100.0
            )
        }
        Report::Interval(interval) => {
            let mib = |bytes: Option<u64>| {
                bytes.map_or("?".into(), |bytes| format!("{:.0}", bytes as f64 / MIB))
            };
            format!(
                "{:4.0} s  {}  hot set {:3.0} % fast  promoted {} MiB  demoted {} MiB",
                interval.t_s,
                interval.rate,
                interval.hot_in_fast * 100.0,
                mib(interval.totals.promoted_bytes),
                mib(interval.totals.demoted_bytes),
            )
        }
        Report::Shift { t_s } => format!("{t_s:4.0} s  the hot set jumps"),
        Report::Done { rate, .. } => format!("done, mean {rate}"),
        Report::Verified { words, errors } => format!("{words} words verified, {errors} wrong"),
        Report::AgentLog { .. } | Report::Failed { .. } | Report::Finished => return,
    };
    eprintln!("{:13} {line}", system.to_string());
}

/// The file appears whole or not at all.
fn write_atomically(path: &Path, result: &RunResult) -> anyhow::Result<()> {
    let write = || -> anyhow::Result<()> {
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
        let mut file = tempfile::Builder::new()
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
            .tempfile_in(folder.unwrap_or(Path::new(".")))?;
        serde_json::to_writer_pretty(&mut file, result)?;
        file.write_all(b"\n")?;
        file.persist(path)?;
        Ok(())
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// What the run found, one line for each system.
fn list(result: &RunResult) -> String {
    let figure = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.3}"));
    let mib =
        |bytes: Option<u64>| bytes.map_or("-".into(), |bytes| format!("{:.0}", bytes as f64 / MIB));
    let mut lines = format!(
        "{:13} {:>8} {:>8} {:>6} {:>6} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6}\n",
        "system",
        "mean",
        "steady",
        "hot %",
        "t90 s",
        "mgmt s",
        "steady s",
        "scanned",
        "up MiB",
        "down MiB",
        "wrong"
    );
    for s in &result.systems {
        lines += &format!(
            "{:13} {:>8} {:>8} {:>6.1} {:>6} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6}\n",
            s.name,
            figure(s.mean_mops.or(s.mean_latency_ns)),
            figure(s.steady_mops.or(s.steady_latency_ns)),
            s.hot_in_fast_final * 100.0,
            s.t90_s.map_or("-".into(), |t| format!("{t:.1}")),
            figure(s.mgmt_cpu_s),
            figure(s.mgmt_cpu_steady_s),
            s.kswapd_scanned,
            mib(s.bytes_promoted),
            mib(s.bytes_demoted),
            s.verify_errors
                .map_or("-".into(), |errors| errors.to_string()),
        );
    }
    lines
}
