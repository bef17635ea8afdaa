//! Detects that a VM uses other memory than its histories show.
//!
//! # Problem
//! Looks differ by chance. They also differ if a look is longer or shorter than those before, or the VM is faster or
//! slower. Then all blocks are found accessed more often, or less. Neither means that other memory is hot.
//!
//! # Approach
//! Earlier looks give the probability that a look finds a block accessed. If accesses are random, a look that is `f`
//! times as long misses a block with probability `q^f` instead of `q`. One `f` for all blocks is chosen such that the
//! expected number of accessed blocks equals that of the latest looks. Pearson's chi-squared measures the rest: for
//! each block, the squared difference between found and expected, in units of its variance. By chance it is about the
//! number of blocks, with a spread that follows from the same probabilities.
//!
//! # Properties
//! - Neither chance nor looks of another length contradict, except very rarely.
//! - A VM that uses other memory contradicts within four looks. This needs twenty such blocks, where a look finds at
//!   most half of the rest accessed.

use super::{History, LATEST, LOOKS};

/// Number of looks before the latest.
const BEFORE: u32 = LOOKS - LATEST;

/// Required difference beyond chance, in standard deviations; and the model's own relative error.
const SURE: f64 = 5.0;
const MODEL_ERROR: f64 = 0.1;

/// Range of the ratio of look lengths, as a power of two in both directions; and the number of bisections.
const STRETCH_LOG2: f64 = 3.0;
const HALVINGS: u32 = 12;

/// Number of blocks by how many looks found them accessed: earlier looks, and the latest.
#[derive(Debug)]
pub(super) struct Found([[u32; LATEST as usize + 1]; BEFORE as usize + 1]);

impl Found {
    /// Counts full histories.
    pub(super) fn of(histories: impl Iterator<Item = History>) -> Self {
        let mut found = Self([[0; LATEST as usize + 1]; BEFORE as usize + 1]);
        for History(bits) in histories {
            let latest = (bits >> BEFORE).count_ones();
            let before = (bits << LATEST).count_ones();
            found.0[before as usize][latest as usize] += 1;
        }
        found
    }

    /// Whether there is a contradiction. See the module's text.
    pub(super) fn is_contradiction(&self) -> bool {
        let stretch = self.stretch();
        let (mut chi_squared, mut expected, mut variance) = (0.0, 0.0, 0.0);
        for (before, row) in (0u32..).zip(&self.0) {
            let probability = stretched(before, stretch);
            let of_one = probability * (1.0 - probability);
            // The probability itself is an estimate from few looks.
            let of_latest = of_one * (1.0 / f64::from(LATEST) + 1.0 / f64::from(BEFORE));
            for (latest, &blocks) in (0u32..).zip(row) {
                let beyond = f64::from(latest) / f64::from(LATEST) - probability;
                chi_squared += f64::from(blocks) * beyond * beyond / of_latest;
            }
            let blocks: u32 = row.iter().sum();
            expected += f64::from(blocks);
            // The variance of a squared binomial variable, in units of its variance.
            let tails = (1.0 / of_one - 6.0) / f64::from(LATEST);
            variance += f64::from(blocks) * (2.0 + tails.max(0.0));
        }
        chi_squared > expected * (1.0 + MODEL_ERROR) + SURE * variance.sqrt()
    }

    /// Ratio of the length of the latest looks to those before.
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

/// Probability that a look of `stretch` times the length finds a block accessed that `before` earlier looks found.
///
/// It is never 0 or 1.
fn stretched(before: u32, stretch: f64) -> f64 {
    let looks = f64::from(BEFORE + 2);
    let missed = 1.0 - f64::from(before + 1) / looks;
    let least = 1.0 / looks;
    (1.0 - missed.powf(stretch)).clamp(least, 1.0 - least)
}
