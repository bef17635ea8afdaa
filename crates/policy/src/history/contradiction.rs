//! Whether the latest looks at a VM's memory contradict the ones before: the VM has turned to other memory.
//!
//! # Problem
//! Looks differ by chance. They also differ because a look is longer or shorter than those before, or the VM faster or
//! slower: then all blocks are found accessed more often, or less. Neither means that other memory is hot.
//!
//! # Approach
//! The looks before say how probable it was for a look to find a block accessed. Where accesses come at random, a look that is `f` times
//! as long misses a block with probability `q^f` if it was `q` before. The same `f` for all blocks is the one with which as
//! many would be found accessed as the latest looks found. What it does not explain is measured by Pearson's chi-squared: for each block
//! the square of what was found beyond what was expected, in units of its variance. Chance makes it about as large as there are
//! blocks, with a spread that follows from the same probabilities.
//!
//! # Properties
//! - Chance hardly ever contradicts, nor do looks of another length.
//! - A VM that turns to other memory contradicts within four looks: to twenty blocks or more, where a look finds no
//!   more than half of the rest accessed.

use super::{History, LATEST, LOOKS};

/// Looks before the latest.
const BEFORE: u32 = LOOKS - LATEST;

/// How far beyond chance it must be, in standard deviations; and what the model itself may be wrong by, as a part of what
/// chance gives.
const SURE: f64 = 5.0;
const MODEL_ERROR: f64 = 0.1;

/// How many times as long looks may be as those before, as a power of two either way; and how often that is halved to find it.
const STRETCH_LOG2: f64 = 3.0;
const HALVINGS: u32 = 12;

/// Blocks, by how many looks found them accessed: of those before, and of the latest.
#[derive(Debug)]
pub(super) struct Found([[u32; LATEST as usize + 1]; BEFORE as usize + 1]);

impl Found {
    /// In full histories.
    pub(super) fn of(histories: impl Iterator<Item = History>) -> Self {
        let mut found = Self([[0; LATEST as usize + 1]; BEFORE as usize + 1]);
        for History(bits) in histories {
            let latest = (bits >> BEFORE).count_ones();
            let before = (bits << LATEST).count_ones();
            found.0[before as usize][latest as usize] += 1;
        }
        found
    }

    /// See the module's text.
    pub(super) fn is_contradiction(&self) -> bool {
        let stretch = self.stretch();
        let (mut chi_squared, mut expected, mut variance) = (0.0, 0.0, 0.0);
        for (before, row) in (0u32..).zip(&self.0) {
            let probability = stretched(before, stretch);
            let of_one = probability * (1.0 - probability);
            // The probability is itself known from so many looks only.
            let of_latest = of_one * (1.0 / f64::from(LATEST) + 1.0 / f64::from(BEFORE));
            for (latest, &blocks) in (0u32..).zip(row) {
                let beyond = f64::from(latest) / f64::from(LATEST) - probability;
                chi_squared += f64::from(blocks) * beyond * beyond / of_latest;
            }
            let blocks: u32 = row.iter().sum();
            expected += f64::from(blocks);
            // That of the square of a binomial variable in units of its variance.
            let tails = (1.0 / of_one - 6.0) / f64::from(LATEST);
            variance += f64::from(blocks) * (2.0 + tails.max(0.0));
        }
        chi_squared > expected * (1.0 + MODEL_ERROR) + SURE * variance.sqrt()
    }

    /// How many times as long the latest looks were as those before.
    fn stretch(&self) -> f64 {
        let rows = (0u32..).zip(&self.0);
        let blocks: Vec<(u32, u32)> = rows.clone().map(|(b, row)| (b, row.iter().sum())).collect();
        let ones = |row: &[u32]| -> u32 { (0u32..).zip(row).map(|(ones, &n)| ones * n).sum() };
        let found = rows.map(|(_, row)| ones(row)).sum::<u32>();
        let found = f64::from(found) / f64::from(LATEST);
        let (mut least, mut most) = (-STRETCH_LOG2, STRETCH_LOG2);
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(least, most);
            let of = |&(before, blocks): &(u32, u32)| {
                f64::from(blocks) * stretched(before, middle.exp2())
            };
            match blocks.iter().map(of).sum::<f64>() < found {
                true => least = middle,
                false => most = middle,
            }
        }
        f64::midpoint(least, most).exp2()
    }
}

/// How probable it is that a look finds a block accessed which so many looks before found accessed, if it is so many times as
/// long. Neither never nor always is ever certain.
fn stretched(before: u32, stretch: f64) -> f64 {
    let looks = f64::from(BEFORE + 2);
    let missed = 1.0 - f64::from(before + 1) / looks;
    let least = 1.0 / looks;
    (1.0 - missed.powf(stretch)).clamp(least, 1.0 - least)
}
