//! The frame of line charts: amounts at the left, places below, names at the right.

use std::fmt::Write;

use crate::OURS;
use crate::draw::axis::Axis;
use crate::draw::svg::{Px, Size, Svg};

/// Height of a name, and so the least distance between two.
const NAME_HEIGHT: f64 = 16.0;
/// Approximate width of a name's character in bold.
pub(crate) const CHAR_WIDTH: f64 = 9.0;
/// Minimum space for the amounts' labels.
const LEFT_MIN: f64 = 46.0;
/// Space for a line that connects a curve's end with its name.
const LEADER_WIDTH: f64 = 18.0;

/// Position of a chart's plotting area in its picture.
pub(crate) struct Frame {
    pub left: f64,
    pub right: f64,
    pub top: f64,
    pub bottom: f64,
    pub y: Axis,
}

/// A line of a plot.
pub(crate) struct Line {
    pub name: String,
    pub class: String,
    /// Position in the width, and amount; a point without an amount interrupts the line.
    pub points: Vec<(f64, Option<f64>)>,
    /// Position in the width from which points count for the height of the name.
    pub named_from: f64,
}

impl Line {
    /// The amount at which its name is placed: the mean from `named_from` on, or the last one.
    fn named_at(&self) -> Option<f64> {
        let known = || {
            self.points
                .iter()
                .filter_map(|&(s, amount)| Some((s, amount?)))
        };
        let late: Vec<f64> = known()
            .filter(|(share, _)| *share >= self.named_from)
            .map(|(_, amount)| amount)
            .collect();
        match late.len() {
            0 => known().next_back().map(|(_, amount)| amount),
            count => Some(late.iter().sum::<f64>() / count as f64),
        }
    }
}

impl Frame {
    /// A plotting area below `top`, with space for the names of its lines.
    pub(crate) fn new<'a>(
        size: Size,
        top: f64,
        names: impl Iterator<Item = &'a str>,
        y: Axis,
    ) -> Self {
        let chars = names.map(|name| name.chars().count()).max().unwrap_or(0);
        let labels = y.ticks().into_iter().map(|tick| y.label(tick).len());
        let label_chars = labels.max().unwrap_or(0);
        Self {
            left: (label_chars as f64 * CHAR_WIDTH + 10.0).max(LEFT_MIN),
            right: size.width - LEADER_WIDTH - 6.0 - chars as f64 * CHAR_WIDTH,
            top: top + 22.0,
            bottom: size.height - 30.0,
            y,
        }
    }

    /// Horizontal position in the picture.
    pub(crate) fn x(&self, share: f64) -> f64 {
        self.left + (self.right - self.left) * share
    }

    /// Vertical position of an amount.
    pub(crate) fn y(&self, amount: f64) -> f64 {
        self.bottom - (self.bottom - self.top) * self.y.share(amount)
    }

    /// Draws a horizontal line for each tick.
    pub(crate) fn draw_amounts(&self, svg: &mut Svg) {
        for (index, tick) in self.y.ticks().into_iter().enumerate() {
            let y = self.y(tick);
            let class = if index == 0 { "axis" } else { "grid" };
            svg.line(class, (self.left, y), (self.right, y));
            svg.text("tick end", (self.left - 8.0, y + 4.0), &self.y.label(tick));
        }
    }

    /// Draws a tick below the plot.
    pub(crate) fn draw_place(&self, svg: &mut Svg, share: f64, label: &str) {
        let x = self.x(share);
        svg.line("axis", (x, self.bottom), (x, self.bottom + 5.0));
        svg.text("tick middle", (x, self.bottom + 20.0), label);
    }

    /// Draws the lines with their names, Demeter's last and on top.
    pub(crate) fn draw_lines(&self, svg: &mut Svg, lines: &[Line]) {
        let (ours, others): (Vec<&Line>, Vec<&Line>) = lines.iter().partition(|l| l.name == OURS);
        for line in others.into_iter().chain(ours) {
            let class = format!("line {}{}", line.class, strong(&line.name));
            let path = self.path(&line.points);
            svg.element("path", &[("class", &class), ("d", &path)], Some(&line.name));
        }
        let ends = lines.iter().filter_map(|line| {
            let mut points = line.points.iter().rev();
            let (share, _) = points.find(|(_, amount)| amount.is_some())?;
            Some((self.x(*share), self.y(line.named_at()?), line))
        });
        self.draw_names(svg, ends.collect());
    }

    /// The path through the points, interrupted where one is missing. A single point becomes a dot.
    fn path(&self, points: &[(f64, Option<f64>)]) -> String {
        let mut path = String::new();
        for stretch in points.chunk_by(|a, b| a.1.is_some() && b.1.is_some()) {
            let known = stretch
                .iter()
                .filter_map(|&(share, amount)| Some((share, amount?)));
            for (index, (share, amount)) in known.enumerate() {
                let step = if index == 0 { 'M' } else { 'L' };
                // Writing to a String cannot fail.
                let _ = write!(path, "{step}{} {}", Px(self.x(share)), Px(self.y(amount)));
            }
            if stretch.len() == 1 && stretch[0].1.is_some() {
                path.push_str("h0");
            }
        }
        path
    }

    /// Writes names in the order of their amounts. Overlapping names are pushed apart, and connected with their lines.
    fn draw_names(&self, svg: &mut Svg, mut ends: Vec<(f64, f64, &Line)>) {
        ends.sort_by(|a, b| a.1.total_cmp(&b.1));
        let mut places: Vec<f64> = ends.iter().map(|end| end.1).collect();
        push_apart(&mut places, self.bottom);
        for ((x, y, line), place) in ends.into_iter().zip(places) {
            let (from, y) = (self.right + LEADER_WIDTH, Px(y));
            let (start, bend) = (Px(x + 3.0), Px((self.right + 4.0).max(x + 3.0)));
            let leader = format!("M{start} {y}L{bend} {y}L{} {}", Px(from), Px(place));
            let class = format!("leader {}", line.class);
            svg.element("path", &[("class", &class), ("d", &leader)], None);
            let class = format!("label{}", strong(&line.name));
            svg.text(&class, (from + 3.0, place + 4.5), &line.name);
        }
    }
}

/// The class that highlights our own system.
pub(crate) fn strong(name: &str) -> &'static str {
    if name == OURS { " strong" } else { "" }
}

/// Moves ascending places until neighbours are [`NAME_HEIGHT`] apart: downwards first, then upwards from `bottom`.
fn push_apart(places: &mut [f64], bottom: f64) {
    for index in 1..places.len() {
        places[index] = places[index].max(places[index - 1] + NAME_HEIGHT);
    }
    let mut limit = bottom;
    for place in places.iter_mut().rev() {
        *place = place.min(limit);
        limit = *place - NAME_HEIGHT;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::draw::lines::SYSTEMS_MAX;

    proptest! {
        #[test]
        fn names_do_not_overlap(mut places in prop::collection::vec(0.0f64..300.0, 0..SYSTEMS_MAX)) {
            places.sort_by(f64::total_cmp);
            push_apart(&mut places, 300.0);
            prop_assert!(places.windows(2).all(|pair| pair[1] - pair[0] >= NAME_HEIGHT - 1e-6));
            prop_assert!(places.iter().all(|place| *place <= 300.0));
        }
    }

    #[test]
    fn a_name_stands_at_the_mean_of_its_last_points() {
        let points = [(0.0, 9.0), (0.7, 2.0), (0.9, 4.0), (1.0, 0.0)];
        let line = |named_from| Line {
            name: "a".into(),
            class: String::new(),
            points: points.map(|(share, amount)| (share, Some(amount))).into(),
            named_from,
        };
        assert_eq!(line(2.0 / 3.0).named_at(), Some(2.0));
        assert_eq!(line(1.0).named_at(), Some(0.0));
        // The line ends before.
        assert_eq!(line(1.5).named_at(), Some(0.0));
        let nothing = Line {
            points: vec![(1.0, None)],
            ..line(0.0)
        };
        assert_eq!(nothing.named_at(), None);
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
        let points = [
            (0.1, Some(1.0)),
            (0.2, Some(2.0)),
            (0.3, None),
            (0.4, Some(4.0)),
        ];
        assert_eq!(frame.path(&points), "M1 9L2 8M4 6h0");
        assert_eq!(frame.path(&[]), "");
    }
}
