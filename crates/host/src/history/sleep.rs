//! Detects that a VM sleeps, from the CPU time that it wants.
//!
//! # Problem
//! An idle VM hardly runs, so its history stands still and shows its former memory use. The rate of
//! scans does not reveal this: it follows the VM's own time and rises when histories are
//! contradicted. An idle guest still runs a little.
//!
//! # Approach
//! The run and wait times of all virtual CPUs are summed over at least a second. A VM below a bound
//! falls asleep. It wakes at 1.5 times the bound, so that a VM near the bound does not flap. It
//! wakes at once, not only after the second.
//!
//! # Properties
//! - A VM that wants less than the bound is asleep two seconds later at the latest, at any query
//!   rate.
//! - A VM that wants more than the waking bound is awake a second later at the latest, and stays
//!   so.
//! - Between the two bounds it keeps its state.

use std::time::{Duration, Instant};

use demeter_linux::cpu::Scheduled;

/// Bound below which a VM falls asleep: a share of one CPU, plus a share for each virtual CPU.
const BELOW: f64 = 0.1;
const BELOW_EACH: f64 = 0.01;

/// Factor from that bound to the waking bound.
const WAKES: f64 = 1.5;

/// Minimum time of a count.
const COUNTED: Duration = Duration::from_secs(1);

/// Detector of a sleeping VM; see the module's documentation.
#[derive(Debug)]
pub(super) struct Sleep {
    sleeps: bool,
    /// Scheduler times of each virtual CPU when the count began.
    before: Vec<Scheduled>,
    since: Instant,
}

impl Sleep {
    /// Starts for a VM that is awake, with `vcpus` virtual CPUs.
    pub(super) fn new(vcpus: usize, now: Instant) -> Self {
        Self {
            sleeps: false,
            before: vec![Scheduled::default(); vcpus],
            since: now,
        }
    }

    /// Takes the scheduler times of each virtual CPU. Returns whether the VM sleeps.
    pub(super) fn observe(&mut self, now: Instant, vcpus: &[Scheduled]) -> bool {
        let since = vcpus.iter().zip(&self.before).map(|(v, b)| v.since(b));
        let wanted: Duration = since.map(|vcpu| vcpu.ran + vcpu.waited).sum();
        let after = now.saturating_duration_since(self.since);
        let bound = BELOW + BELOW_EACH * vcpus.len() as f64;
        let part = if self.sleeps { bound * WAKES } else { bound };
        let is_awake = wanted >= after.max(COUNTED).mul_f64(part);
        if is_awake || after >= COUNTED {
            self.sleeps = !is_awake;
            self.before = vcpus.to_vec();
            self.since = now;
        }
        self.sleeps
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A VM that is queried from time to time.
    struct Vm {
        sleep: Sleep,
        vcpus: Vec<Scheduled>,
        now: Instant,
    }

    impl Vm {
        fn new(vcpus: usize) -> Self {
            let now = Instant::now();
            Self {
                sleep: Sleep::new(vcpus, now),
                vcpus: vec![Scheduled::default(); vcpus],
                now,
            }
        }

        /// Lets `time` pass: each CPU runs and waits for these shares, with a query every
        /// `asked_ms`.
        fn lives(&mut self, time: Duration, ran: f64, waited: f64, asked_ms: u64) -> bool {
            let step = Duration::from_millis(asked_ms);
            let mut sleeps = false;
            for _ in 0..=time.as_millis() / u128::from(asked_ms) {
                self.now += step;
                for vcpu in &mut self.vcpus {
                    vcpu.ran += step.mul_f64(ran);
                    vcpu.waited += step.mul_f64(waited);
                }
                sleeps = self.sleep.observe(self.now, &self.vcpus);
            }
            sleeps
        }
    }

    #[test]
    fn a_vm_sleeps_that_wants_little_whoever_of_its_cpus_wants_it() {
        let lives = |vcpus, ran, waited| {
            let mut vm = Vm::new(vcpus);
            vm.lives(Duration::from_secs(2), ran, waited, 100)
        };
        assert!(lives(1, 0.08, 0.0));
        assert!(!lives(1, 0.08, 0.4), "it waits for a CPU");
        // Timer ticks of 64 CPUs, then eight CPUs with a small load each.
        assert!(lives(64, 0.005, 0.0));
        assert!(!lives(8, 0.08, 0.0));
    }

    #[test]
    fn a_vm_wakes_at_once() {
        let mut vm = Vm::new(1);
        assert!(vm.lives(Duration::from_secs(2), 0.0, 0.0, 100));
        assert!(!vm.lives(Duration::from_millis(200), 1.0, 0.0, 10));
    }

    proptest! {
        #[test]
        fn it_does_not_matter_how_often_it_is_asked(
            vcpus in 1usize..16, was_busy: bool, part in 0.0f64..3.0, asked_ms in 1u64..900,
        ) {
            let bound = (BELOW + BELOW_EACH * vcpus as f64) / vcpus as f64;
            // Near a bound the result depends on when the count began.
            let [asleep, awake] = [part < 0.9, part > WAKES + 0.1];
            prop_assume!(asleep || awake || (1.1..WAKES - 0.1).contains(&part));
            let mut vm = Vm::new(vcpus);
            let was_asleep = vm.lives(Duration::from_secs(4), if was_busy { 1.0 } else { 0.0 }, 0.0, asked_ms);
            prop_assert_eq!(was_asleep, !was_busy);
            let sleeps = vm.lives(Duration::from_secs(2), part * bound, 0.0, asked_ms);
            prop_assert_eq!(sleeps, asleep || (was_asleep && !awake));
        }
    }
}
