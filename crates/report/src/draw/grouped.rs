//! Bars of systems grouped by case, as speedups over a baseline, so that cases of different length can be compared.

use demeter_outcome::{Case, SystemResult};

use crate::draw::bars::{Bar, Bars, Cluster, Part};
use crate::draw::curves::Spot;
use crate::draw::legend::Legend;
use crate::measure::Measure;
use crate::shape::{self, Group, Setting};
use crate::text::clean;
use crate::text::number::short;

/// Bars of cases.
pub(crate) struct Grouped<'a> {
    /// The baseline system; `None` if absolute figures are shown.
    pub baseline: Option<&'a str>,
    pub bars: Bars,
}

/// A group of bars for each case along an axis, and one for the geometric mean if there is a baseline.
pub(crate) fn by_case<'a>(group: &Group, axis: &Setting, legend: &Legend<'a>) -> Grouped<'a> {
    let measure = group.measure();
    let cases: Vec<&Case> = group.along(axis).into_iter().flatten().collect();
    let baseline = baseline(&measure, &cases, legend);
    let drawn = || legend.0.iter().filter(|(name, _)| Some(*name) != baseline);
    let spot = |case: &Case, name: &str| {
        let system = shape::system(case, name)?;
        match baseline {
            Some(baseline) => relative(&measure, system, shape::system(case, baseline)?),
            None => Spot::of(&measure, system),
        }
    };
    let unit = if baseline.is_some() { "×" } else { "" };
    let cluster = |heading: String, spot: &dyn Fn(&str) -> Option<Spot>| Cluster {
        heading,
        bars: drawn()
            .filter_map(|(name, class)| Some(bar(name, class, spot(name)?, unit)))
            .collect(),
    };
    let clusters = cases
        .iter()
        .map(|case| cluster(group.label(case), &|name| spot(case, name)));
    let mut clusters: Vec<Cluster> = clusters.collect();
    if baseline.is_some() && cases.len() > 1 {
        let mean = |name: &str| {
            let logs = cases.iter().map(|case| Some(spot(case, name)?.value.ln()));
            let sum: f64 = logs.sum::<Option<f64>>()?;
            Some(Spot {
                value: (sum / cases.len() as f64).exp(),
                extremes: None,
            })
        };
        clusters.push(cluster("geometric mean".into(), &mean));
    }
    let what = match baseline {
        Some(_) => "Speed",
        None => measure.title(),
    };
    Grouped {
        baseline,
        bars: Bars {
            title: format!("{what} by {}", axis.title()),
            unit: "",
            clusters,
            reference: baseline.map(|_| 1.0),
        },
    }
}

/// The baseline: `none`, else the first system with a figure in every case; `None` if there is only one system.
fn baseline<'a>(measure: &Measure, cases: &[&Case], legend: &Legend<'a>) -> Option<&'a str> {
    let has = |case: &&Case, name: &str| {
        let value = shape::system(case, name).and_then(|system| measure.value(system));
        value.is_some_and(|value| value > 0.0)
    };
    let names = legend.0.iter().map(|(name, _)| *name);
    let none = names.clone().filter(|name| *name == "none");
    none.chain(names)
        .find(|name| cases.iter().all(|case| has(case, name)))
        .filter(|_| legend.0.len() > 1)
}

/// A bar of one part, followed by its value and unit.
pub(crate) fn bar(name: &str, class: &str, spot: Spot, unit: &str) -> Bar {
    let name = clean::name(name);
    let end = format!("{}{unit}", short(spot.value));
    Bar {
        parts: vec![Part {
            class: class.into(),
            amount: spot.value,
            title: format!("{name}: {end}"),
        }],
        name,
        extremes: spot.extremes,
        end,
    }
}

/// Speedup of a system over the baseline, with its slowest and fastest run.
fn relative(measure: &Measure, system: &SystemResult, baseline: &SystemResult) -> Option<Spot> {
    let value = measure.speed(system, baseline)?;
    let ours = measure.value(system)?;
    let extremes = system.repeats.map(|repeats| {
        if measure.less_is_better() {
            (value * ours / repeats.max, value * ours / repeats.min)
        } else {
            (value * repeats.min / ours, value * repeats.max / ours)
        }
    });
    Some(Spot { value, extremes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use demeter_outcome::{Repeats, Speed, Unit};

    const MOPS: Measure = Measure::Speed(Unit::MOPS);

    fn rate(mean_mops: f64) -> SystemResult {
        SystemResult {
            speed: Some(Speed::new(Unit::MOPS, mean_mops, None)),
            repeats: Some(Repeats {
                runs: 3,
                min: mean_mops / 2.0,
                max: mean_mops * 2.0,
            }),
            ..SystemResult::default()
        }
    }

    #[test]
    fn extremes_are_relative_too_the_slowest_first() {
        let spot = relative(&MOPS, &rate(6.0), &rate(2.0)).unwrap();
        assert_eq!((spot.value, spot.extremes), (3.0, Some((1.5, 6.0))));
        let time = |elapsed_s| SystemResult {
            elapsed_s: Some(elapsed_s),
            ..rate(elapsed_s)
        };
        let spot = relative(&Measure::Elapsed, &time(2.0), &time(6.0)).unwrap();
        assert_eq!((spot.value, spot.extremes), (3.0, Some((1.5, 6.0))));
    }

    #[test]
    fn the_baseline_has_a_figure_in_every_case() {
        let named = |name: &str, mops: Option<f64>| SystemResult {
            name: name.into(),
            speed: Some(Speed::new(Unit::MOPS, mops, None)),
            ..SystemResult::default()
        };
        let case = |none: Option<f64>| Case {
            group: 0,
            settings: vec![],
            systems: vec![named("linux", Some(1.0)), named("none", none)],
        };
        let legend = Legend(vec![("linux", "c3".into()), ("none", "c1".into())]);
        let of = |cases: &[&Case]| baseline(&MOPS, cases, &legend);
        let (known, unknown, zero) = (case(Some(2.0)), case(None), case(Some(0.0)));
        assert_eq!(of(&[&known, &known]), Some("none"));
        assert_eq!(of(&[&known, &unknown]), Some("linux"));
        assert_eq!(of(&[&zero]), Some("linux"));
        let alone = Legend(vec![("none", "c1".into())]);
        assert_eq!(baseline(&MOPS, &[&known], &alone), None);
    }
}
