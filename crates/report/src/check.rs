//! What a result cannot say: values that nobody can have measured.

use crate::file::ContentError;
use crate::provision::Provisioning;
use crate::schema::{Point, Published, Repeats, RunResult, SCHEMA, SystemResult, Tail};

impl RunResult {
    /// Checks that every value can have been measured: numbers are finite; times, rates and
    /// latencies are not negative; shares lie in 0 to 1; each series is in order of time,
    /// percentiles and extremes in order of size.
    /// `mgmt_cpu_s` may be negative: it is a difference of two noisy runs.
    ///
    /// # Errors
    /// [`ContentError::Schema`] or [`ContentError::Value`]: the first thing that is wrong.
    pub fn check(&self) -> Result<(), ContentError> {
        if self.schema != SCHEMA {
            return Err(ContentError::Schema {
                found: self.schema.into(),
            });
        }
        for (index, system) in self.systems.iter().enumerate() {
            system.check(&format!("systems[{index}]"))?;
        }
        for (number, case) in self.cases.iter().enumerate() {
            for (index, system) in case.systems.iter().enumerate() {
                system.check(&format!("cases[{number}].systems[{index}]"))?;
            }
        }
        for (index, published) in self.published.iter().enumerate() {
            published.check(&format!("published[{index}]"))?;
        }
        Ok(())
    }
}

impl Published {
    fn check(&self, place: &str) -> Result<(), ContentError> {
        for (name, value) in [("value", Some(self.value)), ("ours", self.ours)] {
            number(value, || format!("{place}.{name}"))?;
        }
        amount(Some(self.within), || format!("{place}.within"))
    }
}

impl SystemResult {
    fn check(&self, place: &str) -> Result<(), ContentError> {
        let amounts = [
            ("elapsed_s", self.elapsed_s),
            ("mean_mops", self.mean_mops),
            ("steady_mops", self.steady_mops),
            ("mean_latency_ns", self.mean_latency_ns),
            ("steady_latency_ns", self.steady_latency_ns),
            ("t90_s", self.t90_s),
            ("t90_after_shift_s", self.t90_after_shift_s),
            ("moved_steady_bytes_per_s", self.moved_steady_bytes_per_s),
        ];
        for (name, value) in amounts {
            amount(value, || format!("{place}.{name}"))?;
        }
        let differences = [
            ("mgmt_cpu_s", self.mgmt_cpu_s),
            ("mgmt_cpu_steady_s", self.mgmt_cpu_steady_s),
        ];
        for (name, value) in differences {
            number(value, || format!("{place}.{name}"))?;
        }
        if let Some(tail) = &self.tail {
            tail.check(&format!("{place}.tail"))?;
        }
        if let Some(repeats) = &self.repeats {
            repeats.check(&format!("{place}.repeats"))?;
        }
        share(self.hot_in_fast_final, || {
            format!("{place}.hot_in_fast_final")
        })?;
        for (cause, &cpu_s) in &self.cpu_s {
            amount(Some(cpu_s), || format!("{place}.cpu_s.{cause}"))?;
        }
        check_series(&self.series, place)?;
        match &self.provisioning {
            Some(provisioning) => provisioning.check(&format!("{place}.provisioning")),
            None => Ok(()),
        }
    }
}

impl Tail {
    fn check(&self, place: &str) -> Result<(), ContentError> {
        amount(Some(self.mean_ns), || format!("{place}.mean_ns"))?;
        let percentiles = [
            ("p50_ns", self.p50_ns),
            ("p90_ns", self.p90_ns),
            ("p99_ns", self.p99_ns),
            ("p999_ns", self.p999_ns),
        ];
        let mut least = 0.0;
        for (name, value) in percentiles {
            let rule = "finite and no less than 0 and the percentile before";
            let holds = value.is_finite() && value >= least;
            require(holds, value, rule, || format!("{place}.{name}"))?;
            least = value;
        }
        Ok(())
    }
}

impl Repeats {
    fn check(&self, place: &str) -> Result<(), ContentError> {
        amount(Some(self.min), || format!("{place}.min"))?;
        let holds = self.max.is_finite() && self.max >= self.min;
        let rule = "finite and no less than min";
        require(holds, self.max, rule, || format!("{place}.max"))
    }
}

impl Provisioning {
    fn check(&self, place: &str) -> Result<(), ContentError> {
        let amounts = [
            ("inflate_s", self.inflate_s),
            ("inflate_gib_per_s", self.inflate_gib_per_s),
            ("p99_resizing_mops", self.p99_resizing_mops),
            ("p99_other_mops", self.p99_other_mops),
        ];
        for (name, value) in amounts {
            amount(value, || format!("{place}.{name}"))?;
        }
        for (index, resize) in self.resizes.iter().enumerate() {
            let place = |name| format!("{place}.resizes[{index}].{name}");
            amount(Some(resize.t_s), || place("t_s"))?;
            amount(resize.took_s, || place("took_s"))?;
        }
        if let Some(crashes) = &self.crashes {
            amount(Some(crashes.recovered_max_s), || {
                format!("{place}.crashes.recovered_max_s")
            })?;
        }
        for (index, vm) in self.vms.iter().enumerate() {
            let place = format!("{place}.vms[{index}]");
            amount(vm.mean_mops, || format!("{place}.mean_mops"))?;
            check_series(&vm.series, &place)?;
        }
        Ok(())
    }
}

fn check_series(series: &[Point], place: &str) -> Result<(), ContentError> {
    for (index, point) in series.iter().enumerate() {
        point.check(&format!("{place}.series[{index}]"))?;
    }
    for (index, pair) in series.windows(2).enumerate() {
        require(
            pair[0].t_s < pair[1].t_s,
            pair[1].t_s,
            "later than the point before",
            || format!("{place}.series[{}].t_s", index + 1),
        )?;
    }
    Ok(())
}

impl Point {
    fn check(&self, place: &str) -> Result<(), ContentError> {
        let amounts = [
            ("t_s", Some(self.t_s)),
            ("mops", self.mops),
            ("latency_ns", self.latency_ns),
        ];
        for (name, value) in amounts {
            amount(value, || format!("{place}.{name}"))?;
        }
        share(self.hot_in_fast, || format!("{place}.hot_in_fast"))
    }
}

/// Any number, or none.
fn number(value: Option<f64>, place: impl Fn() -> String) -> Result<(), ContentError> {
    let value = value.unwrap_or(0.0);
    require(value.is_finite(), value, "finite", place)
}

fn amount(value: Option<f64>, place: impl Fn() -> String) -> Result<(), ContentError> {
    let value = value.unwrap_or(0.0);
    require(
        value.is_finite() && value >= 0.0,
        value,
        "finite and not negative",
        place,
    )
}

fn share(value: f64, place: impl Fn() -> String) -> Result<(), ContentError> {
    require(
        (0.0..=1.0).contains(&value),
        value,
        "between 0 and 1",
        place,
    )
}

fn require(
    holds: bool,
    value: f64,
    rule: &'static str,
    place: impl Fn() -> String,
) -> Result<(), ContentError> {
    if holds {
        Ok(())
    } else {
        Err(ContentError::Value {
            place: place(),
            value,
            rule,
        })
    }
}
