//! The plot of CPU time by cause: one stacked bar per system.

use std::collections::BTreeSet;

use crate::axis::Axis;
use crate::lines::SYSTEMS_MAX;
use crate::number::short;
use crate::palette;
use crate::schema::{RunResult, SystemResult};
use crate::svg::{Px, Size, Svg};
use crate::text;

/// What the machine is there for: drawn, it would dwarf everything else.
const USEFUL_WORK: &str = "workload_user";
/// Most causes that are told apart.
const CAUSES_MAX: usize = 12;
const ROW_HEIGHT: f64 = 30.0;
const BAR_HEIGHT: f64 = 18.0;
const CHAR_WIDTH: f64 = 8.0;

/// The causes that a result's bars show, in order, each with its class.
pub(crate) struct Causes(pub Vec<(String, String)>);

impl Causes {
    pub(crate) fn of(result: &RunResult) -> Self {
        let all = result
            .systems
            .iter()
            .take(SYSTEMS_MAX)
            .flat_map(|system| &system.cpu_s);
        let names: BTreeSet<&str> = all
            .filter(|(cause, cpu_s)| *cause != USEFUL_WORK && drawable(**cpu_s) > 0.0)
            .map(|(cause, _)| cause.as_str())
            .collect();
        let classes = palette::causes(names.iter().copied());
        let causes = names.into_iter().zip(classes).take(CAUSES_MAX);
        Self(
            causes
                .map(|(cause, class)| (cause.to_owned(), class))
                .collect(),
        )
    }

    fn total_s(&self, system: &SystemResult) -> f64 {
        self.0.iter().map(|(cause, _)| cpu_s(system, cause)).sum()
    }
}

/// Draws the bars in a picture of the given width.
pub(crate) fn plot(result: &RunResult, causes: &Causes, width: f64) -> String {
    let systems = &result.systems[..result.systems.len().min(SYSTEMS_MAX)];
    let names: Vec<String> = systems
        .iter()
        .map(|system| text::name(&system.name))
        .collect();
    let name_chars = names
        .iter()
        .map(|name| name.chars().count())
        .max()
        .unwrap_or(0);
    let left = 10.0 + name_chars as f64 * CHAR_WIDTH;
    // Room for the total behind the longest bar.
    let right = width - 64.0;
    let bottom = systems.len() as f64 * ROW_HEIGHT;
    let longest_s = systems
        .iter()
        .map(|system| causes.total_s(system))
        .fold(0.0, f64::max);
    let axis = Axis::exact(longest_s, (width / 110.0) as u32);
    let x = |cpu_s: f64| left + (right - left) * axis.share(cpu_s);

    let mut svg = Svg::new(
        Size {
            width,
            height: bottom + 26.0,
        },
        "CPU seconds by cause",
    );
    for tick in axis.ticks() {
        svg.line("grid", (x(tick), 0.0), (x(tick), bottom));
        let label = format!("{} s", axis.label(tick));
        svg.text("tick middle", (x(tick), bottom + 18.0), &label);
    }
    for (index, (system, name)) in systems.iter().zip(&names).enumerate() {
        let top = index as f64 * ROW_HEIGHT + (ROW_HEIGHT - BAR_HEIGHT) / 2.0;
        let text_y = top + BAR_HEIGHT / 2.0 + 4.5;
        let strong = if name == "demeter" { " strong" } else { "" };
        svg.text(&format!("end{strong}"), (left - 8.0, text_y), name);
        let mut from_s = 0.0;
        for (cause, class) in &causes.0 {
            let cpu_s = cpu_s(system, cause);
            if cpu_s > 0.0 {
                let bar = (x(from_s), x(from_s + cpu_s));
                // A hair of ground between neighbours, as far as a thin bar can spare it.
                let width = (bar.1 - bar.0 - 1.0).max((bar.1 - bar.0) / 2.0);
                let title = format!("{name}: {} {} s", label(cause), short(cpu_s));
                svg.element(
                    "rect",
                    &[
                        ("class", &format!("{class} bar")),
                        ("x", &Px(bar.0)),
                        ("y", &Px(top)),
                        ("width", &Px(width)),
                        ("height", &Px(BAR_HEIGHT)),
                    ],
                    Some(&title),
                );
                from_s += cpu_s;
            }
        }
        svg.text(
            "tick",
            (x(from_s) + 6.0, text_y),
            &format!("{} s", short(from_s)),
        );
    }
    svg.line("axis", (left, 0.0), (left, bottom));
    svg.finish()
}

/// A cause as people write it.
pub(crate) fn label(cause: &str) -> String {
    text::name(&cause.replace('_', " "))
}

fn cpu_s(system: &SystemResult, cause: &str) -> f64 {
    system.cpu_s.get(cause).copied().map_or(0.0, drawable)
}

/// Bounded so that sums stay finite.
fn drawable(cpu_s: f64) -> f64 {
    if cpu_s.is_finite() {
        cpu_s.clamp(0.0, 1e290)
    } else {
        0.0
    }
}
