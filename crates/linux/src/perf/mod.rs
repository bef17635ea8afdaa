//! perf events: the system calls, the rings that the kernel writes, and who may have them.

pub mod ring;
pub mod sys;

use std::fs;
use std::path::Path;

/// Above this level of `kernel.perf_event_paranoid`, which Debian's kernels have, CAP_PERFMON opens no
/// event.
pub const PARANOIA_MAX: i32 = 2;

/// The level of `kernel.perf_event_paranoid`, if there is one.
pub fn paranoia(root: &Path) -> Option<i32> {
    let text = fs::read_to_string(root.join("proc/sys/kernel/perf_event_paranoid")).ok()?;
    text.trim().parse().ok()
}
