//! `demeter guest assess`: how fast would programs be with less or more fast memory?
//!
//! # Problem
//! An operator who adds or removes fast memory wants to know the effect. The agent estimates it for each size
//! (`demeter_policy::benefit`), and tells the host's controller the same.
//!
//! # Approach
//! Ask the agent for its estimate each second, and show the mean.
//!
//! # Properties
//! - More fast memory gives a larger share; all memory serves all accesses.
//! - The slowdown is what the host's controller computes from the same estimate.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use demeter_guest::status::Status;
use demeter_policy::benefit::Benefit;
use demeter_policy::{ByteCount, MIB};
use serde::Serialize;

use super::client::Client;
use super::heat::watch;
use crate::speeds::{self, Speeds};
use crate::{output, signals, simulated};

/// Sizes of fast memory to show, percent of the memory that is used.
const SIZES: [u64; 11] = [5, 10, 15, 20, 25, 30, 40, 50, 60, 75, 100];

/// Time between two questions.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// Length of a full bar, characters.
const BAR: f64 = 40.0;

/// Shows how fast programs would be with fast memory of several sizes, by a running agent's estimate.
///
/// The agent may manage memory meanwhile, or only observe it (demeter guest --observe-only). The load should be
/// typical. Memory without accesses counts as cold.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  demeter guest --pid 4711 --observe-only    an agent that moves nothing, in another terminal
  demeter guest assess                       the mean of a minute
  demeter guest assess --seconds 600 --json  that of ten minutes, for other programs
  demeter guest assess --svg speed.svg       also a picture (package demeter-lab)
  demeter guest assess --scenario scenarios/gups.toml  of a simulated program")]
pub struct Args {
    #[command(flatten)]
    client: Client,
    /// Time to observe, seconds
    #[arg(long, value_name = "S", default_value_t = 60)]
    seconds: u32,
    /// Run this scenario under demeter on the simulator instead, and assess its program (package
    /// demeter-lab)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["socket", "seconds"])]
    scenario: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Also write a picture of the speed by size (package demeter-lab)
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// The best result of one size of fast memory.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Point {
    /// Its size.
    fast_mib: u64,
    /// Share of the memory that is used, %.
    memory_percent: u64,
    /// Share of the accesses that it serves, %.
    accesses_percent: f64,
    /// Lower bound of the slowdown compared with fast memory only: 1.1 is 10 % slower.
    slowdown_at_least: f64,
    /// Upper bound of that slowdown.
    slowdown_at_most: f64,
}

/// The output of `demeter guest assess`.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Assessment {
    tracker: String,
    used_mib: u64,
    /// Share of the accesses that fast memory served at the end, %.
    accesses_percent_now: Option<f64>,
    fast_mib_now: u64,
    points: Vec<Point>,
}

/// Observes, and prints the assessment.
pub fn assess(args: &Args) -> anyhow::Result<()> {
    speeds::check(args.svg.as_deref())?;
    let stop = signals::stop_flag()?;
    let mut seen = Seen::default();
    let mut status = Status::default();
    match &args.scenario {
        Some(path) => look_at_simulated(path, &stop, &mut seen)?,
        None => {
            let ask = || args.client.get("/v1/status");
            watch(ask, args.seconds, ASK_EVERY, &stop, |_, now: Status| {
                if let Some(benefit) = &now.benefit {
                    seen.add(benefit);
                }
                status = now;
                Ok(())
            })?;
        }
    }
    let Some(assessment) = seen.assess(&status) else {
        anyhow::bail!(
            "the agent has not seen enough accesses; let it manage a busy process (see demeter guest status), or observe longer"
        );
    };
    if let Some(file) = &args.svg {
        draw(file, &assessment)?;
    }
    output::print(match args.json {
        true => serde_json::to_string_pretty(&assessment)? + "\n",
        false => text(&assessment),
    })
}

/// Observes a simulated program.
fn look_at_simulated(path: &Path, stop: &AtomicBool, seen: &mut Seen) -> anyhow::Result<()> {
    simulated::look(path, stop, |_, _, benefit| {
        if let Some(benefit) = benefit() {
            seen.add(&benefit);
        }
    })
}

/// Sums over all estimates.
#[derive(Debug, Default)]
struct Seen {
    count: u32,
    used: u64,
    /// Shares of accesses and both bounds of the slowdown, by size.
    sums: [[f64; 3]; SIZES.len()],
}

impl Seen {
    fn add(&mut self, benefit: &Benefit) {
        self.count = self.count.saturating_add(1);
        self.used = benefit.points().last().map_or(0, |point| point.fast.0);
        for (sums, percent) in self.sums.iter_mut().zip(SIZES) {
            let fast = ByteCount(size(self.used, percent));
            let slowdown = benefit.slowdown(fast);
            let values = [benefit.served(fast), slowdown.min, slowdown.max];
            sums.iter_mut()
                .zip(values)
                .for_each(|(sum, value)| *sum += value);
        }
    }

    /// `None` without an estimate.
    fn assess(&self, status: &Status) -> Option<Assessment> {
        let count = f64::from(self.count);
        let point = |(sums, percent): (&[f64; 3], u64)| {
            let [served, min, max] = sums.map(|sum| sum / count);
            Point {
                fast_mib: size(self.used, percent) / MIB,
                memory_percent: percent,
                accesses_percent: served * 100.0,
                slowdown_at_least: min,
                slowdown_at_most: max,
            }
        };
        let fast = status.targets.iter().map(|target| target.fast_bytes);
        (self.count > 0).then(|| Assessment {
            tracker: match status.tracker.as_str() {
                "" => "of the simulator".into(),
                tracker => tracker.into(),
            },
            used_mib: self.used / MIB,
            accesses_percent_now: status.fast_hit_permille.map(|hit| f64::from(hit) / 10.0),
            fast_mib_now: fast.fold(0, u64::saturating_add) / MIB,
            points: self.sums.iter().zip(SIZES).map(point).collect(),
        })
    }
}

fn size(used: u64, percent: u64) -> u64 {
    match percent {
        100 => used,
        _ => used / 100 * percent,
    }
}

/// Draws the speed by size, as a share of that with all memory fast.
fn draw(file: &Path, it: &Assessment) -> anyhow::Result<()> {
    let bounds = |point: &Point| {
        (
            100.0 / point.slowdown_at_most,
            100.0 / point.slowdown_at_least,
        )
    };
    let speeds = Speeds {
        name: "programs".into(),
        bounds_percent: it.points.iter().map(bounds).collect(),
    };
    speeds::draw(file, &SIZES, vec![speeds])
}

fn text(it: &Assessment) -> String {
    let mut text = format!("{} MiB in use, seen by tracker {}", it.used_mib, it.tracker);
    if let Some(now) = it.accesses_percent_now.filter(|_| it.fast_mib_now > 0) {
        text += &format!(
            "; {} MiB of them fast, with {now:.0} % of the accesses",
            it.fast_mib_now
        );
    }
    text += "\n\nfast memory    accesses  slower by\n";
    for point in &it.points {
        let bar = "#".repeat((point.accesses_percent / 100.0 * BAR).round() as usize);
        let [least, most] = [point.slowdown_at_least, point.slowdown_at_most]
            .map(|slowdown| format!("{:.0}", (slowdown - 1.0) * 100.0));
        let slower = match least == most {
            true => format!("{most} %"),
            false => format!("{least} to {most} %"),
        };
        text += &format!(
            "{:>6} MiB {:>3} %  {:>5.1} %  {slower:>12}  {bar}\n",
            point.fast_mib, point.memory_percent, point.accesses_percent,
        );
    }
    text + "\nAccesses that fast memory of a size serves if the hottest memory lies there, and how much slower programs are than \
            with\nall memory fast. Two numbers are the bounds of an estimate.\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn benefit(points: &[(u64, u16)], waits: [u16; 2]) -> Benefit {
        let points: Vec<_> = points
            .iter()
            .map(|(mib, served)| (mib * MIB, *served))
            .collect();
        let fields = serde_json::json!({
            "points": points, "fast_latency_ns": 100, "slow_latency_ns": 300, "running_ms": 1000,
            "waits_min_permille": waits[0], "waits_max_permille": waits[1],
        });
        serde_json::from_value(fields).unwrap()
    }

    fn at(it: &Assessment, percent: u64) -> Point {
        let found = it.points.iter().find(|p| p.memory_percent == percent);
        *found.unwrap()
    }

    #[test]
    fn the_mean_of_estimates_is_shown_as_the_host_computes_it() {
        let mut seen = Seen::default();
        assert_eq!(seen.assess(&Status::default()), None);
        seen.add(&benefit(&[(0, 0), (20, 1000), (200, 1000)], [500, 500]));
        seen.add(&benefit(&[(0, 0), (20, 800), (200, 1000)], [0, 500]));
        let it = seen.assess(&Status::default()).unwrap();
        assert_eq!(it.used_mib, 200);
        let tenth = at(&it, 10);
        assert!((tenth.accesses_percent - 90.0).abs() < 1e-9);
        // A fifth of the accesses takes three times as long, for half of the time.
        assert!((tenth.slowdown_at_most - 1.1).abs() < 1e-9);
        assert!((tenth.slowdown_at_least - 1.0).abs() < 1e-9);
        assert_eq!(at(&it, 100).slowdown_at_most, 1.0);
        let text = text(&it);
        assert!(
            text.contains("20 MiB  10 %   90.0 %     0 to 10 %  ####"),
            "{text}"
        );
    }

    #[cfg(feature = "study")]
    #[test]
    fn the_picture_has_both_bounds_of_the_speed() {
        let mut seen = Seen::default();
        seen.add(&benefit(&[(0, 0), (20, 750), (200, 1000)], [0, 500]));
        let it = seen.assess(&Status::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("speed.svg");
        draw(&file, &it).unwrap();
        let svg = std::fs::read_to_string(file).unwrap();
        // A quarter of the accesses takes three times as long, for half of the time at most.
        assert!(svg.contains("programs, 10 %: 90.0 (80.0 to 100)"), "{svg}");
    }

    /// In the scenario 9 of 10 accesses go to an eighth of the memory; the rest are uniform.
    #[cfg(feature = "study")]
    #[test]
    fn the_hot_part_of_a_simulated_program_is_found() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scenarios/ci.toml");
        let mut seen = Seen::default();
        look_at_simulated(Path::new(path), &AtomicBool::new(false), &mut seen).unwrap();
        let it = seen.assess(&Status::default()).unwrap();
        assert!(
            (75.0..95.0).contains(&at(&it, 20).accesses_percent),
            "{it:?}"
        );
        assert!(at(&it, 5).accesses_percent < 50.0, "{it:?}");
    }
}
