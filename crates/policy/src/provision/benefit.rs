//! Divides a pool so that the next block goes where it saves most time.

use super::fill::{Bounds, fill};
use super::smoothed::toward;
use crate::benefit::{Benefit, POINTS_MAX};

/// Time that a VM's programs save with fast memory of each size, compared with none. It does not fall with size.
///
/// A second of programs that run `t` times as long as with fast memory alone holds only a `t`-th of their work. So the next MiB
/// saves its time divided by `t`, and the sum is a logarithm.
///
/// Sizes between two points are interpolated. Beyond the last point nothing more is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Curve {
    points: [Point; POINTS_MAX],
    len: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Point {
    bytes: u64,
    /// CPU time saved per second, microseconds.
    saved_us: u64,
}

impl Curve {
    /// The curve of a VM, by the upper bound of the time that its programs wait.
    pub fn new(benefit: &Benefit) -> Self {
        let latency_ns = benefit.latency_ns();
        let more = f64::from(latency_ns.slow) / f64::from(latency_ns.fast) - 1.0;
        let waits = f64::from(benefit.waits().max_permille) / 1000.0;
        let times = |served: f64| 1.0 + waits * more * (1.0 - served);
        let running_us = f64::from(benefit.running_ms()) * 1000.0;
        let mut curve = Self::default();
        for (to, from) in curve.points.iter_mut().zip(benefit.points()) {
            let served = f64::from(from.served_permille) / 1000.0;
            *to = Point {
                bytes: from.fast.0,
                saved_us: (running_us * (times(0.0) / times(served)).ln()) as u64,
            };
            curve.len += 1;
        }
        curve
    }

    fn points(&self) -> &[Point] {
        &self.points[..self.len]
    }

    #[cfg(test)]
    pub(super) fn sizes(&self) -> impl Iterator<Item = u64> {
        self.points().iter().map(|point| point.bytes)
    }

    /// Time saved with `bytes`, microseconds per second.
    pub(super) fn saved_us(&self, bytes: u64) -> u64 {
        let after = self.points().partition_point(|point| point.bytes <= bytes);
        let Some(below) = after.checked_sub(1).map(|i| self.points[i]) else {
            return 0;
        };
        let Some(above) = self.points().get(after) else {
            return below.saved_us;
        };
        let more = u128::from(above.saved_us - below.saved_us) * u128::from(bytes - below.bytes);
        below.saved_us + (more / u128::from(above.bytes - below.bytes)) as u64
    }

    /// The part within `bounds` as pieces of falling slope: the concave hull. Memory that the VM has already counts for
    /// more than memory that it would be given.
    fn pieces(&self, bounds: &Bounds, current: u64) -> Vec<(u64, u64)> {
        let inner = self.points().iter().map(|point| point.bytes);
        let mut sizes: Vec<_> = inner.chain([current]).collect();
        sizes.retain(|bytes| bounds.least < *bytes && *bytes < bounds.most);
        sizes.sort_unstable();
        let mut hull: Vec<Point> = vec![];
        for bytes in [bounds.least].into_iter().chain(sizes).chain([bounds.most]) {
            let kept = self.saved_us(bytes.min(current));
            let new = Point {
                bytes,
                // A curve's times are far below 2^60.
                saved_us: kept * KEPT + (self.saved_us(bytes) - kept) * GIVEN,
            };
            while let [.., before, last] = hull[..]
                && is_steeper(piece(last, new), piece(before, last))
            {
                hull.pop();
            }
            if hull.last().is_none_or(|last| last.bytes < bytes) {
                hull.push(new);
            }
        }
        let pieces = hull.windows(2).map(|pair| piece(pair[0], pair[1]));
        pieces.take_while(|(_, saved_us)| *saved_us > 0).collect()
    }
}

/// Memory goes from one VM to another only if it saves a fifth more time there: estimates have errors, and each move
/// costs time. These are the weights of memory that a VM has and of memory that it would be given.
const KEPT: u64 = 6;
const GIVEN: u64 = 5;

/// Its size, and the time that it saves.
fn piece(from: Point, to: Point) -> (u64, u64) {
    (to.bytes - from.bytes, to.saved_us - from.saved_us)
}

/// Whether a piece saves at least as much per byte as another.
fn is_steeper(piece: (u64, u64), other: (u64, u64)) -> bool {
    slope(piece, other) >= slope(other, piece)
}

/// A piece's slope, in a unit that it shares with `other`'s.
fn slope((_, saved_us): (u64, u64), (bytes, _): (u64, u64)) -> u128 {
    u128::from(saved_us) * u128::from(bytes)
}

/// The mean of curves over time, as [`Smoothed`](super::Smoothed): at each size a new one has a quarter of the weight.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SmoothedCurve(Option<Curve>);

impl SmoothedCurve {
    /// Adds a measurement, and returns the mean at its sizes.
    pub fn update(&mut self, measured: Curve) -> Curve {
        let mut mean = measured;
        if let Some(before) = self.0 {
            for point in &mut mean.points[..mean.len] {
                point.saved_us = toward(before.saved_us(point.bytes), point.saved_us);
            }
            // Rounding must not make it fall.
            for i in 1..mean.len {
                mean.points[i].saved_us = mean.points[i].saved_us.max(mean.points[i - 1].saved_us);
            }
        }
        self.0 = Some(mean);
        mean
    }
}

/// Divides `pool` between VMs with curves: each VM begins with its minimum, and the piece that saves most per byte is
/// next. Pieces that save the same are cut in proportion. The rest is divided by `weights`. `current` is what each VM
/// has now.
///
/// VMs without a curve get what `weights` give them of the rest. The sum of `least` must not exceed the pool.
pub(super) fn divide(
    pool: u64,
    curves: &[Option<Curve>],
    weights: &[u64],
    bounds: &[Bounds],
    current: &[u64],
) -> Vec<u64> {
    let mut grants: Vec<u64> = bounds.iter().map(|bounds| bounds.least).collect();
    let mut pieces: Vec<(usize, (u64, u64))> = vec![];
    for (vm, ((curve, bounds), &current)) in curves.iter().zip(bounds).zip(current).enumerate() {
        let of_vm = curve.map(|curve| curve.pieces(bounds, current));
        let of_vm = of_vm.unwrap_or_default();
        pieces.extend(of_vm.into_iter().map(|piece| (vm, piece)));
    }
    pieces.sort_by(|(_, a), (_, b)| slope(*b, *a).cmp(&slope(*a, *b)));
    for equal in pieces.chunk_by(|(_, a), (_, b)| slope(*a, *b) == slope(*b, *a)) {
        let (mut parts, mut within) = (vec![0; grants.len()], vec![]);
        equal.iter().for_each(|&(vm, (bytes, _))| parts[vm] = bytes);
        let mut left = pool;
        for (grant, part) in grants.iter().zip(&parts) {
            left -= grant;
            within.push(Bounds {
                least: 0,
                most: *part,
            });
        }
        let given = fill(left, &parts, &within);
        grants
            .iter_mut()
            .zip(given)
            .for_each(|(grant, part)| *grant += part);
    }
    let rest: Vec<_> = grants
        .iter()
        .zip(bounds)
        .map(|(&least, bounds)| Bounds { least, ..*bounds })
        .collect();
    fill(pool, weights, &rest)
}
