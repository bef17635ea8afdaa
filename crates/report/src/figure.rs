//! Figures by name, for tables, pictures and comparisons that a scenario asks for.

use crate::schema::SystemResult;

/// A figure of a result by its name: a field that is a number (`elapsed_s`, `mean_mops`, ...),
/// one of the latencies (`tail.p99_ns`), of the counters (`counters.flush_total`) or of the causes
/// of CPU time (`cpu_s.track`, or several of them: `cpu_s.migrate+fault`); or `cores_managing`, the CPU time of management divided by the
/// time that passed. Nothing where there is no such figure, or nobody measured it.
pub fn figure(system: &SystemResult, name: &str) -> Option<f64> {
    if let Some(counter) = name.strip_prefix("counters.") {
        return system.counters.get(counter).map(|&n| n as f64);
    }
    if let Some(cause) = name.strip_prefix("cpu_s.") {
        let seconds = cause.split('+').map(|cause| system.cpu_s.get(cause));
        return seconds.sum();
    }
    if let Some(latency) = name.strip_prefix("tail.") {
        let tail = system.tail?;
        return Some(match latency {
            "mean_ns" => tail.mean_ns,
            "p50_ns" => tail.p50_ns,
            "p90_ns" => tail.p90_ns,
            "p99_ns" => tail.p99_ns,
            "p999_ns" => tail.p999_ns,
            _ => return None,
        });
    }
    let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
    match name {
        "elapsed_s" => system.elapsed_s,
        "mean_mops" => system.mean_mops,
        "steady_mops" => system.steady_mops,
        "peak_mops" => {
            let mops = system.series.iter().filter_map(|point| point.mops);
            mops.reduce(f64::max)
        }
        "mean_latency_ns" => system.mean_latency_ns,
        "steady_latency_ns" => system.steady_latency_ns,
        "hot_in_fast_final" => Some(system.hot_in_fast_final),
        "t90_s" => system.t90_s,
        "mgmt_cpu_s" => system.mgmt_cpu_s,
        "cores_managing" => {
            let seconds = system.elapsed_s.or(system.series.last().map(|p| p.t_s))?;
            (seconds > 0.0).then_some(system.mgmt_cpu_s? / seconds)
        }
        "bytes_promoted" => bytes(system.bytes_promoted),
        "bytes_demoted" => bytes(system.bytes_demoted),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Point, Tail};

    #[test]
    fn figures_are_found_by_name() {
        let point = |t_s, mops| Point {
            t_s,
            mops: Some(mops),
            ..Point::default()
        };
        let system = SystemResult {
            mgmt_cpu_s: Some(6.0),
            bytes_promoted: Some(7),
            tail: Some(Tail {
                p99_ns: 5.0,
                ..Tail::default()
            }),
            counters: [("flush_total".into(), 9)].into(),
            cpu_s: [("track".into(), 0.5), ("fault".into(), 1.0)].into(),
            series: vec![point(1.0, 3.0), point(2.0, 2.0)],
            ..SystemResult::default()
        };
        for (name, value) in [
            ("counters.flush_total", Some(9.0)),
            ("cpu_s.track", Some(0.5)),
            ("cpu_s.track+fault", Some(1.5)),
            ("cpu_s.track+bogus", None),
            ("tail.p99_ns", Some(5.0)),
            ("tail.p98_ns", None),
            ("peak_mops", Some(3.0)),
            ("cores_managing", Some(3.0)),
            ("bytes_promoted", Some(7.0)),
            ("elapsed_s", None),
            ("counters.bogus", None),
            ("bogus", None),
        ] {
            assert_eq!(figure(&system, name), value, "{name}");
        }
        let fixed = SystemResult {
            elapsed_s: Some(12.0),
            ..system
        };
        assert_eq!(figure(&fixed, "cores_managing"), Some(0.5));
    }
}
