//! Where time, invalidations and single operations' time went.

use std::fmt::Write;

use super::Page;
use crate::bars::{Bar, Bars, Block, Part};
use crate::breakdown::{FLUSHES, Parts, Split, flush_table};
use crate::curves::{Curve, Curves, Spot, even};
use crate::measure::Measure;
use crate::number::short;
use crate::schema::{RunResult, SystemResult, Tail};
use crate::shape::{Cast, Side};
use crate::text::{self, Escaped};

/// Most cases of a picture of bars.
const SIDES_MAX: usize = 12;
/// Most cases of which percentiles are drawn.
const TAILS_MAX: usize = 6;

/// A percentile's name and where it is found.
type Percentile = (&'static str, fn(&Tail) -> f64);

/// The percentiles that are drawn.
const PERCENTILES: [Percentile; 4] = [
    ("p50", |tail| tail.p50_ns),
    ("p90", |tail| tail.p90_ns),
    ("p99", |tail| tail.p99_ns),
    ("p99.9", |tail| tail.p999_ns),
];

impl Page {
    /// How long the work took, where it was fixed and there are no cases to draw it over.
    pub(super) fn elapsed(&mut self, result: &RunResult) {
        let measure = Measure::of(result.systems.iter());
        if measure != Measure::Elapsed {
            return;
        }
        let cast = Cast::of(result);
        let bar = |(name, class): &(&str, String)| {
            let system = result.systems.iter().find(|system| system.name == *name)?;
            let amount = measure.value(system)?;
            let (name, end) = (text::name(name), format!("{} s", short(amount)));
            Some(Bar {
                parts: vec![Part {
                    class: class.clone(),
                    amount,
                    title: format!("{name}: {end}"),
                }],
                name,
                extremes: system.repeats.map(|repeats| (repeats.min, repeats.max)),
                end,
            })
        };
        let bars = Bars {
            title: measure.title().into(),
            unit: "s",
            blocks: vec![Block {
                heading: String::new(),
                bars: cast.0.iter().filter_map(bar).collect(),
            }],
            reference: None,
        };
        self.section(measure.title(), &format!("In {}.", measure.unit()));
        self.plot(|width| bars.plot(width));
    }

    /// How long single operations took.
    pub(super) fn tail(&mut self, result: &RunResult) {
        let mut sides = Side::all(result);
        sides.retain(|side| side.systems.iter().any(|system| system.tail.is_some()));
        if sides.is_empty() {
            return;
        }
        let mut note = "In nanoseconds, by powers of ten; less is better.".to_owned();
        if sides.len() > TAILS_MAX {
            // Writing to a String cannot fail.
            let _ = write!(note, " The first {TAILS_MAX} of {} cases.", sides.len());
        }
        self.section("How long single operations took", &note);
        let cast = Cast::of(result);
        for side in sides.into_iter().take(TAILS_MAX) {
            if !side.heading.is_empty() {
                self.subsection(&side.heading);
            }
            self.curves(&percentiles(&side, &cast));
        }
    }

    /// CPU time by cause.
    pub(super) fn cpu(&mut self, result: &RunResult) {
        self.stacked(
            result,
            Split::Cpu,
            "CPU time spent beside the work",
            "CPU seconds of the whole run by cause. The work itself is not drawn: user time, \
             accesses to memory, the kernel's ticks.",
        );
    }

    /// Invalidations by kind.
    pub(super) fn flushes(&mut self, result: &RunResult) {
        self.stacked(
            result,
            Split::Flushes,
            FLUSHES,
            "How often translations were dropped, by who did it and how much: a guest one address \
             or all of its own, on the CPU that it ran on or on others; the host a virtual CPU's or \
             a whole VM's (invept).",
        );
        if let Some((heading, rows)) = flush_table(&Side::all(result)) {
            if result.cases.is_empty() {
                self.table(&heading, &rows, 1);
            } else {
                self.add(format_args!(
                    "<details>\n<summary>{FLUSHES} of each case</summary>\n"
                ));
                self.table(&heading, &rows, 2);
                self.add(format_args!("</details>\n"));
            }
        }
    }

    /// Nothing where there are so many cases that nobody would compare their bars.
    fn stacked(&mut self, result: &RunResult, split: Split, title: &str, note: &str) {
        let sides = Side::all(result);
        let parts = Parts::of(split, sides.iter().flat_map(|side| side.systems));
        if parts.is_empty() || sides.len() > SIDES_MAX {
            return;
        }
        self.section(title, note);
        self.add(format_args!("<ul class=\"legend\">\n"));
        for (class, label) in parts.legend() {
            self.add(format_args!(
                "<li><i class=\"{class}\"></i>{}</li>\n",
                Escaped(&label)
            ));
        }
        self.add(format_args!("</ul>\n"));
        let bars = parts.bars(&sides);
        self.plot(|width| bars.plot(width));
    }
}

fn percentiles(side: &Side, cast: &Cast) -> Curves {
    let curve = |(name, class): &(&str, String)| {
        let of_name = |system: &&SystemResult| system.name == *name;
        let tail = side.systems.iter().find(of_name)?.tail?;
        let spot = |(_, of): &Percentile| {
            Some(Spot {
                value: of(&tail),
                extremes: None,
            })
        };
        Some(Curve {
            name: text::name(name),
            class: class.clone(),
            spots: PERCENTILES.iter().map(spot).collect(),
        })
    };
    let labels = PERCENTILES.iter().map(|(label, _)| (*label).to_owned());
    Curves {
        title: format!("Latency of operations by percentile {}", side.heading),
        places: even(PERCENTILES.len()).zip(labels).collect(),
        is_log: true,
        curves: cast.0.iter().filter_map(curve).collect(),
    }
}
