//! Plots over time.

use demeter_outcome::{RunResult, SystemResult, WorkloadResult};
use maud::{Markup, html};

use super::{plot, section};
use crate::draw::lines::{self, Quantity, SYSTEMS_MAX};
use crate::draw::svg::Size;
use crate::text::clean;
use crate::text::summary::workloads;

/// All quantities of the result's systems over time.
pub(super) fn pictures(result: &RunResult) -> Markup {
    let systems = &result.systems;
    let mut note = String::new();
    if systems.len() > SYSTEMS_MAX {
        let all = systems.len();
        note = format!(
            " The plots show the first {SYSTEMS_MAX} of {all} systems; the table shows all."
        );
    }
    html! {
        (lines(result, &Quantity::speed(systems), str::to_owned, &note, 340.0))
        (lines(result, &Quantity::HotShare, str::to_owned, "", 260.0))
        (lines(result, &Quantity::FastMemory, str::to_owned, "", 220.0))
        @if systems.iter().any(|run| run.provisioning.is_some()) {
            (vms(result))
        } @else {
            (programs(result))
        }
    }
}

/// A quantity over time, if known; its title becomes the picture's.
fn lines(
    result: &RunResult,
    quantity: &Quantity,
    title: impl Fn(&str) -> String,
    note: &str,
    height: f64,
) -> Markup {
    html! {
        @if quantity.is_known(&result.systems) {
            (section(&title(&quantity.title()), &format!("In {}.{note}", quantity.unit())))
            (plot(|width| lines::plot(result, quantity, Size { width, height })))
        }
    }
}

/// A result whose lines are these workloads, each with a name.
fn lines_of<'a>(
    result: &RunResult,
    workloads: impl Iterator<Item = (&'a str, &'a WorkloadResult)>,
) -> RunResult {
    let line = |(name, workload): (&str, &WorkloadResult)| SystemResult {
        name: name.into(),
        speed: workload.speed.clone(),
        series: workload.series.clone(),
        ..SystemResult::default()
    };
    RunResult {
        systems: workloads.map(line).collect(),
        ..result.clone()
    }
}

/// The VMs of each run with several VMs: each run has a picture with a line per VM.
fn vms(result: &RunResult) -> Markup {
    html! {
        @for run in result.systems.iter().take(SYSTEMS_MAX) {
            @let vms = run.workloads.iter().map(|vm| (vm.name.as_str(), vm));
            @let vms = lines_of(result, vms);
            @let title = |quantity: &str| {
                format!("{}: {} of each VM", clean::name(&run.name), quantity.to_lowercase())
            };
            @for quantity in [Quantity::speed(&vms.systems), Quantity::FastMemory] {
                (lines(&vms, &quantity, title, "", 220.0))
            }
        }
    }
}

/// Each of several programs: its picture has a line per system.
fn programs(result: &RunResult) -> Markup {
    html! {
        @for name in workloads(&result.systems) {
            @let of_name = result.systems.iter().filter_map(|system| {
                let found = system.workloads.iter().find(|workload| workload.name == name)?;
                Some((system.name.as_str(), found))
            });
            @let program = lines_of(result, of_name);
            @let title = |quantity: &str| {
                format!("{}: {}", clean::name(name), quantity.to_lowercase())
            };
            @for quantity in [Quantity::speed(&program.systems), Quantity::FastMemory] {
                (lines(&program, &quantity, title, "", 260.0))
            }
        }
    }
}
