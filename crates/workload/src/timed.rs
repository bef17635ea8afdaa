//! The timed phase: workers that count operations, and a reporter that wakes once per interval.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::Error;
use super::event::{Output, Rate, WorkloadEvent};
use super::wait::Waiter;

/// Operations of a worker between two checks of [`Control`].
pub(crate) const BATCH: u64 = 1024;

const STOP: u32 = u32::MAX;

/// Schedule of a timed phase.
#[derive(Debug, Clone)]
pub(crate) struct Schedule {
    /// Length of the phase.
    pub(crate) duration: Duration,
    /// Interval of reports.
    pub(crate) interval: Duration,
    /// Times at which [`Control::stage`] is incremented, since the start; ascending.
    pub(crate) shifts_at: Vec<Duration>,
}

/// State shared between workers and the reporter.
pub(crate) struct Control {
    stage: AtomicU32,
    ops: Vec<PaddedCounter>,
}

/// A counter with its own cache line.
#[derive(Default)]
#[repr(align(64))]
struct PaddedCounter(AtomicU64);

impl Control {
    /// The stage of the phase: 0, plus one after each shift; `None` when it has ended.
    pub(crate) fn stage(&self) -> Option<usize> {
        let stage = self.stage.load(Relaxed);
        (stage != STOP).then_some(stage as usize)
    }

    /// Counts a batch of `worker`. Only that worker may call this.
    pub(crate) fn batch_done(&self, worker: usize) {
        self.done(worker, BATCH);
    }

    /// Counts operations of `worker`. Only that worker may call this.
    pub(crate) fn done(&self, worker: usize, count: u64) {
        let ops = &self.ops[worker].0;
        ops.store(ops.load(Relaxed) + count, Relaxed);
    }

    fn total_ops(&self) -> u64 {
        self.ops.iter().map(|ops| ops.0.load(Relaxed)).sum()
    }
}

/// An event from the reporter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Tick {
    /// An interval has ended.
    Interval {
        /// Seconds since the start of the phase.
        t_s: f64,
        /// Seconds since the last report.
        length_s: f64,
        /// Operations since the last report.
        ops: u64,
    },
    /// The stage was incremented.
    Shift {
        /// The new stage.
        stage: usize,
        /// Seconds since the start of the phase.
        t_s: f64,
    },
}

/// Totals of the whole phase.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Total {
    /// Its actual length, seconds.
    pub(crate) t_s: f64,
    /// Number of operations, including the last one.
    pub(crate) ops: u64,
    /// Whether a signal ended it early.
    pub(crate) stopped: bool,
}

impl Total {
    /// Reports `done`. Then fails if a signal has ended the phase.
    pub(crate) fn say_done(self, output: Output, rate: Rate) -> Result<(), Error> {
        let Self { t_s, ops, stopped } = self;
        output.say(&WorkloadEvent::Done { t_s, ops, rate })?;
        if stopped { Err(Error::Stopped) } else { Ok(()) }
    }
}

/// Runs `worker(number, control)` in `threads` threads until the schedule ends, a signal arrives or `report` fails. A
/// worker must return when [`Control::stage`] is `None`.
pub(crate) fn run(
    schedule: &Schedule,
    threads: usize,
    waiter: &Waiter,
    worker: impl Fn(usize, &Control) + Sync,
    mut report: impl FnMut(Tick) -> Result<(), Error>,
) -> Result<Total, Error> {
    let control = Control {
        stage: AtomicU32::new(0),
        ops: (0..threads).map(|_| PaddedCounter::default()).collect(),
    };
    let start = Instant::now();
    let outcome = std::thread::scope(|scope| {
        let (control, worker) = (&control, &worker);
        for number in 0..threads {
            scope.spawn(move || worker(number, control));
        }
        let outcome = supervise(schedule, start, waiter, control, &mut report);
        control.stage.store(STOP, Relaxed);
        outcome
    });
    let stopped = match outcome {
        Err(Error::Stopped) => true,
        other => other.map(|()| false)?,
    };
    Ok(Total {
        t_s: start.elapsed().as_secs_f64(),
        ops: control.total_ops(),
        stopped,
    })
}

fn supervise(
    schedule: &Schedule,
    start: Instant,
    waiter: &Waiter,
    control: &Control,
    report: &mut impl FnMut(Tick) -> Result<(), Error>,
) -> Result<(), Error> {
    let in_time = |&&at: &&Duration| at < schedule.duration;
    let mut shifts = schedule
        .shifts_at
        .iter()
        .filter(in_time)
        .zip(1u32..)
        .peekable();
    let mut next_message = schedule.interval.min(schedule.duration);
    let (mut last_t_s, mut last_ops) = (0.0, 0);
    loop {
        let shift_now = shifts.next_if(|&(&at, _)| at <= next_message);
        waiter.until(start + shift_now.map_or(next_message, |(&at, _)| at))?;
        let t_s = start.elapsed().as_secs_f64();
        if let Some((_, stage)) = shift_now {
            control.stage.store(stage, Relaxed);
            report(Tick::Shift {
                stage: stage as usize,
                t_s,
            })?;
            continue;
        }
        let ops = control.total_ops();
        report(Tick::Interval {
            t_s,
            length_s: t_s - last_t_s,
            ops: ops - last_ops,
        })?;
        (last_t_s, last_ops) = (t_s, ops);
        if next_message >= schedule.duration {
            return Ok(());
        }
        next_message = (next_message + schedule.interval).min(schedule.duration);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spin(number: usize, control: &Control) {
        while control.stage().is_some() {
            control.batch_done(number);
        }
    }

    #[test]
    fn reports_add_up_and_each_shift_comes_once() {
        let ms = Duration::from_millis;
        let schedule = Schedule {
            duration: ms(50),
            interval: ms(20),
            shifts_at: vec![ms(25), ms(30), ms(70)],
        };
        let mut ticks = Vec::new();
        let waiter = Waiter::new().unwrap();
        let total = run(&schedule, 2, &waiter, spin, |tick| {
            ticks.push(tick);
            Ok(())
        })
        .unwrap();
        // 20, the shifts at 25 and 30, 40, and the short last one; 70 is never reached.
        assert!(
            matches!(
                ticks[..],
                [
                    Tick::Interval { .. },
                    Tick::Shift { stage: 1, .. },
                    Tick::Shift { stage: 2, .. },
                    Tick::Interval { .. },
                    Tick::Interval { .. },
                ]
            ),
            "{ticks:?}"
        );
        let reported: u64 = ticks
            .iter()
            .map(|tick| match tick {
                Tick::Interval { ops, .. } => *ops,
                Tick::Shift { .. } => 0,
            })
            .sum();
        assert!(reported > 0 && reported <= total.ops);
        assert!(!total.stopped && total.t_s >= 0.05);
    }

    #[test]
    fn a_failing_report_ends_the_workers() {
        let s = Duration::from_secs;
        let schedule = Schedule {
            duration: s(3600),
            interval: Duration::from_millis(1),
            shifts_at: vec![],
        };
        let waiter = Waiter::new().unwrap();
        let outcome = run(&schedule, 1, &waiter, spin, |_| Err(Error::HoldClosed));
        assert!(matches!(outcome, Err(Error::HoldClosed)));
    }
}
