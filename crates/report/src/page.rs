//! The page: one HTML file that needs nothing else, no script and no network.

mod cases;
mod over_time;
mod spent;
mod tables;

use std::fmt::{self, Write};

use crate::agreement::Agreement;
use crate::lines::SYSTEMS_MAX;
use crate::measure::Measure;
use crate::number::percent;
use crate::palette;
use crate::schema::RunResult;
use crate::shape::Cast;
use crate::summary::steady_of_oracle;
use crate::text::{self, Escaped};

const STYLE: &str = include_str!("page.css");
/// Widths of each picture for wide and for narrow windows; the style sheet shows one of them.
const WIDE: f64 = 920.0;
const NARROW: f64 = 400.0;

/// The result as one self-contained page: pictures of what it has (figures over time, over the
/// settings of its cases, by cause), the tables of the terminal, the run's facts and counters.
/// Names from the file are shown as text, whatever they are.
pub fn html(result: &RunResult) -> String {
    let scenario = text::name(&result.scenario);
    let mut page = Page(String::new());
    page.add(format_args!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" \
         content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>{} - Demeter</title>\n<style>\n{STYLE}{}\n</style>\n</head>\n<body>\n<main>\n",
        Escaped(&scenario),
        palette::css(),
    ));
    page.head(result, &scenario);
    page.cases(result);
    page.elapsed(result);
    if result.cases.is_empty() || !result.systems.is_empty() {
        page.over_time(result);
    }
    page.tail(result);
    page.cpu(result);
    page.flushes(result);
    page.figures(result);
    page.published(result);
    page.facts(result);
    page.counters(result);
    page.add(format_args!("</main>\n</body>\n</html>\n"));
    page.0
}

struct Page(String);

impl Page {
    fn add(&mut self, text: fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = self.0.write_fmt(text);
    }

    fn head(&mut self, result: &RunResult, scenario: &str) {
        let systems = result.systems.len().max(Cast::of(result).0.len());
        let cases = match result.cases.len() {
            0 => String::new(),
            cases => format!("{}, ", counted(cases, "case")),
        };
        self.add(format_args!(
            "<h1>{}</h1>\n<p class=\"soft\">{cases}{}, {} each, {}</p>\n",
            Escaped(scenario),
            counted(systems, "system"),
            length(result),
            Escaped(&place(&result.on)),
        ));
        let shares: Vec<String> = result
            .systems
            .iter()
            .filter(|system| system.name != "oracle")
            .filter_map(|system| {
                let share = steady_of_oracle(&result.systems, system)?;
                Some(format!("{} {} %", text::name(&system.name), percent(share)))
            })
            .take(SYSTEMS_MAX)
            .collect();
        if !shares.is_empty() {
            self.add(format_args!(
                "<p class=\"lead\">Share of the oracle's performance in the last third of the \
                 run: {}.</p>\n",
                Escaped(&shares.join(", "))
            ));
        }
        if let Some(agreement) = Agreement::of(result) {
            let counts = agreement.counts();
            self.add(format_args!(
                "<p class=\"lead\">Published figures beside ours: {}.</p>\n",
                Escaped(&counts)
            ));
        }
    }

    fn section(&mut self, title: &str, note: &str) {
        self.add(format_args!(
            "<h2>{}</h2>\n<p class=\"soft\">{}</p>\n",
            Escaped(title),
            Escaped(note)
        ));
    }

    fn subsection(&mut self, title: &str) {
        self.add(format_args!("<h3>{}</h3>\n", Escaped(title)));
    }

    /// A picture in both widths.
    fn plot(&mut self, draw: impl Fn(f64) -> String) {
        for (class, width) in [("wide", WIDE), ("narrow", NARROW)] {
            self.add(format_args!(
                "<div class=\"plot {class}\">\n{}</div>\n",
                draw(width)
            ));
        }
    }

    fn facts(&mut self, result: &RunResult) {
        self.add(format_args!("<h2>The run</h2>\n<dl>\n"));
        let shift = result
            .shift_at_s
            .map(|at_s| format!("{at_s} s into the timed phase"));
        let facts = [
            ("Scenario", Some(text::name(&result.scenario))),
            ("Where", Some(text::name(&result.on))),
            (
                "Timed phase",
                Some(format!("{} for each system", length(result))),
            ),
            ("Hot set jumps", shift),
            ("Seed", Some(result.seed.to_string())),
            ("Result schema", Some(result.schema.to_string())),
        ];
        for (name, value) in facts {
            if let Some(value) = value {
                self.add(format_args!(
                    "<dt>{name}</dt><dd>{}</dd>\n",
                    Escaped(&value)
                ));
            }
        }
        self.add(format_args!("</dl>\n"));
    }
}

/// Where a scenario ran, for people.
fn place(on: &str) -> String {
    match on {
        "lab" => "in the lab: real VMs on stock kernels, emulated slow memory".into(),
        "sim" => "on the simulated machine".into(),
        "here" => "on this machine's own memory nodes".into(),
        other => format!("on {}", text::name(other)),
    }
}

/// How long each run was; where the work is fixed, how long it may have been.
fn length(result: &RunResult) -> String {
    let cases = result.cases.iter().flat_map(|case| &case.systems);
    let systems = result.systems.iter().chain(cases);
    match Measure::of(systems) {
        Measure::Elapsed => format!("at most {} s", result.duration_s),
        Measure::Throughput | Measure::Latency => format!("{} s", result.duration_s),
    }
}

/// A number of things, in words.
fn counted(count: usize, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        _ => format!("{count} {what}s"),
    }
}
