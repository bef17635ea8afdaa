//! Converts measurements to a result file, for `demeter report`.

use demeter_dirtylog::{Report, What};
use demeter_outcome::{Point, RunResult, Speed, SystemResult, Unit};

/// One entry for each measurement, named by how the log was read and cleared.
pub fn result(reports: &[Report]) -> RunResult {
    let end_ms = reports
        .iter()
        .filter_map(|report| Some(report.samples.last()?.until_ms));
    RunResult {
        scenario: "dirty-log".into(),
        on: "here".into(),
        duration_s: (end_ms.fold(0.0, f64::max) / 1000.0).ceil() as u64,
        systems: reports.iter().map(system).collect(),
        ..RunResult::default()
    }
}

fn system(report: &Report) -> SystemResult {
    let logged = || {
        let steps = report.steps.iter();
        steps.filter(|step| !matches!(step.what, What::Before | What::Disable))
    };
    let sum = |of: fn(&demeter_dirtylog::Step) -> Option<u64>| logged().filter_map(of).sum::<u64>();
    // A KVM without this counter gives no count, not 0.
    let counted = |of: fn(&demeter_dirtylog::Step) -> Option<u64>| {
        logged().any(|step| of(step).is_some()).then(|| sum(of))
    };
    let huge = |what| {
        let mut steps = report.steps.iter().filter(move |step| step.what == what);
        steps.next()?.counts.huge_blocks
    };
    let split = huge(What::Before).zip(huge(What::Sweep));
    let counters = [
        ("stage2_faults", counted(|step| step.counts.faults)),
        (
            "blocks_split",
            split.map(|(before, after)| before.saturating_sub(after)),
        ),
        ("log_passes", Some(report.settings.passes.into())),
        ("pages_sent", counted(|step| step.dirty_pages)),
        ("enable_ms", Some(report.ms(What::Enable) as u64)),
    ];
    let counters = counters
        .into_iter()
        .filter_map(|(name, count)| Some((name.to_owned(), count?)));
    let mops = |stores: f64, ms: f64| (ms > 0.0).then(|| stores / ms / 1000.0);
    let (stores, ms) = logged().fold((0.0, 0.0), |(stores, ms), step| {
        (
            stores + step.speed.stores_per_s * step.ms / 1000.0,
            ms + step.ms,
        )
    });
    let series = report.samples.iter().map(|sample| Point {
        t_s: sample.until_ms / 1000.0,
        speed: mops(sample.stores as f64, sample.for_ms),
        ..Point::default()
    });
    SystemResult {
        name: name(report),
        speed: Some(Speed::new(Unit::MOPS, mops(stores, ms), None)),
        counters: counters.collect(),
        series: series.collect(),
        ..SystemResult::default()
    }
}

/// `initially-set, 16 MiB, 1000 us`.
fn name(report: &Report) -> String {
    let settings = &report.settings;
    let chunk = settings.clear_chunk_mib.map(|mib| format!(", {mib} MiB"));
    let pause = (settings.clear_pause_us > 0).then(|| format!(", {} us", settings.clear_pause_us));
    let split = settings
        .eager_split_kib
        .map(|kib| format!(", split {kib} KiB"));
    let parts = [chunk, pause, split].into_iter().flatten();
    settings.protect.to_string() + &parts.collect::<String>()
}
