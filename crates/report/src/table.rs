//! The tables in the terminal.

use crate::agreement::Agreement;
use crate::breakdown::{FLUSHES, flush_table};
use crate::columns::{aligned, wrap};
use crate::schema::RunResult;
use crate::shape::Side;
use crate::summary::{Column, Row, Summary};

/// The result as lines of text: its figures, a sentence that explains them, and those that others
/// have published beside ours. Nothing in it but printable characters, whatever the file says.
pub fn table(result: &RunResult) -> String {
    let tables = Summary::all(result);
    let mut blocks: Vec<String> = tables.iter().map(figures).collect();
    blocks.extend(tables.last().map(|last| wrapped(last.explanation)));
    // Of cases, the page has it.
    let sides = Some(Side::all(result)).filter(|_| result.cases.is_empty());
    if let Some((heading, rows)) = sides.and_then(|sides| flush_table(&sides)) {
        let rows: Vec<_> = [heading].into_iter().chain(rows).collect();
        blocks.push(format!("{FLUSHES}\n{}", aligned(&rows, 1)));
    }
    if let Some(agreement) = Agreement::of(result) {
        let rows = agreement.rows.iter().map(|row| agreement.row(row));
        let rows: Vec<_> = [agreement.heading()].into_iter().chain(rows).collect();
        blocks.push(aligned(&rows, agreement.names()));
        blocks.push(wrapped(&agreement.sentence()));
    }
    blocks.join("\n")
}

/// Text in lines of bounded width.
fn wrapped(text: &str) -> String {
    wrap(text).join("\n") + "\n"
}

/// Heading and rows.
fn figures(summary: &Summary) -> String {
    let columns = &summary.columns;
    let titles: Vec<String> = columns.iter().map(|column| column.title.clone()).collect();
    let width = |text: &String| text.chars().count();
    let mut widths: Vec<usize> = titles.iter().map(width).collect();
    for row in &summary.rows {
        for (width, cell) in widths.iter_mut().zip(&row.cells) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let groups = groups(columns, &mut widths);
    let mut lines = vec![groups, line(columns, &widths, &titles)];
    if !summary.heading.is_empty() {
        lines.insert(0, summary.heading.clone());
    }
    let rows = summary.rows.iter();
    lines.extend(rows.map(|Row { cells, .. }| line(columns, &widths, cells)));
    if summary.left_out > 0 {
        lines.push(format!("and {} more rows", summary.left_out));
    }
    lines.push(String::new());
    lines.join("\n")
}

/// Blanks before a column: a wider gap sets groups apart, and columns without one.
fn gap(columns: &[Column], index: usize) -> usize {
    match index {
        0 => 0,
        _ if columns[index].group.is_empty() => 2,
        _ if columns[index - 1].group == columns[index].group => 1,
        _ => 2,
    }
}

/// The upper heading: each group's name, right-aligned over its columns. Widens a group's first
/// column where the name needs it.
fn groups(columns: &[Column], widths: &mut [usize]) -> String {
    let mut line = String::new();
    let mut start = 0;
    for group in columns.chunk_by(|a, b| a.group == b.group) {
        let end = start + group.len();
        let inner_gaps = group.len() - 1;
        let width = |widths: &[usize]| widths[start..end].iter().sum::<usize>() + inner_gaps;
        let name = group[0].group;
        widths[start] += name.len().saturating_sub(width(widths));
        line.push_str(&" ".repeat(gap(columns, start)));
        line.push_str(&format!("{name:>width$}", width = width(widths)));
        start = end;
    }
    line.trim_end().into()
}

fn line(columns: &[Column], widths: &[usize], cells: &[String]) -> String {
    let mut line = String::new();
    for (index, (cell, &width)) in cells.iter().zip(widths).enumerate() {
        line.push_str(&" ".repeat(gap(columns, index)));
        // Names to the left, figures to the right.
        line.push_str(&if columns[index].is_name {
            format!("{cell:<width$}")
        } else {
            format!("{cell:>width$}")
        });
    }
    line.trim_end().into()
}
