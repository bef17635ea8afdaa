//! Tries several settings on a host, and recommends one.
//!
//! A setting is better if the guest keeps more of its speed while its writes are logged. Among nearly equal settings
//! the one with the shortest wait is best, because users of the guest notice waits.

use serde::Serialize;

use crate::offer::{EagerSplit, Offer};
use crate::report::{Report, What};
use crate::settings::{Protect, Settings};

/// Speeds are nearly equal if they differ by at most this part of the highest.
const NEARLY: f64 = 0.05;
/// On a quiet machine, speeds before logging differ by at most this part of the highest.
const QUIET: f64 = 0.1;
/// Number of chunks, where memory is cleared in chunks.
const CHUNKS: u64 = 16;
/// Pause after a chunk, if any, microseconds.
const PAUSE_US: u64 = 1000;

/// The settings to try. They keep guest and memory of `base`, and vary the use of the log.
pub fn tried(base: &Settings, offer: &Offer) -> Vec<Settings> {
    let memory_mib = base.vcpus as u64 * base.slice_mib;
    let chunk = (memory_mib / CHUNKS).max(1);
    let ways = [
        (Protect::Get, None, 0),
        (Protect::Manual, None, 0),
        (Protect::Manual, Some(chunk), 0),
        (Protect::InitiallySet, None, 0),
        (Protect::InitiallySet, Some(chunk), 0),
        (Protect::InitiallySet, Some(chunk), PAUSE_US),
    ];
    let splits = match &offer.eager_split {
        EagerSplit::Chunk { sizes_kib } => {
            let block = sizes_kib.iter().copied().find(|&kib| kib >= 2048);
            [Some(None), block.map(Some)]
        }
        _ => [Some(base.eager_split_kib), None],
    };
    let with = |eager_split_kib| {
        ways.iter().map(
            move |&(protect, clear_chunk_mib, clear_pause_us)| Settings {
                protect,
                clear_chunk_mib,
                clear_pause_us,
                eager_split_kib,
                ..base.clone()
            },
        )
    };
    let all = splits.into_iter().flatten().flat_map(with);
    all.filter(|settings| offer.allows(settings).is_ok())
        .collect()
}

/// The recommended setting.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Recommendation {
    /// Index among the reports.
    pub index: usize,
    /// Whether the shortest wait decided among nearly equal speeds.
    pub by_wait: bool,
}

/// The best report; `None` if there are none.
pub fn recommend(reports: &[Report]) -> Option<Recommendation> {
    let most = reports
        .iter()
        .map(|report| report.speed_kept)
        .fold(0.0, f64::max);
    let near = |report: &Report| report.speed_kept >= most * (1.0 - NEARLY);
    let nearly: Vec<usize> = (0..reports.len())
        .filter(|&index| near(&reports[index]))
        .collect();
    let wait = |index: &usize| reports[*index].worst_wait_us;
    let index = nearly
        .iter()
        .copied()
        .min_by(|a, b| wait(a).total_cmp(&wait(b)))?;
    Some(Recommendation {
        index,
        by_wait: nearly.len() > 1,
    })
}

/// Difference of the speeds before logging, which should be equal, as a part of the highest.
fn spread(reports: &[Report]) -> f64 {
    let before = reports.iter().flat_map(|report| &report.steps);
    let before = before.filter(|step| step.what == What::Before);
    let (least, most) = before.fold((f64::INFINITY, 0.0), |(least, most): (f64, f64), step| {
        let speed = step.speed.stores_per_s;
        (least.min(speed), most.max(speed))
    });
    if most > 0.0 { 1.0 - least / most } else { 0.0 }
}

/// The reports as a table, and the recommendation.
pub fn table(reports: &[Report]) -> String {
    let mut text = String::from(
        "protect        chunk MiB  pause us  split KiB   enable ms   passes ms   speed kept %  worst wait ms\n",
    );
    for report in reports {
        let Settings {
            protect,
            clear_chunk_mib,
            clear_pause_us,
            eager_split_kib,
            ..
        } = &report.settings;
        let or_dash = |value: &Option<u64>| value.map_or("-".into(), |value| value.to_string());
        let passes = [What::Sweep, What::Get, What::Clear].map(|what| report.ms(what));
        text.push_str(&format!(
            "{:<14} {:>9} {clear_pause_us:>9} {:>10} {:>11.2} {:>11.1} {:>14.1} {:>14.1}\n",
            protect.to_string(),
            or_dash(clear_chunk_mib),
            or_dash(eager_split_kib),
            report.ms(What::Enable),
            passes.iter().sum::<f64>(),
            report.speed_kept * 100.0,
            report.worst_wait_us / 1000.0,
        ));
    }
    if let Some(best) = recommend(reports) {
        let why = match best.by_wait {
            true => "others keep nearly as much speed; it has the shortest wait of these",
            false => "it keeps the most speed",
        };
        text.push_str(&format!(
            "\nTake: {} ({why}).\n",
            reports[best.index].settings.line()
        ));
    }
    let spread = spread(reports);
    if spread > QUIET {
        text.push_str(&format!(
            "The machine is not quiet: speeds before logging differ by {:.0} %. Measure again before you believe it.\n",
            spread * 100.0
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::{offer, report};

    #[test]
    fn what_the_kernel_lacks_is_not_tried() {
        let mut offer = offer();
        let base = Settings::default();
        let all = tried(&base, &offer);
        assert_eq!(all.len(), 6);
        assert!(all.iter().all(|settings| settings.check().is_ok()));
        assert_eq!(all[2].clear_chunk_mib, Some(16));
        offer.initially_set = false;
        assert_eq!(tried(&base, &offer).len(), 3);
        offer.manual = false;
        let left = tried(&base, &offer);
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].protect, Protect::Get);
    }

    #[test]
    fn on_arm_each_is_tried_with_and_without_eager_splitting() {
        let mut offer = offer();
        offer.eager_split = EagerSplit::Chunk {
            sizes_kib: vec![4, 2048, 1 << 20],
        };
        let all = tried(&Settings::default(), &offer);
        let split = |kib| {
            all.iter()
                .filter(|settings| settings.eager_split_kib == kib)
                .count()
        };
        assert_eq!((all.len(), split(None), split(Some(2048))), (12, 6, 6));
    }

    #[test]
    fn speed_decides_and_among_equals_the_shortest_wait() {
        let report = |logged, wait| report(Settings::default(), 100.0, logged, wait);
        let best = |reports: &[Report]| recommend(reports).unwrap();
        let clear = best(&[report(50.0, 1.0), report(90.0, 500.0), report(70.0, 2.0)]);
        assert_eq!((clear.index, clear.by_wait), (1, false));
        let close = best(&[report(90.0, 500.0), report(88.0, 20.0), report(80.0, 1.0)]);
        assert_eq!((close.index, close.by_wait), (1, true));
        assert_eq!(recommend(&[]), None);
        let text = table(&[report(50.0, 1.0), report(90.0, 500.0)]);
        assert!(text.contains("it keeps the most speed"), "{text}");
        assert!(!text.contains("not quiet"), "{text}");
    }

    #[test]
    fn a_machine_that_is_not_quiet_is_told() {
        let report = |before| report(Settings::default(), before, 50.0, 1.0);
        let text = table(&[report(100.0), report(91.0), report(60.0)]);
        assert!(text.contains("differ by 40 %"), "{text}");
    }
}
