//! Pictures of CPU time, invalidations and operation latencies.

use demeter_outcome::{RunResult, SystemResult, Tail};
use maud::{Markup, html};

use super::cases::curves;
use super::{plot, section, tables};
use crate::draw::bars::{Bars, Cluster};
use crate::draw::curves::{Curve, Curves, Spot, even};
use crate::draw::grouped;
use crate::draw::legend::Legend;
use crate::draw::stacked::{FLUSHES, Parts, Split};
use crate::measure::Measure;
use crate::shape::Side;
use crate::text::clean;
use crate::text::flushes::flush_table;
use crate::text::kvm::{KVM, kvm_table};

/// Maximum number of cases in a bar chart.
const SIDES_MAX: usize = 12;
/// Maximum number of cases with percentiles.
const TAILS_MAX: usize = 6;

/// A percentile's name and value.
type Percentile = (&'static str, fn(&Tail) -> f64);

/// The percentiles that are drawn.
const PERCENTILES: [Percentile; 4] = [
    ("p50", |tail| tail.p50_ns),
    ("p90", |tail| tail.p90_ns),
    ("p99", |tail| tail.p99_ns),
    ("p99.9", |tail| tail.p999_ns),
];

/// Elapsed time of fixed work, without cases.
pub(super) fn elapsed(result: &RunResult) -> Markup {
    let measure = Measure::of(result.systems.iter());
    if measure != Measure::Elapsed {
        return Markup::default();
    }
    let legend = Legend::of(result);
    let bar = |(name, class): &(&str, String)| {
        let system = result.systems.iter().find(|system| system.name == *name)?;
        Some(grouped::bar(name, class, Spot::of(&measure, system)?, " s"))
    };
    let bars = Bars {
        title: measure.title().into(),
        unit: "s",
        clusters: vec![Cluster {
            heading: String::new(),
            bars: legend.0.iter().filter_map(bar).collect(),
        }],
        reference: None,
    };
    html! {
        (section(measure.title(), &format!("In {}.", measure.unit())))
        (plot(|width| bars.plot(width)))
    }
}

/// Latencies of single operations.
pub(super) fn tail(result: &RunResult) -> Markup {
    let mut sides = Side::all(result);
    sides.retain(|side| side.systems.iter().any(|system| system.tail.is_some()));
    let mut note = "In nanoseconds, by powers of ten; less is better.".to_owned();
    if sides.len() > TAILS_MAX {
        note = format!("{note} The first {TAILS_MAX} of {} cases.", sides.len());
    }
    let legend = Legend::of(result);
    html! {
        @if !sides.is_empty() { (section("How long single operations took", &note)) }
        @for side in sides.iter().take(TAILS_MAX) {
            @if !side.heading.is_empty() { h3 { (side.heading) } }
            (curves(&percentiles(side, &legend)))
        }
    }
}

/// CPU time by cause.
pub(super) fn cpu(result: &RunResult) -> Markup {
    stacked(
        result,
        Split::Cpu,
        "CPU time spent beside the work",
        "CPU seconds of the whole run by cause. The work itself is not drawn: user time, accesses to \
         memory, the kernel's ticks.",
    )
}

/// Invalidations by kind.
pub(super) fn flushes(result: &RunResult) -> Markup {
    let table = flush_table(&Side::all(result));
    html! {
        (stacked(
            result,
            Split::Flushes,
            FLUSHES,
            "How often translations were dropped, by who did it and how much: a guest one address or \
             all of its own, on the CPU that it ran on or on others; the host a virtual CPU's or a \
             whole VM's (invept).",
        ))
        @if let Some(table) = table {
            @if result.cases.is_empty() {
                (tables::table("", &table))
            } @else {
                details {
                    summary { (FLUSHES) " of each case" }
                    (tables::table("", &table))
                }
            }
        }
    }
}

/// Counters of a nested host's KVM.
pub(super) fn kvm(result: &RunResult) -> Markup {
    let table = kvm_table(&Side::all(result));
    html! {
        @if let Some(table) = table {
            (section(KVM, "Exits of virtual CPUs, faults in second-level tables, flushes of a VM's translations that \
                were asked for and made, and pages that the host's kernel has moved."))
            (tables::table("", &table))
        }
    }
}

/// Stacked bars; empty if there are too many cases to compare.
fn stacked(result: &RunResult, split: Split, title: &str, note: &str) -> Markup {
    let sides = Side::all(result);
    let parts = Parts::of(split, sides.iter().flat_map(|side| side.systems));
    if parts.is_empty() || sides.len() > SIDES_MAX {
        return Markup::default();
    }
    let bars = parts.bars(&sides);
    html! {
        (section(title, note))
        ul.legend {
            @for (class, label) in parts.legend() { li { i class=(class) {} (label) } }
        }
        (plot(|width| bars.plot(width)))
    }
}

fn percentiles(side: &Side, legend: &Legend) -> Curves {
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
            name: clean::name(name),
            class: class.clone(),
            spots: PERCENTILES.iter().map(spot).collect(),
        })
    };
    let labels = PERCENTILES.iter().map(|(label, _)| (*label).to_owned());
    Curves {
        title: format!("Latency of operations by percentile {}", side.heading),
        places: even(PERCENTILES.len()).zip(labels).collect(),
        is_log: true,
        curves: legend.0.iter().filter_map(curve).collect(),
    }
}
