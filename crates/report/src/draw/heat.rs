//! Heat maps: a figure over two settings, the best cells highlighted.

use crate::draw::frame::CHAR_WIDTH;
use crate::draw::palette::HEAT_STEPS;
use crate::draw::svg::{Px, Size, Svg};
use crate::text::number::short;

/// Height of a cell.
const CELL_HEIGHT: f64 = 30.0;
/// Widest cell.
const CELL_WIDTH_MAX: f64 = 96.0;
/// Space above the cells for the name of the vertical setting.
const HEAD: f64 = 24.0;
/// Space below the cells for the values of the horizontal setting, on two lines, and its name.
const FOOT: f64 = 56.0;
/// Height of a line of these values.
const LINE: f64 = 14.0;

/// A figure at each point of two settings.
pub(crate) struct Heat {
    /// Description for screen readers.
    pub title: String,
    /// The horizontal setting and its values.
    pub x: (String, Vec<String>),
    /// The vertical setting and its values.
    pub y: (String, Vec<String>),
    /// Rows of cells; `None` if not measured.
    pub cells: Vec<Vec<Option<f64>>>,
}

/// The scale from values to shades.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Shades {
    /// The smallest value of all maps with this scale.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// Whether the smallest is the best.
    pub less_is_better: bool,
}

impl Shades {
    /// A scale for all these values; `None` without values.
    pub(crate) fn over(values: impl Iterator<Item = f64>, less_is_better: bool) -> Option<Self> {
        let values = values.filter(|value| value.is_finite());
        let range = values.fold(None, |range, value| match range {
            None => Some((value, value)),
            Some((min, max)) => Some((f64::min(min, value), f64::max(max, value))),
        });
        range.map(|(min, max)| Self {
            min,
            max,
            less_is_better,
        })
    }

    /// Step of a value: 0 is the worst.
    fn step(&self, value: f64) -> usize {
        // Halved, so that the difference of huge numbers stays finite.
        let range = self.max / 2.0 - self.min / 2.0;
        let share = (value / 2.0 - self.min / 2.0) / range;
        let last = HEAT_STEPS - 1;
        if !share.is_finite() {
            return last / 2;
        }
        let step = ((share * HEAT_STEPS as f64) as usize).min(last);
        if self.less_is_better {
            last - step
        } else {
            step
        }
    }
}

impl Heat {
    /// Height of its picture.
    pub(crate) fn height(&self) -> f64 {
        HEAD + self.y.1.len() as f64 * CELL_HEIGHT + FOOT
    }

    /// Draws the map in a picture of the given width.
    pub(crate) fn plot(&self, shades: &Shades, width: f64) -> String {
        let columns = self.x.1.len().max(1);
        let label_chars = self.y.1.iter().map(|label| label.chars().count()).max();
        let left = 14.0 + label_chars.unwrap_or(0) as f64 * CHAR_WIDTH;
        let cell = ((width - left - 4.0) / columns as f64).clamp(4.0, CELL_WIDTH_MAX);
        let height = self.height();
        let bottom = height - FOOT;
        let size = Size { width, height };
        let mut svg = Svg::new(size, &self.title);
        svg.text("note", (0.0, HEAD - 9.0), &format!("{} ↓", self.y.0));
        for (row, (label, cells)) in self.y.1.iter().zip(&self.cells).enumerate() {
            let top = HEAD + row as f64 * CELL_HEIGHT;
            let text_y = top + CELL_HEIGHT / 2.0 + 4.0;
            svg.text("tick end", (left - 8.0, text_y), label);
            for (column, (value, x_label)) in cells.iter().zip(&self.x.1).enumerate() {
                let x = left + column as f64 * cell;
                let point = format!("{} {x_label}, {} {label}", self.x.0, self.y.0);
                draw_cell(&mut svg, shades, (x, top, cell), *value, &point);
            }
        }
        self.draw_columns(&mut svg, left, cell, bottom);
        svg.finish()
    }

    /// Draws the values, in turn on two lines if they do not fit on one, and their setting's name below. A value that would
    /// cover another is left out.
    fn draw_columns(&self, svg: &mut Svg, left: f64, cell: f64, bottom: f64) {
        let labels = &self.x.1;
        let half = |label: &String| label.chars().count() as f64 * CHAR_WIDTH / 2.0;
        let fit = labels
            .windows(2)
            .all(|two| half(&two[0]) + half(&two[1]) <= cell);
        let lines = if fit { 1 } else { 2 };
        let mut free_from = [f64::NEG_INFINITY; 2];
        for (column, label) in labels.iter().enumerate() {
            let x = left + (column as f64 + 0.5) * cell;
            let line = column % lines;
            if x - half(label) >= free_from[line] {
                let y = bottom + 17.0 + line as f64 * LINE;
                svg.text("tick middle", (x, y), label);
                free_from[line] = x + half(label);
            }
        }
        svg.text(
            "note",
            (left, bottom + FOOT - 6.0),
            &format!("{} →", self.x.0),
        );
    }
}

/// A cell by its left and top edge and width.
fn draw_cell(
    svg: &mut Svg,
    shades: &Shades,
    (x, top, width): (f64, f64, f64),
    value: Option<f64>,
    point: &str,
) {
    let middle = (x + width / 2.0, top + CELL_HEIGHT / 2.0 + 4.0);
    let Some(value) = value.filter(|value| value.is_finite()) else {
        svg.text("tick middle", middle, "-");
        return;
    };
    let step = shades.step(value);
    let text = short(value);
    svg.element(
        "rect",
        &[
            ("class", &format!("h{step}")),
            ("x", &Px(x)),
            ("y", &Px(top)),
            ("width", &Px(width - 1.0)),
            ("height", &Px(CELL_HEIGHT - 1.0)),
        ],
        Some(&format!("{point}: {text}")),
    );
    if text.len() as f64 * CHAR_WIDTH <= width {
        svg.text(&format!("cell middle on{step}"), middle, &text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shades(values: &[f64], less_is_better: bool) -> Shades {
        Shades::over(values.iter().copied(), less_is_better).unwrap()
    }

    #[test]
    fn the_best_is_the_strongest() {
        let rate = shades(&[1.0, f64::INFINITY, 3.0, 2.0], false);
        assert_eq!([1.0, 2.0, 3.0].map(|v| rate.step(v)), [0, 4, 8]);
        let time = shades(&[1.0, 3.0], true);
        assert_eq!([1.0, 2.0, 3.0].map(|v| time.step(v)), [8, 4, 0]);
        // Equal values, and values as far apart as possible.
        assert_eq!(shades(&[2.0], false).step(2.0), 4);
        assert_eq!(shades(&[-f64::MAX, f64::MAX], false).step(f64::MAX), 8);
        assert_eq!(Shades::over([].into_iter(), false), None);
    }

    /// Names of programs that do not fit side by side under narrow cells.
    #[test]
    fn every_column_has_its_label() {
        let names = ["graph500", "liblinear", "pagerank", "silo"].map(String::from);
        let heat = Heat {
            title: "t".into(),
            x: ("workload".into(), names.to_vec()),
            y: ("system".into(), vec!["demeter".into()]),
            cells: vec![vec![Some(1.0); 4]],
        };
        let svg = heat.plot(&shades(&[1.0], false), 77.0 + 4.0 * 74.0);
        for name in names {
            assert!(svg.contains(&format!(">{name}</text>")), "{name}: {svg}");
        }
    }

    #[test]
    fn cells_stand_in_their_row_and_column() {
        let heat = Heat {
            title: "t".into(),
            x: ("epoch ms".into(), vec!["1".into(), "2".into()]),
            y: ("<y>".into(), vec!["5".into()]),
            cells: vec![vec![Some(1.5), None]],
        };
        let svg = heat.plot(&shades(&[1.5], false), 127.0);
        assert!(
            svg.contains("<rect class=\"h4\" x=\"23\" y=\"24\" width=\"49\""),
            "{svg}"
        );
        assert!(svg.contains("epoch ms 1, &lt;y&gt; 5: 1.50"), "{svg}");
        assert_eq!(svg.matches("<rect").count(), 1);
        assert!(svg.contains(">-</text>"), "{svg}");
    }
}
