//! Merges the reports of several guests into one machine's reports.

use std::collections::VecDeque;
use std::mem::{Discriminant, discriminant};

use demeter_workload::Rate;

use super::Fault;
use crate::link::{Interval, ProgramFigure, Totals, VmMessage};

/// Maximum lead of one guest's reports over another's: one per second of the longest timed phase.
const AHEAD_MAX: usize = 4096;

/// Reports of guests that wait for the other guests' reports.
#[derive(Debug)]
pub struct ReportQueues {
    said: Vec<VecDeque<VmMessage>>,
}

impl ReportQueues {
    /// An empty queue for each of `guests` guests.
    pub fn new(guests: usize) -> Self {
        Self {
            said: vec![VecDeque::new(); guests],
        }
    }

    /// Adds a guest's next report.
    pub fn push(&mut self, guest: usize, report: VmMessage) -> Result<(), Fault> {
        let said = &mut self.said[guest];
        if said.len() >= AHEAD_MAX {
            return Err(Fault::Guest(format!(
                "number {} is {AHEAD_MAX} reports ahead of another",
                guest + 1
            )));
        }
        said.push_back(report);
        Ok(())
    }

    /// Whether a guest has finished and waits for the others.
    pub fn has_finished(&self, guest: usize) -> bool {
        self.said[guest].back() == Some(&VmMessage::Finished)
    }

    /// Drops a guest's reports, as it starts again.
    pub fn forget(&mut self, guest: usize) {
        self.said[guest].clear();
    }

    /// Returns one report of each guest, once all have arrived. All are of one kind. If one guest has an extra
    /// interval, it is dropped.
    pub fn next(&mut self) -> Result<Option<Vec<VmMessage>>, Fault> {
        loop {
            let fronts: Option<Vec<Discriminant<VmMessage>>> = self
                .said
                .iter()
                .map(|said| said.front().map(discriminant))
                .collect();
            let Some(fronts) = fronts else {
                return Ok(None);
            };
            if fronts.iter().all(|kind| *kind == fronts[0]) {
                return Ok(Some(
                    self.said
                        .iter_mut()
                        .filter_map(VecDeque::pop_front)
                        .collect(),
                ));
            }
            let surplus = |said: &&mut VecDeque<VmMessage>| {
                matches!(said.front(), Some(VmMessage::Interval(_)))
            };
            match self.said.iter_mut().find(surplus) {
                Some(said) => drop(said.pop_front()),
                None => {
                    return Err(Fault::Guest(format!(
                        "is out of step with others: {fronts:?}"
                    )));
                }
            }
        }
    }
}

/// Merges the reports of the named guests, with their fast memory if known. A single guest's report is unchanged.
pub fn merge(names: &[&str], fast_bytes: &[u64], mut reports: Vec<VmMessage>) -> Option<VmMessage> {
    if reports.len() < 2 {
        return reports.pop();
    }
    let figures = |rates: &[Option<Rate>]| {
        let each = names.iter().zip(rates).enumerate();
        each.map(|(index, (name, rate))| ProgramFigure {
            name: (*name).into(),
            unit: rate
                .map(|rate| rate.unit().name().into())
                .unwrap_or_default(),
            value: rate.map(Rate::value),
            is_elapsed: false,
            fast_bytes: fast_bytes.get(index).copied(),
        })
        .collect()
    };
    let mut merged = reports.into_iter().fold(Merged::default(), Merged::add);
    Some(match merged.last.take()? {
        VmMessage::Start { .. } => VmMessage::Start {
            hot_in_fast: merged.hot_in_fast(names.len()),
            totals: merged.totals,
        },
        VmMessage::Interval(_) => VmMessage::Interval(Interval {
            t_s: merged.t_s,
            rate: Rate::sum(&merged.rates),
            programs: figures(&merged.rates),
            hot_in_fast: merged.hot_in_fast(names.len()),
            totals: merged.totals,
        }),
        VmMessage::Done { .. } => VmMessage::Done {
            t_s: merged.t_s,
            rate: Rate::sum(&merged.rates),
            programs: figures(&merged.rates),
            totals: merged.totals,
            // It is of one VM's memory.
            estimate: None,
        },
        VmMessage::Verified { .. } => VmMessage::Verified {
            words: merged.words,
            errors: merged.errors,
        },
        VmMessage::AgentLog { .. } => {
            let named = names.iter().zip(&merged.texts);
            let text = named.map(|(name, text)| format!("== {name}\n{text}\n"));
            VmMessage::AgentLog {
                text: text.collect(),
            }
        }
        other => other,
    })
}

/// The combination of several reports of one kind.
#[derive(Debug, Default)]
struct Merged {
    t_s: f64,
    rates: Vec<Option<Rate>>,
    hot_in_fast: Vec<f64>,
    totals: Totals,
    words: u64,
    errors: u64,
    texts: Vec<String>,
    last: Option<VmMessage>,
}

impl Merged {
    fn add(mut self, mut report: VmMessage) -> Self {
        if let Some(totals) = report.totals_mut() {
            let totals = std::mem::take(totals);
            self.totals = match self.last {
                None => totals,
                Some(_) => self.totals.plus(totals),
            };
        }
        match &mut report {
            VmMessage::Start { hot_in_fast, .. } => self.hot_in_fast.extend(*hot_in_fast),
            VmMessage::Interval(interval) => {
                self.t_s = self.t_s.max(interval.t_s);
                self.rates.push(interval.rate);
                self.hot_in_fast.extend(interval.hot_in_fast);
            }
            VmMessage::Done { t_s, rate, .. } => {
                self.t_s = self.t_s.max(*t_s);
                self.rates.push(*rate);
            }
            VmMessage::Verified { words, errors } => {
                self.words = self.words.saturating_add(*words);
                self.errors = self.errors.saturating_add(*errors);
            }
            VmMessage::AgentLog { text } => self.texts.push(std::mem::take(text)),
            _ => {}
        }
        self.last = Some(report);
        self
    }

    /// The mean, if all guests report it.
    fn hot_in_fast(&self, guests: usize) -> Option<f64> {
        let shares = &self.hot_in_fast;
        (shares.len() == guests).then(|| shares.iter().sum::<f64>() / guests as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(t_s: f64, mops: f64, agent_s: f64) -> VmMessage {
        VmMessage::Interval(Interval {
            t_s,
            rate: Some(Rate::Mops(mops)),
            programs: vec![],
            hot_in_fast: Some(mops / 10.0),
            totals: Totals {
                cpu_s: [("agent_user".into(), agent_s)].into(),
                promoted_bytes: Some(5),
                ..Totals::default()
            },
        })
    }

    #[test]
    fn guests_wait_for_each_other_and_a_surplus_interval_is_left_out() {
        let mut lineup = ReportQueues::new(2);
        lineup.push(0, VmMessage::Filled).unwrap();
        assert_eq!(lineup.next().unwrap(), None);
        lineup.push(1, VmMessage::Filled).unwrap();
        let both = lineup.next().unwrap().unwrap();
        assert_eq!(both, [VmMessage::Filled, VmMessage::Filled]);
        for (guest, report) in [
            (0, interval(1.0, 1.0, 0.0)),
            (0, VmMessage::Finished),
            (1, VmMessage::Finished),
        ] {
            assert!(!lineup.has_finished(guest));
            lineup.push(guest, report).unwrap();
        }
        assert!(lineup.has_finished(0));
        let both = lineup.next().unwrap().unwrap();
        assert_eq!(both, [VmMessage::Finished, VmMessage::Finished]);
    }

    #[test]
    fn guests_out_of_step_and_far_ahead_are_faults() {
        let mut lineup = ReportQueues::new(2);
        lineup.push(0, VmMessage::Filled).unwrap();
        lineup.push(1, VmMessage::Finished).unwrap();
        let said = lineup.next().unwrap_err().to_string();
        assert!(said.contains("out of step"), "{said}");
        let mut lineup = ReportQueues::new(2);
        let pushed = (0..=AHEAD_MAX).find(|_| lineup.push(1, VmMessage::Filled).is_err());
        assert_eq!(pushed, Some(AHEAD_MAX));
    }

    #[test]
    fn speeds_and_counters_add_up_and_each_guest_has_its_figure() {
        let reports = vec![interval(1.0, 1.0, 0.5), interval(1.25, 2.0, 0.25)];
        let merged = merge(&["a", "b"], &[7], reports).unwrap();
        let VmMessage::Interval(merged) = merged else {
            panic!("{merged:?}")
        };
        assert_eq!((merged.t_s, merged.rate), (1.25, Some(Rate::Mops(3.0))));
        assert!((merged.hot_in_fast.unwrap() - 0.15).abs() < 1e-12);
        assert_eq!(merged.totals.cpu_s["agent_user"], 0.75);
        assert_eq!(
            (merged.totals.promoted_bytes, merged.totals.demoted_bytes),
            (Some(10), None)
        );
        let [a, b] = &merged.programs[..] else {
            panic!("{merged:?}")
        };
        assert_eq!(
            (&a.name[..], &a.unit[..], a.value),
            ("a", "Mops", Some(1.0))
        );
        assert_eq!(
            (a.fast_bytes, b.value, b.fast_bytes),
            (Some(7), Some(2.0), None)
        );
    }

    #[test]
    fn a_single_guests_reports_are_its_own() {
        let report = interval(1.0, 1.0, 0.5);
        assert_eq!(merge(&["vm"], &[], vec![report.clone()]), Some(report));
        let logs = ["x", "y"].map(|text| VmMessage::AgentLog { text: text.into() });
        let Some(VmMessage::AgentLog { text }) = merge(&["a", "b"], &[], logs.into()) else {
            panic!()
        };
        assert_eq!(text, "== a\nx\n== b\ny\n");
        // Latencies of several guests cannot be added.
        assert_eq!(Rate::sum(&[Some(Rate::LatencyNs(1.0)); 2]), None);
    }
}
