//! Converts the reports of a fleet of VMs to a result, without I/O.

use demeter_outcome::{Point, Provisioning, Resize, Speed, SystemResult, WorkloadResult};
use demeter_scenario::Variant;

use super::fleet::FleetTimeline;

/// Bytes in a gibibyte.
const GIB: f64 = (1u64 << 30) as f64;

/// The result of the run called `name`; none if some VM's reports are incomplete.
pub fn summarise(name: &str, variant: Variant, fleet: FleetTimeline) -> Option<SystemResult> {
    let results = fleet.vms.iter().enumerate().map(|(index, (vm, timeline))| {
        let mut result = timeline.summarise(vm)?;
        for point in &mut result.series {
            point.fast_bytes = fast_at(&fleet.fast_bytes, index, point.t_s);
        }
        Some(result)
    });
    let results: Vec<SystemResult> = results.collect::<Option<_>>()?;
    let vms = results.len() as f64;
    let mut sum = results.iter().cloned().reduce(add)?;
    sum.name = name.into();
    let points = sum.series.iter_mut().map(|point| &mut point.hot_in_fast);
    for share in points.chain([&mut sum.hot_in_fast_final]) {
        *share = share.map(|sum| sum / vms);
    }
    let (resizing, other): (Vec<Point>, Vec<Point>) = sum
        .series
        .iter()
        .partition(|point| is_resizing(point.t_s, &fleet.resizes));
    let bytes = |mib: u64| mib << 20;
    sum.provisioning = Some(Provisioning {
        provisioner: variant.provisioner.to_string(),
        policy: variant.policy.to_string(),
        bytes_inflated: fleet.sizing.map(|sizing| sizing.inflated_bytes),
        host_bytes_returned: fleet.sizing.map(|sizing| sizing.returned_bytes),
        inflate_s: fleet.sizing.map(|sizing| sizing.took_s),
        inflate_gib_per_s: fleet
            .sizing
            .map(|sizing| sizing.inflated_bytes as f64 / GIB / sizing.took_s)
            .filter(|rate| rate.is_finite()),
        fast_free_bytes: fleet.free_mib.map(|[fast, _]| bytes(fast)),
        slow_free_bytes: fleet.free_mib.map(|[_, slow]| bytes(slow)),
        p99_resizing: reached_by_99_percent(&resizing),
        p99_other: reached_by_99_percent(&other).filter(|_| !fleet.resizes.is_empty()),
        pool_violations: fleet.violations,
        crashes: None,
        soak: None,
        resizes: fleet.resizes,
    });
    if results.len() > 1 {
        sum.workloads = results.into_iter().map(of_vm).collect();
    }
    Some(sum)
}

fn of_vm(result: SystemResult) -> WorkloadResult {
    WorkloadResult {
        name: result.name,
        elapsed_s: result.elapsed_s,
        speed: result.speed,
        verify_errors: result.verify_errors,
        series: result.series,
    }
}

fn plus<T: std::ops::Add<Output = T>>(a: Option<T>, b: Option<T>) -> Option<T> {
    Some(a? + b?)
}

/// The sum of two results: throughputs of one unit, times and counts are added. So are shares; the caller divides them.
fn add(mut sum: SystemResult, other: SystemResult) -> SystemResult {
    sum.speed = sum.speed.zip(other.speed).and_then(|(a, b)| {
        (a.unit == b.unit && !a.unit.is_time()).then(|| Speed {
            mean: plus(a.mean, b.mean),
            steady: plus(a.steady, b.steady),
            unit: a.unit,
        })
    });
    sum.hot_in_fast_final = plus(sum.hot_in_fast_final, other.hot_in_fast_final);
    // Times to find the hot set have no sum for several changing hot sets.
    (sum.t90_s, sum.t90_after_shift_s) = (None, None);
    sum.kswapd_scanned += other.kswapd_scanned;
    sum.bytes_promoted = plus(sum.bytes_promoted, other.bytes_promoted);
    sum.bytes_demoted = plus(sum.bytes_demoted, other.bytes_demoted);
    sum.moved_steady_bytes_per_s =
        plus(sum.moved_steady_bytes_per_s, other.moved_steady_bytes_per_s);
    sum.verify_errors = plus(sum.verify_errors, other.verify_errors);
    for (cause, cpu_s) in other.cpu_s {
        *sum.cpu_s.entry(cause).or_default() += cpu_s;
    }
    for (name, count) in other.counters {
        *sum.counters.entry(name).or_default() += count;
    }
    // Intervals end together, to within the delay of reports.
    let pairs = sum.series.iter().zip(&other.series);
    let add = |(a, b): (&Point, &Point)| Point {
        t_s: a.t_s,
        speed: plus(a.speed, b.speed).filter(|_| sum.speed.is_some()),
        hot_in_fast: plus(a.hot_in_fast, b.hot_in_fast),
        fast_bytes: plus(a.fast_bytes, b.fast_bytes),
    };
    sum.series = pairs.map(add).collect();
    sum
}

/// The VM's fast memory at a time: the last value before it.
fn fast_at(seen: &[(f64, Vec<Option<u64>>)], vm: usize, t_s: f64) -> Option<u64> {
    let last = seen.iter().take_while(|(at_s, _)| *at_s <= t_s).last()?;
    *last.1.get(vm)?
}

/// Whether a resize was in progress in the interval of one second that ended at `t_s`. A resize that never completes
/// lasts until the next one begins.
fn is_resizing(t_s: f64, resizes: &[Resize]) -> bool {
    resizes.iter().enumerate().any(|(index, resize)| {
        let next_s = resizes
            .get(index + 1)
            .map_or(f64::INFINITY, |next| next.t_s);
        let end_s = resize.took_s.map_or(next_s, |took_s| resize.t_s + took_s);
        resize.t_s < t_s && t_s - 1.0 < end_s
    })
}

/// The throughput that 99 % of the points reach.
fn reached_by_99_percent(points: &[Point]) -> Option<f64> {
    let mut speeds: Vec<f64> = points.iter().filter_map(|point| point.speed).collect();
    speeds.sort_by(f64::total_cmp);
    speeds.get(speeds.len() / 100).copied()
}

#[cfg(test)]
mod tests {
    use demeter_outcome::Unit;

    use super::*;

    fn resize(t_s: f64, took_s: Option<f64>) -> Resize {
        Resize {
            t_s,
            took_s,
            ..Resize::default()
        }
    }

    #[test]
    fn intervals_that_meet_a_resize_are_told_apart() {
        let resizes = [
            resize(10.5, Some(0.7)),
            resize(20.0, None),
            resize(25.0, Some(0.1)),
        ];
        let hit: Vec<u32> = (1..30)
            .filter(|&t| is_resizing(t.into(), &resizes))
            .collect();
        assert_eq!(hit, [11, 12, 21, 22, 23, 24, 25, 26]);
        assert!(!is_resizing(5.0, &[]));
    }

    #[test]
    fn a_hundredth_of_the_points_may_be_slower() {
        let points = |count: u32| -> Vec<Point> {
            let point = |mops| Point {
                speed: Some(f64::from(mops)),
                ..Point::default()
            };
            (0..count).map(point).collect()
        };
        assert_eq!(reached_by_99_percent(&points(10)), Some(0.0));
        assert_eq!(reached_by_99_percent(&points(200)), Some(2.0));
        assert_eq!(reached_by_99_percent(&[]), None);
    }

    #[test]
    fn a_points_memory_is_what_was_last_seen() {
        let seen = [(0.0, vec![Some(1), None]), (2.0, vec![Some(5), Some(7)])];
        assert_eq!(fast_at(&seen, 0, 1.9), Some(1));
        assert_eq!(fast_at(&seen, 0, 2.0), Some(5));
        assert_eq!(fast_at(&seen, 1, 1.0), None);
        assert_eq!(fast_at(&[], 0, 1.0), None);
    }

    #[test]
    fn vms_add_up() {
        let one = |unit: &Unit, mops: f64, errors| SystemResult {
            speed: Some(Speed::new(unit.clone(), mops, None)),
            verify_errors: errors,
            series: vec![Point {
                t_s: 1.0,
                speed: Some(mops),
                hot_in_fast: Some(0.5),
                fast_bytes: Some(10),
            }],
            ..SystemResult::default()
        };
        let mops = &Unit::MOPS;
        let sum = add(one(mops, 1.0, Some(0)), one(mops, 2.0, Some(3)));
        assert_eq!((sum.mean(), sum.verify_errors), (Some(3.0), Some(3)));
        assert_eq!(
            (sum.series[0].speed, sum.series[0].fast_bytes),
            (Some(3.0), Some(20))
        );
        // Latencies, and results of different units, have no sum.
        for (a, b) in [(mops, &Unit::new("requests/s")), (&Unit::NS, &Unit::NS)] {
            let sum = add(one(a, 1.0, None), one(b, 1.0, None));
            assert_eq!((&sum.speed, sum.series[0].speed), (&None, None));
        }
        // A VM without verification makes the sum unknown, not good.
        let unknown = add(one(mops, 1.0, Some(0)), one(mops, 1.0, None));
        assert_eq!(unknown.verify_errors, None);
    }
}
