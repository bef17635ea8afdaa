//! Pictures of cases. The varied settings decide the kind, see [`Shape`].

use demeter_outcome::{Case, RunResult};
use maud::{Markup, html};

use super::{plot, section};
use crate::draw::along::{along, shares_of_oracle};
use crate::draw::bars::Bars;
use crate::draw::curves::{Curves, Spot};
use crate::draw::field;
use crate::draw::grouped::{self, Grouped};
use crate::draw::heat::{Heat, Shades};
use crate::draw::legend::Legend;
use crate::draw::palette::HEAT_STEPS;
use crate::draw::svg::Size;
use crate::shape::{self, Group, Setting, Shape};
use crate::text::clean;
use crate::text::number::short;

/// Height of a picture of curves.
const CURVES_HEIGHT: f64 = 320.0;

/// Maximum number of bars side by side.
const BARS_MAX: usize = 12;

/// The picture of each group of cases.
pub(super) fn pictures(result: &RunResult) -> Markup {
    // A map shows systems without colours.
    let (legend, of_map) = (&Legend::of(result), &Legend::first(field::ROWS_MAX, result));
    html! {
        @for group in &Group::all(result) {
            @match group.shape() {
                Shape::Lines(axis) => (curves_of(group, axis, legend)),
                Shape::Bars(axis) => (bars_of(group, axis, of_map)),
                Shape::Heat { x, y } => (heat_of(group, (x, y), of_map)),
                Shape::Table => {}
            }
        }
    }
}

fn curves_of(group: &Group, axis: &Setting, legend: &Legend) -> Markup {
    let measure = group.measure();
    let title = format!("{} by {}", measure.title(), axis.title());
    let of_measure = along(group, axis, legend, &title, |_, s| Spot::of(&measure, s));
    let cores_title = format!("Cores spent on management by {}", axis.title());
    let cores = along(group, axis, legend, &cores_title, |_, system| {
        Some(Spot {
            value: system.cores_managing()?,
            extremes: None,
        })
    });
    html! {
        @if let Some(shares) = shares_of_oracle(group, axis, legend) {
            (section(&shares.title, &note(group, "percent, more is better", &[axis])))
            (curves(&shares))
        }
        (section(&title, &note(group, &measure.unit(), &[axis])))
        (curves(&of_measure))
        @if axis.counts_vms() && !cores.curves.is_empty() {
            (section(
                &cores_title,
                "CPU time of management, less that of none, divided by the time that passed: cores \
                 that do no work.",
            ))
            (curves(&cores))
        }
    }
}

/// A picture of curves in both widths.
pub(super) fn curves(curves: &Curves) -> Markup {
    plot(|width| {
        curves.plot(Size {
            width,
            height: CURVES_HEIGHT,
        })
    })
}

fn bars_of(group: &Group, axis: &Setting, legend: &Legend) -> Markup {
    let Grouped { baseline, bars } = grouped::by_case(group, axis, legend);
    let is_crowded = bars.clusters.iter().any(|c| c.bars.len() > BARS_MAX);
    let unit = match baseline.map(clean::name) {
        Some(baseline) if is_crowded => format!("multiples of {baseline}, more is better"),
        Some(baseline) => format!("multiples of {baseline} (the dashed line), more is better"),
        None => group.measure().unit(),
    };
    html! {
        (section(&bars.title, &note(group, &unit, &[axis])))
        @if is_crowded {
            (field_of(&bars, axis, group.measure().less_is_better() && baseline.is_none()))
        } @else {
            (plot(|width| bars.plot(width)))
        }
    }
}

/// Many systems in many cases as one heat map.
fn field_of(bars: &Bars, axis: &Setting, less_is_better: bool) -> Markup {
    let Some((heat, shades)) = field::map_of(bars, axis, less_is_better) else {
        return Markup::default();
    };
    html! {
        (scale(&shades))
        (plot(|width| heat.plot(&shades, width)))
    }
}

fn heat_of(group: &Group, (x, y): (&Setting, &Setting), legend: &Legend) -> Markup {
    let measure = group.measure();
    let values = group.cases.iter().flat_map(|case| &case.systems);
    let values = values.filter_map(|system| measure.value(system));
    let Some(shades) = Shades::over(values, measure.less_is_better()) else {
        return Markup::default();
    };
    let title = format!("{} by {} and {}", measure.title(), y.title(), x.title());
    let cases = group.over(x, y);
    let labels = |axis: &Setting| axis.values.iter().map(|value| clean::name(value)).collect();
    let maps = legend.0.iter().filter_map(|(name, _)| {
        let cell = |case: &Option<&Case>| measure.value(shape::system((*case)?, name)?);
        let rows = cases.iter().map(|row| row.iter().map(cell).collect());
        let cells: Vec<Vec<Option<f64>>> = rows.collect();
        let name = clean::name(name);
        let heat = Heat {
            title: format!("{name}: {title}"),
            x: (x.title(), labels(x)),
            y: (y.title(), labels(y)),
            cells,
        };
        let is_empty = heat.cells.iter().flatten().all(Option::is_none);
        (!is_empty).then_some((name, heat))
    });
    html! {
        (section(&title, &note(group, &measure.unit(), &[y, x])))
        (scale(&shades))
        @for (name, heat) in maps {
            h3 { (name) }
            (plot(|width| heat.plot(&shades, width)))
        }
    }
}

/// The legend of the shades.
fn scale(shades: &Shades) -> Markup {
    let (worst, best) = if shades.less_is_better {
        (shades.max, shades.min)
    } else {
        (shades.min, shades.max)
    };
    html! {
        p.shades {
            (short(worst)) " "
            @for step in 0..HEAT_STEPS { i class={ "h" (step) } {} }
            " " (short(best)) " is best"
        }
    }
}

/// The unit, the axes' full names, and the settings common to all cases.
fn note(group: &Group, unit: &str, axes: &[&Setting]) -> String {
    let keys: Vec<String> = axes.iter().map(|axis| clean::name(axis.key)).collect();
    let note = format!("In {unit}; over {}.", keys.join(" and "));
    match group.common() {
        common if common.is_empty() => note,
        common => format!("{note} All with {common}."),
    }
}
