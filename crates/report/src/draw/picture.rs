//! A standalone picture: colours, ground and a title.

use std::fmt::Display;

use crate::draw::palette;
use crate::draw::svg::{Size, Svg};

/// Space for the title.
pub(crate) const TOP: f64 = 40.0;

/// A picture of this size with a title, in both colour schemes. The space below [`TOP`] is free.
pub(crate) fn titled(size: Size, title: &str) -> Svg {
    let mut svg = Svg::new(size, title);
    svg.style(&palette::css());
    let ground: [(&str, &dyn Display); 3] = [
        ("class", &"ground"),
        ("width", &"100%"),
        ("height", &"100%"),
    ];
    svg.element("rect", &ground, None);
    svg.text("title", (16.0, 27.0), title);
    svg
}
