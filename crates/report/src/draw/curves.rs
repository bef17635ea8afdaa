//! Line charts over a few places: a system's figure by a setting, or by percentile.

use std::fmt::Write;

use demeter_outcome::SystemResult;

use crate::draw::axis::Axis;
use crate::draw::frame::{CHAR_WIDTH, Frame, Line};
use crate::draw::svg::{Px, Size, Svg};
use crate::measure::Measure;
use crate::text::number::short;

/// Radius of the dot at each place.
const DOT: f64 = 3.0;
/// Half the width of an error bar's ends.
const WHISKER: f64 = 4.0;
/// Ratio of an axis' largest to smallest number from which it is logarithmic.
const LOG_RATIO: f64 = 16.0;

/// A picture of several curves over the same places.
pub(crate) struct Curves {
    /// Description for screen readers.
    pub title: String,
    /// Position in the width and label of each place, ascending.
    pub places: Vec<(f64, String)>,
    /// Whether the amounts' axis is logarithmic.
    pub is_log: bool,
    pub curves: Vec<Curve>,
}

/// One system's curve.
pub(crate) struct Curve {
    pub name: String,
    pub class: String,
    /// One value per place; a missing one interrupts the curve.
    pub spots: Vec<Option<Spot>>,
}

/// A value with its extremes, if measured several times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spot {
    pub value: f64,
    pub extremes: Option<(f64, f64)>,
}

impl Spot {
    /// The main figure of a system, with the extremes of several runs.
    pub(crate) fn of(measure: &Measure, system: &SystemResult) -> Option<Self> {
        Some(Self {
            value: measure.value(system)?,
            extremes: system.repeats.map(|repeats| (repeats.min, repeats.max)),
        })
    }
}

/// Positions of ascending numbers in the width; logarithmic if they span a wide range.
pub(crate) fn shares(numbers: &[f64]) -> Vec<f64> {
    let (Some(&first), Some(&last)) = (numbers.first(), numbers.last()) else {
        return vec![];
    };
    let scale = |number: f64| {
        if first > 0.0 && last / first >= LOG_RATIO {
            number.ln()
        } else {
            number
        }
    };
    let (from, to) = (scale(first), scale(last));
    let share = |number: &f64| {
        if to > from {
            ((scale(*number) - from) / (to - from)).clamp(0.0, 1.0)
        } else {
            0.5
        }
    };
    numbers.iter().map(share).collect()
}

/// Positions of `count` places at equal distances.
pub(crate) fn even(count: usize) -> impl Iterator<Item = f64> {
    (0..count).map(move |index| (index as f64 + 0.5) / count as f64)
}

impl Curves {
    /// Draws a picture of the given size.
    pub(crate) fn plot(&self, size: Size) -> String {
        let mut svg = Svg::new(size, &self.title);
        let names = self.curves.iter().map(|curve| curve.name.as_str());
        let frame = Frame::new(size, 0.0, names, self.amounts());
        frame.draw_amounts(&mut svg);
        self.draw_places(&mut svg, &frame);
        let lines = self.curves.iter().map(|curve| Line {
            name: curve.name.clone(),
            class: curve.class.clone(),
            points: self
                .along(curve)
                .map(|(s, share, _)| (share, s.map(|s| s.value)))
                .collect(),
            // Beside its last point.
            named_from: f64::INFINITY,
        });
        frame.draw_lines(&mut svg, &lines.collect::<Vec<_>>());
        for curve in &self.curves {
            for (spot, share, label) in self.along(curve) {
                if let Some(spot) = spot {
                    draw_spot(&mut svg, &frame, curve, frame.x(share), spot, label);
                }
            }
        }
        svg.finish()
    }

    /// A curve's spots with position and label of their places.
    fn along<'a>(&'a self, curve: &'a Curve) -> impl Iterator<Item = (Option<Spot>, f64, &'a str)> {
        let spots = curve.spots.iter().zip(&self.places);
        spots.map(|(spot, (share, label))| (*spot, *share, label.as_str()))
    }

    /// The axis of all spots.
    fn amounts(&self) -> Axis {
        let spots = self.curves.iter().flat_map(|curve| &curve.spots).flatten();
        let values = spots.flat_map(|spot| {
            let (low, high) = spot.extremes.unwrap_or((spot.value, spot.value));
            [low, spot.value, high]
        });
        let max = values.clone().fold(0.0, f64::max);
        if self.is_log {
            let min = values.filter(|value| *value > 0.0).fold(max, f64::min);
            Axis::log(min, max, 6)
        } else {
            Axis::rounded(max, 6)
        }
    }

    /// Draws as many labels as fit.
    fn draw_places(&self, svg: &mut Svg, frame: &Frame) {
        let mut free_from = f64::NEG_INFINITY;
        for (share, label) in &self.places {
            let half = label.chars().count() as f64 * CHAR_WIDTH / 2.0;
            if frame.x(*share) - half >= free_from {
                frame.draw_place(svg, *share, label);
                free_from = frame.x(*share) + half + CHAR_WIDTH;
            }
        }
    }
}

fn draw_spot(svg: &mut Svg, frame: &Frame, curve: &Curve, x: f64, spot: Spot, label: &str) {
    let mut title = format!("{}, {label}: {}", curve.name, short(spot.value));
    if let Some((low, high)) = spot.extremes {
        let _ = write!(title, " ({} to {})", short(low), short(high));
        let (low, high) = (Px(frame.y(low)), Px(frame.y(high)));
        let (left, right) = (Px(x - WHISKER), Px(x + WHISKER));
        let x = Px(x);
        let bar = format!(
            "M{left} {low}L{right} {low}M{x} {low}L{x} {high}M{left} {high}L{right} {high}"
        );
        let class = format!("whisker {}", curve.class);
        svg.element("path", &[("class", &class), ("d", &bar)], None);
    }
    svg.element(
        "circle",
        &[
            ("class", &curve.class),
            ("cx", &Px(x)),
            ("cy", &Px(frame.y(spot.value))),
            ("r", &Px(DOT)),
        ],
        Some(&title),
    );
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_that_span_many_powers_lie_by_powers() {
        assert_eq!(shares(&[1.0, 2.0, 5.0]), [0.0, 0.25, 1.0]);
        let wide = shares(&[10.0, 100.0, 1000.0]);
        assert!((wide[1] - 0.5).abs() < 1e-9, "{wide:?}");
        assert_eq!(shares(&[3.0, 3.0]), [0.5, 0.5]);
        assert!(shares(&[]).is_empty());
    }

    proptest! {
        #[test]
        fn shares_keep_the_order(mut numbers in prop::collection::vec(-1e15f64..1e15, 1..50)) {
            numbers.sort_by(f64::total_cmp);
            let shares = shares(&numbers);
            prop_assert!(shares.windows(2).all(|pair| pair[0] <= pair[1]));
            prop_assert!(shares.iter().all(|share| (0.0..=1.0).contains(share)));
        }
    }

    #[test]
    fn a_value_stands_where_its_axis_says() {
        let spot = |value, extremes| Some(Spot { value, extremes });
        let curves = Curves {
            title: "a & b".into(),
            places: vec![(0.0, "1".into()), (0.5, "2".into()), (1.0, "3".into())],
            is_log: false,
            curves: vec![Curve {
                name: "demeter".into(),
                class: "c2".into(),
                spots: vec![spot(5.0, Some((0.0, 10.0))), None, spot(10.0, None)],
            }],
        };
        let svg = curves.plot(Size {
            width: 400.0,
            height: 152.0,
        });
        // Amounts 0 to 10 lie from 122 up to 22; the right edge leaves space for the name.
        assert!(svg.contains("cx=\"46\" cy=\"72\""), "{svg}");
        assert!(svg.contains("cx=\"313\" cy=\"22\""), "{svg}");
        assert!(
            svg.contains("M42 122L50 122M46 122L46 22M42 22L50 22"),
            "{svg}"
        );
        // The missing value interrupts the line.
        assert!(svg.contains("d=\"M46 72h0M313 22h0\""), "{svg}");
        assert!(svg.contains("demeter, 1: 5.00 (0 to 10.0)"), "{svg}");
        assert!(svg.contains("a &amp; b"));
    }
}
