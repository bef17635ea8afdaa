//! Pictures of cases: which one follows from what varies, see [`Shape`].

use std::fmt::Write;

use super::Page;
use crate::bars::{Bar, Bars, Block, Part};
use crate::curves::{self, Curve, Curves, Spot};
use crate::figure::figure;
use crate::heat::{Heat, Shades};
use crate::measure::Measure;
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
            spot(measure, system)
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
        let measure = group.measure();
        let cases: Vec<&Case> = group.along(axis).into_iter().flatten().collect();
        let (title, unit) = match baseline(measure, &cases, cast) {
            Some(baseline) => {
                let name = text::name(baseline);
                (
                    format!("Speed by {}", axis.title()),
                    format!("multiples of {name} (the dashed line), more is better"),
                )
            }
            None => (
                format!("{} by {}", measure.title(), axis.title()),
                measure.unit().to_owned(),
            ),
        };
        self.section(&title, &note(group, &unit, &[axis]));
        let bars = grouped(group, &cases, cast, title);
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

/// The main figure of a system, with the extremes of several runs.
fn spot(measure: Measure, system: &SystemResult) -> Option<Spot> {
    Some(Spot {
        value: measure.value(system)?,
        extremes: system.repeats.map(|repeats| (repeats.min, repeats.max)),
    })
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

/// The system to which the others are held, if there are others: `none`, else the first one that
/// has a figure in every case.
fn baseline<'a>(measure: Measure, cases: &[&Case], cast: &Cast<'a>) -> Option<&'a str> {
    let has = |case: &&Case, name: &str| {
        let value = shape::system(case, name).and_then(|system| measure.value(system));
        value.is_some_and(|value| value > 0.0)
    };
    let everywhere = |name: &&str| cases.iter().all(|case| has(case, name));
    let names = cast.0.iter().map(|(name, _)| *name);
    let none = names.clone().filter(|name| *name == "none");
    none.chain(names)
        .find(everywhere)
        .filter(|_| cast.0.len() > 1)
}

/// A block of bars for each case, and one for the geometric mean over all of them where they are
/// held to a baseline.
fn grouped(group: &Group, cases: &[&Case], cast: &Cast, title: String) -> Bars {
    let measure = group.measure();
    let baseline = baseline(measure, cases, cast);
    let show = |value: f64| match baseline {
        Some(_) => format!("{}×", short(value)),
        None => short(value),
    };
    let bar = |name: &str, class: &str, spot: Spot| {
        let name = text::name(name);
        let end = show(spot.value);
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
    };
    let drawn = || cast.0.iter().filter(|(name, _)| Some(*name) != baseline);
    let spot_of = |case: &Case, name: &str| {
        let system = shape::system(case, name)?;
        match baseline {
            Some(baseline) => relative(measure, system, shape::system(case, baseline)?),
            None => spot(measure, system),
        }
    };
    let block = |case: &&Case| Block {
        heading: group.label(case),
        bars: drawn()
            .filter_map(|(name, class)| Some(bar(name, class, spot_of(case, name)?)))
            .collect(),
    };
    let mut blocks: Vec<Block> = cases.iter().map(block).collect();
    if baseline.is_some() && cases.len() > 1 {
        let mean = |name: &str| {
            let logs = cases
                .iter()
                .map(|case| Some(spot_of(case, name)?.value.ln()));
            let sum: f64 = logs.sum::<Option<f64>>()?;
            let value = (sum / cases.len() as f64).exp();
            Some(Spot {
                value,
                extremes: None,
            })
        };
        let bars = drawn().filter_map(|(name, class)| Some(bar(name, class, mean(name)?)));
        blocks.push(Block {
            heading: "geometric mean".into(),
            bars: bars.collect(),
        });
    }
    Bars {
        title,
        unit: "",
        blocks,
        reference: baseline.map(|_| 1.0),
    }
}

/// How many times as fast as the baseline a system is, and its slowest and its fastest run.
fn relative(measure: Measure, system: &SystemResult, baseline: &SystemResult) -> Option<Spot> {
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
