//! mix: parts of memory with different access patterns, at once or in turn, as in a scenario's `[workload]` of that
//! kind.

use std::hint::black_box;
use std::str::FromStr;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use clap::Parser;
use demeter_policy::MIB;
use demeter_scenario::{self as scenario, MixAccesses};

use super::args::Common;
use super::event::{Output, Rate, WorkloadEvent};
use super::region::Region;
use super::rng::Rng;
use super::timed::{self, Control, Tick};
use super::wait::Waiter;
use super::{Error, memlat};

/// Words in a cache line.
const LINE_WORDS: usize = MixAccesses::LINE as usize / size_of::<u64>();

/// Runs in a part between two checks of the clock.
const RUNS: usize = 16;

/// Parts of memory that are used in different ways
#[derive(Debug, Clone, Parser)]
#[command(name = "mix", version)]
pub struct Mix {
    /// The parts, as a scenario's [workload] names them, in TOML
    #[arg(
        long,
        value_name = "TOML",
        default_value = "parts = [{ size_mib = 800 }]"
    )]
    workload: Parameters,
    /// Have the hot memory come from this NUMA node, and touch it first
    #[arg(long, value_name = "NODE")]
    place_hot: Option<u32>,
    #[command(flatten)]
    common: Common,
}

/// Validated parameters of a scenario.
#[derive(Debug, Clone)]
struct Parameters(scenario::Mix);

impl FromStr for Parameters {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mix: scenario::Mix = toml::from_str(text).map_err(|e| e.message().to_string())?;
        mix.is_sound()?;
        Ok(Self(mix))
    }
}

/// Positions of the parts in the region.
struct Layout {
    accesses: MixAccesses,
    /// Start of each part, in words from the region's start.
    starts: Vec<usize>,
}

impl Layout {
    fn new(mix: &scenario::Mix) -> Self {
        let accesses = MixAccesses::new(mix);
        let mut at = mix.cold_mib * MIB;
        let start = |part: &scenario::MixPart| {
            let start = at as usize / size_of::<u64>();
            at += part.bytes;
            start
        };
        Self {
            starts: accesses.parts.iter().map(start).collect(),
            accesses,
        }
    }

    /// The initial hot sets, in bytes from the region's start.
    fn hot(&self) -> Vec<std::ops::Range<u64>> {
        let parts = self.starts.iter().zip(&self.accesses.parts);
        let hot = parts.filter(|(_, part)| part.hot_bytes > 0);
        hot.map(|(start, part)| {
            let start = (start * size_of::<u64>()) as u64 + part.hot_start(0);
            start..start + part.hot_bytes
        })
        .collect()
    }

    /// The hot set, if there is one that never moves; otherwise empty.
    fn lasting_hot_set(&self) -> std::ops::Range<u64> {
        let stays = |part: &scenario::MixPart| !part.moves();
        match self.hot().as_slice() {
            [hot] if self.accesses.parts.iter().all(stays) && self.accesses.turn(0).is_none() => {
                hot.clone()
            }
            _ => 0..0,
        }
    }
}

/// Runs mix with these arguments. An operation is an access.
pub fn run(args: &Mix) -> Result<(), Error> {
    let output = Output {
        json: args.common.json,
    };
    let Parameters(mix) = &args.workload;
    let layout = Layout::new(mix);
    let waiter = Waiter::new()?;
    let parts_bytes: u64 = layout.accesses.parts.iter().map(|part| part.bytes).sum();
    let region = Region::map(mix.cold_mib * MIB + parts_bytes)?;
    if let Some(node) = args.place_hot {
        for hot in layout.hot() {
            region.prefer_node(&hot, node)?;
            memlat::touch(&region, &hot, &waiter)?;
        }
    }
    let all = 0..region.words().len() as u64 * size_of::<u64>() as u64;
    memlat::touch(&region, &all, &waiter)?;

    let hot = layout.lasting_hot_set();
    output.say(&WorkloadEvent::Ready {
        start: region.start(),
        bytes: all.end,
        hot_start: region.start() + hot.start,
        hot_bytes: hot.end - hot.start,
    })?;
    args.common.wait_if_held(&waiter)?;
    let begin = Instant::now();
    let total = timed::run(
        &args.common.schedule(vec![]),
        mix.threads as usize,
        &waiter,
        |thread, control| access(&region, &layout, args, begin, thread, control),
        |tick| match tick {
            Tick::Interval { t_s, length_s, ops } => output.say(&WorkloadEvent::Interval {
                t_s,
                ops,
                rate: Rate::mops(ops, length_s),
            }),
            Tick::Shift { .. } => Ok(()),
        },
    )?;
    total.say_done(output, Rate::mops(total.ops, total.t_s))?;
    args.common.wait_if_held(&waiter)
}

/// Runs one thread's accesses until the phase ends.
fn access(
    region: &Region,
    layout: &Layout,
    args: &Mix,
    begin: Instant,
    thread: usize,
    control: &Control,
) {
    let (words, accesses) = (region.words(), &layout.accesses);
    let mut rng = Rng::new(args.common.seed, thread as u64);
    // Each thread sweeps its own piece.
    let Parameters(mix) = &args.workload;
    let piece = |part: &scenario::MixPart| part.bytes / MixAccesses::LINE / u64::from(mix.threads);
    let pieces: Vec<u64> = accesses.parts.iter().map(piece).collect();
    let mut swept = vec![0; pieces.len()];
    let mut sum = 0u64;
    while control.stage().is_some() {
        let now_ns = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let turn = accesses.turn(now_ns);
        for _ in 0..RUNS {
            let chosen = accesses.choose(turn, &mut rng);
            let (part, start) = (&accesses.parts[chosen], layout.starts[chosen]);
            let hot_start = part.hot_start(now_ns);
            for _ in 0..MixAccesses::RUN {
                let line = if part.is_in_order {
                    let line = thread as u64 * pieces[chosen] + swept[chosen];
                    swept[chosen] += 1;
                    if swept[chosen] >= pieces[chosen] {
                        swept[chosen] = 0;
                    }
                    line
                } else {
                    part.offset(hot_start, &mut rng) / MixAccesses::LINE
                };
                let word = &words[start + line as usize * LINE_WORDS];
                if part.is_store(&mut rng) {
                    word.store(sum, Relaxed);
                } else {
                    sum = sum.wrapping_add(word.load(Relaxed));
                }
            }
        }
        control.done(thread, (RUNS * MixAccesses::RUN) as u64);
    }
    black_box(sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(text: &str) -> Layout {
        Layout::new(&text.parse::<Parameters>().unwrap().0)
    }

    #[test]
    fn parts_lie_one_after_the_other_behind_what_is_cold() {
        let layout = layout(
            "cold_mib = 3\nparts = [{ size_mib = 4 }, { size_mib = 8, hot_mib = 2, hot_weight = 1 }]",
        );
        assert_eq!(layout.starts, [3, 7].map(|mib| mib * MIB as usize / 8));
        assert_eq!(layout.lasting_hot_set(), 13 * MIB..15 * MIB);
    }

    #[test]
    fn a_hot_set_that_moves_is_not_told() {
        let moving = "parts = [{ size_mib = 8, hot_mib = 2, hot_weight = 1, moves_s = 1 }]";
        assert_eq!(layout(moving).lasting_hot_set(), 0..0);
        assert_eq!(layout("parts = [{ size_mib = 8 }]").lasting_hot_set(), 0..0);
    }

    #[test]
    fn what_a_scenario_may_not_say_is_refused() {
        for (text, want) in [
            ("parts = []", "number"),
            ("parts = [{ size_mib = 0 }]", "size_mib"),
            ("parts = [{ size = 1 }]", "unknown field"),
        ] {
            let error = text.parse::<Parameters>().err().unwrap();
            assert!(error.contains(want), "{error}");
        }
    }
}
