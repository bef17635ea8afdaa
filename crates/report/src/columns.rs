//! Text in columns, and in lines of bounded width.

/// Width that text and tables of ordinary figures keep to, characters.
pub(crate) const WIDTH: usize = 100;

/// Rows as lines of text: the first `left` columns to the left, figures to the right.
pub(crate) fn aligned(rows: &[Vec<String>], left: usize) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let cell = if column < left {
                format!("{cell:<width$}")
            } else {
                format!("{cell:>width$}")
            };
            text.push_str(if column == 0 { "" } else { "  " });
            text.push_str(&cell);
        }
        text.truncate(text.trim_end_matches(' ').len());
        text.push('\n');
    }
    text
}

/// Text in lines of at most [`WIDTH`] characters, as far as its words allow.
pub(crate) fn wrap(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        if lines[last].is_empty() {
            lines[last].push_str(word);
        } else if lines[last].chars().count() + 1 + word.chars().count() <= WIDTH {
            lines[last].push(' ');
            lines[last].push_str(word);
        } else {
            lines.push(word.into());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_left_and_figures_right() {
        let row = |cells: [&str; 3]| cells.map(String::from).to_vec();
        let text = aligned(&[row(["a", "1", ""]), row(["bcd", "100", "x"])], 1);
        assert_eq!(text, "a      1\nbcd  100  x\n");
        assert_eq!(aligned(&[], 1), "");
    }

    #[test]
    fn lines_are_broken_between_words() {
        let text = "word ".repeat(50);
        let lines = wrap(&text);
        assert_eq!(lines.join(" "), text.trim_end());
        assert!(lines.iter().all(|line| line.len() <= WIDTH));
        assert_eq!(lines.len(), 3);
    }
}
