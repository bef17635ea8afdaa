//! The main figures as text, for terminal and page.

mod cases;
mod marks;
mod provisioned;

use std::collections::BTreeSet;

use demeter_outcome::{NONE, RunResult, Speed, SystemResult};

use crate::OURS;
use crate::measure::Measure;
use crate::shape::Group;
use crate::text::clean;
use crate::text::grid::{Column, Row, Table};
use crate::text::number::{count, percent, short};

/// Most rows of a table.
const ROWS_MAX: usize = 1000;
/// Maximum number of workloads shown separately.
const WORKLOADS_MAX: usize = 8;

/// The surroundings that a figure depends on.
struct Context<'a> {
    /// All systems under equal conditions.
    systems: &'a [SystemResult],
    measure: Measure,
    duration_s: f64,
}

impl Context<'_> {
    fn peer(&self, name: &str) -> Option<&SystemResult> {
        self.systems.iter().find(|system| system.name == name)
    }
}

/// A column's cell for a system.
type Cell = Box<dyn Fn(&Context, &SystemResult) -> Option<String>>;

/// Columns with their cells.
#[derive(Default)]
struct Figures(Vec<(Column, Cell)>);

impl Figures {
    fn add(
        &mut self,
        group: impl Into<String>,
        title: impl Into<String>,
        cell: impl Fn(&Context, &SystemResult) -> Option<String> + 'static,
    ) {
        let column = Column {
            group: group.into(),
            title: title.into(),
            is_name: self.0.is_empty(),
        };
        self.0.push((column, Box::new(cell)));
    }

    /// Keeps the columns that some system has.
    fn known(mut self, context: &Context) -> Self {
        let is_known = |cell: &Cell| context.systems.iter().any(|s| cell(context, s).is_some());
        self.0
            .retain(|(column, cell)| column.is_name || is_known(cell));
        self
    }

    fn row(&self, context: &Context, system: &SystemResult) -> Row {
        let cell = |cell: &Cell| cell(context, system).unwrap_or_else(|| "-".into());
        Row {
            cells: self.0.iter().map(|(_, figure)| cell(figure)).collect(),
            class: if system.name == OURS { "ours" } else { "" },
        }
    }
}

const EXPLANATION: &str = "The end (steady) is the last third of the run; an oracle had its hot \
     set placed in fast memory from the start; t90 is the time until 90 % of the (first, second) hot \
     set was there; management CPU is the VM's system time plus the agent's user time, less the system \
     time of none, in seconds and in % of one CPU.";

/// Explains the overhead column.
const OVERHEAD: &str = " Overhead is the most memory that a system had for itself: histories, counters, \
     filters, queues, second copies.";

/// The tables of a result's systems and of each group of cases (at least one), with an explanation.
pub(crate) fn tables(result: &RunResult) -> (Vec<Table>, String) {
    let groups: Vec<Group> = Group::all(result);
    let (of_systems, explanation) = of_systems(result);
    if groups.is_empty() {
        return (vec![of_systems], explanation);
    }
    let of_systems = Some(of_systems).filter(|_| !result.systems.is_empty());
    let of_cases = groups.iter().map(|group| cases::table(result, group));
    let cases = groups.iter().flat_map(|group| &group.cases);
    let told = told_of_overhead(cases.flat_map(|case| &case.systems));
    (
        of_systems.into_iter().chain(of_cases).collect(),
        format!("{}{told}", cases::EXPLANATION),
    )
}

fn of_systems(result: &RunResult) -> (Table, String) {
    let systems = &result.systems;
    let context = Context {
        systems,
        measure: Measure::of(systems.iter()),
        duration_s: result.duration_s as f64,
    };
    let (figures, explanation) = match provisioned::figures(systems) {
        Some((figures, explanation)) => (figures.known(&context), explanation),
        None => (figures(&context, result.shift_at_s.is_some()), EXPLANATION),
    };
    let shown = systems.iter().take(ROWS_MAX);
    let table = Table {
        heading: String::new(),
        rows: shown.map(|system| figures.row(&context, system)).collect(),
        columns: figures.0.into_iter().map(|(column, _)| column).collect(),
        left_out: systems.len().saturating_sub(ROWS_MAX),
    };
    let notes = marks::notes(systems, |system| of_oracle(&context, system));
    let told = told_of_overhead(systems.iter());
    (table, format!("{explanation}{told}{notes}"))
}

/// The explanation of overhead, if a table has it.
fn told_of_overhead<'a>(mut systems: impl Iterator<Item = &'a SystemResult>) -> &'static str {
    if systems.any(has_overhead) {
        OVERHEAD
    } else {
        ""
    }
}

/// The five main figures of a result with an oracle.
pub(crate) fn brief(result: &RunResult) -> Option<Table> {
    let systems = &result.systems;
    systems.iter().find(|system| is_oracle(system))?;
    let context = Context {
        systems,
        measure: Measure::of(systems.iter()),
        duration_s: result.duration_s as f64,
    };
    let mut figures = Figures::default();
    figures.add("", "system", |_, s| Some(marks::name(s)));
    figures.add("% of oracle", "mean", |c, s| {
        of_oracle(c, s).map(marks::of_oracle)
    });
    figures.add("% of oracle", "end", |c, s| {
        steady_of_oracle(c.systems, s).map(marks::of_oracle)
    });
    figures.add("hot set", "after s", |_, s| s.t90_s.map(seconds));
    figures.add("CPU", "%", |c, s| {
        ratio(s.mgmt_cpu_s, Some(c.duration_s)).map(percent)
    });
    Some(Table {
        heading: String::new(),
        rows: systems.iter().map(|s| figures.row(&context, s)).collect(),
        columns: figures.0.into_iter().map(|(column, _)| column).collect(),
        left_out: 0,
    })
}

/// A system's share of the oracle's performance over the last third; 1 is equal.
pub(crate) fn steady_of_oracle(systems: &[SystemResult], system: &SystemResult) -> Option<f64> {
    let oracle = systems.iter().find(|s| s.name == "oracle")?;
    let unit = &oracle.speed.as_ref()?.unit;
    let ours = system.speed.as_ref().filter(|speed| speed.unit == *unit)?;
    Measure::Speed(unit.clone()).times(ours.steady?, oracle.steady()?)
}

/// Figures of systems with memory of fixed size. For fixed work the last third is omitted.
fn figures(context: &Context, shifts: bool) -> Figures {
    let any = |has: fn(&SystemResult) -> bool| context.systems.iter().any(has);
    let is_fixed = context.measure == Measure::Elapsed;
    let has_workloads = any(|s| !s.workloads.is_empty());
    let mut figures = Figures::default();

    figures.add("", "system", |_, s| Some(marks::name(s)));
    if is_fixed {
        figures.add("elapsed", "s", |_, s| s.elapsed_s.map(short));
    }
    if any(|s| s.repeats.is_some()) {
        figures.add("all runs", "min..max", |_, s| extremes(s));
    }
    if has_workloads {
        add_workloads(&mut figures, context.systems);
    } else {
        add_speed(&mut figures, context.systems, !is_fixed);
    }
    if any(is_oracle) && (is_fixed || !has_workloads) {
        figures.add("% of oracle", "mean", |c, s| {
            of_oracle(c, s).map(marks::of_oracle)
        });
        if !is_fixed {
            figures.add("% of oracle", "end", |c, s| {
                steady_of_oracle(c.systems, s).map(marks::of_oracle)
            });
        }
    } else if any(is_none) && (is_fixed || !has_workloads) {
        figures.add("times", "none", times_none);
    }
    if any(|s| s.hot_in_fast_final.is_some()) {
        figures.add("hot in", "fast%", hot_in_fast);
        if shifts {
            figures.add("t90, s", "1st", |_, s| s.t90_s.map(seconds));
            figures.add("t90, s", "2nd", |_, s| s.t90_after_shift_s.map(seconds));
        } else {
            figures.add("t90", "s", |_, s| s.t90_s.map(seconds));
        }
    }
    figures.add("management CPU", "s", |_, s| s.mgmt_cpu_s.map(seconds));
    figures.add("management CPU", "%", |c, s| {
        ratio(s.mgmt_cpu_s, Some(s.elapsed_s.unwrap_or(c.duration_s))).map(percent)
    });
    if !is_fixed {
        figures.add("management CPU", "end%", |c, s| {
            ratio(s.mgmt_cpu_steady_s, Some(c.duration_s / 3.0)).map(percent)
        });
    }
    figures.add("kswapd", "scanned", |_, s| Some(count(s.kswapd_scanned)));
    figures.add("moved MiB", "up", |_, s| s.bytes_promoted.map(mib));
    figures.add("moved MiB", "down", |_, s| s.bytes_demoted.map(mib));
    if any(has_overhead) {
        figures.add("overhead", "MiB", overhead_mib);
    }
    if any(|s| s.verify_errors.is_some()) {
        figures.add("wrong", "words", |_, s| s.verify_errors.map(count));
    }
    if any(|s| s.tail.is_some()) {
        add_tail(&mut figures);
    }
    figures
}

/// Adds the speed and, where relevant, that of the last third.
fn add_speed(figures: &mut Figures, systems: &[SystemResult], has_end: bool) {
    let heading = Measure::speed_of(systems.iter()).heading();
    figures.add(heading.clone(), "mean", |_, s| s.mean().map(short));
    if has_end {
        figures.add(heading, "end", |_, s| s.steady().map(short));
    }
}

/// Adds the speed of each workload, or its elapsed time if it counts nothing.
fn add_workloads(figures: &mut Figures, systems: &[SystemResult]) {
    for name in workloads(systems) {
        let workload = |system: &SystemResult, name: &str| {
            system.workloads.iter().find(|w| w.name == name).cloned()
        };
        let mut speeds = systems.iter().filter_map(|s| workload(s, name)?.speed);
        let (heading, key) = (clean::name(name), name.to_owned());
        match speeds.next() {
            Some(Speed { unit, .. }) => {
                figures.add(heading.clone(), clean::name(unit.name()), move |_, s| {
                    workload(s, &key)?.speed?.mean.map(short)
                })
            }
            None => figures.add(heading.clone(), "s", move |_, s| {
                workload(s, &key)?.elapsed_s.map(short)
            }),
        }
        // Memory owned by VMs has separate tables.
        let held = move |system: &SystemResult, name: &str| match system.provisioning {
            None => workload(system, name)?.series.last()?.fast_bytes,
            Some(_) => None,
        };
        if systems.iter().any(|system| held(system, name).is_some()) {
            let key = name.to_owned();
            figures.add(heading, "fast MiB", move |_, s| {
                held(s, &key).map(|bytes| (bytes >> 20).to_string())
            });
        }
    }
}

/// Names of these systems' workloads, in order; at most eight.
pub(crate) fn workloads(systems: &[SystemResult]) -> Vec<&str> {
    let mut seen = BTreeSet::new();
    let all = systems.iter().flat_map(|system| &system.workloads);
    let names = all.map(|workload| workload.name.as_str());
    let names = names.filter(|name| seen.insert(*name));
    names.take(WORKLOADS_MAX).collect()
}

fn hot_in_fast(_: &Context, system: &SystemResult) -> Option<String> {
    system.hot_in_fast_final.map(percent)
}

/// Whether its own memory is known.
fn has_overhead(system: &SystemResult) -> bool {
    system.memory_overhead_bytes.is_some_and(|bytes| bytes > 0)
}

fn overhead_mib(_: &Context, system: &SystemResult) -> Option<String> {
    let bytes = system.memory_overhead_bytes?;
    Some(short(bytes as f64 / f64::from(1 << 20)))
}

/// Adds latencies of single operations.
fn add_tail(figures: &mut Figures) {
    let group = "operations, ns";
    figures.add(group, "p50", |_, s| Some(short(s.tail?.p50_ns)));
    figures.add(group, "p99", |_, s| Some(short(s.tail?.p99_ns)));
    figures.add(group, "p99.9", |_, s| Some(short(s.tail?.p999_ns)));
}

/// A system's share of the oracle's performance.
fn of_oracle(context: &Context, system: &SystemResult) -> Option<f64> {
    let oracle = context.peer("oracle")?;
    context.measure.speed(system, oracle)
}

/// Speedup of a system over `none`.
fn times_none(context: &Context, system: &SystemResult) -> Option<String> {
    let none = context.peer(NONE)?;
    context.measure.speed(system, none).map(short)
}

fn is_oracle(system: &SystemResult) -> bool {
    system.name == "oracle"
}

fn is_none(system: &SystemResult) -> bool {
    system.name == NONE
}

/// The lowest and the highest main figure of several runs.
fn extremes(system: &SystemResult) -> Option<String> {
    let repeats = system.repeats?;
    Some(format!("{}..{}", short(repeats.min), short(repeats.max)))
}

/// `part / whole`, if both are known and the quotient is meaningful.
fn ratio(part: Option<f64>, whole: Option<f64>) -> Option<f64> {
    let ratio = part? / whole?;
    ratio.is_finite().then_some(ratio)
}

/// Seconds of a clock with whole seconds.
fn seconds(seconds: f64) -> String {
    if seconds < 999.95 {
        format!("{seconds:.1}")
    } else {
        short(seconds)
    }
}

fn mib(bytes: u64) -> String {
    count(bytes.div_ceil(1 << 20))
}
