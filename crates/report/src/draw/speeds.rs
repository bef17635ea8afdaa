//! Speed by size of fast memory, as `demeter host assess` estimates it.

use crate::draw::curves::{self, Curve, Curves, Spot};
use crate::draw::palette;
use crate::draw::picture::{self, TOP};
use crate::draw::svg::Size;
use crate::text::clean;

/// Size of the picture below its title.
const SIZE: Size = Size {
    width: 720.0,
    height: 360.0,
};

/// Maximum number of curves: a reader cannot distinguish more.
const CURVES_MAX: usize = 12;

const TITLE: &str = "Speed with fast memory of several sizes, % of that with fast memory alone";

/// The speed of one VM at each size.
pub struct Speeds {
    /// Its name.
    pub name: String,
    /// Lower and upper bound at each size, percent.
    pub bounds_percent: Vec<(f64, f64)>,
}

/// A picture of the first 12 of these, by sizes in percent of the memory that is used.
pub fn speeds_svg(sizes_percent: &[f64], all: &[Speeds]) -> String {
    let all = &all[..all.len().min(CURVES_MAX)];
    let classes = palette::systems(all.iter().map(|of| of.name.as_str()));
    let spot = |&(low, high): &(f64, f64)| {
        Some(Spot {
            value: (low + high) / 2.0,
            extremes: (high > low).then_some((low, high)),
        })
    };
    let curve = |(of, class): (&Speeds, String)| Curve {
        name: clean::name(&of.name),
        class,
        spots: of.bounds_percent.iter().map(spot).collect(),
    };
    let labels = sizes_percent.iter().map(|percent| format!("{percent} %"));
    let curves = Curves {
        title: TITLE.into(),
        places: curves::shares(sizes_percent)
            .into_iter()
            .zip(labels)
            .collect(),
        is_log: false,
        curves: all.iter().zip(classes).map(curve).collect(),
    };
    let whole = Size {
        height: SIZE.height + TOP,
        ..SIZE
    };
    let mut svg = picture::titled(whole, TITLE);
    svg.place(TOP, &curves.plot(SIZE));
    svg.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_bars_and_names_are_harmless() {
        let speeds = |name: &str| Speeds {
            name: name.into(),
            bounds_percent: vec![(50.0, 80.0), (100.0, 100.0)],
        };
        let many: Vec<_> = (0..50).map(|at| speeds(&format!("vm<{at}>"))).collect();
        let svg = speeds_svg(&[25.0, 100.0], &many);
        assert!(
            svg.contains("vm&lt;0&gt;, 25 %: 65.0 (50.0 to 80.0)"),
            "{svg}"
        );
        assert!(svg.contains("vm&lt;11&gt;") && !svg.contains("vm&lt;12&gt;"));
    }
}
