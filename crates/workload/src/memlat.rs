//! memlat: the mean latency of dependent loads.
//!
//! Idle memory (`--cold`) is touched first and takes the fast node. Then a region is linked into one random cycle of
//! cache lines, which the program follows.

use std::hint::black_box;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use clap::Parser;

use super::args::Common;
use super::chain;
use super::event::{Output, Rate, WorkloadEvent};
use super::region::Region;
use super::rng::Rng;
use super::timed::{self, BATCH, Tick};
use super::wait::Waiter;
use super::{Error, Size};

/// Words of the smallest page: touching one word of each populates all pages.
const PAGE_WORDS: usize = 4096 / 8;

/// Mean latency of a random pointer chase
#[derive(Debug, Clone, Parser)]
#[command(name = "memlat", version)]
pub struct Memlat {
    /// Size of the region that is chased
    #[arg(long, default_value = "100MiB")]
    size: Size,
    /// Size of the idle memory that is touched first
    #[arg(long, default_value = "0KiB")]
    cold: Size,
    /// Have the hot memory come from this NUMA node, and touch it first
    #[arg(long, value_name = "NODE")]
    place_hot: Option<u32>,
    #[command(flatten)]
    common: Common,
}

/// Runs memlat with these arguments.
pub fn run(args: &Memlat) -> Result<(), Error> {
    if args.size.bytes == 0 {
        return Err(Error::Arguments("--size must be above 0".into()));
    }
    let output = Output {
        json: args.common.json,
    };
    let waiter = Waiter::new()?;
    let cold = Region::map(args.cold.bytes)?;
    let chased = Region::map(args.size.bytes)?;
    match args.place_hot {
        Some(node) => {
            chased.prefer_node(&(0..args.size.bytes), node)?;
            touch(&chased, &all(&chased), &waiter)?;
            touch(&cold, &all(&cold), &waiter)?;
        }
        None => {
            touch(&cold, &all(&cold), &waiter)?;
            touch(&chased, &all(&chased), &waiter)?;
        }
    }
    chain::link(chased.words(), &mut Rng::new(args.common.seed, 0));

    output.say(&WorkloadEvent::all_hot(chased.start(), args.size.bytes))?;
    args.common.wait_if_held(&waiter)?;
    let total = timed::run(
        &args.common.schedule(vec![]),
        1,
        &waiter,
        |thread, control| {
            let mut at = 0;
            while control.stage().is_some() {
                at = chain::follow(chased.words(), at, BATCH);
                control.batch_done(thread);
            }
            black_box(at);
        },
        |tick| match tick {
            Tick::Interval { t_s, length_s, ops } => output.say(&WorkloadEvent::Interval {
                t_s,
                ops,
                rate: Rate::latency_ns(ops, length_s),
            }),
            Tick::Shift { .. } => Ok(()),
        },
    )?;
    total.say_done(output, Rate::latency_ns(total.ops, total.t_s))?;
    args.common.wait_if_held(&waiter)?;
    Ok(())
}

fn all(region: &Region) -> Range<u64> {
    0..size_of_val(region.words()) as u64
}

/// Touches every page of these bytes of a region in address order, until a signal arrives.
pub(super) fn touch(region: &Region, bytes: &Range<u64>, waiter: &Waiter) -> Result<(), Error> {
    let [start, end] = [bytes.start, bytes.end].map(|byte| byte as usize / size_of::<u64>());
    for chunk in region.words()[start..end].chunks(PAGE_WORDS * 512) {
        waiter.check()?;
        for page in chunk.chunks(PAGE_WORDS) {
            // Not zero, since a system may share or drop pages of zeroes.
            page[0].store(1, Relaxed);
        }
    }
    Ok(())
}
