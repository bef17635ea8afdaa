//! gups: random 8-byte updates of an array with a hot set.
//!
//! With probability `--weight`, an update goes to a random word of the hot set, otherwise to a random word of the rest.
//! The array is populated in address order, so first touch fills the fast node with its start. `--reverse` puts the hot
//! set at the end, the worst case.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use clap::Parser;

use super::args::{Common, seconds};
use super::event::{Output, Rate, WorkloadEvent};
use super::geometry::Geometry;
use super::region::{Mapping, Region};
use super::rng::Rng;
use super::sharers;
use super::tagged_words::{Check, ThreadWords, WORD_BYTES, fresh, hot_below, updated};
use super::timed::{self, BATCH, Control, Tick};
use super::wait::Waiter;
use super::{Error, Size, SizeError};

/// Words processed between two signal checks while populating and verifying: 2 MiB.
const CHUNK_WORDS: u64 = (2 << 20) / WORD_BYTES;

const THREADS_MAX: i64 = 1024;

const SHARED_BY_MAX: i64 = 64;

/// Interval at which an idle thread checks whether it is still idle.
const NAP: Duration = Duration::from_millis(100);

/// Random 8-byte updates with a hot set
#[derive(Debug, Clone, Parser)]
#[command(name = "gups", version)]
pub struct Gups {
    /// Size of the array
    #[arg(long, default_value = "800MiB")]
    size: Size,
    /// Size of the hot set
    #[arg(long, default_value = "100MiB")]
    hot: Size,
    /// Share of the updates that go to the hot set, 0 to 1
    #[arg(long, default_value = "0.9", value_parser = weight)]
    weight: f64,
    /// Hot set at the end of the array instead of its start
    #[arg(long)]
    reverse: bool,
    /// Threads that update
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=THREADS_MAX))]
    threads: u32,
    /// Second of the timed phase at which the hot set jumps to the middle of the array
    #[arg(long, value_name = "S", value_parser = seconds)]
    shift_at: Option<Duration>,
    /// From this second of the timed phase on the hot set has this size, or nothing is updated; may be given
    /// several times, in order of time
    #[arg(long = "phase", value_name = "S:SIZE|S:idle", value_parser = phase, conflicts_with = "shift_at")]
    phases: Vec<Phase>,
    /// At the end check that no word and no update was lost
    #[arg(long)]
    verify: bool,
    /// Have the hot memory come from this NUMA node, and touch it first
    #[arg(long, value_name = "NODE")]
    place_hot: Option<u32>,
    /// Bind the array to these NUMA nodes
    #[arg(long, value_name = "NODES", value_delimiter = ',', conflicts_with_all = ["interleave", "place_hot"])]
    bind: Vec<u32>,
    /// Have the array's pages come from these NUMA nodes in turn
    #[arg(
        long,
        value_name = "NODES",
        value_delimiter = ',',
        conflicts_with = "place_hot"
    )]
    interleave: Vec<u32>,
    /// Processes that map the array; all but one touch it once and are idle
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=SHARED_BY_MAX))]
    shared_by: u32,
    /// Address space without access to reserve on each side of the array
    #[arg(long, default_value = "0MiB")]
    reserve: Size,
    #[command(flatten)]
    common: Common,
}

/// A phase: the hot set has another size, or the threads are idle.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Phase {
    at: Duration,
    hot: Option<Size>,
}

/// Runs gups with these arguments.
pub fn run(args: &Gups) -> Result<(), Error> {
    let geometry = if args.phases.is_empty() {
        Geometry::new(args.size, args.hot, args.reverse, args.shift_at.is_some())?
    } else {
        // An idle phase keeps the hot set of the phase before.
        let later = args.phases.iter().scan(args.hot, |hot, phase| {
            *hot = phase.hot.unwrap_or(*hot);
            Some(*hot)
        });
        let sizes: Vec<Size> = std::iter::once(args.hot).chain(later).collect();
        Geometry::resized(args.size, &sizes, args.reverse)?
    };
    let shares = shares(&geometry, u64::from(args.threads))?;
    let shifts_at = shifts_at(args)?;
    let output = Output {
        json: args.common.json,
    };
    let waiter = Waiter::new()?;
    let mapping = Mapping {
        is_shared: args.shared_by > 1,
        reserve_bytes: args.reserve.bytes,
    };
    let region = Region::map_as(geometry.size, mapping)?;
    for (nodes, mode) in [
        (&args.bind, libc::MPOL_BIND),
        (&args.interleave, libc::MPOL_INTERLEAVE),
    ] {
        if !nodes.is_empty() {
            region.set_policy(nodes, mode)?;
        }
    }
    populate(&region, &geometry, args, &waiter)?;
    sharers::start(&region, args.shared_by - 1)?;

    let address = |hot: &Range<u64>| (region.start() + hot.start, hot.end - hot.start);
    let (hot_start, hot_bytes) = address(&geometry.hot[0]);
    output.say(&WorkloadEvent::Ready {
        start: region.start(),
        bytes: geometry.size,
        hot_start,
        hot_bytes,
    })?;
    args.common.wait_if_held(&waiter)?;

    let total = timed::run(
        &args.common.schedule(shifts_at),
        args.threads as usize,
        &waiter,
        |thread, control| update(&region, args, thread, &shares[thread], control),
        |tick| match tick {
            Tick::Interval { t_s, length_s, ops } => output.say(&WorkloadEvent::Interval {
                t_s,
                ops,
                rate: Rate::mops(ops, length_s),
            }),
            Tick::Shift { stage, t_s } => {
                let (hot_start, hot_bytes) = address(&geometry.hot[stage]);
                output.say(&WorkloadEvent::Shift {
                    t_s,
                    hot_start,
                    hot_bytes,
                })
            }
        },
    )?;
    total.say_done(output, Rate::mops(total.ops, total.t_s))?;
    args.common.wait_if_held(&waiter)?;
    if args.verify {
        let check = check(&region, args.common.seed, &waiter)?;
        let (words, errors) = (check.words, check.errors(total.ops));
        output.say(&WorkloadEvent::Verified { words, errors })?;
        if errors > 0 {
            return Err(Error::Corrupt { words, errors });
        }
    }
    Ok(())
}

/// Times at which the hot set changes.
fn shifts_at(args: &Gups) -> Result<Vec<Duration>, Error> {
    let shifts_at: Vec<Duration> = match args.shift_at {
        Some(at) => vec![at],
        None => args.phases.iter().map(|phase| phase.at).collect(),
    };
    if shifts_at.iter().any(|&at| at >= args.common.duration) {
        return Err(Error::Arguments(
            "--shift-at and --phase must come before the end of --duration".into(),
        ));
    }
    if !shifts_at.is_sorted_by(|a, b| a < b) {
        return Err(Error::Arguments(
            "--phase: give phases in the order of time".into(),
        ));
    }
    Ok(shifts_at)
}

/// Each thread's words, for each hot set.
fn shares(geometry: &Geometry, threads: u64) -> Result<Vec<Vec<ThreadWords>>, Error> {
    let in_words = |hot: &Range<u64>| hot.start / WORD_BYTES..hot.end / WORD_BYTES;
    let shares: Vec<Vec<ThreadWords>> = (0..threads)
        .map(|thread| {
            let share =
                |hot| ThreadWords::new(thread, threads, geometry.size / WORD_BYTES, &in_words(hot));
            geometry.hot.iter().map(share).collect()
        })
        .collect();
    if shares.iter().flatten().any(|share| share.hot_words() == 0) {
        return Err(Error::Arguments(format!(
            "--hot has fewer words of 8 bytes than --threads {threads}"
        )));
    }
    Ok(shares)
}

/// Writes every word once: placed hot sets first, then all others in address order.
fn populate(
    region: &Region,
    geometry: &Geometry,
    args: &Gups,
    waiter: &Waiter,
) -> Result<(), Error> {
    if let Some(node) = args.place_hot {
        for hot in &geometry.hot {
            region.prefer_node(hot, node)?;
        }
        for hot in &geometry.hot {
            fill(region, hot, args.common.seed, waiter)?;
        }
    }
    // Populated words are written again with the same values, which adds no pages.
    fill(region, &(0..geometry.size), args.common.seed, waiter)
}

fn fill(region: &Region, bytes: &Range<u64>, seed: u64, waiter: &Waiter) -> Result<(), Error> {
    for_chunks(
        bytes.start / WORD_BYTES..bytes.end / WORD_BYTES,
        waiter,
        |chunk| {
            let words = &region.words()[chunk.start as usize..chunk.end as usize];
            for (index, word) in (chunk.start..).zip(words) {
                word.store(fresh(index, seed), Relaxed);
            }
        },
    )
}

fn check(region: &Region, seed: u64, waiter: &Waiter) -> Result<Check, Error> {
    let mut check = Check::default();
    for_chunks(0..region.words().len() as u64, waiter, |chunk| {
        let words = &region.words()[chunk.start as usize..chunk.end as usize];
        for (index, word) in (chunk.start..).zip(words) {
            check.add(index, seed, word.load(Relaxed));
        }
    })?;
    Ok(check)
}

/// Calls `work` for each chunk of `words` in turn, until a signal arrives.
fn for_chunks(
    words: Range<u64>,
    waiter: &Waiter,
    mut work: impl FnMut(Range<u64>),
) -> Result<(), Error> {
    for start in words.clone().step_by(CHUNK_WORDS as usize) {
        waiter.check()?;
        work(start..(start + CHUNK_WORDS).min(words.end));
    }
    Ok(())
}

/// Runs one thread's updates until the phase ends.
fn update(region: &Region, args: &Gups, thread: usize, shares: &[ThreadWords], control: &Control) {
    let words = region.words();
    let hot_below = hot_below(args.weight);
    let mut rng = Rng::new(args.common.seed, thread as u64);
    while let Some(stage) = control.stage() {
        let phase = stage
            .checked_sub(1)
            .and_then(|phase| args.phases.get(phase));
        if phase.is_some_and(|phase| phase.hot.is_none()) {
            std::thread::sleep(NAP);
            continue;
        }
        let share = &shares[stage];
        for _ in 0..BATCH {
            // No other thread owns this word, so a load and a store lose no update.
            let word = &words[share.pick(&mut rng, hot_below) as usize];
            word.store(updated(word.load(Relaxed)), Relaxed);
        }
        control.batch_done(thread);
    }
}

fn phase(text: &str) -> Result<Phase, String> {
    let (at, hot) = text
        .split_once(':')
        .ok_or("needs S:SIZE, as in 20:100MiB, or S:idle")?;
    let hot = match hot {
        "idle" => None,
        size => Some(size.parse().map_err(|e: SizeError| e.to_string())?),
    };
    Ok(Phase {
        at: seconds(at)?,
        hot,
    })
}

fn weight(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(weight) if (0.0..=1.0).contains(&weight) => Ok(weight),
        _ => Err("needs a number from 0 to 1".into()),
    }
}
