//! Compares published figures with measured ones, within limits that the scenario sets.

use std::collections::BTreeSet;

use demeter_outcome::{Figure, Published, RunResult};

use crate::shape;
use crate::text::clean;
use crate::text::grid::{Row, Table};
use crate::text::number::short;

/// Maximum number of published figures shown.
const FIGURES_MAX: usize = 500;
/// Maximum number of sources named below the table.
const SOURCES_MAX: usize = 8;

/// The comparison of a result's figures with published ones.
pub(crate) struct Agreement {
    pub table: Table,
    /// Number of figures that agree.
    pub counts: String,
    /// Sources of the published figures.
    sources: Vec<String>,
}

impl Agreement {
    /// `None` if nothing was published.
    pub(crate) fn of(result: &RunResult) -> Option<Self> {
        if result.published.is_empty() {
            return None;
        }
        let shown = || result.published.iter().take(FIGURES_MAX);
        let sources: BTreeSet<&str> = shown().map(|p| p.source.as_str()).collect();
        let sources = sources.into_iter().take(SOURCES_MAX).map(clean::sentence);
        let titles = [
            "figure",
            "system",
            "case",
            "published",
            "ours",
            "difference",
            "limit",
            "agree",
        ];
        let agreed = result.published.iter().filter(|p| p.agrees()).count();
        Some(Self {
            table: Table::plain(
                titles.map(String::from).to_vec(),
                3,
                shown().map(row).collect(),
            ),
            counts: format!("{agreed} of {} agree", result.published.len()),
            sources: sources.filter(|source| !source.is_empty()).collect(),
        })
    }

    /// The number of agreeing figures, its meaning, and the sources.
    pub(crate) fn sentence(&self) -> String {
        let mut text = self.counts.clone();
        text.push_str(
            ": ours is within the limit, a share of the published figure that the scenario set, and a \
             ratio is on the same side of 1. What was not measured does not agree.",
        );
        if !self.sources.is_empty() {
            text.push_str(" Published in: ");
            text.push_str(&self.sources.join("; "));
            text.push('.');
        }
        text
    }
}

fn row(published: &Published) -> Row {
    let (system, agrees) = (clean::name(&published.system), published.agrees());
    let cells = [
        clean::name(&words(published)),
        match &published.over {
            Some(over) => format!("{system} / {}", clean::name(over)),
            None => system,
        },
        shape::settings(&published.case),
        short(published.value),
        published.ours.map_or("-".into(), short),
        difference(published),
        format!("{} %", short_percent(published.within)),
        match agrees {
            true => "yes",
            false if published.is_reversed() => "NO, reversed",
            false => "NO",
        }
        .into(),
    ];
    Row {
        cells: cells.into(),
        class: if agrees { "" } else { "apart" },
    }
}

/// A figure's name in words; unchanged if a later version added it.
fn words(published: &Published) -> String {
    let figure = Figure::try_from(published.figure.clone());
    figure.map_or_else(
        |_| published.figure.replace('_', " "),
        |figure| figure.words(published.over.is_some()),
    )
}

/// Difference of the measured value from the published one, in percent of the latter.
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
        // The published value is zero, or the ratio is huge.
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
        // A ratio must agree on which system is better, unless it was published as about 1.
        assert!(!agrees(1.19, Some(0.87), 0.3) && !agrees(1.19, Some(1.0), 0.3));
        assert!(agrees(1.19, Some(1.01), 0.3) && !agrees(0.8, Some(1.01), 0.3));
        assert!(agrees(0.97, Some(1.02), 0.3));
        // Figures other than ratios have no better side.
        let amount = Published {
            over: None,
            ..published(1.19, Some(0.87), 0.3)
        };
        assert!(amount.agrees());
        // A published zero agrees with zero only.
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
