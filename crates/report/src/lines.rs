//! Plots over time: one line per system, named at its end.

use std::fmt::Write;

use crate::axis::Axis;
use crate::frame::{End, Frame};
use crate::measure::Measure;
use crate::palette;
use crate::schema::{Point, RunResult, SystemResult};
use crate::summary::shows_latency;
use crate::svg::{Px, Size, Svg};
use crate::text;

/// Bytes in a mebibyte.
const MIB: f64 = (1u64 << 20) as f64;
/// Most systems that are drawn: more lines say nothing. The table has them all.
pub(crate) const SYSTEMS_MAX: usize = 12;
/// Most points of a line: about two for each pixel that a picture is wide.
const POINTS_MAX: usize = 1600;

/// What a plot over time shows of each point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Quantity {
    /// Million updates per second.
    Throughput,
    /// Nanoseconds per load.
    Latency,
    /// Share of the hot set in fast memory, percent.
    HotShare,
    /// Fast memory owned, MiB.
    FastMemory,
}

impl Quantity {
    /// What the workload of this result measures.
    pub(crate) fn performance(result: &RunResult) -> Self {
        if shows_latency(&result.systems) {
            Self::Latency
        } else {
            Self::Throughput
        }
    }

    /// The plot's title.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Throughput => "Throughput over time",
            Self::Latency => "Latency over time",
            Self::HotShare => "How much of the hot set lies in fast memory",
            Self::FastMemory => "Fast memory over time",
        }
    }

    /// The vertical axis' unit, and which end is good.
    pub(crate) fn unit(self) -> &'static str {
        match self {
            Self::Throughput => "million updates per second, more is better",
            Self::Latency => "nanoseconds per dependent load, less is better",
            Self::HotShare => "percent of its bytes",
            Self::FastMemory => "MiB owned",
        }
    }

    /// Whether there is anything to draw.
    pub(crate) fn is_known(self, systems: &[SystemResult]) -> bool {
        let mut points = systems.iter().flat_map(|system| &system.series);
        points.any(|point| self.of(point).is_some())
    }

    fn of(self, point: &Point) -> Option<f64> {
        let value = match self {
            Self::Throughput => point.mops,
            Self::Latency => point.latency_ns,
            Self::HotShare => Some(point.hot_in_fast * 100.0),
            Self::FastMemory => point.fast_bytes.map(|bytes| bytes as f64 / MIB),
        };
        value.filter(|value| value.is_finite())
    }
}

/// One system's line.
struct Line {
    name: String,
    class: String,
    /// Second and value; a point without a value breaks the line.
    points: Vec<(f64, Option<f64>)>,
}

/// The plot of throughput (or latency) over time as a picture of its own, for a README: with its
/// title and both colour schemes inside. It draws the first twelve systems.
pub fn throughput_svg(result: &RunResult) -> String {
    let quantity = Quantity::performance(result);
    let size = Size {
        width: 880.0,
        height: 400.0,
    };
    let title = format!("{} ({})", quantity.title(), quantity.unit());
    let mut svg = Svg::new(size, &format!("{}: {title}", text::name(&result.scenario)));
    svg.style(&palette::css());
    svg.element(
        "rect",
        &[
            ("class", &"ground"),
            ("width", &"100%"),
            ("height", &"100%"),
        ],
        None,
    );
    svg.text(
        "title",
        (16.0, 27.0),
        &format!("{}: {title}", text::name(&result.scenario)),
    );
    draw(&mut svg, size, 40.0, result, quantity);
    svg.finish()
}

/// The plot as a part of a page, whose style sheet must hold [`palette::css`].
pub(crate) fn plot(result: &RunResult, quantity: Quantity, size: Size) -> String {
    let mut svg = Svg::new(size, &format!("{} ({})", quantity.title(), quantity.unit()));
    draw(&mut svg, size, 0.0, result, quantity);
    svg.finish()
}

/// Draws below `top`.
fn draw(svg: &mut Svg, size: Size, top: f64, result: &RunResult, quantity: Quantity) {
    let lines = lines(result, quantity);
    let values = || lines.iter().flat_map(|line| &line.points);
    // Where the work is fixed, the timed phase may have been allowed to last much longer.
    let planned_s = match Measure::of(result.systems.iter()) {
        Measure::Elapsed => 0.0,
        Measure::Throughput | Measure::Latency => result.duration_s as f64,
    };
    let t_max_s = values().map(|(t_s, _)| *t_s).fold(planned_s, f64::max);
    let value_max = values().filter_map(|(_, value)| *value).fold(0.0, f64::max);
    let y = match quantity {
        Quantity::HotShare => Axis::exact(100.0, 5),
        _ => Axis::rounded(value_max, 6),
    };
    let frame = Frame::new(size, top, lines.iter().map(|line| line.name.as_str()), y);
    let time = Axis::exact(t_max_s, (size.width / 90.0) as u32);
    frame.draw_amounts(svg);
    for tick in time.ticks() {
        let label = format!("{} s", time.label(tick));
        frame.draw_place(svg, time.share(tick), &label);
    }
    if let Some(shift_at_s) = result.shift_at_s.filter(|at_s| *at_s as f64 <= t_max_s) {
        let x = frame.x(time.share(shift_at_s as f64));
        svg.line("shift", (x, frame.top - 6.0), (x, frame.bottom));
        svg.text("note middle", (x, frame.top - 10.0), "the hot set jumps");
    }
    // Demeter's line last: on top of the others.
    let is_ours = |line: &&Line| line.name == "demeter";
    for line in lines
        .iter()
        .filter(|l| !is_ours(l))
        .chain(lines.iter().filter(is_ours))
    {
        let strong = if is_ours(&line) { " strong" } else { "" };
        let class = format!("line {}{strong}", line.class);
        let path = path(&frame, &time, &line.points);
        svg.element("path", &[("class", &class), ("d", &path)], Some(&line.name));
    }
    let ends = lines.iter().filter_map(|line| {
        let known = |(t_s, value): &(f64, Option<f64>)| Some((*t_s, (*value)?));
        let (t_s, value) = line.points.iter().rev().find_map(known)?;
        Some(End {
            x: frame.x(time.share(t_s)),
            y: frame.y(value),
            name: &line.name,
            class: &line.class,
        })
    });
    frame.draw_names(svg, ends.collect());
}

fn lines(result: &RunResult, quantity: Quantity) -> Vec<Line> {
    let classes = palette::systems(result.systems.iter().map(|system| system.name.as_str()));
    let line = |(system, class): (&SystemResult, String)| {
        let points = system.series.iter().filter(|point| point.t_s.is_finite());
        let points = points
            .map(|point| (point.t_s, quantity.of(point)))
            .collect::<Vec<_>>();
        Line {
            name: text::name(&system.name),
            class,
            points: thin(&points, POINTS_MAX),
        }
    };
    let drawn = |line: &Line| line.points.iter().any(|(_, value)| value.is_some());
    result
        .systems
        .iter()
        .zip(classes)
        .map(line)
        .filter(drawn)
        .take(SYSTEMS_MAX)
        .collect()
}

/// Keeps at most about `points_max` points: of each stretch the lowest and the highest, so that
/// no spike is lost.
fn thin(points: &[(f64, Option<f64>)], points_max: usize) -> Vec<(f64, Option<f64>)> {
    if points.len() <= points_max {
        return points.to_vec();
    }
    let stretch = points.len().div_ceil(points_max / 2);
    let mut kept = Vec::with_capacity(points_max + 2);
    for points in points.chunks(stretch) {
        let by_value = |a: &&(f64, Option<f64>), b: &&(f64, Option<f64>)| {
            a.1.unwrap_or(0.0).total_cmp(&b.1.unwrap_or(0.0))
        };
        let ends = [
            points.iter().min_by(by_value),
            points.iter().max_by(by_value),
        ];
        let mut ends: Vec<_> = ends.into_iter().flatten().copied().collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        ends.dedup_by(|a, b| a.0 == b.0);
        kept.extend(ends);
    }
    kept
}

/// The path through the points, broken where a value is missing. A point alone becomes a dot.
fn path(frame: &Frame, time: &Axis, points: &[(f64, Option<f64>)]) -> String {
    let mut path = String::new();
    for stretch in points.chunk_by(|a, b| a.1.is_some() && b.1.is_some()) {
        let known = stretch
            .iter()
            .filter_map(|(t_s, value)| Some((*t_s, (*value)?)));
        for (index, (t_s, value)) in known.enumerate() {
            let command = if index == 0 { 'M' } else { 'L' };
            // Writing to a String cannot fail.
            let (x, y) = (frame.x(time.share(t_s)), frame.y(value));
            let _ = write!(path, "{command}{} {}", Px(x), Px(y));
        }
        if stretch.len() == 1 && stretch[0].1.is_some() {
            path.push_str("h0");
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn thinning_keeps_extremes_order_and_bound(
            values in prop::collection::vec(prop::option::of(0.0f64..10.0), 0..500),
        ) {
            let points: Vec<_> = values.iter().enumerate().map(|(t, v)| (t as f64, *v)).collect();
            let kept = thin(&points, 20);
            prop_assert!(kept.len() <= 20);
            prop_assert!(kept.windows(2).all(|pair| pair[0].0 < pair[1].0));
            let max = |points: &[(f64, Option<f64>)]| {
                points.iter().filter_map(|point| point.1).fold(0.0, f64::max)
            };
            prop_assert_eq!(max(&kept), max(&points));
        }
    }

    #[test]
    fn a_gap_breaks_the_line_and_a_lone_point_is_a_dot() {
        let frame = Frame {
            left: 0.0,
            right: 10.0,
            top: 0.0,
            bottom: 10.0,
            y: Axis::exact(10.0, 5),
        };
        let time = frame.y;
        let points = [
            (1.0, Some(1.0)),
            (2.0, Some(2.0)),
            (3.0, None),
            (4.0, Some(4.0)),
        ];
        assert_eq!(path(&frame, &time, &points), "M1 9L2 8M4 6h0");
        assert_eq!(path(&frame, &time, &[]), "");
    }
}
