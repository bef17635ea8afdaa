//! A fault of a scenario: one line that names the key and how to repair it.

use std::fmt::Display;
use std::ops::RangeInclusive;

/// Refuses a value that is not within its bounds.
pub(crate) fn within<T: PartialOrd + Display>(
    key: &str,
    value: T,
    bounds: RangeInclusive<T>,
) -> Result<(), String> {
    if bounds.contains(&value) {
        return Ok(());
    }
    let (least, most) = bounds.into_inner();
    Err(format!("{key} = {value}: must be {least} to {most}"))
}

/// Refuses 0.
pub(crate) fn at_least_one(key: &str, value: u64) -> Result<(), String> {
    match value {
        0 => Err(format!("{key} = 0: must be at least 1")),
        _ => Ok(()),
    }
}

/// Refuses what holds, with the text of what is wrong.
pub(crate) fn refuse_if(is_wrong: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if is_wrong { Err(what()) } else { Ok(()) }
}
