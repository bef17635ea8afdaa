//! Marks at figures that need care, and their explanation.

use demeter_outcome::{HOST_NOISE_MAX, SystemResult};

use super::steady_of_oracle;
use crate::text::clean;
use crate::text::number::percent;

/// Mark of a system whose run the host disturbed.
const DISTURBED: char = '*';
/// Mark of a share of the oracle's speed above 100 %.
const ABOVE: char = '^';
/// A share that is printed as 100.0 % is not marked.
const ABOVE_MIN: f64 = 1.0005;

/// A system's name, with its best settings if it had several, and marked if disturbed.
pub(super) fn name(system: &SystemResult) -> String {
    let mut shown = clean::name(&system.name);
    if let Some(settings) = &system.settings {
        shown.push_str(&format!(" ({})", clean::name(settings)));
    }
    if system.metadata.is_disturbed() {
        shown.push(DISTURBED);
    }
    shown
}

/// A share of the oracle's performance, marked if above 100 %.
pub(super) fn of_oracle(share: f64) -> String {
    let mut shown = percent(share);
    if is_above(share) {
        shown.push(ABOVE);
    }
    shown
}

fn is_above(share: f64) -> bool {
    share >= ABOVE_MIN
}

/// Explanations of the marks in a table.
pub(super) fn notes(
    systems: &[SystemResult],
    mean: impl Fn(&SystemResult) -> Option<f64>,
) -> String {
    let mut notes = String::new();
    if systems.iter().any(|s| !s.other_settings.is_empty()) {
        notes.push_str(
            " In brackets stand the settings under which a system was best; the result file has the \
             others.",
        );
    }
    let disturbed = systems.iter().filter(|s| s.metadata.is_disturbed());
    let worst = disturbed.map(|s| s.metadata.noise()).reduce(f64::max);
    if let Some(worst) = worst {
        notes.push_str(&format!(
            " {DISTURBED} Disturbed: of the time of the VM's CPUs, or of the last third, the host took \
             more than {:.0} % for something else (at most {:.0} %).",
            HOST_NOISE_MAX * 100.0,
            worst * 100.0,
        ));
    }
    let shares = |s| [mean(s), steady_of_oracle(systems, s)];
    if systems.iter().flat_map(shares).flatten().any(is_above) {
        notes.push_str(&format!(
            " {ABOVE} More than the oracle had: no skill, but a luckier or less disturbed run, or a \
             scenario in which the oracle's placement is not the best."
        ));
    }
    notes
}
