//! The report page: one self-contained HTML file without scripts.
//!
//! Text from the file is sanitized where it is used (`text::clean`), and the template escapes it.

mod cases;
mod over_time;
mod spent;
mod tables;

use demeter_outcome::RunResult;
use maud::{Markup, PreEscaped, html};

use crate::draw::legend::Legend;
use crate::draw::lines::SYSTEMS_MAX;
use crate::draw::palette;
use crate::measure::Measure;
use crate::text::agreement::Agreement;
use crate::text::clean;
use crate::text::number::percent;
use crate::text::summary::steady_of_oracle;

const STYLE: &str = include_str!("page.css");
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";
/// Widths of each picture for wide and narrow windows; the style sheet shows one of them.
const WIDTHS: [(&str, f64); 2] = [("wide", 920.0), ("narrow", 400.0)];

/// The result as one self-contained page.
///
/// It has pictures (figures over time, over the settings of cases, by cause), the tables of the terminal, and the run's
/// facts and counters. Any name from the file is shown as text.
pub fn html(result: &RunResult) -> String {
    let scenario = clean::name(&result.scenario);
    let page = html! {
        (PreEscaped("<!doctype html>\n"))
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                title { (scenario) " - Demeter" }
                style { (PreEscaped(STYLE)) (PreEscaped(palette::css())) }
            }
            body {
                main {
                    (head(result, &scenario))
                    (cases::pictures(result))
                    (spent::elapsed(result))
                    @if result.cases.is_empty() || !result.systems.is_empty() {
                        (over_time::pictures(result))
                    }
                    (spent::tail(result))
                    (spent::cpu(result))
                    (spent::flushes(result))
                    (spent::kvm(result))
                    (tables::figures(result))
                    (tables::published(result))
                    (facts(result))
                    (tables::counters(result))
                }
            }
        }
    };
    page.into_string()
}

fn head(result: &RunResult, scenario: &str) -> Markup {
    let systems = result.systems.len().max(Legend::of(result).0.len());
    let shares: Vec<String> = result
        .systems
        .iter()
        .filter(|system| system.name != "oracle")
        .filter_map(|system| {
            let share = steady_of_oracle(&result.systems, system)?;
            Some(format!(
                "{} {} %",
                clean::name(&system.name),
                percent(share)
            ))
        })
        .take(SYSTEMS_MAX)
        .collect();
    html! {
        h1 { (scenario) }
        p.soft {
            @if !result.cases.is_empty() { (counted(result.cases.len(), "case")) ", " }
            (counted(systems, "system")) ", " (length(result)) " each, " (place(&result.on))
        }
        @if !shares.is_empty() {
            p.lead {
                "Share of the oracle's performance in the last third of the run: "
                (shares.join(", ")) "."
            }
        }
        @if let Some(agreement) = Agreement::of(result) {
            p.lead { "Published figures beside ours: " (agreement.counts) "." }
        }
    }
}

fn section(title: &str, note: &str) -> Markup {
    html! {
        h2 { (title) }
        p.soft { (note) }
    }
}

/// A picture in both widths.
fn plot(draw: impl Fn(f64) -> String) -> Markup {
    html! {
        @for (class, width) in WIDTHS {
            div class={ "plot " (class) } { (PreEscaped(draw(width))) }
        }
    }
}

fn facts(result: &RunResult) -> Markup {
    let shift = result.shift_at_s;
    let cases = result.cases.iter().flat_map(|case| &case.systems);
    let mut systems = result.systems.iter().chain(cases);
    let scale = systems.find_map(|system| system.metadata.scale);
    let facts = [
        ("Scenario", Some(clean::name(&result.scenario))),
        ("Where", Some(clean::name(&result.on))),
        (
            "Timed phase",
            Some(format!("{} for each system", length(result))),
        ),
        (
            "Hot set jumps",
            shift.map(|at_s| format!("{at_s} s into the timed phase")),
        ),
        (
            "Scale",
            scale.map(|n| format!("a simulated page stands for {n}")),
        ),
        ("Seed", Some(result.seed.to_string())),
        ("Result schema", Some(result.schema.to_string())),
    ];
    html! {
        h2 { "The run" }
        dl {
            @for (name, value) in facts {
                @if let Some(value) = value { dt { (name) } dd { (value) } }
            }
        }
    }
}

/// Where a scenario ran, for people.
fn place(on: &str) -> String {
    match on {
        "lab" => "in the lab: real VMs on stock kernels, emulated slow memory".into(),
        "sim" => "on the simulated machine".into(),
        "here" => "on this machine's own memory nodes".into(),
        other => format!("on {}", clean::name(other)),
    }
}

/// The length of each run; for fixed work, its time limit.
fn length(result: &RunResult) -> String {
    let cases = result.cases.iter().flat_map(|case| &case.systems);
    let systems = result.systems.iter().chain(cases);
    match Measure::of(systems) {
        Measure::Elapsed => format!("at most {} s", result.duration_s),
        Measure::Speed(_) => format!("{} s", result.duration_s),
    }
}

/// A number of things, in words.
fn counted(count: usize, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        _ => format!("{count} {what}s"),
    }
}
