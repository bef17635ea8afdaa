//! Curves of each system along a setting of the cases: main figure, and share of an oracle.

use demeter_outcome::{Case, RunResult, SystemResult};

use crate::draw::curves::{self, Curve, Curves, Spot};
use crate::draw::legend::Legend;
use crate::draw::picture::{self, TOP};
use crate::draw::svg::Size;
use crate::shape::{self, Group, Setting, Shape};
use crate::text::clean;
use crate::text::worst_first::ORACLE;

/// Size of a standalone picture below its title.
const SIZE: Size = Size {
    width: 880.0,
    height: 400.0,
};

/// A curve for each system with values.
pub(crate) fn along(
    group: &Group,
    axis: &Setting,
    legend: &Legend,
    title: &str,
    spot: impl Fn(&Case, &SystemResult) -> Option<Spot>,
) -> Curves {
    let cases = group.along(axis);
    let places = curves::shares(axis.numbers.as_deref().unwrap_or_default());
    let labels = axis.values.iter().map(|value| clean::name(value));
    let spot_of = |case: &Case, name: &str| spot(case, shape::system(case, name)?);
    let curve = |(name, class): &(&str, String)| Curve {
        name: clean::name(name),
        class: class.clone(),
        spots: (cases.iter())
            .map(|case| case.and_then(|case| spot_of(case, name)))
            .collect(),
    };
    let curves = legend.0.iter().map(curve);
    Curves {
        title: title.into(),
        places: places.into_iter().zip(labels).collect(),
        is_log: false,
        curves: curves
            .filter(|curve| curve.spots.iter().any(Option::is_some))
            .collect(),
    }
}

/// Each system's share of its case's oracle, percent; `None` if a case has no oracle.
pub(crate) fn shares_of_oracle(group: &Group, axis: &Setting, legend: &Legend) -> Option<Curves> {
    let has_oracle = |case: &&Case| shape::system(case, ORACLE).is_some();
    if !group.cases.iter().all(has_oracle) {
        return None;
    }
    let measure = group.measure();
    let share = |case: &Case, system: &SystemResult| {
        let of = shape::system(case, ORACLE).filter(|_| system.name != ORACLE)?;
        Some(Spot {
            value: measure.speed(system, of)? * 100.0,
            extremes: None,
        })
    };
    let title = format!("Share of the oracle by {}", axis.title());
    let curves = along(group, axis, legend, &title, share);
    (!curves.curves.is_empty()).then_some(curves)
}

/// A standalone picture of each system's share of the oracle, for cases that differ in a number, such as their size.
///
/// `None` for other results.
pub fn shares_svg(result: &RunResult) -> Option<String> {
    let legend = Legend::of(result);
    let groups = Group::all(result);
    let curves = groups.iter().find_map(|group| match group.shape() {
        Shape::Lines(axis) => shares_of_oracle(group, axis, &legend),
        _ => None,
    })?;
    let title = format!(
        "{}: {} (percent)",
        clean::name(&result.scenario),
        curves.title
    );
    let whole = Size {
        height: SIZE.height + TOP,
        ..SIZE
    };
    let mut svg = picture::titled(whole, &title);
    svg.place(TOP, &curves.plot(SIZE));
    Some(svg.finish())
}
