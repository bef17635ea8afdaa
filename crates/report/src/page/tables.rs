//! Tables of figures, of published ones, of invalidations and of counters.

use std::collections::BTreeSet;

use super::Page;
use crate::agreement::Agreement;
use crate::breakdown::FLUSH;
use crate::lines::SYSTEMS_MAX;
use crate::number::count;
use crate::schema::RunResult;
use crate::summary::{Column, Summary};
use crate::text::{self, Escaped};

/// Most kernel counters and columns of their table.
const COUNTERS_MAX: usize = 100;

impl Page {
    /// The tables that the terminal shows, too.
    pub(super) fn figures(&mut self, result: &RunResult) {
        let tables = Summary::all(result);
        let explanation = tables.last().map_or("", |last| last.explanation);
        self.section("Figures", explanation);
        for summary in tables {
            self.summary(&summary);
        }
    }

    fn summary(&mut self, summary: &Summary) {
        let columns = &summary.columns;
        if !summary.heading.is_empty() {
            self.subsection(&summary.heading);
        }
        self.add(format_args!(
            "<div class=\"scroll\">\n<table class=\"figures\">\n<thead>\n<tr>"
        ));
        for group in columns.chunk_by(|a, b| a.group == b.group) {
            let (span, name) = (group.len(), Escaped(group[0].group));
            self.add(format_args!("<th colspan=\"{span}\">{name}</th>"));
        }
        self.add(format_args!("</tr>\n"));
        let titles: Vec<String> = columns.iter().map(|column| column.title.clone()).collect();
        let is_name = |column: &Column| column.is_name;
        // The first column is to the left anyway.
        let names = columns.iter().rposition(is_name).map_or(1, |last| last + 1);
        self.heading(&titles, names);
        for row in &summary.rows {
            let class = match (row.is_ours, row.starts_case) {
                (true, true) => "ours first",
                (true, false) => "ours",
                (false, true) => "first",
                (false, false) => "",
            };
            self.row(class, &row.cells, names);
        }
        self.add(format_args!("</tbody>\n</table>\n</div>\n"));
        if summary.left_out > 0 {
            let left_out = summary.left_out;
            self.add(format_args!(
                "<p class=\"soft\">and {left_out} more rows</p>\n"
            ));
        }
    }

    /// What others have published beside ours.
    pub(super) fn published(&mut self, result: &RunResult) {
        let Some(agreement) = Agreement::of(result) else {
            return;
        };
        self.section("Published figures beside ours", &agreement.sentence());
        self.add(format_args!(
            "<div class=\"scroll\">\n<table class=\"figures\">\n<thead>\n"
        ));
        self.heading(&agreement.heading(), agreement.names());
        for row in &agreement.rows {
            let class = if row.agrees { "" } else { "apart" };
            self.row(class, &agreement.row(row), agreement.names());
        }
        self.add(format_args!("</tbody>\n</table>\n</div>\n"));
    }

    /// A table of its own, the first `names` columns to the left.
    pub(super) fn table(&mut self, heading: &[String], rows: &[Vec<String>], names: usize) {
        self.add(format_args!("<div class=\"scroll\">\n<table>\n<thead>\n"));
        self.heading(heading, names);
        for row in rows {
            self.row("", row, names);
        }
        self.add(format_args!("</tbody>\n</table>\n</div>\n"));
    }

    /// The last row of a table's head.
    fn heading(&mut self, titles: &[String], names: usize) {
        self.add(format_args!("<tr>"));
        for (index, title) in titles.iter().enumerate() {
            let (class, title) = (name_class(index, names), Escaped(title));
            self.add(format_args!("<th{class}>{title}</th>"));
        }
        self.add(format_args!("</tr>\n</thead>\n<tbody>\n"));
    }

    fn row(&mut self, class: &str, cells: &[String], names: usize) {
        self.add(format_args!("<tr class=\"{class}\">"));
        for (index, cell) in cells.iter().enumerate() {
            let (class, cell) = (name_class(index, names), Escaped(cell));
            self.add(format_args!("<td{class}>{cell}</td>"));
        }
        self.add(format_args!("</tr>\n"));
    }

    /// What was counted, but for invalidations, which have a table of their own.
    pub(super) fn counters(&mut self, result: &RunResult) {
        let systems = &result.systems[..result.systems.len().min(SYSTEMS_MAX)];
        let names: BTreeSet<&str> = systems
            .iter()
            .flat_map(|system| system.counters.keys().map(String::as_str))
            .filter(|name| !name.starts_with(FLUSH))
            .collect();
        if names.is_empty() {
            return;
        }
        let whose = match result.on.as_str() {
            "sim" => "The simulator's counters over the timed phase",
            _ => "Kernel counters over the timed phase (/proc/vmstat)",
        };
        self.add(format_args!("<details>\n<summary>{whose}</summary>\n"));
        let heading = systems.iter().map(|system| text::name(&system.name));
        let heading: Vec<String> = ["counter".to_owned()].into_iter().chain(heading).collect();
        let row = |name: &str| {
            let value = |counter: Option<&u64>| counter.map_or("-".into(), |value| count(*value));
            let values = systems
                .iter()
                .map(|system| value(system.counters.get(name)));
            [text::name(name)].into_iter().chain(values).collect()
        };
        let rows: Vec<Vec<String>> = names.into_iter().take(COUNTERS_MAX).map(row).collect();
        self.table(&heading, &rows, 1);
        self.add(format_args!("</details>\n"));
    }
}

/// Names stand to the left.
fn name_class(column: usize, names: usize) -> &'static str {
    if column < names {
        " class=\"name\""
    } else {
        ""
    }
}
