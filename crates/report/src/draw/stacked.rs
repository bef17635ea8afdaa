//! Stacked bars of CPU time or invalidations, one per system, by cause or kind.

use std::collections::BTreeSet;

use demeter_outcome::{Role, SystemResult, role};

use crate::draw::bars::{Bar, Bars, Cluster, Part};
use crate::draw::lines::SYSTEMS_MAX;
use crate::draw::palette;
use crate::shape::Side;
use crate::text::clean;
use crate::text::number::{count, short};

/// Prefix of invalidation counters.
pub(crate) const FLUSH: &str = "flush_";
/// Their title.
pub(crate) const FLUSHES: &str = "Invalidations of translations";
/// The counter that is the sum of the others.
pub(crate) const FLUSH_TOTAL: &str = "flush_total";
/// Maximum number of parts shown separately.
const PARTS_MAX: usize = 12;

/// The quantity of stacked bars.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Split {
    /// CPU seconds by cause.
    Cpu,
    /// Invalidations of translations by kind.
    Flushes,
}

/// The parts that are drawn, each with its class, in order.
pub(crate) struct Parts {
    split: Split,
    pub(crate) parts: Vec<(String, palette::Class)>,
}

impl Split {
    /// The parts of one system.
    fn of(self, system: &SystemResult) -> Vec<(&str, f64)> {
        match self {
            Self::Cpu => {
                let causes = system.cpu_s.iter().map(|(cause, s)| (cause.as_str(), *s));
                causes
                    .filter(|(cause, _)| role(cause) != Some(Role::Work))
                    .collect()
            }
            Self::Flushes => flushes(system).map(|(kind, n)| (kind, n as f64)).collect(),
        }
    }

    /// An amount with its unit.
    fn show(self, amount: f64) -> String {
        match self {
            Self::Cpu => format!("{} s", short(amount)),
            Self::Flushes => count(amount as u64),
        }
    }

    /// A part's name for people.
    pub(crate) fn label(self, part: &str) -> String {
        let part = match self {
            Self::Cpu => part,
            Self::Flushes => part.strip_prefix(FLUSH).unwrap_or(part),
        };
        clean::name(&part.replace('_', " "))
    }
}

/// A system's invalidations by kind, without the total.
pub(crate) fn flushes(system: &SystemResult) -> impl Iterator<Item = (&str, u64)> {
    let counters = system.counters.iter().map(|(name, n)| (name.as_str(), *n));
    counters.filter(|(name, _)| name.starts_with(FLUSH) && *name != FLUSH_TOTAL)
}

impl Parts {
    /// The parts that are not zero for some system.
    pub(crate) fn of<'a>(split: Split, systems: impl Iterator<Item = &'a SystemResult>) -> Self {
        let all = systems.flat_map(|system| split.of(system));
        let names: BTreeSet<(usize, &str)> = all
            .filter(|(_, amount)| *amount > 0.0)
            .map(|(part, _)| (palette::rank(part), part))
            .collect();
        let names = names.iter().map(|(_, part)| *part).take(PARTS_MAX);
        let classes = palette::parts(names.clone());
        Self {
            split,
            parts: names.map(str::to_owned).zip(classes).collect(),
        }
    }

    /// Whether there is nothing to draw.
    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Class and label of each part.
    pub(crate) fn legend(&self) -> impl Iterator<Item = (&str, String)> {
        let parts = self.parts.iter();
        parts.map(|(part, class)| (class.as_str(), self.split.label(part)))
    }

    /// A cluster for each side, with a bar for each system.
    pub(crate) fn bars(&self, sides: &[Side]) -> Bars {
        let (title, unit) = match self.split {
            Split::Cpu => ("CPU seconds by cause", "s"),
            Split::Flushes => ("Invalidations by kind", ""),
        };
        let cluster = |side: &Side| Cluster {
            heading: side.heading.clone(),
            bars: side
                .systems
                .iter()
                .take(SYSTEMS_MAX)
                .map(|system| self.bar(system))
                .collect(),
        };
        Bars {
            title: title.into(),
            unit,
            clusters: sides.iter().map(cluster).collect(),
            reference: None,
        }
    }

    fn bar(&self, system: &SystemResult) -> Bar {
        let name = clean::name(&system.name);
        let amounts = self.split.of(system);
        let parts = self.parts.iter().filter_map(|(part, class)| {
            let (_, amount) = *amounts.iter().find(|(found, _)| found == part)?;
            let label = self.split.label(part);
            Some(Part {
                class: class.clone(),
                amount,
                title: format!("{name}: {label} {}", self.split.show(amount)),
            })
        });
        let parts: Vec<Part> = parts.collect();
        let sum = parts.iter().map(|part| part.amount).sum();
        Bar {
            name: name.clone(),
            parts,
            extremes: None,
            end: self.split.show(sum),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system() -> SystemResult {
        let cpu_s = [
            ("compute", 9.0),
            ("idle", 5.0),
            ("track", 0.5),
            ("migrate", 0.25),
            ("exit", 0.0),
            ("another", 1.0),
        ];
        let counters = [
            ("flush_total", 7),
            ("flush_guest_remote", 4),
            ("flush_host_invept", 3),
            ("samples", 99),
        ];
        SystemResult {
            name: "demeter".into(),
            cpu_s: cpu_s.map(|(cause, s)| (cause.to_owned(), s)).into(),
            counters: counters.map(|(name, n)| (name.to_owned(), n)).into(),
            ..SystemResult::default()
        }
    }

    #[test]
    fn management_is_drawn_by_stage_and_the_work_is_not() {
        let system = system();
        let parts = Parts::of(Split::Cpu, [&system].into_iter());
        let labels: Vec<String> = parts.legend().map(|(_, label)| label).collect();
        assert_eq!(labels, ["track", "migrate", "another"]);
        let side = Side {
            heading: "silo".into(),
            systems: &[system],
        };
        let bars = parts.bars(&[side]);
        let bar = &bars.clusters[0].bars[0];
        let amounts: Vec<f64> = bar.parts.iter().map(|part| part.amount).collect();
        assert_eq!(amounts, [0.5, 0.25, 1.0]);
        assert_eq!((bar.end.as_str(), bars.unit), ("1.75 s", "s"));
        assert_eq!(bar.parts[0].title, "demeter: track 0.500 s");
    }

    #[test]
    fn invalidations_are_drawn_by_kind_and_their_sum_is_not_a_kind() {
        let system = system();
        let parts = Parts::of(Split::Flushes, [&system].into_iter());
        let labels: Vec<String> = parts.legend().map(|(_, label)| label).collect();
        assert_eq!(labels, ["guest remote", "host invept"]);
        let side = Side {
            heading: String::new(),
            systems: &[system],
        };
        let bars = parts.bars(std::slice::from_ref(&side));
        assert_eq!(bars.clusters[0].bars[0].end, "7");
        let none = SystemResult::default();
        assert!(Parts::of(Split::Flushes, [&none].into_iter()).is_empty());
    }
}
