//! The figures of a group of cases, with a block of rows per case.

use super::{Context, Figures, ROWS_MAX};
use super::{
    add_tail, extremes, has_overhead, hot_in_fast, is_none, is_oracle, mib, of_oracle,
    overhead_mib, seconds, times_none,
};

use demeter_outcome::{RunResult, SystemResult};

use crate::measure::Measure;
use crate::shape::{self, Group};
use crate::text::clean;
use crate::text::grid::{Column, Row, Table};
use crate::text::number::{percent, short};

pub(super) const EXPLANATION: &str = "A block of rows for each case, its settings before them. An oracle had \
     its hot set placed in fast memory from the start; management CPU is what a system costs on top of \
     none, in seconds and in cores over the whole run; moved counts both directions.";

/// The table of a group.
pub(super) fn table(result: &RunResult, group: &Group) -> Table {
    let figures = figures(group);
    let setting = |axis: &shape::Setting| Column {
        group: String::new(),
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
                0 => clean::name(shape::value(case, axis.key)),
                _ => String::new(),
            });
            let row = figures.row(&context, system);
            rows.push(Row {
                cells: settings.chain(row.cells).collect(),
                class: match (row.class, index) {
                    ("ours", 0) => "ours first",
                    (_, 0) => "first",
                    (class, _) => class,
                },
            });
        }
    }
    Table {
        heading: group.common(),
        columns,
        left_out: all - rows.len(),
        rows,
    }
}

fn figures(group: &Group) -> Figures {
    let systems = || group.cases.iter().flat_map(|case| &case.systems);
    let any = |has: fn(&SystemResult) -> bool| systems().any(has);
    let mut figures = Figures::default();

    figures.add("", "system", |_, s| Some(clean::name(&s.name)));
    let measure = group.measure();
    let (heading, title) = match &measure {
        Measure::Elapsed => (measure.heading(), "s"),
        Measure::Speed(unit) if unit.is_time() => ("latency".into(), unit.name()),
        Measure::Speed(_) => (measure.heading(), "mean"),
    };
    figures.add(heading, title, |c, s| c.measure.value(s).map(short));
    if any(|s| s.repeats.is_some()) {
        figures.add("all runs", "min..max", |_, s| extremes(s));
    }
    if any(is_oracle) {
        figures.add("% of", "oracle", |c, s| of_oracle(c, s).map(percent));
    } else if any(is_none) {
        figures.add("times", "none", times_none);
    }
    if any(|s| s.hot_in_fast_final.is_some()) {
        figures.add("hot in", "fast%", hot_in_fast);
    }
    figures.add("management CPU", "s", |_, s| s.mgmt_cpu_s.map(seconds));
    figures.add("management CPU", "cores", |_, s| {
        s.cores_managing().map(short)
    });
    figures.add("moved", "MiB", |_, s| Some(mib(s.bytes_moved()?)));
    if any(has_overhead) {
        figures.add("overhead", "MiB", overhead_mib);
    }
    if any(|s| s.tail.is_some()) {
        add_tail(&mut figures);
    }
    figures
}
