//! Heat maps of many systems in many cases, with a row for each system.

use demeter_outcome::RunResult;

use crate::draw::bars::{Bar, Bars, Cluster};
use crate::draw::grouped::{self, Grouped};
use crate::draw::heat::{Heat, Shades};
use crate::draw::legend::Legend;
use crate::draw::picture::{self, TOP};
use crate::draw::svg::Size;
use crate::shape::{Group, Setting, Shape};
use crate::text::clean;

/// Maximum number of rows.
pub(crate) const ROWS_MAX: usize = 64;

/// Width of a standalone picture, and space for a line above each map.
const WIDTH: f64 = 880.0;
const LINE: f64 = 24.0;

/// The map of these bars; `None` if they have no values.
pub(crate) fn map_of(bars: &Bars, axis: &Setting, less_is_better: bool) -> Option<(Heat, Shades)> {
    let value = |bar: &Bar| bar.parts.iter().map(|part| part.amount).sum::<f64>();
    let all = bars.clusters.iter().flat_map(|cluster| &cluster.bars);
    let shades = Shades::over(all.clone().map(value), less_is_better)?;
    let mut names: Vec<String> = vec![];
    for bar in all {
        if !names.contains(&bar.name) {
            names.push(bar.name.clone());
        }
    }
    let row = |name: &String| {
        let of_it = |cluster: &Cluster| cluster.bars.iter().find(|b| b.name == *name).map(value);
        bars.clusters.iter().map(of_it).collect()
    };
    let headings = bars.clusters.iter().map(|cluster| cluster.heading.clone());
    let heat = Heat {
        title: bars.title.clone(),
        x: (axis.title(), headings.collect()),
        cells: names.iter().map(row).collect(),
        y: ("system".into(), names),
    };
    Some((heat, shades))
}

/// A standalone picture of cases that differ in one setting, such as the workload: a map for each group of cases.
///
/// `None` for other results.
pub fn maps_svg(result: &RunResult) -> Option<String> {
    let legend = Legend::first(ROWS_MAX, result);
    let (mut maps, mut unit) = (vec![], String::new());
    for group in &Group::all(result) {
        let Shape::Bars(axis) = group.shape() else {
            continue;
        };
        let Grouped { baseline, bars } = grouped::by_case(group, axis, &legend);
        unit = match baseline {
            Some(baseline) => format!("multiples of {}", clean::name(baseline)),
            None => group.measure().unit(),
        };
        let is_time = group.measure().less_is_better() && baseline.is_none();
        let map = map_of(&bars, axis, is_time);
        maps.extend(map.map(|(heat, shades)| (group.common(), heat, shades)));
    }
    let heights = maps.iter().map(|(_, heat, _)| LINE + heat.height());
    let title = format!(
        "{}: {} ({unit})",
        clean::name(&result.scenario),
        maps.first()?.1.title
    );
    let size = Size {
        width: WIDTH,
        height: TOP + heights.sum::<f64>(),
    };
    let mut svg = picture::titled(size, &title);
    let mut top = TOP;
    for (common, heat, shades) in &maps {
        svg.text("note", (16.0, top + LINE - 6.0), common);
        svg.place(top + LINE, &heat.plot(shades, WIDTH));
        top += LINE + heat.height();
    }
    Some(svg.finish())
}
