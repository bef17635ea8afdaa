//! The tables in the terminal.

use demeter_outcome::RunResult;

use crate::draw::stacked::FLUSHES;
use crate::shape::Side;
use crate::text::agreement::Agreement;
use crate::text::flushes::flush_table;
use crate::text::grid::{Table, wrap};
use crate::text::kvm::{KVM, kvm_table};
use crate::text::summary;

/// The result as lines of text: figures with an explanation, then published figures.
///
/// The output has only printable characters, whatever the file contains.
pub fn table(result: &RunResult) -> String {
    let (tables, explanation) = summary::tables(result);
    let mut parts: Vec<String> = tables.iter().map(Table::text).collect();
    parts.push(wrap(&explanation));
    // For cases, only the page has it.
    let sides = Some(Side::all(result)).filter(|_| result.cases.is_empty());
    if let Some(sides) = sides {
        let tables = [(FLUSHES, flush_table(&sides)), (KVM, kvm_table(&sides))];
        let there = tables
            .into_iter()
            .filter_map(|(title, table)| Some((title, table?)));
        parts.extend(there.map(|(title, table)| format!("{title}\n{}", table.text())));
    }
    if let Some(agreement) = Agreement::of(result) {
        parts.push(agreement.table.text());
        parts.push(wrap(&agreement.sentence()));
    }
    parts.join("\n")
}
