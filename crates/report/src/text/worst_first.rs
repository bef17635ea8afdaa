//! Many scenarios, one line each: what our system does to each against others, worst first.

use demeter_outcome::{Case, NONE, RunResult, SystemResult};

use crate::OURS;
use crate::measure::Measure;
use crate::text::clean;
use crate::text::grid::{Row, Table, wrap};

/// Bytes of a MiB.
const MIB: f64 = (1u64 << 20) as f64;

/// Systems that manage nothing: yardsticks, no rivals.
const ORACLE: &str = "oracle";

const EXPLANATION: &str = "How many times as fast demeter is as with memory left alone (none), over the \
     whole run and over its last third; as the best other system, named; and as an oracle that had \
     the hot set in fast memory from the start, where there is one. Management CPU in % of one CPU.";

/// A result of cases as lines of text, the case in which we are slowest first.
pub fn worst_first(result: &RunResult) -> String {
    format!("{}\n{}", figures(result).text(), wrap(EXPLANATION))
}

/// Its table.
pub(crate) fn figures(result: &RunResult) -> Table {
    let mut lines: Vec<_> = result
        .cases
        .iter()
        .map(|case| line(case, result.duration_s as f64))
        .collect();
    lines.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let titles = [
        "scenario",
        "best rival",
        "x none",
        "end",
        "x rival",
        "x oracle",
        "up MiB",
        "down MiB",
        "mgmt %",
    ];
    let rows = lines.into_iter().map(|(_, cells)| Row { cells, class: "" });
    Table::plain(titles.map(String::from).into(), 2, rows.collect())
}

/// The line of a case, and how bad it is: the lesser of mean and last third against none.
fn line(case: &Case, duration_s: f64) -> (f64, Vec<String>) {
    let name = case.settings.iter().map(|(_, value)| value.as_str());
    let name = clean::name(&name.collect::<Vec<_>>().join(" "));
    let named = |name: &str| case.systems.iter().find(|s| s.name == name);
    let measure = Measure::of(case.systems.iter());
    let Some(ours) = named(OURS) else {
        let blanks = std::iter::repeat_n(String::from("-"), 8);
        return (f64::INFINITY, [name].into_iter().chain(blanks).collect());
    };
    let over = |other: Option<&SystemResult>| measure.speed(ours, other?);
    let at_end = |other: Option<&SystemResult>| {
        let (ours, theirs) = (ours.speed.as_ref()?, other?.speed.as_ref()?);
        Measure::Speed(ours.unit.clone()).times(ours.steady?, theirs.steady?)
    };
    let (mean, end) = (over(named(NONE)), at_end(named(NONE)));
    let is_rival = |s: &&SystemResult| ![OURS, NONE, ORACLE].contains(&s.name.as_str());
    let rivals = case.systems.iter().filter(is_rival);
    let rival = rivals
        .filter_map(|s| Some((measure.speed(ours, s)?, s)))
        .min_by(|(a, _), (b, _)| a.total_cmp(b));
    let times = |value: Option<f64>| value.map_or("-".into(), |v| format!("{v:.3}"));
    let mib = |bytes: Option<u64>| bytes.map_or("-".into(), |b| format!("{:.0}", b as f64 / MIB));
    let share = |s: f64| format!("{:.1}", s / duration_s * 100.0);
    let cells = vec![
        name,
        rival.map_or("-".into(), |(_, s)| clean::name(&s.name)),
        times(mean),
        times(end),
        times(rival.map(|(speed, _)| speed)),
        times(over(named(ORACLE))),
        mib(ours.bytes_promoted),
        mib(ours.bytes_demoted),
        ours.mgmt_cpu_s.map_or("-".into(), share),
    ];
    let worst = mean.into_iter().chain(end).fold(f64::INFINITY, f64::min);
    (worst, cells)
}

#[cfg(test)]
mod tests {
    use demeter_outcome::{Speed, Unit};

    use super::*;

    fn system(name: &str, mean: f64, end: f64) -> SystemResult {
        SystemResult {
            name: name.into(),
            speed: Some(Speed::new(Unit::MOPS, mean, Some(end))),
            bytes_promoted: Some(3 << 20),
            ..SystemResult::default()
        }
    }

    #[test]
    fn the_worst_comes_first_and_the_best_rival_is_named() {
        let case = |name: &str, systems| Case {
            group: 0,
            settings: vec![("scenario".into(), name.into())],
            systems,
        };
        let result = RunResult {
            duration_s: 60,
            cases: vec![
                case(
                    "good",
                    vec![system("none", 1.0, 1.0), system(OURS, 2.0, 2.0)],
                ),
                case(
                    "bad",
                    vec![
                        system("none", 1.0, 1.0),
                        system("linux", 0.5, 0.5),
                        system("memtis", 0.8, 0.8),
                        system(OURS, 1.0, 0.6),
                    ],
                ),
                case("unknown", vec![system("none", 1.0, 1.0)]),
            ],
            ..RunResult::default()
        };
        let text = worst_first(&result);
        let words = |n: usize| {
            let line = text.lines().nth(n).unwrap();
            line.split_whitespace()
                .map(String::from)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            words(1),
            [
                "bad", "memtis", "1.000", "0.600", "1.250", "-", "3", "-", "-"
            ]
        );
        assert_eq!(words(2)[..4], ["good", "-", "2.000", "2.000"]);
        assert_eq!(words(3)[0], "unknown");
    }
}
