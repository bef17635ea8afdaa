//! Pictures of cases: which one follows from what varies, see [`Shape`].

use std::fmt::Write;

use super::Page;
use crate::curves::{self, Curve, Curves, Spot};
use crate::figure::figure;
use crate::grouped::{self, Grouped};
use crate::heat::{Heat, Shades};
use crate::number::short;
use crate::palette::HEAT_STEPS;
use crate::schema::{Case, RunResult, SystemResult};
use crate::shape::{self, Cast, Group, Setting, Shape};
use crate::svg::Size;
use crate::text::{self, Escaped};

/// Height of a picture of curves.
const CURVES_HEIGHT: f64 = 320.0;

impl Page {
    /// The picture of each group of cases.
    pub(super) fn cases(&mut self, result: &RunResult) {
        let cast = Cast::of(result);
        for group in Group::all(result) {
            match group.shape() {
                Shape::Lines(axis) => self.curves_of(&group, axis, &cast),
                Shape::Bars(axis) => self.bars_of(&group, axis, &cast),
                Shape::Heat { x, y } => self.heat_of(&group, (x, y), &cast),
                Shape::Table => {}
            }
        }
    }

    fn curves_of(&mut self, group: &Group, axis: &Setting, cast: &Cast) {
        let measure = group.measure();
        let title = format!("{} by {}", measure.title(), axis.title());
        self.section(&title, &note(group, measure.unit(), &[axis]));
        self.curves(&along(group, axis, cast, &title, |system| {
            Spot::of(measure, system)
        }));
        let cores = |system: &SystemResult| {
            let value = figure(system, "cores_managing")?;
            Some(Spot {
                value,
                extremes: None,
            })
        };
        if axis.counts_vms() {
            let title = format!("Cores spent on management by {}", axis.title());
            let curves = along(group, axis, cast, &title, cores);
            if !curves.curves.is_empty() {
                self.section(
                    &title,
                    "CPU time of management, less that of none, divided by the time that passed: \
                     cores that do no work.",
                );
                self.curves(&curves);
            }
        }
    }

    /// A picture of curves in both widths.
    pub(super) fn curves(&mut self, curves: &Curves) {
        self.plot(|width| {
            curves.plot(Size {
                width,
                height: CURVES_HEIGHT,
            })
        });
    }

    fn bars_of(&mut self, group: &Group, axis: &Setting, cast: &Cast) {
        let Grouped { baseline, bars } = grouped::by_case(group, axis, cast);
        let unit = match baseline {
            Some(baseline) => format!(
                "multiples of {} (the dashed line), more is better",
                text::name(baseline)
            ),
            None => group.measure().unit().to_owned(),
        };
        self.section(&bars.title, &note(group, &unit, &[axis]));
        self.plot(|width| bars.plot(width));
    }

    fn heat_of(&mut self, group: &Group, (x, y): (&Setting, &Setting), cast: &Cast) {
        let measure = group.measure();
        let values = group.cases.iter().flat_map(|case| &case.systems);
        let values = values.filter_map(|system| measure.value(system));
        let Some(shades) = Shades::over(values, measure.less_is_better()) else {
            return;
        };
        let title = format!("{} by {} and {}", measure.title(), y.title(), x.title());
        self.section(&title, &note(group, measure.unit(), &[y, x]));
        self.shades(&shades);
        let cases = group.over(x, y);
        let labels = |axis: &Setting| axis.values.iter().map(|value| text::name(value)).collect();
        for (name, _) in &cast.0 {
            let cell = |case: &Option<&Case>| measure.value(shape::system((*case)?, name)?);
            let cells: Vec<Vec<Option<f64>>> = cases
                .iter()
                .map(|row| row.iter().map(cell).collect())
                .collect();
            if cells.iter().flatten().all(Option::is_none) {
                continue;
            }
            let name = text::name(name);
            self.subsection(&name);
            let heat = Heat {
                title: format!("{name}: {title}"),
                x: (x.title(), labels(x)),
                y: (y.title(), labels(y)),
                cells,
            };
            self.plot(|width| heat.plot(&shades, width));
        }
    }

    /// What the shades mean.
    fn shades(&mut self, shades: &Shades) {
        let (worst, best) = if shades.less_is_better {
            (shades.max, shades.min)
        } else {
            (shades.min, shades.max)
        };
        let worst = short(worst);
        self.add(format_args!("<p class=\"shades\">{} ", Escaped(&worst)));
        for step in 0..HEAT_STEPS {
            self.add(format_args!("<i class=\"h{step}\"></i>"));
        }
        let best = short(best);
        self.add(format_args!(" {} is best</p>\n", Escaped(&best)));
    }
}

/// The unit, what the axes' whole names are, and what all cases have in common.
fn note(group: &Group, unit: &str, axes: &[&Setting]) -> String {
    let keys: Vec<String> = axes.iter().map(|axis| text::name(axis.key)).collect();
    let mut note = format!("In {unit}; over {}.", keys.join(" and "));
    let common = group.common();
    if !common.is_empty() {
        let _ = write!(note, " All with {common}.");
    }
    note
}

/// A curve for each system that has anything to show.
fn along(
    group: &Group,
    axis: &Setting,
    cast: &Cast,
    title: &str,
    spot: impl Fn(&SystemResult) -> Option<Spot>,
) -> Curves {
    let cases = group.along(axis);
    let shares = curves::shares(axis.numbers.as_deref().unwrap_or_default());
    let labels = axis.values.iter().map(|value| text::name(value));
    let curve = |(name, class): &(&str, String)| Curve {
        name: text::name(name),
        class: class.clone(),
        spots: cases
            .iter()
            .map(|case| spot(shape::system((*case)?, name)?))
            .collect(),
    };
    let curves = cast.0.iter().map(curve);
    Curves {
        title: title.into(),
        places: shares.into_iter().zip(labels).collect(),
        is_log: false,
        curves: curves
            .filter(|curve| curve.spots.iter().any(Option::is_some))
            .collect(),
    }
}
