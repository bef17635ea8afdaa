//! `demeter guest assess`: the share of accesses that fast memory of each size would serve.
//!
//! # Problem
//! An operator who adds or removes fast memory wants to know the effect. The agent knows the heat of each part of
//! memory.
//!
//! # Approach
//! Sum the heat of each block over some time. Fast memory of a size serves, at best, the accesses to the hottest blocks
//! that fit. A program that always waits for memory is slower by the latencies of the remaining accesses. Other
//! programs wait less, so this is an upper bound.
//!
//! # Properties
//! - More fast memory gives a larger share; all memory serves all accesses.
//! - Memory with uniform accesses is served in proportion to its size.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use demeter_guest::heat::{Heat, ProcessHeat, RangeHeat};
use demeter_guest::status::{Status, TierStatus};
use demeter_policy::{BLOCK_SIZE, MIB};
use serde::Serialize;

use super::client::Client;
use super::heat::watch;
use super::simulated;
use crate::{output, signals};

/// Sizes of fast memory to show, percent of the resident memory.
const SIZES: [u64; 11] = [5, 10, 15, 20, 25, 30, 40, 50, 60, 75, 100];

/// Maximum number of blocks summed per sample, 2 TiB, because the agent reports the ends of ranges.
const BLOCKS_MAX: usize = 1 << 20;

/// Length of a full bar, characters.
const BAR: f64 = 40.0;

/// Shows the share of accesses that fast memory of each size would serve, from a running agent's observations.
///
/// The agent may manage memory meanwhile, or only observe it (demeter guest --observe-only). The load should be
/// typical. Memory without accesses counts as cold.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  demeter guest --pid 4711 --observe-only    an agent that moves nothing, in another terminal
  demeter guest assess                       from a minute of its observations
  demeter guest assess --seconds 600 --json  from ten minutes, for other programs
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
}

/// The best result of one size of fast memory.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Point {
    /// Its size.
    fast_mib: u64,
    /// Share of the resident memory, %.
    memory_percent: u64,
    /// Share of the accesses that it serves, %.
    accesses_percent: f64,
    /// Upper bound of a program's slowdown compared with fast memory only.
    slowdown_at_most: f64,
}

/// The output of `demeter guest assess`.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Assessment {
    tracker: String,
    resident_mib: u64,
    /// Share of the accesses that fast memory served during the observation, %.
    accesses_percent_now: f64,
    fast_mib_now: u64,
    points: Vec<Point>,
}

/// Observes, and prints the assessment.
pub fn assess(args: &Args) -> anyhow::Result<()> {
    let stop = signals::stop_flag()?;
    let mut seen = Seen::default();
    let status = match &args.scenario {
        Some(path) => look_at_simulated(path, &stop, &mut seen)?,
        None => {
            watch(&args.client, args.seconds, &stop, |_, heat| {
                seen.add(&heat);
                Ok(())
            })?;
            args.client.get("/v1/status")?
        }
    };
    let Some(assessment) = seen.assess(&status) else {
        anyhow::bail!(
            "the agent saw no accesses; let it manage a busy process (see demeter guest status), or observe longer"
        );
    };
    output::print(match args.json {
        true => serde_json::to_string_pretty(&assessment)? + "\n",
        false => text(&assessment),
    })
}

/// Observes a simulated program. All of its memory counts as resident and slow.
fn look_at_simulated(path: &Path, stop: &AtomicBool, seen: &mut Seen) -> anyhow::Result<Status> {
    let latencies_ns = simulated::look(path, stop, |_, ranking| {
        let mut processes: BTreeMap<u32, Vec<RangeHeat>> = BTreeMap::new();
        for ranked in ranking {
            processes.entry(ranked.pid.0).or_default().push(RangeHeat {
                start: ranked.range.start().0,
                end: ranked.range.end().0,
                samples: ranked.count,
                fast_bytes: 0,
                slow_bytes: ranked.range.len().0,
            });
        }
        let process = |(pid, ranges)| ProcessHeat { pid, ranges };
        seen.add(&Heat {
            processes: processes.into_iter().map(process).collect(),
            ..Heat::default()
        });
    })?;
    let tier = |latency_ns: u64| TierStatus {
        latency_ns: u32::try_from(latency_ns).unwrap_or(u32::MAX),
        ..TierStatus::default()
    };
    Ok(Status {
        tracker: "of the simulator".into(),
        tiers: latencies_ns.map(tier).into(),
        ..Status::default()
    })
}

/// A block's resident bytes, and its heat summed over samples.
#[derive(Debug, Clone, Copy, Default)]
struct Part {
    bytes: u64,
    heat: f64,
}

/// The sum of all samples.
#[derive(Debug, Default)]
struct Seen {
    /// By process and block number.
    parts: BTreeMap<(u32, u64), Part>,
    in_fast: f64,
    all: f64,
    fast_bytes: u64,
}

impl Seen {
    fn add(&mut self, heat: &Heat) {
        let mut left = BLOCKS_MAX;
        self.fast_bytes = 0;
        for part in self.parts.values_mut() {
            part.bytes = 0;
        }
        for process in &heat.processes {
            for range in &process.ranges {
                let (from, to) = (range.start / BLOCK_SIZE, range.end.div_ceil(BLOCK_SIZE));
                let blocks = to.saturating_sub(from).max(1);
                let resident = range.fast_bytes.saturating_add(range.slow_bytes);
                self.fast_bytes = self.fast_bytes.saturating_add(range.fast_bytes);
                if resident == 0 {
                    continue;
                }
                self.all += range.samples;
                self.in_fast += range.samples * range.fast_bytes as f64 / resident as f64;
                for block in (from..to).take(left) {
                    left -= 1;
                    let part = self.parts.entry((process.pid, block)).or_default();
                    part.bytes = resident / blocks;
                    part.heat += range.samples / blocks as f64;
                }
            }
        }
        // Freed memory needs no fast memory.
        self.parts.retain(|_, part| part.bytes > 0);
    }

    /// `None` if no access was seen.
    fn assess(&self, status: &Status) -> Option<Assessment> {
        let mut parts: Vec<Part> = self.parts.values().copied().collect();
        let density = |part: &Part| part.heat / part.bytes as f64;
        parts.sort_by(|a, b| density(b).total_cmp(&density(a)));
        let resident: u64 = parts.iter().map(|part| part.bytes).sum();
        let heat: f64 = parts.iter().map(|part| part.heat).sum();
        let is_seen = resident > 0 && heat > 0.0;
        let latency =
            |tier: Option<&TierStatus>| tier.map_or(1.0, |tier| f64::from(tier.latency_ns.max(1)));
        let slower = latency(status.tiers.last()) / latency(status.tiers.first());
        let point = |memory_percent: u64| {
            let size = resident / 100 * memory_percent;
            let share = match memory_percent {
                100 => 1.0,
                _ => served(&parts, size) / heat,
            };
            Point {
                fast_mib: size / MIB,
                memory_percent,
                accesses_percent: share * 100.0,
                slowdown_at_most: share + (1.0 - share) * slower.max(1.0),
            }
        };
        is_seen.then(|| Assessment {
            tracker: status.tracker.clone(),
            resident_mib: resident / MIB,
            accesses_percent_now: self.in_fast / self.all * 100.0,
            fast_mib_now: self.fast_bytes / MIB,
            points: SIZES.into_iter().map(point).collect(),
        })
    }
}

/// The heat of the hottest parts that fit into `size` bytes; the last may fit partly. `parts` are sorted, hottest
/// first.
fn served(parts: &[Part], size: u64) -> f64 {
    let mut left = size;
    let mut served = 0.0;
    for part in parts {
        let taken = part.bytes.min(left);
        served += part.heat * taken as f64 / part.bytes as f64;
        left -= taken;
        if left == 0 {
            break;
        }
    }
    served
}

fn text(it: &Assessment) -> String {
    let mut text = format!(
        "{} MiB in memory, seen by tracker {}",
        it.resident_mib, it.tracker
    );
    if it.fast_mib_now > 0 {
        text += &format!(
            "; {} MiB of them fast, with {:.0} % of the accesses",
            it.fast_mib_now, it.accesses_percent_now
        );
    }
    text += "\n\nfast memory    accesses  at most slower by\n";
    for point in &it.points {
        let bar = "#".repeat((point.accesses_percent / 100.0 * BAR).round() as usize);
        text += &format!(
            "{:>6} MiB {:>3} %  {:>5.1} %  {:>5.0} %  {bar}\n",
            point.fast_mib,
            point.memory_percent,
            point.accesses_percent,
            (point.slowdown_at_most - 1.0) * 100.0,
        );
    }
    text + "\nAccesses that fast memory of a size serves if the hottest memory lies there. A program that waits for memory \
            all\nthe time is slower than with all memory fast by the last figure, any other by less.\n"
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn status() -> Status {
        let tier = |latency_ns| TierStatus {
            latency_ns,
            ..TierStatus::default()
        };
        Status {
            tracker: "damon".into(),
            tiers: vec![tier(100), tier(300)],
            ..Status::default()
        }
    }

    /// Heat of ranges, each given as its blocks, its blocks in fast memory, and its samples.
    fn heat(ranges: &[(u64, u64, f64)]) -> Heat {
        let mut start = 0;
        let range = |&(blocks, fast, samples): &(u64, u64, f64)| {
            start += blocks * BLOCK_SIZE;
            RangeHeat {
                start: start - blocks * BLOCK_SIZE,
                end: start,
                samples,
                fast_bytes: fast * BLOCK_SIZE,
                slow_bytes: (blocks - fast) * BLOCK_SIZE,
            }
        };
        let ranges = ranges.iter().map(range).collect();
        Heat {
            processes: vec![ProcessHeat { pid: 7, ranges }],
            ..Heat::default()
        }
    }

    fn assessed(looks: &[Heat]) -> Option<Assessment> {
        let mut seen = Seen::default();
        looks.iter().for_each(|heat| seen.add(heat));
        seen.assess(&status())
    }

    #[test]
    fn a_hot_tenth_is_served_by_a_tenth() {
        let it = assessed(&[heat(&[(90, 45, 100.0), (10, 0, 900.0)])]).unwrap();
        assert_eq!((it.resident_mib, it.fast_mib_now), (200, 90));
        assert!((it.accesses_percent_now - 5.0).abs() < 1e-9);
        let at = |percent| {
            it.points
                .iter()
                .find(|p| p.memory_percent == percent)
                .unwrap()
        };
        assert!((at(10).accesses_percent - 90.0).abs() < 1e-6);
        assert!((at(5).accesses_percent - 45.0).abs() < 1e-6);
        // A tenth of the accesses takes three times as long.
        assert!((at(10).slowdown_at_most - 1.2).abs() < 1e-6);
        assert!(
            text(&it).contains("20 MiB  10 %   90.0 %     20 %"),
            "{}",
            text(&it)
        );
    }

    #[test]
    fn what_is_not_accessed_or_was_freed_is_no_basis() {
        assert_eq!(assessed(&[]), None);
        assert_eq!(assessed(&[heat(&[(10, 0, 0.0)])]), None);
        let (before, after) = (heat(&[(10, 0, 5.0), (90, 0, 900.0)]), heat(&[(10, 0, 5.0)]));
        assert_eq!(assessed(&[before, after]).unwrap().resident_mib, 20);
    }

    #[test]
    fn a_range_without_end_is_cut() {
        let endless = RangeHeat {
            start: 0,
            end: u64::MAX,
            samples: 1.0,
            fast_bytes: 0,
            slow_bytes: u64::MAX,
        };
        let mut seen = Seen::default();
        let ranges = vec![endless, endless];
        let processes = vec![ProcessHeat { pid: 7, ranges }];
        seen.add(&Heat {
            processes,
            ..Heat::default()
        });
        assert_eq!(seen.parts.len(), BLOCKS_MAX);
        assert!(seen.assess(&status()).is_some());
    }

    /// In the scenario 9 of 10 accesses go to an eighth of the memory; the rest are uniform.
    #[cfg(feature = "study")]
    #[test]
    fn the_hot_part_of_a_simulated_program_is_found() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scenarios/ci.toml");
        let mut seen = Seen::default();
        let status =
            look_at_simulated(Path::new(path), &AtomicBool::new(false), &mut seen).unwrap();
        let it = seen.assess(&status).unwrap();
        let at = |percent| {
            it.points
                .iter()
                .find(|p| p.memory_percent == percent)
                .unwrap()
        };
        assert!((80.0..95.0).contains(&at(15).accesses_percent), "{it:?}");
        assert!(at(5).accesses_percent < 50.0, "{it:?}");
    }

    proptest! {
        #[test]
        fn more_serves_more_and_even_use_is_served_by_its_part(
            ranges in prop::collection::vec((1u64..50, 0u64..50, 0.0..1e6f64), 1..20),
            even in any::<bool>(),
        ) {
            let ranges: Vec<_> = ranges.iter().map(|&(blocks, fast, samples)| {
                (blocks, fast.min(blocks), if even { blocks as f64 } else { samples + 1.0 })
            }).collect();
            let it = assessed(&[heat(&ranges)]).unwrap();
            let shares: Vec<f64> = it.points.iter().map(|p| p.accesses_percent).collect();
            prop_assert!(shares.windows(2).all(|w| w[0] <= w[1] + 1e-6), "{:?}", shares);
            prop_assert!((shares[SIZES.len() - 1] - 100.0).abs() < 1e-6);
            for (share, percent) in shares.iter().zip(SIZES) {
                prop_assert!(*share >= percent as f64 - 0.1);
                prop_assert!(!even || (share - percent as f64).abs() < 0.1);
            }
        }
    }
}
