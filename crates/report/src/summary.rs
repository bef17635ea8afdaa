//! The figures that people compare, as text: what the terminal's table and the page's both show.

mod cases;
mod provisioned;

use crate::measure::Measure;
use crate::number::{count, percent, short};
use crate::schema::{RunResult, SystemResult};
use crate::shape::Group;
use crate::text;

/// Most rows of a table.
const ROWS_MAX: usize = 1000;

/// A table of figures: one row per system, one column per figure.
pub(crate) struct Summary {
    /// What all rows have in common; may be empty.
    pub heading: String,
    pub columns: Vec<Column>,
    pub rows: Vec<Row>,
    /// Rows that there would be besides.
    pub left_out: usize,
    /// How to read the figures.
    pub explanation: &'static str,
}

/// A column's heading: neighbours of one group share the upper line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Column {
    pub group: &'static str,
    pub title: String,
    /// Whether its cells are names, not figures.
    pub is_name: bool,
}

/// One system.
pub(crate) struct Row {
    /// As many as there are columns; `-` where nothing was measured.
    pub cells: Vec<String>,
    pub is_ours: bool,
    /// Whether it is the first of a case.
    pub starts_case: bool,
}

/// What a figure needs besides the system itself.
struct Context<'a> {
    /// All systems that ran under the same conditions.
    systems: &'a [SystemResult],
    measure: Measure,
    duration_s: f64,
}

impl Context<'_> {
    fn peer(&self, name: &str) -> Option<&SystemResult> {
        self.systems.iter().find(|system| system.name == name)
    }
}

type Figure = fn(&Context, &SystemResult) -> Option<String>;

/// Columns and what stands in them.
#[derive(Default)]
struct Figures(Vec<(Column, Figure)>);

impl Figures {
    fn add(&mut self, group: &'static str, title: &str, figure: Figure) {
        let column = Column {
            group,
            title: title.into(),
            is_name: self.0.is_empty(),
        };
        self.0.push((column, figure));
    }

    fn row(&self, context: &Context, system: &SystemResult) -> Row {
        let cell = |figure: &Figure| figure(context, system).unwrap_or_else(|| "-".into());
        Row {
            cells: self.0.iter().map(|(_, figure)| cell(figure)).collect(),
            is_ours: system.name == "demeter",
            starts_case: false,
        }
    }
}

const EXPLANATION: &str = "The end (steady) is the last third of the run; an oracle had its hot \
     set placed in fast memory from the start; t90 is the time until 90 % of the (first, second) hot \
     set was there; management CPU is the VM's system time plus the agent's user time, less the system \
     time of none, in seconds and in % of one CPU.";

impl Summary {
    /// The tables of a result: of its systems, and of each group of its cases. At least one.
    pub(crate) fn all(result: &RunResult) -> Vec<Self> {
        let groups: Vec<Group> = Group::all(result);
        let mut tables = vec![];
        if groups.is_empty() || !result.systems.is_empty() {
            tables.push(Self::of_systems(result));
        }
        tables.extend(groups.iter().map(|group| cases::summary(result, group)));
        tables
    }

    fn of_systems(result: &RunResult) -> Self {
        let systems = &result.systems;
        let context = Context {
            systems,
            measure: Measure::of(systems.iter()),
            duration_s: result.duration_s as f64,
        };
        let (figures, explanation) = provisioned::figures(systems)
            .unwrap_or_else(|| (figures(&context, result.shift_at_s.is_some()), EXPLANATION));
        let shown = systems.iter().take(ROWS_MAX);
        Self {
            heading: String::new(),
            rows: shown.map(|system| figures.row(&context, system)).collect(),
            columns: figures.0.into_iter().map(|(column, _)| column).collect(),
            left_out: systems.len().saturating_sub(ROWS_MAX),
            explanation,
        }
    }
}

/// Whether the workload reports latency (memlat) instead of throughput (gups).
pub(crate) fn shows_latency(systems: &[SystemResult]) -> bool {
    let any = |figure: fn(&SystemResult) -> bool| systems.iter().any(figure);
    any(|s| s.mean_latency_ns.is_some()) && !any(|s| s.mean_mops.is_some())
}

/// A system's share of the oracle's performance over the last third: 1 is as good as the oracle.
pub(crate) fn steady_of_oracle(systems: &[SystemResult], system: &SystemResult) -> Option<f64> {
    let oracle = systems.iter().find(|s| s.name == "oracle")?;
    if shows_latency(systems) {
        ratio(oracle.steady_latency_ns, system.steady_latency_ns)
    } else {
        ratio(system.steady_mops, oracle.steady_mops)
    }
}

/// The figures of systems that manage a memory of one size. Where the work is fixed and not the
/// time, the last third of the run is of no interest.
fn figures(context: &Context, shifts: bool) -> Figures {
    let any = |has: fn(&SystemResult) -> bool| context.systems.iter().any(has);
    let is_fixed = context.measure == Measure::Elapsed;
    let mut figures = Figures::default();
    let mut add = |group, title, figure: Figure| figures.add(group, title, figure);

    add("", "system", |_, s| Some(text::name(&s.name)));
    if is_fixed {
        add("elapsed", "s", |_, s| s.elapsed_s.map(short));
    }
    if any(|s| s.repeats.is_some()) {
        add("all runs", "min..max", |_, s| extremes(s));
    }
    if shows_latency(context.systems) {
        add("latency, ns", "mean", |_, s| s.mean_latency_ns.map(short));
        if !is_fixed {
            add("latency, ns", "end", |_, s| s.steady_latency_ns.map(short));
        }
    } else {
        add("Mops", "mean", |_, s| s.mean_mops.map(short));
        if !is_fixed {
            add("Mops", "end", |_, s| s.steady_mops.map(short));
        }
    }
    if any(is_oracle) {
        add("% of oracle", "mean", of_oracle);
        if !is_fixed {
            add("% of oracle", "end", |c, s| {
                steady_of_oracle(c.systems, s).map(percent)
            });
        }
    } else if any(is_none) {
        add("times", "none", times_none);
    }
    add("hot in", "fast%", |_, s| Some(percent(s.hot_in_fast_final)));
    if shifts {
        add("t90, s", "1st", |_, s| s.t90_s.map(seconds));
        add("t90, s", "2nd", |_, s| s.t90_after_shift_s.map(seconds));
    } else {
        add("t90", "s", |_, s| s.t90_s.map(seconds));
    }
    add("management CPU", "s", |_, s| s.mgmt_cpu_s.map(seconds));
    add("management CPU", "%", |c, s| {
        ratio(s.mgmt_cpu_s, Some(s.elapsed_s.unwrap_or(c.duration_s))).map(percent)
    });
    if !is_fixed {
        add("management CPU", "end%", |c, s| {
            ratio(s.mgmt_cpu_steady_s, Some(c.duration_s / 3.0)).map(percent)
        });
    }
    add("kswapd", "scanned", |_, s| Some(count(s.kswapd_scanned)));
    add("moved MiB", "up", |_, s| s.bytes_promoted.map(mib));
    add("moved MiB", "down", |_, s| s.bytes_demoted.map(mib));
    if any(|s| s.verify_errors.is_some()) {
        add("wrong", "words", |_, s| s.verify_errors.map(count));
    }
    if any(|s| s.tail.is_some()) {
        add_tail(&mut figures);
    }
    figures
}

/// How long single operations took.
fn add_tail(figures: &mut Figures) {
    let mut add = |title, figure: Figure| figures.add("operations, ns", title, figure);
    add("p50", |_, s| Some(short(s.tail?.p50_ns)));
    add("p99", |_, s| Some(short(s.tail?.p99_ns)));
    add("p99.9", |_, s| Some(short(s.tail?.p999_ns)));
}

/// A system's share of the oracle's performance, in percent.
fn of_oracle(context: &Context, system: &SystemResult) -> Option<String> {
    let oracle = context.peer("oracle")?;
    context.measure.speed(system, oracle).map(percent)
}

/// How many times as fast as `none` a system is.
fn times_none(context: &Context, system: &SystemResult) -> Option<String> {
    let none = context.peer("none")?;
    context.measure.speed(system, none).map(short)
}

fn is_oracle(system: &SystemResult) -> bool {
    system.name == "oracle"
}

fn is_none(system: &SystemResult) -> bool {
    system.name == "none"
}

/// The smallest and the largest main figure of several runs.
fn extremes(system: &SystemResult) -> Option<String> {
    let repeats = system.repeats?;
    Some(format!("{}..{}", short(repeats.min), short(repeats.max)))
}

/// `part / whole`, where both are known and the quotient means something.
fn ratio(part: Option<f64>, whole: Option<f64>) -> Option<f64> {
    let ratio = part? / whole?;
    ratio.is_finite().then_some(ratio)
}

/// Seconds of a clock that ticks in whole ones.
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
