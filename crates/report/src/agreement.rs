//! Published figures beside ours: how far they are apart, and whether that is within the limit
//! that the scenario set beforehand.

use std::collections::BTreeSet;

use crate::measure::words;
use crate::number::short;
use crate::schema::{Published, RunResult};
use crate::shape;
use crate::text;

/// Most published figures that are shown.
const FIGURES_MAX: usize = 500;
/// Most sources that are named below the table.
const SOURCES_MAX: usize = 8;

/// A result's figures beside the published ones.
pub(crate) struct Agreement {
    pub rows: Vec<Row>,
    agreed: usize,
    all: usize,
    /// Where the published ones are from.
    sources: Vec<String>,
    /// Whether any row is about one case of several.
    has_cases: bool,
}

/// One figure.
pub(crate) struct Row {
    figure: String,
    system: String,
    case: String,
    published: String,
    ours: String,
    difference: String,
    limit: String,
    pub agrees: bool,
}

impl Agreement {
    /// Nothing where nobody has published anything.
    pub(crate) fn of(result: &RunResult) -> Option<Self> {
        if result.published.is_empty() {
            return None;
        }
        let shown = result.published.iter().take(FIGURES_MAX);
        let sources: BTreeSet<&str> = shown.clone().map(|p| p.source.as_str()).collect();
        let sources = sources.into_iter().take(SOURCES_MAX).map(text::sentence);
        Some(Self {
            rows: shown.clone().map(row).collect(),
            sources: sources.filter(|source| !source.is_empty()).collect(),
            agreed: result.published.iter().filter(|p| p.agrees()).count(),
            all: result.published.len(),
            has_cases: shown.clone().any(|p| !p.case.is_empty()),
        })
    }

    /// How many figures agree.
    pub(crate) fn counts(&self) -> String {
        format!("{} of {} agree", self.agreed, self.all)
    }

    /// How many figures agree, what that means, and where the published ones are from.
    pub(crate) fn sentence(&self) -> String {
        let mut text = self.counts();
        text.push_str(
            ": ours is within the limit, a share of the published figure that the scenario set. \
             What was not measured does not agree.",
        );
        if !self.sources.is_empty() {
            text.push_str(" Published in: ");
            text.push_str(&self.sources.join("; "));
            text.push('.');
        }
        text
    }

    /// How many columns at the left are names.
    pub(crate) fn names(&self) -> usize {
        2 + usize::from(self.has_cases)
    }

    /// The columns' headings.
    pub(crate) fn heading(&self) -> Vec<String> {
        let all = [
            "figure",
            "system",
            "case",
            "published",
            "ours",
            "difference",
            "limit",
            "agree",
        ];
        self.cells(all.map(String::from))
    }

    /// The columns of a row.
    pub(crate) fn row(&self, row: &Row) -> Vec<String> {
        self.cells([
            row.figure.clone(),
            row.system.clone(),
            row.case.clone(),
            row.published.clone(),
            row.ours.clone(),
            row.difference.clone(),
            row.limit.clone(),
            if row.agrees { "yes" } else { "NO" }.into(),
        ])
    }

    /// Without the column of cases where there are none.
    fn cells(&self, all: [String; 8]) -> Vec<String> {
        let cells = all.into_iter().enumerate();
        cells
            .filter(|(column, _)| *column != 2 || self.has_cases)
            .map(|(_, cell)| cell)
            .collect()
    }
}

fn row(published: &Published) -> Row {
    let system = text::name(&published.system);
    Row {
        figure: text::name(&words(&published.figure, published.over.is_some())),
        system: match &published.over {
            Some(over) => format!("{system} / {}", text::name(over)),
            None => system,
        },
        case: shape::settings(&published.case),
        published: short(published.value),
        ours: published.ours.map_or("-".into(), short),
        difference: difference(published),
        limit: format!("{} %", short_percent(published.within)),
        agrees: published.agrees(),
    }
}

/// Ours from the published one, in percent of that.
fn difference(published: &Published) -> String {
    let Some(ours) = published.ours else {
        return "-".into();
    };
    let share = (ours - published.value) / published.value.abs();
    if ours == published.value {
        "0.0 %".into()
    } else if share.is_finite() && (share * 100.0).abs() < 9999.95 {
        format!("{:+.1} %", share * 100.0)
    } else {
        // From nothing, or past all comparison.
        let sign = if ours > published.value { '+' } else { '-' };
        format!("{sign}>9999 %")
    }
}

fn short_percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent.fract() == 0.0 && percent.abs() < 1e4 {
        format!("{percent:.0}")
    } else {
        short(percent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn published(value: f64, ours: Option<f64>, within: f64) -> Published {
        Published {
            figure: "counters.flush_total".into(),
            system: "h-tpp".into(),
            over: Some("demeter".into()),
            case: vec![],
            value,
            ours,
            within,
            source: "the paper".into(),
        }
    }

    #[test]
    fn a_figure_agrees_within_its_limit() {
        let agrees = |value, ours, within| published(value, ours, within).agrees();
        assert!(agrees(8.0, Some(9.6), 0.2) && agrees(8.0, Some(6.4), 0.2));
        assert!(!agrees(8.0, Some(9.7), 0.2) && !agrees(8.0, Some(6.3), 0.2));
        assert!(!agrees(8.0, None, 9.0));
        // Published as nothing: only nothing agrees.
        assert!(agrees(0.0, Some(0.0), 0.2) && !agrees(0.0, Some(0.1), 0.2));
        assert!(agrees(-2.0, Some(-2.1), 0.1));
    }

    #[test]
    fn differences_are_of_the_published_one() {
        let difference = |value, ours| difference(&published(value, ours, 0.2));
        assert_eq!(difference(8.0, Some(6.0)), "-25.0 %");
        assert_eq!(difference(8.0, Some(8.0)), "0.0 %");
        assert_eq!(difference(0.0, Some(8.0)), "+>9999 %");
        assert_eq!(difference(8.0, None), "-");
        assert_eq!(difference(-2.0, Some(-1.0)), "+50.0 %");
    }
}
