//! Values that a configuration may have.

use demeter_policy::{ByteCount, MIB};

use super::error::{ConfigError, wrong};

/// Maximum of `slowdown_max_percent`. Slow memory of more than eleven times the latency is no memory tier.
const SLOWDOWN_PERCENT_MAX: u32 = 1000;

/// 8 PiB. As much for each of [`VMS_MAX`](super::VMS_MAX) VMs still adds up to bytes in 64 bits.
pub(super) const MIB_MAX: u64 = 1 << 33;

pub(super) fn mib(count: u64) -> ByteCount {
    ByteCount(count.saturating_mul(MIB))
}

pub(super) fn check_share(table: &str, share: u32) -> Result<(), ConfigError> {
    match share {
        0 => Err(wrong(format!("{table}.share = 0"), "set 1 or more")),
        _ => Ok(()),
    }
}

pub(super) fn check_slowdown(table: &str, percent: Option<u32>) -> Result<(), ConfigError> {
    match percent.filter(|percent| !(1..=SLOWDOWN_PERCENT_MAX).contains(percent)) {
        Some(percent) => Err(wrong(
            format!("{table}.slowdown_max_percent = {percent}"),
            "give 1 to 1000: at most so many percent slower than with fast memory alone",
        )),
        None => Ok(()),
    }
}

pub(super) fn within(key: &str, value_mib: u64) -> Result<(), ConfigError> {
    if value_mib <= MIB_MAX {
        return Ok(());
    }
    let what = format!("{key} = {value_mib} is more than any machine has");
    Err(wrong(what, "give MiB"))
}
