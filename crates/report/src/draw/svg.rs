//! A small SVG writer: escaped attributes, numeric coordinates.

use std::fmt::{self, Display, Write};

use crate::text::clean::Escaped;

/// A coordinate or length in the picture's units, rounded to a tenth.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Px(pub f64);

impl Display for Px {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_assert!(
            self.0.is_finite() && self.0.abs() < 1e6,
            "coordinate {}",
            self.0
        );
        let tenths = (self.0 * 10.0).round() as i64;
        let sign = if tenths < 0 { "-" } else { "" };
        write!(f, "{sign}{}", tenths.abs() / 10)?;
        if tenths % 10 == 0 {
            Ok(())
        } else {
            write!(f, ".{}", tenths.abs() % 10)
        }
    }
}

/// Width and height of a picture.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Size {
    pub width: f64,
    pub height: f64,
}

/// A picture that elements are appended to.
pub(crate) struct Svg(String);

impl Svg {
    /// An empty picture. `label` describes it for screen readers.
    pub(crate) fn new(size: Size, label: &str) -> Self {
        let (width, height) = (Px(size.width), Px(size.height));
        let label = Escaped(label);
        Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             width=\"{width}\" height=\"{height}\" role=\"img\" aria-label=\"{label}\">\n"
        ))
    }

    /// Adds a style sheet of our own, without escaping.
    pub(crate) fn style(&mut self, css: &str) {
        self.push(format_args!("<style>{css}</style>\n"));
    }

    /// Adds an element; `title` is shown on hover.
    pub(crate) fn element(
        &mut self,
        name: &str,
        attributes: &[(&str, &dyn Display)],
        title: Option<&str>,
    ) {
        self.push(format_args!("<{name}"));
        for (key, value) in attributes {
            let value = value.to_string();
            self.push(format_args!(" {key}=\"{}\"", Escaped(&value)));
        }
        match title {
            Some(title) => {
                self.push(format_args!(
                    "><title>{}</title></{name}>\n",
                    Escaped(title)
                ));
            }
            None => self.push(format_args!("/>\n")),
        }
    }

    /// A straight line.
    pub(crate) fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let ends = [Px(from.0), Px(from.1), Px(to.0), Px(to.1)];
        self.element(
            "line",
            &[
                ("class", &class),
                ("x1", &ends[0]),
                ("y1", &ends[1]),
                ("x2", &ends[2]),
                ("y2", &ends[3]),
            ],
            None,
        );
    }

    /// Adds a line of text; `class` sets size, colour and alignment.
    pub(crate) fn text(&mut self, class: &str, at: (f64, f64), text: &str) {
        let (x, y) = (Px(at.0), Px(at.1));
        let text = Escaped(text);
        self.push(format_args!(
            "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{text}</text>\n"
        ));
    }

    /// Adds another picture at this distance from the top.
    pub(crate) fn place(&mut self, top: f64, picture: &str) {
        let top = Px(top);
        self.push(format_args!(
            "<g transform=\"translate(0 {top})\">\n{picture}</g>\n"
        ));
    }

    /// The picture's text.
    pub(crate) fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }

    fn push(&mut self, text: fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = self.0.write_fmt(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_are_short() {
        let texts = [0.0, 1.5, -0.04, -1.25, 12.34, 100.0].map(|v| Px(v).to_string());
        assert_eq!(texts, ["0", "1.5", "0", "-1.3", "12.3", "100"]);
        assert_eq!(Px(-0.5).to_string(), "-0.5");
    }

    #[test]
    fn markup_in_data_stays_text() {
        let mut svg = Svg::new(
            Size {
                width: 1.0,
                height: 1.0,
            },
            "\"><script>",
        );
        svg.text("tick", (0.0, 0.0), "</text><script>");
        svg.element("path", &[("d", &"\" onload=\"x")], Some("<b>"));
        let text = svg.finish();
        assert!(!text.contains("<script") && !text.contains("<b>"));
        assert!(!text.contains("\" onload=\""));
    }
}
