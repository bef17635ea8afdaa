//! Estimates the benefit of fast memory of each size for a guest's programs.
//!
//! # Problem
//! A host that divides fast memory between VMs needs to know how much time each VM would save with more of it. An
//! operator who sells a service level needs the slowdown against a VM whose memory is all fast.
//!
//! # Terms
//! - *served*: the share of accesses that go to fast memory if the hottest memory lies there.
//! - *waits*: the share of its time that a program would wait for memory if all of it were fast. An interval, because
//!   accessed bits do not show it and loads may overlap.
//!
//! # Approach
//! Where samples are counted, the share served by the hottest memory of each size is measured ([`served`]). With
//! accessed bits it is the heat of ranges, summed from the hottest down. A few points describe it: sizes are chosen
//! where straight lines between them come nearest to all shares.
//!
//! An access to slow memory takes the latency of the slow tier instead of the fast one. So the slowdown of a program
//! with a share *served* is 1 + waits × (slow ÷ fast − 1) × (1 − served). It does not depend on the present placement.
//!
//! # Properties
//! - A benefit has at most [`POINTS_MAX`] points; sizes rise, and the served share does not fall.
//! - All resident memory serves all accesses.
//! - Memory with uniform accesses is served in proportion to its size.
//! - A slowdown is at least 1, at most slow ÷ fast, and does not rise with fast memory.

use serde::{Deserialize, Serialize};

use crate::served::{self, SIZES, Served};
use crate::{ByteCount, PerTier, RankedRange, ResidencyMap, Tier};

/// Maximum number of points.
pub const POINTS_MAX: usize = 16;

/// Distance from a line that needs no point: one per thousand.
const OFF_MIN: f64 = 0.001;

/// Maximum of a latency, nanoseconds.
pub const LATENCY_MAX_NS: u32 = 1_000_000;

/// Maximum of the CPU time per second, milliseconds: that of 8192 CPUs.
pub const RUNNING_MAX_MS: u32 = 8_192_000;

/// The benefit of fast memory for a guest's programs. Its fields keep the module's properties, also when it is read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Fields", try_from = "Fields")]
pub struct Benefit {
    points: Vec<BenefitPoint>,
    latency_ns: PerTier<u32>,
    running_ms: u32,
    waits: Waits,
}

/// A benefit's fields in JSON.
#[derive(Serialize, Deserialize)]
struct Fields {
    /// Fast memory in bytes, and the accesses that it serves, per thousand.
    points: Vec<(u64, u16)>,
    fast_latency_ns: u32,
    slow_latency_ns: u32,
    running_ms: u32,
    waits_min_permille: u16,
    waits_max_permille: u16,
}

impl From<Benefit> for Fields {
    fn from(benefit: Benefit) -> Self {
        let point = |point: BenefitPoint| (point.fast.0, point.served_permille);
        Self {
            points: benefit.points.into_iter().map(point).collect(),
            fast_latency_ns: benefit.latency_ns.fast,
            slow_latency_ns: benefit.latency_ns.slow,
            running_ms: benefit.running_ms,
            waits_min_permille: benefit.waits.min_permille,
            waits_max_permille: benefit.waits.max_permille,
        }
    }
}

impl TryFrom<Fields> for Benefit {
    type Error = NoBenefit;

    fn try_from(fields: Fields) -> Result<Self, NoBenefit> {
        let point = |(fast, served_permille)| BenefitPoint {
            fast: ByteCount(fast),
            served_permille,
        };
        let latency_ns = PerTier {
            fast: fields.fast_latency_ns,
            slow: fields.slow_latency_ns,
        };
        let waits = Waits {
            min_permille: fields.waits_min_permille,
            max_permille: fields.waits_max_permille,
        };
        let points = fields.points.into_iter().map(point).collect();
        Self::new(points, latency_ns, fields.running_ms, waits)
    }
}

/// The result of one size of fast memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BenefitPoint {
    /// Fast memory that the VM owns, including memory of the guest's kernel.
    pub fast: ByteCount,
    /// Accesses that it serves, per thousand.
    pub served_permille: u16,
}

/// Share of its time that a program would wait for memory if all of it were fast, per thousand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Waits {
    /// Lower bound.
    pub min_permille: u16,
    /// Upper bound.
    pub max_permille: u16,
}

/// A slowdown against a VM whose memory is all fast: 1.1 is 10 % slower.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slowdown {
    /// Lower bound.
    pub min: f64,
    /// Upper bound.
    pub max: f64,
}

/// Error: the fields contradict each other or exceed a bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a benefit of fast memory whose fields contradict each other")]
pub struct NoBenefit;

impl Benefit {
    /// A benefit from its fields: `running_ms` is the CPU time of programs per second.
    ///
    /// # Errors
    /// They do not keep the module's properties.
    pub fn new(
        points: Vec<BenefitPoint>,
        latency_ns: PerTier<u32>,
        running_ms: u32,
        waits: Waits,
    ) -> Result<Self, NoBenefit> {
        let rises = |pair: &[BenefitPoint]| {
            pair[0].fast < pair[1].fast && pair[0].served_permille <= pair[1].served_permille
        };
        let is_sound = (1..=POINTS_MAX).contains(&points.len())
            && points.windows(2).all(rises)
            && points.iter().all(|point| point.served_permille <= 1000)
            && (1..=latency_ns.slow).contains(&latency_ns.fast)
            && latency_ns.slow <= LATENCY_MAX_NS
            && running_ms <= RUNNING_MAX_MS
            && waits.min_permille <= waits.max_permille
            && waits.max_permille <= 1000;
        let benefit = Self {
            points,
            latency_ns,
            running_ms,
            waits,
        };
        is_sound.then_some(benefit).ok_or(NoBenefit)
    }

    /// A benefit from random steps, for tests: bytes beyond the point before, and what is served, in any order. Then the
    /// latency of fast memory and what slow memory adds, and the least and greatest wait.
    ///
    /// # Panics
    /// A value is out of bounds.
    #[cfg(any(test, feature = "testing"))]
    pub fn of_steps(
        steps: Vec<(ByteCount, u16)>,
        (fast_ns, more_ns): (u32, u32),
        running_ms: u32,
        (min_permille, max_permille): (u16, u16),
    ) -> Self {
        let mut served: Vec<u16> = steps.iter().map(|step| step.1).collect();
        served.sort_unstable();
        let mut fast = ByteCount(0);
        let point = |((step, _), served_permille): ((ByteCount, u16), u16)| {
            fast.0 += step.0;
            BenefitPoint {
                fast,
                served_permille,
            }
        };
        let points = steps.into_iter().zip(served).map(point).collect();
        let latency_ns = PerTier {
            fast: fast_ns,
            slow: fast_ns + more_ns,
        };
        let waits = Waits {
            min_permille,
            max_permille,
        };
        Self::new(points, latency_ns, running_ms, waits).expect("the steps are within bounds")
    }

    /// Its points, by size.
    pub fn points(&self) -> &[BenefitPoint] {
        &self.points
    }

    /// Latency of a load from each tier, nanoseconds.
    pub fn latency_ns(&self) -> PerTier<u32> {
        self.latency_ns
    }

    /// CPU time of programs per second, milliseconds.
    pub fn running_ms(&self) -> u32 {
        self.running_ms
    }

    /// Share of time that they would wait for memory if all of it were fast.
    pub fn waits(&self) -> Waits {
        self.waits
    }

    /// Share of accesses that `fast` serves, 0 to 1: linear between points, and nothing below the first.
    pub fn served(&self, fast: ByteCount) -> f64 {
        let after = self.points.partition_point(|point| point.fast <= fast);
        let share = |point: &BenefitPoint| f64::from(point.served_permille) / 1000.0;
        let Some(below) = after.checked_sub(1).map(|i| &self.points[i]) else {
            return 0.0;
        };
        let Some(above) = self.points.get(after) else {
            return share(below);
        };
        let part = (fast.0 - below.fast.0) as f64 / (above.fast.0 - below.fast.0) as f64;
        share(below) + (share(above) - share(below)) * part
    }

    /// The slowdown with `fast`.
    pub fn slowdown(&self, fast: ByteCount) -> Slowdown {
        let slow = (1.0 - self.served(fast)) * self.more();
        let of = |permille: u16| 1.0 + f64::from(permille) / 1000.0 * slow;
        Slowdown {
            min: of(self.waits.min_permille),
            max: of(self.waits.max_permille),
        }
    }

    /// The smallest fast memory with at most this slowdown, by its upper bound, `percent` above 1; `None` if no point
    /// has it.
    pub fn fast_for(&self, percent: u32) -> Option<ByteCount> {
        let most = 1.0 + f64::from(percent) / 100.0;
        let is_enough = |fast| self.slowdown(fast).max <= most;
        let enough = self.points.partition_point(|point| !is_enough(point.fast));
        let mut high = self.points.get(enough)?.fast.0;
        let mut low = enough.checked_sub(1).map_or(0, |i| self.points[i].fast.0);
        // `high` is enough and `low` is not; a halving costs nothing, so no closed form is needed.
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            match is_enough(ByteCount(middle)) {
                true => high = middle,
                false => low = middle,
            }
        }
        Some(ByteCount(high))
    }

    /// The benefit in a VM whose kernel and other programs need `others` of fast memory first.
    #[must_use]
    pub fn beside(mut self, others: ByteCount) -> Self {
        let last = self.points.last().map_or(0, |point| point.fast.0);
        let others = others.0.min(u64::MAX - last);
        for point in &mut self.points {
            point.fast.0 += others;
        }
        self
    }

    /// Time that a load from slow memory takes longer, in times of a load from fast memory.
    fn more(&self) -> f64 {
        f64::from(self.latency_ns.slow) / f64::from(self.latency_ns.fast) - 1.0
    }
}

/// The observations of a guest.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    /// Ranges of all processes.
    pub ranking: &'a [RankedRange],
    /// Places of their blocks.
    pub residency: &'a ResidencyMap,
    /// The share that the hottest memory serves; `None` if the tracker counts no samples.
    pub served: Option<&'a Served>,
    /// Latency of a load from each tier, nanoseconds.
    pub latency_ns: PerTier<u32>,
    /// CPU time of programs per second, milliseconds.
    pub running_ms: u32,
    /// Loads per second that wait for memory; `None` if the tracker does not count them.
    pub loads_per_s: Option<f64>,
    /// Whether loads may overlap, so that their latencies add up to an upper bound.
    pub overlaps: bool,
}

impl Observed<'_> {
    /// The benefit of fast memory; `None` until enough accesses were seen.
    pub fn benefit(&self) -> Option<Benefit> {
        let placed = self.ranking.iter().map(|range| {
            let placement = self.residency.placement(range.pid, &range.range);
            (range.count, placement)
        });
        let mut parts: Vec<_> = placed
            .filter(|(_, placement)| placement.total().0 > 0)
            .collect();
        let density =
            |(count, placement): &(f64, PerTier<ByteCount>)| count / placement.total().0 as f64;
        parts.sort_by(|a, b| density(b).total_cmp(&density(a)));
        let count: f64 = parts.iter().map(|(count, _)| count).sum();
        // Also if nothing is resident.
        if !count.is_finite() || count <= 0.0 {
            return None;
        }
        let bytes: u64 = parts.iter().map(|(_, placement)| placement.total().0).sum();
        let in_fast = |(count, at): &(f64, PerTier<ByteCount>)| {
            count * at.fast.0 as f64 / at.total().0 as f64
        };
        let served_now = parts.iter().map(in_fast).sum::<f64>() / count;
        let shares = match self.served {
            Some(served) => served.shares()?,
            None => ranked_shares(&parts, count, bytes),
        };
        let points = points(&shares, bytes);
        let waits = self.waits(served_now.clamp(0.0, 1.0));
        let running_ms = self.running_ms.min(RUNNING_MAX_MS);
        Benefit::new(points, self.latency_ns, running_ms, waits).ok()
    }

    /// The share of time that programs would wait if all memory were fast, with this share served now.
    fn waits(&self, served_now: f64) -> Waits {
        let anything = Waits {
            min_permille: 0,
            max_permille: 1000,
        };
        let Some(loads) = self.loads_per_s.filter(|_| self.running_ms > 0) else {
            return anything;
        };
        let [fast_ms, slow_ms] = Tier::ALL.map(|t| f64::from(*self.latency_ns.get(t)) * 1e-6);
        let waiting_ms = loads * fast_ms;
        let more_ms = loads * (1.0 - served_now) * (slow_ms - fast_ms);
        let others_ms = (f64::from(self.running_ms) - waiting_ms - more_ms).max(0.0);
        let share = waiting_ms / (waiting_ms + others_ms);
        let permille = match share.is_finite() {
            true => (share * 1000.0).round().clamp(0.0, 1000.0) as u16,
            false => 0,
        };
        Waits {
            min_permille: if self.overlaps { 0 } else { permille },
            max_permille: permille,
        }
    }
}

/// The share of all accesses that each size serves by the heat of parts, the hottest first.
fn ranked_shares(parts: &[(f64, PerTier<ByteCount>)], count: f64, bytes: u64) -> [f64; SIZES + 1] {
    let mut shares = [0.0; SIZES + 1];
    let (mut next, mut below, mut served) = (0, 0, 0.0);
    for (at, share) in shares.iter_mut().enumerate() {
        let size = (served::size(at) * bytes as f64) as u64;
        while let Some((count, placement)) = parts.get(next)
            && below + placement.total().0 <= size
        {
            below += placement.total().0;
            served += count;
            next += 1;
        }
        let partly = parts.get(next).map_or(0.0, |(count, placement)| {
            count * size.saturating_sub(below) as f64 / placement.total().0 as f64
        });
        *share = ((served + partly) / count).clamp(0.0, 1.0);
    }
    shares[SIZES] = 1.0;
    shares
}

/// Points whose connecting lines come nearest to the shares that all sizes of `bytes` serve.
fn points(shares: &[f64; SIZES + 1], bytes: u64) -> Vec<BenefitPoint> {
    let mut chosen = vec![0, SIZES];
    while chosen.len() < POINTS_MAX {
        let pairs = chosen.windows(2);
        let off = pairs.flat_map(|pair| {
            let (from, to) = (pair[0], pair[1]);
            let slope = (shares[to] - shares[from]) / (served::size(to) - served::size(from));
            (from + 1..to).map(move |at| {
                let line = shares[from] + slope * (served::size(at) - served::size(from));
                (at, (shares[at] - line).abs())
            })
        });
        let Some((farthest, off)) = off.max_by(|a, b| a.1.total_cmp(&b.1)) else {
            break;
        };
        if off < OFF_MIN {
            break;
        }
        chosen.insert(chosen.partition_point(|at| *at < farthest), farthest);
    }
    let mut points: Vec<BenefitPoint> = vec![];
    for at in chosen {
        let point = BenefitPoint {
            fast: ByteCount(match at {
                SIZES => bytes,
                _ => (served::size(at) * bytes as f64) as u64,
            }),
            served_permille: (shares[at] * 1000.0).round() as u16,
        };
        match points.last_mut() {
            Some(before) if before.fast >= point.fast => *before = point,
            _ => points.push(point),
        }
    }
    points
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::working_set::tests::memory;
    use crate::{BLOCK_SIZE, MIB};

    fn seen(parts: &[(u64, f64)], loads_per_s: Option<f64>) -> Option<Benefit> {
        let in_slow: Vec<_> = parts
            .iter()
            .map(|&(blocks, count)| (0, blocks, count))
            .collect();
        let (ranking, residency) = memory(&in_slow);
        let observed = Observed {
            ranking: &ranking,
            residency: &residency,
            served: None,
            latency_ns: PerTier {
                fast: 100,
                slow: 300,
            },
            running_ms: 1000,
            loads_per_s,
            overlaps: false,
        };
        Some(observed.benefit()?.beside(ByteCount(10 * MIB)))
    }

    #[test]
    fn a_hot_tenth_is_served_by_a_tenth() {
        let it = seen(&[(90, 100.0), (10, 900.0)], None).unwrap();
        assert_eq!(it.served(ByteCount(10 * MIB)), 0.0);
        assert!((0.7..=0.9).contains(&it.served(ByteCount(30 * MIB))));
        assert!(it.served(ByteCount(40 * MIB)) > 0.9);
        assert_eq!(it.served(ByteCount(210 * MIB)), 1.0);
        assert_eq!(it.slowdown(ByteCount(0)), Slowdown { min: 1.0, max: 3.0 });
    }

    #[test]
    fn counted_loads_tell_the_time_that_a_program_waits() {
        // A million loads from slow memory take 300 ms; from fast memory they would take 100 of 800 ms.
        let it = seen(&[(90, 100.0)], Some(1e6)).unwrap();
        assert_eq!(
            it.waits(),
            Waits {
                min_permille: 125,
                max_permille: 125
            }
        );
        let slowdown = it.slowdown(ByteCount(0)).max;
        assert!((slowdown - 1.25).abs() < 1e-9, "{slowdown}");
        let half = it.fast_for(12).unwrap();
        assert!((100 * MIB..110 * MIB).contains(&half.0), "{half}");
        assert!(it.slowdown(half).max <= 1.12);
        assert!(it.slowdown(ByteCount(half.0 - 1)).max > 1.12);
        // More loads than the time allows.
        let it = seen(&[(90, 100.0)], Some(f64::INFINITY)).unwrap();
        assert!(it.waits().max_permille <= 1000);
    }

    #[test]
    fn without_accesses_there_is_no_benefit() {
        assert_eq!(seen(&[], None), None);
        assert_eq!(seen(&[(5, 0.0)], None), None);
        assert_eq!(seen(&[(5, f64::NAN)], None), None);
    }

    #[test]
    fn contradictions_are_refused() {
        let point = |mib: u64, served_permille| BenefitPoint {
            fast: ByteCount(mib * MIB),
            served_permille,
        };
        let (rises, falls) = ([point(1, 0), point(2, 900)], [point(1, 900), point(2, 0)]);
        let latency_ns = PerTier {
            fast: 100,
            slow: 200,
        };
        let waits = |min_permille, max_permille| Waits {
            min_permille,
            max_permille,
        };
        let new = |points: &[BenefitPoint], latency_ns, running_ms, waits| {
            Benefit::new(points.into(), latency_ns, running_ms, waits)
        };
        assert!(new(&rises, latency_ns, 1, waits(0, 1000)).is_ok());
        assert!(new(&falls, latency_ns, 1, waits(0, 1000)).is_err());
        assert!(new(&[rises[0], rises[0]], latency_ns, 1, waits(0, 1000)).is_err());
        assert!(new(&[point(1, 1001)], latency_ns, 1, waits(0, 1000)).is_err());
        assert!(new(&[], latency_ns, 1, waits(0, 1000)).is_err());
        let many: Vec<_> = (0..17).map(|mib| point(mib, 0)).collect();
        assert!(new(&many, latency_ns, 1, waits(0, 1000)).is_err());
        assert!(new(&rises, PerTier { fast: 0, slow: 200 }, 1, waits(0, 1)).is_err());
        assert!(
            new(
                &rises,
                PerTier {
                    fast: 201,
                    slow: 200
                },
                1,
                waits(0, 1)
            )
            .is_err()
        );
        let most = PerTier {
            fast: 1,
            slow: LATENCY_MAX_NS + 1,
        };
        assert!(new(&rises, most, 1, waits(0, 1)).is_err());
        assert!(new(&rises, latency_ns, RUNNING_MAX_MS + 1, waits(0, 1)).is_err());
        assert!(new(&rises, latency_ns, 1, waits(2, 1)).is_err());
        assert!(new(&rises, latency_ns, 1, waits(2, 1001)).is_err());
    }

    proptest! {
        #[test]
        fn more_serves_more_and_even_use_is_served_by_its_part(
            parts in prop::collection::vec((1u64..50, 0.0..1e6f64), 1..20),
            loads in prop::option::of(0.0..1e9f64),
            even in any::<bool>(),
        ) {
            let parts: Vec<_> = parts.iter().map(|&(blocks, count)| {
                (blocks, if even { blocks as f64 } else { count + 1.0 })
            }).collect();
            let it = seen(&parts, loads).unwrap();
            let bytes = parts.iter().map(|part| part.0 * BLOCK_SIZE).sum::<u64>();
            let last = it.points().last().unwrap();
            prop_assert_eq!((last.fast.0, last.served_permille), (10 * MIB + bytes, 1000));
            for point in it.points() {
                let part = (point.fast.0 - 10 * MIB) as f64 / bytes as f64;
                let served = f64::from(point.served_permille) / 1000.0;
                prop_assert!(served >= part - 1e-3);
                prop_assert!(!even || served <= part + 1e-3);
                let slowdown = it.slowdown(point.fast);
                prop_assert!(1.0 <= slowdown.min && slowdown.min <= slowdown.max);
                prop_assert!(slowdown.max <= 3.0 + 1e-9);
            }
        }
    }
}
