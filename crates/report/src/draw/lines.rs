//! Plots over time, with a line per system.

use demeter_outcome::{Point, RunResult, SystemResult};

use crate::draw::axis::Axis;
use crate::draw::frame::{Frame, Line};
use crate::draw::svg::{Size, Svg};
use crate::draw::{palette, picture};
use crate::measure::Measure;
use crate::text::clean;

/// Bytes in a mebibyte.
const MIB: f64 = (1u64 << 20) as f64;
/// Maximum number of systems drawn; the table has all.
pub(crate) const SYSTEMS_MAX: usize = 12;
/// Maximum number of points of a line: about two per pixel.
const POINTS_MAX: usize = 1600;

/// The quantity that a plot over time shows.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Quantity {
    /// Speed of the workload.
    Speed(Measure),
    /// Share of the hot set in fast memory, percent.
    HotShare,
    /// Fast memory owned, MiB.
    FastMemory,
}

impl Quantity {
    /// The speed that the workload of this result reports.
    pub(crate) fn speed(systems: &[SystemResult]) -> Self {
        Self::Speed(Measure::speed_of(systems.iter()))
    }

    /// The plot's title.
    pub(crate) fn title(&self) -> String {
        match self {
            Self::Speed(measure) => format!("{} over time", measure.title()),
            Self::HotShare => "How much of the hot set lies in fast memory".into(),
            Self::FastMemory => "Fast memory over time".into(),
        }
    }

    /// Unit of the vertical axis, and which end is better.
    pub(crate) fn unit(&self) -> String {
        match self {
            Self::Speed(measure) => measure.unit(),
            Self::HotShare => "percent of its bytes".into(),
            Self::FastMemory => "MiB owned".into(),
        }
    }

    /// Whether any system has this quantity.
    pub(crate) fn is_known(&self, systems: &[SystemResult]) -> bool {
        let mut points = systems.iter().flat_map(|system| &system.series);
        points.any(|point| self.of(point).is_some())
    }

    fn of(&self, point: &Point) -> Option<f64> {
        let value = match self {
            Self::Speed(_) => point.speed,
            Self::HotShare => point.hot_in_fast.map(|share| share * 100.0),
            Self::FastMemory => point.fast_bytes.map(|bytes| bytes as f64 / MIB),
        };
        value.filter(|value| value.is_finite())
    }
}

/// A standalone plot of throughput (or latency) over time, for a README.
///
/// It has a title and both colour schemes, and shows the first twelve systems.
pub fn throughput_svg(result: &RunResult) -> String {
    let quantity = &Quantity::speed(&result.systems);
    let size = Size {
        width: 880.0,
        height: 400.0,
    };
    let name = clean::name(&result.scenario);
    let title = format!("{name}: {} ({})", quantity.title(), quantity.unit());
    let mut svg = picture::titled(size, &title);
    draw(&mut svg, size, picture::TOP, result, quantity);
    svg.finish()
}

/// The plot as a part of a page whose style sheet contains [`palette::css`].
pub(crate) fn plot(result: &RunResult, quantity: &Quantity, size: Size) -> String {
    let mut svg = Svg::new(size, &format!("{} ({})", quantity.title(), quantity.unit()));
    draw(&mut svg, size, 0.0, result, quantity);
    svg.finish()
}

/// Draws below `top`.
fn draw(svg: &mut Svg, size: Size, top: f64, result: &RunResult, quantity: &Quantity) {
    let mut lines = lines(result, quantity);
    let values = || lines.iter().flat_map(|line| &line.points);
    // If the work is fixed, the limit of the timed phase may be much longer.
    let planned_s = match Measure::of(result.systems.iter()) {
        Measure::Elapsed => 0.0,
        Measure::Speed(_) => result.duration_s as f64,
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
    for line in &mut lines {
        for (place, _) in &mut line.points {
            *place = time.share(*place);
        }
    }
    frame.draw_lines(svg, &lines);
}

/// The line of each system over seconds.
fn lines(result: &RunResult, quantity: &Quantity) -> Vec<Line> {
    let classes = palette::systems(result.systems.iter().map(|system| system.name.as_str()));
    let line = |(system, class): (&SystemResult, String)| {
        let points = system.series.iter().filter(|point| point.t_s.is_finite());
        let points: Vec<_> = points
            .map(|point| (point.t_s, quantity.of(point)))
            .collect();
        Line {
            name: clean::name(&system.name),
            class,
            points: thin(&points, POINTS_MAX),
            named_from: 2.0 / 3.0,
        }
    };
    let drawn = |line: &Line| line.points.iter().any(|(_, value)| value.is_some());
    let lines = result.systems.iter().zip(classes).map(line);
    lines.filter(drawn).take(SYSTEMS_MAX).collect()
}

/// Reduces a line to about `points_max` points. It keeps the lowest and highest of each section, so that no spike is
/// lost.
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
}
