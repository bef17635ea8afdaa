//! The audit log: every change of a size, and who asked for it.
//!
//! It goes to the events and, at level `info`, to the program's log, which outlives the controller.

use super::{Deciding, of_pool, unix_ms};
use crate::controller::{LogEntry, What};
use crate::view::EventLog;
use crate::{PoolName, VmName};

impl Deciding {
    /// Logs what the controllers did since the last step, and who asked for it.
    pub(super) fn audit(&mut self, by: &str) {
        for (pool, controller) in self.controller.iter_mut() {
            for entry in controller.take_log() {
                tell(&self.log, pool, entry, Some(by));
            }
        }
    }

    /// Logs an event that somebody asked for.
    pub(super) fn note(&mut self, vm: Option<&VmName>, what: String, by: &str) {
        let vm = vm.map(ToString::to_string);
        tracing::info!("{}: {what}; asked by {by}", vm.as_deref().unwrap_or("host"));
        self.log.push_by(unix_ms(), vm, what, Some(by.into()));
        self.stale = true;
    }
}

/// Logs an entry of a pool's controller.
pub(super) fn tell(log: &EventLog, pool: &PoolName, entry: LogEntry, by: Option<&str>) {
    let vm = entry.vm.map(|vm| vm.to_string());
    let what = match vm {
        Some(_) => entry.what.to_string(),
        None => format!("{}{}", of_pool(pool), entry.what),
    };
    let about = vm.as_deref().unwrap_or("host");
    // All other entries happen without a request.
    let by = by.filter(|_| matches!(entry.what, What::Desired(_) | What::Forgiven));
    match by {
        Some(by) => tracing::info!("{about}: {what}; asked by {by}"),
        None => tracing::debug!("{about}: {what}"),
    }
    log.push_by(unix_ms(), vm, what, by.map(Into::into));
}
