//! Converts the heat of blocks to ranges, for people and for the order of look-ups.
//!
//! Adjacent blocks whose rates are within a factor of two are one range. If there are too many ranges, groups of 8, 64
//! or 512 blocks replace blocks. Ranges partition the space.

use super::{CHUNK_BLOCKS, Chunk, Estimate, Heat, LEVELS};
use crate::{Block, ClassifiedRange, VirtRange};

/// The window of the ranges for people and look-ups: some seconds.
const WINDOW: usize = 1;

/// Maximum number of ranges of one process before groups replace blocks.
const RANGES_MAX: usize = 512;

impl Heat {
    /// The ranges, by address.
    pub fn ranges(&self) -> Vec<ClassifiedRange> {
        self.ranges_over(WINDOW)
    }

    /// The ranges by the heat of a window, by address.
    pub fn ranges_over(&self, window: usize) -> Vec<ClassifiedRange> {
        let small = (0..LEVELS - 1).find_map(|level| self.runs_of(window, level, RANGES_MAX));
        let runs = small.or_else(|| self.runs_of(window, LEVELS - 1, usize::MAX));
        let range = |run: Run| {
            Some(ClassifiedRange {
                range: VirtRange::new(
                    Block(run.blocks.start).start(),
                    Block(run.blocks.end).start(),
                )?,
                count: run.events,
                born_epoch: 0,
            })
        };
        let runs = runs.unwrap_or_default().0;
        runs.into_iter().filter_map(range).collect()
    }

    /// The runs of groups at this level; `None` as soon as there are more than `runs_max`.
    fn runs_of(&self, window: usize, level: usize, runs_max: usize) -> Option<Runs> {
        let size = 1u64 << (3 * level);
        let mut runs = Runs::default();
        let mut next = 0;
        for vma in &self.space {
            let blocks = Block::numbers_of(vma);
            let mut at = blocks.start.max(next);
            next = next.max(blocks.end);
            while at < blocks.end {
                let number = at / CHUNK_BLOCKS as u64;
                let next = self.chunks.partition_point(|chunk| chunk.number < number);
                let next = self.chunks.get(next);
                let is_seen = next.is_some_and(|chunk| chunk.number == number);
                let end = match next {
                    Some(chunk) if !is_seen => chunk.number * CHUNK_BLOCKS as u64,
                    Some(_) => (number + 1) * CHUNK_BLOCKS as u64,
                    None => blocks.end,
                };
                let end = end.min(blocks.end);
                match next.filter(|_| is_seen) {
                    // Memory without evidence is one run.
                    None => runs.push(at..end, 0.0),
                    Some(chunk) => self.rates(chunk, (window, level), |group, events| {
                        let group = group * size..(group + 1) * size;
                        runs.push(group.start.max(at)..group.end.min(end), events);
                    }),
                }
                if runs.0.len() > runs_max {
                    return None;
                }
                at = end;
            }
        }
        Some(runs)
    }

    /// Calls `each` with the number of each group of a chunk at a level, and one block's events in the window.
    fn rates(
        &self,
        chunk: &Chunk,
        (window, level): (usize, usize),
        mut each: impl FnMut(u64, f64),
    ) {
        let groups = CHUNK_BLOCKS >> (3 * level);
        let first = chunk.number * groups as u64;
        let span_s = self.span_s(window);
        if level == 0 {
            let mut estimates = [Estimate::default(); CHUNK_BLOCKS];
            self.of_chunk(Block(first))
                .estimates(window, &mut estimates);
            for (block, estimate) in (first..).zip(&estimates) {
                each(block, estimate.rate * span_s);
            }
            return;
        }
        for at in 0..groups {
            let (events, exposure_s) = self.seen(chunk, window, level, at);
            let rate = match exposure_s > 0.0 {
                true => events / exposure_s,
                false => 0.0,
            };
            each(first + at as u64, rate * span_s);
        }
    }
}

/// Adjacent blocks of similar heat.
struct Run {
    blocks: std::ops::Range<u64>,
    /// Events of all blocks in the window.
    events: f64,
    class: i32,
}

/// The exponent of a number of at least 1, as `log2` rounded down.
fn binary_exponent(number: f64) -> i32 {
    (number.to_bits() >> 52) as i32 - 1023
}

#[derive(Default)]
struct Runs(Vec<Run>);

impl Runs {
    /// Adds blocks with `events` each.
    fn push(&mut self, blocks: std::ops::Range<u64>, events: f64) {
        if blocks.is_empty() {
            return;
        }
        // Blocks with less than one event are one class; blocks without events are another.
        let class = match events > 0.0 {
            true => binary_exponent(events.max(1.0)) + 1,
            false => 0,
        };
        let events = events * (blocks.end - blocks.start) as f64;
        match self.0.last_mut() {
            Some(last) if last.blocks.end == blocks.start && last.class == class => {
                last.blocks.end = blocks.end;
                last.events += events;
            }
            _ => self.0.push(Run {
                blocks,
                events,
                class,
            }),
        }
    }
}
