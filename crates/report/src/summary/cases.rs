//! The figures of a group of cases: a block of rows per case, its settings before them.

use super::{Column, Context, Figure, Figures, ROWS_MAX, Row, Summary};
use super::{add_tail, extremes, is_none, is_oracle, mib, of_oracle, seconds, times_none};
use crate::figure::figure;
use crate::measure::Measure;
use crate::number::{percent, short};
use crate::schema::{RunResult, SystemResult};
use crate::shape::{self, Group};
use crate::text;

const EXPLANATION: &str = "A block of rows for each case, its settings before them. An oracle had \
     its hot set placed in fast memory from the start; management CPU is what a system costs on top of \
     none, in seconds and in cores over the whole run; moved counts both directions.";

/// The table of a group.
pub(super) fn summary(result: &RunResult, group: &Group) -> Summary {
    let figures = figures(group);
    let setting = |axis: &shape::Setting| Column {
        group: "",
        title: axis.title(),
        is_name: axis.numbers.is_none(),
    };
    let columns = group.axes.iter().map(setting);
    let columns = columns.chain(figures.0.iter().map(|(column, _)| column.clone()));
    let columns = columns.collect();
    let mut rows = vec![];
    let mut all = 0;
    for case in &group.cases {
        all += case.systems.len();
        let context = Context {
            systems: &case.systems,
            measure: group.measure(),
            duration_s: result.duration_s as f64,
        };
        let free = ROWS_MAX - rows.len();
        for (index, system) in case.systems.iter().take(free).enumerate() {
            let settings = group.axes.iter().map(|axis| match index {
                0 => text::name(shape::value(case, axis.key)),
                _ => String::new(),
            });
            let row = figures.row(&context, system);
            rows.push(Row {
                cells: settings.chain(row.cells).collect(),
                starts_case: index == 0,
                ..row
            });
        }
    }
    Summary {
        heading: group.common(),
        columns,
        left_out: all - rows.len(),
        rows,
        explanation: EXPLANATION,
    }
}

fn figures(group: &Group) -> Figures {
    let systems = || group.cases.iter().flat_map(|case| &case.systems);
    let any = |has: fn(&SystemResult) -> bool| systems().any(has);
    let mut figures = Figures::default();
    let mut add = |group, title, figure: Figure| figures.add(group, title, figure);

    add("", "system", |_, s| Some(text::name(&s.name)));
    match group.measure() {
        Measure::Elapsed => add("elapsed", "s", |_, s| s.elapsed_s.map(short)),
        Measure::Throughput => add("Mops", "mean", |_, s| s.mean_mops.map(short)),
        Measure::Latency => add("latency", "ns", |_, s| s.mean_latency_ns.map(short)),
    }
    if any(|s| s.repeats.is_some()) {
        add("all runs", "min..max", |_, s| extremes(s));
    }
    if any(is_oracle) {
        add("% of", "oracle", of_oracle);
    } else if any(is_none) {
        add("times", "none", times_none);
    }
    add("hot in", "fast%", |_, s| Some(percent(s.hot_in_fast_final)));
    add("management CPU", "s", |_, s| s.mgmt_cpu_s.map(seconds));
    add("management CPU", "cores", |_, s| {
        figure(s, "cores_managing").map(short)
    });
    add("moved", "MiB", |_, s| {
        Some(mib(s.bytes_promoted?.saturating_add(s.bytes_demoted?)))
    });
    if any(|s| s.tail.is_some()) {
        add_tail(&mut figures);
    }
    figures
}
