//! Validates the values of a result.

use std::fmt;

use crate::file::ContentError;
use crate::provisioning::Provisioning;
use crate::schema::{Case, Point, Published, RunResult, SCHEMA, Speed, SystemResult};
use crate::schema::{Repeats, Tail, WorkloadResult};

type Checked = Result<(), ContentError>;

impl RunResult {
    /// Checks that every value can have been measured.
    ///
    /// - Numbers are finite.
    /// - Times, rates and latencies are not negative.
    /// - Shares lie in 0 to 1.
    /// - Each series is sorted by time, and percentiles and extremes by size.
    ///
    /// `mgmt_cpu_s` may be negative: it is a difference of two noisy runs.
    ///
    /// # Errors
    /// [`ContentError::Schema`] or [`ContentError::Value`]: the first invalid value.
    pub fn check(&self) -> Result<(), ContentError> {
        if self.schema != SCHEMA {
            let found = self.schema.into();
            return Err(ContentError::Schema { found });
        }
        let place = ValuePath::default();
        place.each("systems", &self.systems, system)?;
        place.each("cases", &self.cases, |case: &Case, place| {
            place.each("systems", &case.systems, system)
        })?;
        place.each(
            "published",
            &self.published,
            |published: &Published, place| {
                place.numbers([("value", Some(published.value)), ("ours", published.ours)])?;
                place.amounts([("within", Some(published.within))])
            },
        )
    }
}

fn system(of_system: &SystemResult, place: &ValuePath) -> Checked {
    run(of_system, place)?;
    // The decoder limits the depth.
    place.each("other_settings", &of_system.other_settings, system)
}

/// Checks the values of one run of a system.
fn run(system: &SystemResult, place: &ValuePath) -> Checked {
    place.amounts([
        ("elapsed_s", system.elapsed_s),
        ("t90_s", system.t90_s),
        ("t90_after_shift_s", system.t90_after_shift_s),
        ("moved_steady_bytes_per_s", system.moved_steady_bytes_per_s),
    ])?;
    place.numbers([
        ("mgmt_cpu_s", system.mgmt_cpu_s),
        ("mgmt_cpu_steady_s", system.mgmt_cpu_steady_s),
    ])?;
    place.share("metadata.host_noise", system.metadata.host_noise)?;
    let steady = system.metadata.host_noise_steady;
    place.share("metadata.host_noise_steady", steady)?;
    place.share("hot_in_fast_final", system.hot_in_fast_final)?;
    for (cause, &s) in &system.cpu_s {
        place.amounts([(format!("cpu_s.{cause}").as_str(), Some(s))])?;
    }
    if let Some(Tail {
        mean_ns,
        p50_ns,
        p90_ns,
        p99_ns,
        p999_ns,
    }) = system.tail
    {
        place.amounts([
            ("tail.mean_ns", Some(mean_ns)),
            ("tail.p50_ns", Some(p50_ns)),
        ])?;
        place.ascending("tail.p90_ns", [p50_ns, p90_ns])?;
        place.ascending("tail.p99_ns", [p90_ns, p99_ns])?;
        place.ascending("tail.p999_ns", [p99_ns, p999_ns])?;
    }
    if let Some(Repeats { min, max, .. }) = system.repeats {
        place.amounts([("repeats.min", Some(min))])?;
        place.ascending("repeats.max", [min, max])?;
    }
    speed(&system.speed, place)?;
    series(&system.series, place)?;
    place.each(
        "workloads",
        &system.workloads,
        |workload: &WorkloadResult, place| {
            place.amounts([("elapsed_s", workload.elapsed_s)])?;
            speed(&workload.speed, place)?;
            series(&workload.series, place)
        },
    )?;
    match &system.provisioning {
        Some(of_system) => provisioning(of_system, &place.inner("provisioning", None)),
        None => Ok(()),
    }
}

fn speed(speed: &Option<Speed>, place: &ValuePath) -> Checked {
    let of = |part: fn(&Speed) -> Option<f64>| speed.as_ref().and_then(part);
    place.amounts([
        ("speed.mean", of(|s| s.mean)),
        ("speed.steady", of(|s| s.steady)),
    ])
}

fn provisioning(provisioning: &Provisioning, place: &ValuePath) -> Checked {
    let crashes = provisioning.crashes.as_ref();
    place.amounts([
        ("inflate_s", provisioning.inflate_s),
        ("inflate_gib_per_s", provisioning.inflate_gib_per_s),
        ("p99_resizing", provisioning.p99_resizing),
        ("p99_other", provisioning.p99_other),
        (
            "crashes.recovered_max_s",
            crashes.map(|c| c.recovered_max_s),
        ),
    ])?;
    place.each("resizes", &provisioning.resizes, |resize, place| {
        place.amounts([("t_s", Some(resize.t_s)), ("took_s", resize.took_s)])
    })
}

fn series(series: &[Point], place: &ValuePath) -> Checked {
    place.each("series", series, |point: &Point, place| {
        place.amounts([("t_s", Some(point.t_s)), ("speed", point.speed)])?;
        place.share("hot_in_fast", point.hot_in_fast)
    })?;
    for (index, pair) in series.windows(2).enumerate() {
        let rule = "later than the point before";
        let place = place.inner("series", index + 1);
        place.require("t_s", pair[1].t_s, pair[0].t_s < pair[1].t_s, rule)?;
    }
    Ok(())
}

/// The path of a value, such as `systems[0].series[1]`; formatted only when needed.
#[derive(Clone, Copy, Default)]
struct ValuePath<'a>(Option<(&'a ValuePath<'a>, &'a str, Option<usize>)>);

impl fmt::Display for ValuePath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some((outer, name, Some(index))) => write!(f, "{outer}{name}[{index}]."),
            Some((outer, name, None)) => write!(f, "{outer}{name}."),
            None => Ok(()),
        }
    }
}

impl ValuePath<'_> {
    fn inner<'a>(&'a self, name: &'a str, index: impl Into<Option<usize>>) -> ValuePath<'a> {
        ValuePath(Some((self, name, index.into())))
    }

    /// Checks all items of a list.
    fn each<T>(
        &self,
        name: &str,
        list: &[T],
        check: impl Fn(&T, &ValuePath) -> Checked,
    ) -> Checked {
        let mut items = list.iter().enumerate();
        items.try_for_each(|(index, item)| check(item, &self.inner(name, index)))
    }

    fn numbers<const N: usize>(&self, values: [(&str, Option<f64>); N]) -> Checked {
        let known = values
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)));
        known
            .into_iter()
            .try_for_each(|(name, value)| self.require(name, value, value.is_finite(), "finite"))
    }

    fn amounts<const N: usize>(&self, values: [(&str, Option<f64>); N]) -> Checked {
        let known = values
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)));
        known.into_iter().try_for_each(|(name, value)| {
            let holds = value.is_finite() && value >= 0.0;
            self.require(name, value, holds, "finite and not negative")
        })
    }

    fn share(&self, name: &str, value: Option<f64>) -> Checked {
        let value = value.unwrap_or(0.0);
        self.require(name, value, (0.0..=1.0).contains(&value), "between 0 and 1")
    }

    fn ascending(&self, name: &str, [before, value]: [f64; 2]) -> Checked {
        let holds = value.is_finite() && value >= before;
        self.require(name, value, holds, "finite and no less than the one before")
    }

    fn require(&self, name: &str, value: f64, holds: bool, rule: &'static str) -> Checked {
        match holds {
            true => Ok(()),
            false => Err(ContentError::Value {
                place: format!("{self}{name}"),
                value,
                rule,
            }),
        }
    }
}
