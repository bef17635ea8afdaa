//! Single tables without explanations, for documents.

use demeter_outcome::RunResult;

use crate::shape::Side;
use crate::text::agreement::Agreement;
use crate::text::grid::Table;
use crate::text::kvm::kvm_table;
use crate::text::{predicted, summary, worst_first};

/// The tables of a result to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "kebab-case")]
pub enum Part {
    /// Figures: a line for each system, or for each system of each case.
    Figures,
    /// Five figures of each system, beside an oracle.
    Brief,
    /// Published figures beside ours.
    Published,
    /// For a folder of scenarios: a table for each of our systems, a line for each scenario, the worst first.
    WorstFirst,
    /// The counts of a nested host's KVM.
    Kvm,
    /// Slowdown by size of fast memory, as agents estimated it and as measured.
    Predicted,
}

/// These tables as lines of text; empty if the result has none.
pub fn part(result: &RunResult, part: Part) -> String {
    match part {
        Part::Figures => {
            let (tables, _) = summary::tables(result);
            let tables: Vec<String> = tables.iter().map(Table::text).collect();
            tables.join("\n")
        }
        Part::Brief => summary::brief(result)
            .map(|table| table.text())
            .unwrap_or_default(),
        Part::Published => Agreement::of(result)
            .map(|agreement| agreement.table.text())
            .unwrap_or_default(),
        Part::WorstFirst => {
            let tables = worst_first::figures(result);
            let tables: Vec<String> = tables.iter().map(Table::text).collect();
            tables.join("\n")
        }
        Part::Predicted => predicted::table(result)
            .map(|table| table.text())
            .unwrap_or_default(),
        Part::Kvm => kvm_table(&Side::all(result))
            .map(|table| table.text())
            .unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use demeter_outcome::{Published, SystemResult};

    use super::*;

    #[test]
    fn a_part_is_a_piece_of_the_whole() {
        let text = include_str!("../../../outcome/tests/example.json");
        let mut result = RunResult::from_json(text).unwrap();
        let figures = part(&result, Part::Figures);
        assert!(figures.contains("demeter") && !figures.contains("last third"));
        assert!(crate::table(&result).starts_with(&figures));
        assert_eq!(part(&result, Part::Brief), "");
        assert_eq!(part(&result, Part::Published), "");
        assert_eq!(part(&result, Part::WorstFirst), "");
        assert_eq!(part(&result, Part::Kvm), "");
        assert_eq!(part(&result, Part::Predicted), "");
        let oracle = SystemResult {
            name: "oracle".into(),
            ..result.systems[0].clone()
        };
        result.systems.push(oracle);
        let brief = part(&result, Part::Brief);
        assert!(brief.lines().count() == 4, "{brief}");
        assert!(brief.lines().all(|line| line.len() <= 60), "{brief}");
        assert!(brief.ends_with('\n') && brief.contains("100.0"), "{brief}");
        result.systems.pop();
        result.systems[0].counters = [("kvm_exits".to_owned(), 3)].into();
        let kvm = part(&result, Part::Kvm);
        assert!(kvm.lines().count() == 2 && crate::table(&result).contains(&kvm));
        result.published.push(Published {
            figure: "mgmt_cpu_s".into(),
            system: "demeter".into(),
            over: None,
            case: vec![],
            value: 1.0,
            ours: Some(1.0),
            within: 0.1,
            source: "somebody".into(),
        });
        let published = part(&result, Part::Published);
        assert!(published.lines().count() == 2 && !published.contains("somebody"));
        assert!(crate::table(&result).contains(&published));
    }
}
