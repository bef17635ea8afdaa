//! Errors in a scenario: one line that names the key and the fix.

use std::fmt::Display;
use std::ops::RangeInclusive;

/// Rejects a value out of bounds.
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

/// Rejects 0.
pub(crate) fn at_least_one(key: &str, value: u64) -> Result<(), String> {
    match value {
        0 => Err(format!("{key} = 0: must be at least 1")),
        _ => Ok(()),
    }
}

/// Returns an error if the condition holds.
pub(crate) fn refuse_if(is_wrong: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if is_wrong { Err(what()) } else { Ok(()) }
}

/// Whether the name is allowed for files, sockets and headings.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    (1..=64).contains(&name.len()) && name.chars().all(is_plain)
}

/// Rejects a list with duplicates.
pub(crate) fn unique<T: PartialEq + Display>(key: &str, list: &[T]) -> Result<(), String> {
    for (i, item) in list.iter().enumerate() {
        refuse_if(list[..i].contains(item), || {
            format!("{key}: \"{item}\" stands twice; remove one")
        })?;
    }
    Ok(())
}
