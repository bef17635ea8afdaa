//! Tables for terminal and page, and wrapped text.

/// Width of text and of tables with ordinary figures, characters.
const WIDTH: usize = 100;

/// A table.
pub(crate) struct Table {
    /// Settings common to all rows; may be empty.
    pub heading: String,
    pub columns: Vec<Column>,
    pub rows: Vec<Row>,
    /// Number of further rows that are not shown.
    pub left_out: usize,
}

/// A column's heading; adjacent columns of a group share the upper line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Column {
    pub group: String,
    pub title: String,
    /// Whether its cells are names, aligned left, instead of figures.
    pub is_name: bool,
}

/// A row.
pub(crate) struct Row {
    /// One cell per column; `-` if not measured.
    pub cells: Vec<String>,
    /// Its classes in the page's style sheet.
    pub class: &'static str,
}

impl Table {
    /// Columns without groups, the first `names` of them names. Empty columns of names are dropped.
    pub(crate) fn plain(titles: Vec<String>, names: usize, mut rows: Vec<Row>) -> Self {
        let is_used = |column: &usize| {
            let mut cells = rows.iter().map(|row| &row.cells[*column]);
            *column >= names || cells.any(|cell| !cell.is_empty())
        };
        let used: Vec<usize> = (0..titles.len()).filter(is_used).collect();
        for row in &mut rows {
            row.cells = used
                .iter()
                .map(|&column| row.cells[column].clone())
                .collect();
        }
        let column = |&index: &usize| Column {
            group: String::new(),
            title: titles[index].clone(),
            is_name: index < names,
        };
        Self {
            heading: String::new(),
            columns: used.iter().map(column).collect(),
            rows,
            left_out: 0,
        }
    }

    /// Whether some columns share an upper line.
    pub(crate) fn has_groups(&self) -> bool {
        self.columns.iter().any(|column| !column.group.is_empty())
    }

    /// As lines of text.
    pub(crate) fn text(&self) -> String {
        let titles: Vec<String> = self.columns.iter().map(|c| c.title.clone()).collect();
        let mut widths: Vec<usize> = titles.iter().map(|title| width(title)).collect();
        for row in &self.rows {
            for (widest, cell) in widths.iter_mut().zip(&row.cells) {
                *widest = (*widest).max(width(cell));
            }
        }
        // Computed first, because it makes columns wide enough for the groups' names.
        let groups = self.groups(&mut widths);
        let mut lines = vec![];
        lines.extend(Some(self.heading.clone()).filter(|heading| !heading.is_empty()));
        lines.extend(Some(groups).filter(|_| self.has_groups()));
        lines.push(self.line(&widths, &titles));
        lines.extend(self.rows.iter().map(|row| self.line(&widths, &row.cells)));
        if self.left_out > 0 {
            lines.push(format!("and {} more rows", self.left_out));
        }
        lines.push(String::new());
        lines.join("\n")
    }

    /// Spaces before a column: a wider gap separates groups.
    fn gap(&self, index: usize) -> usize {
        let group = &self.columns[index].group;
        match index {
            0 => 0,
            _ if !group.is_empty() && self.columns[index - 1].group == *group => 1,
            _ => 2,
        }
    }

    /// The upper heading: each group's name, right-aligned over its columns. Widens a group's first column if the name
    /// needs it.
    fn groups(&self, widths: &mut [usize]) -> String {
        let mut line = String::new();
        let mut start = 0;
        for group in self.columns.chunk_by(|a, b| a.group == b.group) {
            let end = start + group.len();
            let inner: usize = (start + 1..end).map(|index| self.gap(index)).sum();
            let all = |widths: &[usize]| widths[start..end].iter().sum::<usize>() + inner;
            let name = &group[0].group;
            widths[start] += width(name).saturating_sub(all(widths));
            line.push_str(&" ".repeat(self.gap(start)));
            line.push_str(&format!("{name:>width$}", width = all(widths)));
            start = end;
        }
        line.trim_end().into()
    }

    fn line(&self, widths: &[usize], cells: &[String]) -> String {
        let mut line = String::new();
        for (index, (cell, &width)) in cells.iter().zip(widths).enumerate() {
            line.push_str(&" ".repeat(self.gap(index)));
            line.push_str(&match self.columns[index].is_name {
                true => format!("{cell:<width$}"),
                false => format!("{cell:>width$}"),
            });
        }
        line.trim_end_matches(' ').into()
    }
}

fn width(text: &str) -> usize {
    text.chars().count()
}

/// Wraps text at [`WIDTH`] characters between words; each line ends with a line feed.
pub(crate) fn wrap(text: &str) -> String {
    let mut lines = String::new();
    let mut used = 0;
    for word in text.split_whitespace() {
        let room = used > 0 && used + 1 + width(word) <= WIDTH;
        lines.push_str(if room {
            " "
        } else if used > 0 {
            "\n"
        } else {
            ""
        });
        used = if room { used + 1 } else { 0 } + width(word);
        lines.push_str(word);
    }
    lines + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: [&str; 3]) -> Row {
        Row {
            cells: cells.map(String::from).to_vec(),
            class: "",
        }
    }

    #[test]
    fn names_stand_left_and_figures_right() {
        let titles = || ["", "n", "x"].map(String::from).to_vec();
        let rows = || vec![row(["a", "1", ""]), row(["bcd", "100", "x"])];
        let mut table = Table::plain(titles(), 1, rows());
        assert_eq!(table.text(), "       n  x\na      1\nbcd  100  x\n");
        table.columns[1].group = "both of".into();
        table.columns[2].group = "both of".into();
        assert_eq!(
            table.text(),
            "     both of\n         n x\na        1\nbcd    100 x\n"
        );
        // The second column of names is empty.
        let table = Table::plain(titles(), 2, vec![row(["a", "", "2"])]);
        assert_eq!(table.text(), "   x\na  2\n");
    }

    #[test]
    fn lines_are_broken_between_words() {
        let text = "word ".repeat(50);
        let lines = wrap(&text);
        assert_eq!(lines.replace('\n', " "), text);
        assert!(lines.lines().all(|line| line.len() <= WIDTH));
        assert_eq!(lines.lines().count(), 3);
    }
}
