//! The table in the terminal.

use crate::schema::RunResult;
use crate::summary::{Column, Summary, explanation};

/// Width that tables of ordinary figures and the text below them keep to, characters.
const WIDTH: usize = 100;

/// The result as lines of text, ending with a sentence that explains the figures. Nothing in it
/// but printable characters, whatever the file says.
pub fn table(result: &RunResult) -> String {
    let Summary { columns, rows } = Summary::new(result);
    let titles: Vec<String> = columns.iter().map(|column| column.title.into()).collect();
    let mut widths: Vec<usize> = columns.iter().map(|column| column.title.len()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let groups = groups(&columns, &mut widths);

    let mut lines = vec![groups, line(&columns, &widths, &titles)];
    lines.extend(rows.iter().map(|row| line(&columns, &widths, row)));
    lines.push(String::new());
    lines.extend(wrap(explanation(result)));
    lines.push(String::new());
    lines.join("\n")
}

/// Blanks before a column: a wider gap sets groups apart.
fn gap(columns: &[Column], index: usize) -> usize {
    match index {
        0 => 0,
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
        // The system's name to the left, figures to the right.
        line.push_str(&match index {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
    }
    line.trim_end().into()
}

fn wrap(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        if lines[last].is_empty() {
            lines[last].push_str(word);
        } else if lines[last].len() + 1 + word.len() <= WIDTH {
            lines[last].push(' ');
            lines[last].push_str(word);
        } else {
            lines.push(word.into());
        }
    }
    lines
}
