//! perf events: system calls, rings and permissions.

pub mod ring;
pub mod sys;

use std::fs;
use std::path::Path;

/// Highest level of `kernel.perf_event_paranoid` at which CAP_PERFMON can open events. Debian's kernels have a higher
/// one.
pub const PARANOIA_MAX: i32 = 2;

/// The level of `kernel.perf_event_paranoid`, if it exists.
pub fn paranoia(root: &Path) -> Option<i32> {
    let text = fs::read_to_string(root.join("proc/sys/kernel/perf_event_paranoid")).ok()?;
    text.trim().parse().ok()
}
