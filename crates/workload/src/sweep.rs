//! sweep: reads a large array from start to end in a loop.
//!
//! All parts are equally hot, so a memory manager should leave it alone. Each pass must match the first one.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use clap::Parser;

use super::args::Common;
use super::chain::LINE_WORDS;
use super::event::{Output, Rate, WorkloadEvent};
use super::region::Region;
use super::rng::mix;
use super::timed::{BATCH, Control};
use super::wait::Waiter;
use super::{Error, Size, single_worker};

/// Words processed between two signal checks while populating: 2 MiB.
const CHUNK_WORDS: usize = (2 << 20) / 8;

/// A large array, read from its start to its end again and again
#[derive(Debug, Clone, Parser)]
#[command(name = "sweep", version)]
pub struct Sweep {
    /// Size of the array
    #[arg(long, default_value = "800MiB")]
    size: Size,
    /// Write each cache line as well as read it
    #[arg(long)]
    write: bool,
    #[command(flatten)]
    common: Common,
}

/// Runs sweep with these arguments. An operation is a cache line of 64 bytes.
pub fn run(args: &Sweep) -> Result<(), Error> {
    let output = Output {
        json: args.common.json,
    };
    if args.size.bytes == 0 {
        return Err(Error::Arguments("--size must be above 0".into()));
    }
    let waiter = Waiter::new()?;
    let region = Region::map(args.size.bytes)?;
    let mut expected = 0u64;
    for (number, chunk) in region.words().chunks(CHUNK_WORDS).enumerate() {
        waiter.check()?;
        for (index, word) in (number * CHUNK_WORDS..).zip(chunk) {
            let value = mix(args.common.seed ^ index as u64);
            word.store(value, Relaxed);
            if index % LINE_WORDS == 0 {
                expected = expected.wrapping_add(value);
            }
        }
    }
    output.say(&WorkloadEvent::all_hot(region.start(), args.size.bytes))?;
    single_worker::run(&args.common, &waiter, Rate::mops, |control| {
        sweep(region.words(), args.write, expected, control)
    })
}

/// Sweeps until the phase ends, or the sum of a pass differs from `expected`.
fn sweep(words: &[AtomicU64], write: bool, expected: u64, control: &Control) -> Result<(), Error> {
    loop {
        let mut sum = 0u64;
        for batch in words.chunks(BATCH as usize * LINE_WORDS) {
            if control.stage().is_none() {
                return Ok(());
            }
            for line in batch.chunks(LINE_WORDS) {
                let value = line[0].load(Relaxed);
                sum = sum.wrapping_add(value);
                if write {
                    line[0].store(value, Relaxed);
                }
            }
            control.done(0, batch.len().div_ceil(LINE_WORDS) as u64);
        }
        if sum != expected {
            return Err(Error::Wrong(format!("a pass adds up to {sum:#x}")));
        }
    }
}
