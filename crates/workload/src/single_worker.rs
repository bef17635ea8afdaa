//! The timed phase of a program with one worker and counted operations.

use std::sync::OnceLock;

use super::Error;
use super::args::Common;
use super::event::{Output, Rate, WorkloadEvent};
use super::timed::{self, Control, Tick};
use super::wait::Waiter;

/// Waits for the start if requested, runs `worker` until the phase ends, and reports the speed. `rate` computes it from
/// operations and seconds. A worker that finds an error reports it and returns.
pub(crate) fn run(
    common: &Common,
    waiter: &Waiter,
    rate: fn(u64, f64) -> Rate,
    worker: impl Fn(&Control) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let output = Output { json: common.json };
    if common.hold {
        waiter.line()?;
    }
    let failed = OnceLock::new();
    let work = |_: usize, control: &Control| {
        if let Err(error) = worker(control) {
            // There is one worker, which fails at most once.
            let _ = failed.set(error);
        }
    };
    let total = timed::run(&common.schedule(vec![]), 1, waiter, work, |tick| {
        match tick {
            // The reason is reported below.
            Tick::Interval { .. } if failed.get().is_some() => Err(Error::Stopped),
            Tick::Interval { t_s, length_s, ops } => {
                let rate = rate(ops, length_s);
                output.say(&WorkloadEvent::Interval { t_s, ops, rate })
            }
            Tick::Shift { .. } => Ok(()),
        }
    })?;
    if let Some(error) = failed.into_inner() {
        return Err(error);
    }
    let (t_s, ops) = (total.t_s, total.ops);
    let rate = rate(ops, t_s);
    output.say(&WorkloadEvent::Done { t_s, ops, rate })?;
    match total.stopped {
        true => Err(Error::Stopped),
        false => Ok(()),
    }
}
