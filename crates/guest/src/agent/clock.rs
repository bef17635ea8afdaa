//! The agent's clock.

use std::time::{Duration, Instant};

use demeter_linux::cpu;

/// Time since the agent started. Tests stop it: the machine's speed must not change a decision.
pub(super) struct Clock(pub(super) Box<dyn Fn() -> Times + Send>);

/// A reading of the clock, or the difference of two.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Times {
    pub(super) elapsed: Duration,
    /// CPU time of the agent's thread: a program that preempts it costs nothing.
    pub(super) cpu: Duration,
}

impl Clock {
    pub(super) fn live() -> Self {
        let born = Instant::now();
        Self(Box::new(move || Times {
            elapsed: born.elapsed(),
            cpu: cpu::of_this_thread(),
        }))
    }

    pub(super) fn now(&self) -> Duration {
        self.start().elapsed
    }

    pub(super) fn start(&self) -> Times {
        (self.0)()
    }

    pub(super) fn since(&self, began: Times) -> Times {
        let now = self.start();
        Times {
            elapsed: now.elapsed.saturating_sub(began.elapsed),
            cpu: now.cpu.saturating_sub(began.cpu),
        }
    }
}

pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
