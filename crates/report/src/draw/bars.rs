//! Horizontal bars in clusters: one bar per system, a cluster per case, parts of a bar side by side.

use crate::draw::axis::Axis;
use crate::draw::frame::{CHAR_WIDTH, strong};
use crate::draw::svg::{Px, Size, Svg};

const ROW_HEIGHT: f64 = 30.0;
/// Height of a row if there are many.
const ROW_HEIGHT_LOW: f64 = 22.0;
/// Number of bars from which rows are low.
const MANY: usize = 16;
const HEADING_HEIGHT: f64 = 28.0;
/// Part of a row's height that its bar takes.
const BAR_SHARE: f64 = 0.6;
/// Space below the bars for the ticks.
const FOOT: f64 = 26.0;
/// Maximum number of characters behind a bar.
const END_CHARS: f64 = 8.0;

/// A picture of bars.
pub(crate) struct Bars {
    /// Description for screen readers.
    pub title: String,
    /// Unit after each tick; may be empty.
    pub unit: &'static str,
    pub clusters: Vec<Cluster>,
    /// An amount that all others are compared with.
    pub reference: Option<f64>,
}

/// A group of bars.
pub(crate) struct Cluster {
    /// Heading above the bars; may be empty.
    pub heading: String,
    pub bars: Vec<Bar>,
}

/// One bar.
pub(crate) struct Bar {
    pub name: String,
    /// From left to right.
    pub parts: Vec<Part>,
    /// Smallest and largest of several measurements.
    pub extremes: Option<(f64, f64)>,
    /// Text behind the bar.
    pub end: String,
}

/// A part of a bar.
pub(crate) struct Part {
    pub class: String,
    pub amount: f64,
    /// Text shown on hover.
    pub title: String,
}

impl Bar {
    /// Length of the bar; negative amounts count as zero.
    fn length(&self) -> f64 {
        self.parts.iter().map(|part| drawable(part.amount)).sum()
    }
}

/// Position of amounts in a picture.
struct BarArea {
    left: f64,
    right: f64,
    axis: Axis,
}

impl BarArea {
    fn x(&self, amount: f64) -> f64 {
        self.left + (self.right - self.left) * self.axis.share(amount)
    }
}

impl Bars {
    /// Draws the bars in a picture of the given width.
    pub(crate) fn plot(&self, width: f64) -> String {
        let bars = || self.clusters.iter().flat_map(|cluster| &cluster.bars);
        let chars = bars().map(|bar| bar.name.chars().count()).max();
        let ends = bars().map(|bar| {
            let (_, high) = bar.extremes.unwrap_or_default();
            bar.length().max(drawable(high))
        });
        let longest = ends.fold(drawable(self.reference.unwrap_or(0.0)), f64::max);
        let place = BarArea {
            left: 12.0 + chars.unwrap_or(0) as f64 * CHAR_WIDTH,
            // Space for the text behind the longest bar.
            right: width - END_CHARS * CHAR_WIDTH,
            axis: Axis::exact(longest, (width / 110.0) as u32),
        };
        let row_height = if bars().count() < MANY {
            ROW_HEIGHT
        } else {
            ROW_HEIGHT_LOW
        };
        let heights = self
            .clusters
            .iter()
            .map(|cluster| cluster.head() + cluster.bars.len() as f64 * row_height);
        let bottom = heights.sum::<f64>();
        let size = Size {
            width,
            height: bottom + FOOT,
        };

        let mut svg = Svg::new(size, &self.title);
        for tick in place.axis.ticks() {
            let label = format!("{} {}", place.axis.label(tick), self.unit);
            let at = (place.x(tick), bottom + 18.0);
            svg.text("tick middle", at, label.trim_end());
        }
        let mut top = 0.0;
        for cluster in &self.clusters {
            if !cluster.heading.is_empty() {
                svg.text("label strong", (0.0, top + 19.0), &cluster.heading);
            }
            top += cluster.head();
            let end = top + cluster.bars.len() as f64 * row_height;
            // Beside the bars only, since a line would cross out the heading.
            for tick in place.axis.ticks() {
                svg.line("grid", (place.x(tick), top), (place.x(tick), end));
            }
            if let Some(reference) = self.reference {
                let x = place.x(reference);
                svg.line("shift", (x, top), (x, end));
            }
            for (row, bar) in cluster.bars.iter().enumerate() {
                bar.draw(&mut svg, &place, top + row as f64 * row_height, row_height);
            }
            svg.line("axis", (place.left, top), (place.left, end));
            top = end;
        }
        svg.finish()
    }
}

impl Cluster {
    /// Height of its heading.
    fn head(&self) -> f64 {
        if self.heading.is_empty() {
            0.0
        } else {
            HEADING_HEIGHT
        }
    }
}

impl Bar {
    fn draw(&self, svg: &mut Svg, place: &BarArea, row_top: f64, row_height: f64) {
        let height = (row_height * BAR_SHARE).round();
        let top = row_top + (row_height - height) / 2.0;
        let middle = top + height / 2.0;
        let name_class = format!("end{}", strong(&self.name));
        svg.text(&name_class, (place.left - 8.0, middle + 4.5), &self.name);
        let mut from = 0.0;
        for part in &self.parts {
            let amount = drawable(part.amount);
            if amount > 0.0 {
                let (left, right) = (place.x(from), place.x(from + amount));
                // A gap between neighbours, unless a bar is too thin.
                let width = (right - left - 1.0).max((right - left) / 2.0);
                svg.element(
                    "rect",
                    &[
                        ("class", &format!("{} bar", part.class)),
                        ("x", &Px(left)),
                        ("y", &Px(top)),
                        ("width", &Px(width)),
                        ("height", &Px(height)),
                    ],
                    Some(&part.title),
                );
                from += amount;
            }
        }
        let mut end = place.x(from);
        if let Some((low, high)) = self.extremes {
            let (low, high) = (place.x(drawable(low)), place.x(drawable(high)));
            let (upper, lower) = (Px(middle - 4.0), Px(middle + 4.0));
            let (low, high_px, middle) = (Px(low), Px(high), Px(middle));
            let whisker = format!(
                "M{low} {upper}L{low} {lower}M{low} {middle}L{high_px} {middle}\
                 M{high_px} {upper}L{high_px} {lower}"
            );
            svg.element("path", &[("class", &"whisker c0"), ("d", &whisker)], None);
            end = end.max(high);
        }
        svg.text("tick value", (end + 6.0, middle + 4.5), &self.end);
    }
}

/// Limited so that sums stay finite.
fn drawable(amount: f64) -> f64 {
    if amount.is_finite() {
        amount.clamp(0.0, 1e290)
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(class: &str, amount: f64) -> Part {
        Part {
            class: class.into(),
            amount,
            title: format!("{class} {amount}"),
        }
    }

    fn bar(name: &str, parts: Vec<Part>, extremes: Option<(f64, f64)>) -> Bar {
        Bar {
            name: name.into(),
            parts,
            extremes,
            end: format!("end of {name}"),
        }
    }

    #[test]
    fn parts_stand_side_by_side_and_blocks_below_each_other() {
        let bars = Bars {
            title: "t".into(),
            unit: "s",
            clusters: vec![
                Cluster {
                    heading: "<first>".into(),
                    bars: vec![bar("a", vec![part("c2", 1.0), part("c3", 3.0)], None)],
                },
                Cluster {
                    heading: String::new(),
                    bars: vec![bar("b", vec![part("c2", 2.0)], Some((1.0, 4.0)))],
                },
            ],
            reference: Some(2.0),
        };
        // 21 left of the bars, 72 to their right: a hundred per unit.
        let svg = bars.plot(493.0);
        assert!(
            svg.contains("class=\"c2 bar\" x=\"21\" y=\"34\" width=\"99\""),
            "{svg}"
        );
        assert!(
            svg.contains("class=\"c3 bar\" x=\"121\" y=\"34\" width=\"299\""),
            "{svg}"
        );
        assert!(
            svg.contains("class=\"c2 bar\" x=\"21\" y=\"64\" width=\"199\""),
            "{svg}"
        );
        // From the smallest to the largest measurement; the text follows.
        assert!(svg.contains("M121 73L421 73"), "{svg}");
        assert!(svg.contains("x=\"427\" y=\"77.5\">end of b<"), "{svg}");
        assert!(svg.contains("class=\"shift\" x1=\"221\""), "{svg}");
        assert!(
            svg.contains("&lt;first&gt;") && svg.contains(">4 s<"),
            "{svg}"
        );
    }

    #[test]
    fn what_is_no_amount_has_no_bar() {
        let bars = Bars {
            title: "t".into(),
            unit: "",
            clusters: vec![Cluster {
                heading: String::new(),
                bars: vec![bar("a", vec![part("c2", -1.0), part("c2", f64::NAN)], None)],
            }],
            reference: None,
        };
        assert!(!bars.plot(400.0).contains("<rect"));
    }
}
