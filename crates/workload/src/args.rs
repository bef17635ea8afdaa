//! Common arguments of all workloads, and the exit of a program.

use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, Parser};

use super::Error;
use super::timed::Schedule;
use super::wait::Waiter;

/// Maximum length of the timed phase: a year.
const SECONDS_MAX: f64 = 366.0 * 86_400.0;

/// Arguments of every workload.
#[derive(Debug, Clone, Args)]
pub struct Common {
    /// Length of the timed phase, seconds
    #[arg(long, default_value = "60", value_parser = seconds)]
    pub(crate) duration: Duration,
    /// Time between two reports, seconds
    #[arg(long, default_value = "1", value_parser = seconds)]
    pub(crate) interval: Duration,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Print one JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
    /// Wait for a line on standard input before the timed phase, and again after it
    #[arg(long)]
    pub(crate) hold: bool,
}

impl Common {
    /// The schedule; the hot set changes at `shifts_at`.
    pub(crate) fn schedule(&self, shifts_at: Vec<Duration>) -> Schedule {
        Schedule {
            duration: self.duration,
            interval: self.interval,
            shifts_at,
        }
    }

    /// With `--hold`: waits for a line or a signal.
    pub(crate) fn wait_if_held(&self, waiter: &Waiter) -> Result<(), Error> {
        if self.hold { waiter.line() } else { Ok(()) }
    }
}

/// Reads a positive number of seconds; fractions are allowed.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.001..=SECONDS_MAX).contains(&seconds) => {
            Ok(Duration::from_secs_f64(seconds))
        }
        _ => Err("needs a number of seconds from 0.001 up, as in 60 or 0.5".into()),
    }
}

/// Runs a workload with the arguments of this process. Every failure is one line on standard
/// error; the exit code is 0, 1 (failed) or 2 (wrong arguments).
pub fn run_program<A: Parser>(run: impl FnOnce(&A) -> Result<(), Error>) -> ExitCode {
    let args = match A::try_parse() {
        Ok(args) => args,
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
            ) =>
        {
            // If the help text cannot be written, there is no one to tell.
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{}", one_line(&error.to_string()));
            return ExitCode::from(2);
        }
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Error::Stopped) => {
            eprintln!("stopped by a signal");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Joins the first paragraph of a parser's message into one line.
fn one_line(message: &str) -> String {
    let paragraph = message.split("\n\n").next().unwrap_or_default();
    paragraph.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_positive_and_finite() {
        assert_eq!(seconds("60"), Ok(Duration::from_secs(60)));
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
        for bad in ["0", "-1", "inf", "NaN", "1e300", "1s", ""] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn messages_become_one_line() {
        let message = "error: these are missing:\n  --size <SIZE>\n\nUsage: gups\n";
        assert_eq!(one_line(message), "error: these are missing: --size <SIZE>");
    }
}
