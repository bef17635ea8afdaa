//! Runs one measurement: fill, warm up, enable logging, passes, disable logging.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::machine::{self, Machine, Running};
use crate::memory;
use crate::offer::Offer;
use crate::report::{Counts, Report, Speed, Step, What};
use crate::samples::Sampler;
use crate::settings::{Protect, Settings};

/// Time between two checks of the virtual CPUs' sweeps.
const LOOK_EVERY: Duration = Duration::from_micros(500);
/// Time limit for stopping virtual CPUs.
pub const STOP_LIMIT: Duration = Duration::from_secs(10);

/// The caller of a measurement.
pub trait Watch {
    /// Announces the next step.
    fn begins(&self, what: &str);
    /// Whether to abort.
    fn is_stopped(&self) -> bool;
}

/// Reads the host's capabilities.
///
/// # Errors
/// There is no KVM, or it may not be used.
pub fn offer(root: &Path) -> Result<Offer, Error> {
    Ok(Offer::ask(&machine::open(root)?, root))
}

/// Measures on this host. /proc, /sys and /dev are below `root`, which differs from `/` only in tests.
///
/// # Errors
/// The missing capability or memory, with a hint. Everything is cleaned up.
pub fn run(root: &Path, settings: &Settings, watch: &dyn Watch) -> Result<Report, Error> {
    settings.check()?;
    let kvm = machine::open(root)?;
    let offer = Offer::ask(&kvm, root);
    offer.allows(settings)?;
    memory::is_there(root, settings.memory_bytes(), settings.backing)?;
    watch.begins("filling memory");
    let go_on = |_| match watch.is_stopped() {
        true => Err(Error::Interrupted),
        false => Ok(()),
    };
    let running = Running::start(&kvm, &offer, settings, &go_on)?;
    let report = measure(running.machine(), &offer, settings, watch)?;
    running.stop(STOP_LIMIT)?;
    Ok(report)
}

fn measure(
    machine: &std::sync::Arc<Machine>,
    offer: &Offer,
    settings: &Settings,
    watch: &dyn Watch,
) -> Result<Report, Error> {
    watch.begins("warming up");
    sweep(machine, settings, watch, "for the first time")?;
    let mut clock = Clock::start(machine)?;
    let until = Instant::now() + Duration::from_secs_f64(settings.before_s);
    wait(machine, watch, until, || false)?;
    clock.step(What::Before, 0, None);

    watch.begins("switching logging on");
    machine.log(true)?;
    clock.step(What::Enable, 1, None);
    for pass in 1..=settings.passes {
        watch.begins(&format!("pass {pass} of {}", settings.passes));
        sweep(machine, settings, watch, "while logged")?;
        clock.step(What::Sweep, pass, None);
        let mut bitmap = machine.read_log()?;
        let dirty = bitmap.iter().map(|word| u64::from(word.count_ones())).sum();
        clock.step(What::Get, pass, Some(dirty));
        if settings.protect != Protect::Get {
            clear(machine, settings, &mut bitmap, watch)?;
            clock.step(What::Clear, pass, None);
        }
    }
    watch.begins("switching logging off");
    machine.log(false)?;
    clock.step(What::Disable, settings.passes, None);
    let (steps, samples) = clock.finish();
    Ok(Report::new(settings.clone(), offer.clone(), steps, samples))
}

/// Waits until each virtual CPU has swept its whole slice.
fn sweep(
    machine: &Machine,
    settings: &Settings,
    watch: &dyn Watch,
    doing: &'static str,
) -> Result<(), Error> {
    // One more, because the present store may have been made before.
    let stores = settings.stores_a_sweep() + 1;
    let goals: Vec<u64> = machine.stores().map(|so_far| so_far + stores).collect();
    let swept = || machine.stores().zip(&goals).all(|(now, &goal)| now >= goal);
    let limit = Duration::from_secs_f64(settings.pass_limit_s);
    match wait(machine, watch, Instant::now() + limit, swept)? {
        true => Ok(()),
        false => Err(Error::Slow {
            limit_s: settings.pass_limit_s,
            doing,
        }),
    }
}

/// Waits for a condition until a deadline. Returns whether it was met.
fn wait(
    machine: &Machine,
    watch: &dyn Watch,
    until: Instant,
    done: impl Fn() -> bool,
) -> Result<bool, Error> {
    loop {
        machine.check()?;
        if watch.is_stopped() {
            return Err(Error::Interrupted);
        }
        if done() {
            return Ok(true);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        thread::sleep(LOOK_EVERY.min(left));
    }
}

/// Clears the log chunk by chunk.
fn clear(
    machine: &Machine,
    settings: &Settings,
    bitmap: &mut [u64],
    watch: &dyn Watch,
) -> Result<(), Error> {
    let pause = Duration::from_micros(settings.clear_pause_us);
    for (first, pages) in settings.chunks() {
        if watch.is_stopped() {
            return Err(Error::Interrupted);
        }
        machine.clear_log(bitmap, first, pages)?;
        if !pause.is_zero() {
            thread::sleep(pause);
        }
    }
    Ok(())
}

/// Records the steps with their times and counters.
struct Clock<'a> {
    machine: &'a Machine,
    sampler: Sampler,
    steps: Vec<Step>,
    /// End of the last step, milliseconds since the start, with the counters at that time.
    last_ms: f64,
    stores: u64,
    counters: crate::stats::Counters,
}

impl<'a> Clock<'a> {
    fn start(machine: &'a std::sync::Arc<Machine>) -> Result<Self, Error> {
        let sampler = Sampler::start(machine, Instant::now())?;
        Ok(Self {
            machine,
            last_ms: sampler.mark(),
            sampler,
            steps: vec![],
            stores: machine.stores().sum(),
            counters: machine.counters(),
        })
    }

    /// Ends a step.
    fn step(&mut self, what: What, pass: u32, dirty_pages: Option<u64>) {
        let until_ms = self.sampler.mark();
        let stores: u64 = self.machine.stores().sum();
        let counters = self.machine.counters();
        let took_ms = until_ms - self.last_ms;
        self.steps.push(Step {
            what,
            pass,
            from_ms: self.last_ms,
            ms: took_ms,
            speed: Speed {
                stores_per_s: (stores - self.stores) as f64 / (took_ms / 1000.0),
                worst_wait_us: self.sampler.worst_wait_us(self.last_ms, until_ms),
            },
            counts: Counts::between(&self.counters, &counters),
            dirty_pages,
        });
        (self.last_ms, self.stores, self.counters) = (until_ms, stores, counters);
    }

    fn finish(self) -> (Vec<Step>, Vec<crate::samples::Sample>) {
        (self.steps, self.sampler.finish())
    }
}
