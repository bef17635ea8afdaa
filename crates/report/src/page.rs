//! The page: one HTML file that needs nothing else, no script and no network.

use std::collections::BTreeSet;
use std::fmt::{self, Write};

use crate::bars::{self, Causes};
use crate::lines::{self, Quantity, SYSTEMS_MAX};
use crate::number::{count, percent};
use crate::palette;
use crate::schema::{RunResult, SystemResult};
use crate::summary::{Summary, explanation, steady_of_oracle};
use crate::svg::Size;
use crate::text::{self, Escaped};

const STYLE: &str = include_str!("page.css");
/// Widths of each picture for wide and for narrow windows; the style sheet shows one of them.
const WIDE: f64 = 920.0;
const NARROW: f64 = 400.0;
/// Most kernel counters and columns of their table.
const COUNTERS_MAX: usize = 100;

/// The result as one self-contained page: plots of performance, of the hot set's place and of CPU
/// time by cause, the table, the run's facts and the kernel's counters. Names from the file are
/// shown as text, whatever they are.
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
    page.performance(result);
    page.hot_share(result);
    page.fast_memory(result);
    page.vms(result);
    page.cpu(result);
    page.figures(result);
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
        self.add(format_args!(
            "<h1>{}</h1>\n<p class=\"soft\">{}, {} s each, {}</p>\n",
            Escaped(scenario),
            systems(result.systems.len()),
            result.duration_s,
            Escaped(&place(&result.on)),
        ));
        let shares: Vec<String> = result
            .systems
            .iter()
            .filter(|system| system.name != "oracle")
            .filter_map(|system| {
                let share = steady_of_oracle(result, system)?;
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
    }

    fn section(&mut self, title: &str, note: &str) {
        self.add(format_args!(
            "<h2>{}</h2>\n<p class=\"soft\">{}</p>\n",
            Escaped(title),
            Escaped(note)
        ));
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

    fn performance(&mut self, result: &RunResult) {
        let quantity = Quantity::performance(result);
        let mut note = format!("In {}.", quantity.unit());
        if result.systems.len() > SYSTEMS_MAX {
            let _ = write!(
                note,
                " The plots show the first {SYSTEMS_MAX} of {} systems; the table shows all.",
                result.systems.len()
            );
        }
        self.section(quantity.title(), &note);
        self.over_time(result, quantity, 340.0);
    }

    fn over_time(&mut self, result: &RunResult, quantity: Quantity, height: f64) {
        self.plot(|width| lines::plot(result, quantity, Size { width, height }));
    }

    fn hot_share(&mut self, result: &RunResult) {
        let quantity = Quantity::HotShare;
        self.section(quantity.title(), &format!("In {}.", quantity.unit()));
        self.over_time(result, quantity, 260.0);
    }

    fn fast_memory(&mut self, result: &RunResult) {
        let quantity = Quantity::FastMemory;
        let points = result.systems.iter().flat_map(|system| &system.series);
        let is_known = points.clone().any(|point| point.fast_bytes.is_some());
        if is_known {
            self.section(quantity.title(), &format!("In {}.", quantity.unit()));
            self.over_time(result, quantity, 220.0);
        }
    }

    /// The VMs of each run that had several: a run's picture shows its VMs as another's shows
    /// systems.
    fn vms(&mut self, result: &RunResult) {
        let runs = result.systems.iter().take(SYSTEMS_MAX);
        for run in runs {
            let Some(provisioning) = run.provisioning.as_ref().filter(|p| !p.vms.is_empty()) else {
                continue;
            };
            let name = text::name(&run.name);
            let systems = provisioning.vms.iter().map(|vm| SystemResult {
                name: vm.name.clone(),
                series: vm.series.clone(),
                ..SystemResult::default()
            });
            let vms = RunResult {
                systems: systems.collect(),
                ..result.clone()
            };
            for quantity in [Quantity::Throughput, Quantity::FastMemory] {
                let title = format!("{name}: {} of each VM", quantity.title().to_lowercase());
                self.section(&title, &format!("In {}.", quantity.unit()));
                self.over_time(&vms, quantity, 220.0);
            }
        }
    }

    fn cpu(&mut self, result: &RunResult) {
        let causes = Causes::of(result);
        if causes.0.is_empty() {
            return;
        }
        self.section(
            "CPU time spent beside the work",
            "CPU seconds of the whole run by cause; the workload's own user time is the work and \
             is not drawn.",
        );
        self.add(format_args!("<ul class=\"legend\">\n"));
        for (cause, class) in &causes.0 {
            let label = bars::label(cause);
            self.add(format_args!(
                "<li><i class=\"{class}\"></i>{}</li>\n",
                Escaped(&label)
            ));
        }
        self.add(format_args!("</ul>\n"));
        self.plot(|width| bars::plot(result, &causes, width));
    }

    fn figures(&mut self, result: &RunResult) {
        let Summary { columns, rows } = Summary::new(result);
        self.section("Figures", explanation(result));
        self.add(format_args!(
            "<div class=\"scroll\">\n<table class=\"figures\">\n<thead>\n<tr>"
        ));
        for group in columns.chunk_by(|a, b| a.group == b.group) {
            let (span, name) = (group.len(), Escaped(group[0].group));
            self.add(format_args!("<th colspan=\"{span}\">{name}</th>"));
        }
        self.add(format_args!("</tr>\n<tr>"));
        for column in &columns {
            self.add(format_args!("<th>{}</th>", Escaped(column.title)));
        }
        self.add(format_args!("</tr>\n</thead>\n<tbody>\n"));
        for (system, row) in result.systems.iter().zip(&rows) {
            let class = if system.name == "demeter" {
                " class=\"ours\""
            } else {
                ""
            };
            self.row(class, row);
        }
        self.add(format_args!("</tbody>\n</table>\n</div>\n"));
    }

    fn row(&mut self, class: &str, cells: &[String]) {
        self.add(format_args!("<tr{class}>"));
        for cell in cells {
            self.add(format_args!("<td>{}</td>", Escaped(cell)));
        }
        self.add(format_args!("</tr>\n"));
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
                Some(format!("{} s for each system", result.duration_s)),
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

    fn counters(&mut self, result: &RunResult) {
        let systems = &result.systems[..result.systems.len().min(SYSTEMS_MAX)];
        let names: BTreeSet<&str> = systems
            .iter()
            .flat_map(|system| system.counters.keys().map(String::as_str))
            .collect();
        if names.is_empty() {
            return;
        }
        self.add(format_args!(
            "<details>\n<summary>Kernel counters over the timed phase (/proc/vmstat)</summary>\n\
             <div class=\"scroll\">\n<table>\n<thead>\n<tr><th>counter</th>"
        ));
        for system in systems {
            self.add(format_args!(
                "<th>{}</th>",
                Escaped(&text::name(&system.name))
            ));
        }
        self.add(format_args!("</tr>\n</thead>\n<tbody>\n"));
        for name in names.into_iter().take(COUNTERS_MAX) {
            let mut cells = vec![text::name(name)];
            let value = |counter: Option<&u64>| counter.map_or("-".into(), |value| count(*value));
            cells.extend(
                systems
                    .iter()
                    .map(|system| value(system.counters.get(name))),
            );
            self.row("", &cells);
        }
        self.add(format_args!("</tbody>\n</table>\n</div>\n</details>\n"));
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

fn systems(count: usize) -> String {
    if count == 1 {
        "One system".into()
    } else {
        format!("{count} systems")
    }
}
