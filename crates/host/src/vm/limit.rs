//! The hard limit of a VM's process.

use std::time::Duration;

use super::VmTask;
use super::end::End;
use crate::hard_limit::{HardLimit, HardLimitError};
use crate::process::PeerProcess;

/// Time for the kernel to lower a cgroup's limit, which drops cached files first.
const LIMIT_CHANGE_MAX: Duration = Duration::from_secs(30);

impl VmTask {
    /// Sets up the hard limit of the VM's process, if configured.
    pub(super) async fn find_hard_limit(&mut self, process: PeerProcess) -> Result<(), End> {
        let Some(extra) = self.config.hard_limit_extra() else {
            return Ok(());
        };
        if !self
            .hard_limit
            .as_ref()
            .is_some_and(|limit| limit.is_of(process))
        {
            // Drop the previous process's limit first.
            self.hard_limit = None;
            let root = self.files.root.clone();
            let finding = self.outside.ask("looking for the VM's cgroup", move |_| {
                HardLimit::find(&root, process, extra)
            });
            self.hard_limit = Some(finding.await??);
        }
        Ok(())
    }

    /// Changes the hard limit, if any, and returns whether it has its proper value. Runs on a
    /// thread that may wait, because the kernel drops cached files before it returns.
    pub(super) async fn limit(
        &mut self,
        change: impl FnOnce(&mut HardLimit) -> Result<bool, HardLimitError> + Send + 'static,
    ) -> Result<bool, End> {
        let Some(mut limit) = self.hard_limit.take() else {
            return Ok(true);
        };
        // If the caller stops waiting, the change still completes and the limit is put back
        // afterwards.
        let changing = self.outside.ask_within(
            LIMIT_CHANGE_MAX,
            "changing the VM's memory.max",
            move |_| {
                let changed = change(&mut limit);
                (limit, changed)
            },
        );
        let (limit, changed) = changing.await?;
        let is_as_wanted = changed?;
        self.hard_limit = Some(limit);
        Ok(is_as_wanted)
    }
}
