//! Invalidations of translations by kind, as a table.

use crate::draw::stacked::{FLUSH_TOTAL, Parts, Split, flushes};
use crate::shape::Side;
use crate::text::clean;
use crate::text::grid::{Row, Table};
use crate::text::number::count;

/// Most rows of the table.
const ROWS_MAX: usize = 200;

/// Invalidations by kind, a row for each system; `None` if none were counted.
pub(crate) fn flush_table(sides: &[Side]) -> Option<Table> {
    let parts = Parts::of(Split::Flushes, sides.iter().flat_map(|side| side.systems));
    if parts.is_empty() {
        return None;
    }
    let titles = ["case", "system", "all"].map(String::from).into_iter();
    let titles = titles.chain(parts.legend().map(|(_, label)| label));
    let systems = sides
        .iter()
        .flat_map(|side| side.systems.iter().map(move |s| (side, s)));
    let rows = systems.take(ROWS_MAX).map(|(side, system)| {
        let total = system.counters.get(FLUSH_TOTAL).copied();
        let sum = || flushes(system).fold(0, |sum: u64, (_, n)| sum.saturating_add(n));
        let total = count(total.unwrap_or_else(sum));
        let kinds = parts.parts.iter().map(|(kind, _)| {
            let n = system.counters.get(kind);
            n.map_or("-".into(), |n| count(*n))
        });
        let cells = [side.heading.clone(), clean::name(&system.name), total];
        Row {
            cells: cells.into_iter().chain(kinds).collect(),
            class: "",
        }
    });
    Some(Table::plain(titles.collect(), 2, rows.collect()))
}
