//! Tables of figures, published figures, invalidations and counters.

use std::collections::BTreeSet;

use demeter_outcome::RunResult;
use maud::{Markup, html};

use super::section;
use crate::draw::lines::SYSTEMS_MAX;
use crate::draw::stacked::FLUSH;
use crate::text::agreement::Agreement;
use crate::text::clean;
use crate::text::grid::{Row, Table};
use crate::text::number::count;
use crate::text::summary;

/// Maximum number of kernel counters, and of columns in their table.
const COUNTERS_MAX: usize = 100;

/// The terminal's tables.
pub(super) fn figures(result: &RunResult) -> Markup {
    let (tables, explanation) = summary::tables(result);
    html! {
        (section("Figures", &explanation))
        @for of_group in &tables { (table("figures", of_group)) }
    }
}

/// Published figures beside the measured ones.
pub(super) fn published(result: &RunResult) -> Markup {
    html! {
        @if let Some(agreement) = Agreement::of(result) {
            (section("Published figures beside ours", &agreement.sentence()))
            (table("figures", &agreement.table))
        }
    }
}

/// A table; with the class `figures` it is as wide as the page.
pub(super) fn table(class: &str, table: &Table) -> Markup {
    let columns = &table.columns;
    html! {
        @if !table.heading.is_empty() { h3 { (table.heading) } }
        div.scroll {
            table class=(class) {
                thead {
                    @if table.has_groups() {
                        tr {
                            @for group in columns.chunk_by(|a, b| a.group == b.group) {
                                th colspan=(group.len()) { (group[0].group) }
                            }
                        }
                    }
                    tr { @for column in columns { th.name[column.is_name] { (column.title) } } }
                }
                tbody {
                    @for row in &table.rows {
                        tr class=(row.class) {
                            @for (cell, column) in row.cells.iter().zip(columns) {
                                td.name[column.is_name] { (cell) }
                            }
                        }
                    }
                }
            }
        }
        @if table.left_out > 0 { p.soft { "and " (table.left_out) " more rows" } }
    }
}

/// All counters except invalidations, which have their own table.
pub(super) fn counters(result: &RunResult) -> Markup {
    let systems = &result.systems[..result.systems.len().min(SYSTEMS_MAX)];
    let names: BTreeSet<&str> = systems
        .iter()
        .flat_map(|system| system.counters.keys().map(String::as_str))
        .filter(|name| !name.starts_with(FLUSH))
        .collect();
    let whose = match result.on.as_str() {
        "sim" => "The simulator's counters over the timed phase",
        _ => "Kernel counters over the timed phase (/proc/vmstat)",
    };
    let titles = systems.iter().map(|system| clean::name(&system.name));
    let titles: Vec<String> = ["counter".to_owned()].into_iter().chain(titles).collect();
    let row = |name: &&str| {
        let values = systems.iter().map(|system| {
            let counter = system.counters.get(*name);
            counter.map_or("-".into(), |value| count(*value))
        });
        Row {
            cells: [clean::name(name)].into_iter().chain(values).collect(),
            class: "",
        }
    };
    let rows: Vec<Row> = names.iter().take(COUNTERS_MAX).map(row).collect();
    html! {
        @if !rows.is_empty() {
            details {
                summary { (whose) }
                (table("", &Table::plain(titles, 1, rows)))
            }
        }
    }
}
