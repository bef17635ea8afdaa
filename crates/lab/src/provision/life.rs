//! A VM that runs its workload repeatedly, and its reports.

use std::time::Instant;

use super::fleet::Run;
use crate::error::{Error, VmFault};
use crate::link::VmMessage;
use crate::vm::{PreparedVm, VmChild};

/// The state of such a VM.
pub struct Life<'a> {
    /// Its parts.
    pub vm: &'a PreparedVm,
    /// Its emulator.
    pub child: VmChild,
    /// Number of verified rounds.
    pub rounds: u64,
    /// Number of words checked.
    pub words: u64,
    /// Number of wrong words.
    pub wrong_words: u64,
    /// Whether it may reboot, or stop in the middle of a line.
    pub may_boot: bool,
    /// Whether a line may begin in its middle, since the VM was restored from a snapshot.
    pub may_stutter: bool,
}

impl<'a> Life<'a> {
    /// Starts it.
    pub fn start(vm: &'a PreparedVm) -> Result<Self, Error> {
        Ok(Self {
            child: vm.start()?,
            vm,
            rounds: 0,
            words: 0,
            wrong_words: 0,
            may_boot: true,
            may_stutter: false,
        })
    }

    /// Processes its reports until then. Reports other than counts go to `take`.
    pub fn hear_until(
        &mut self,
        until: Instant,
        run: &Run,
        take: &mut dyn FnMut(&VmMessage),
    ) -> Result<(), Error> {
        loop {
            let report = match self.child.report_until(until, run.stop) {
                Ok(Some(report)) => report,
                Ok(None) => return Ok(()),
                // Half a line from before an interruption.
                Err(VmFault::Nonsense(_)) if self.may_boot || self.may_stutter => continue,
                Err(fault) => return Err(self.vm.error(fault)),
            };
            take(&report);
            match report {
                VmMessage::Booted { .. } if self.may_boot => self.may_boot = false,
                VmMessage::Booted { .. } => {
                    let what = "it started anew by itself; see its console".into();
                    return Err(self.vm.error(VmFault::Job(what)));
                }
                VmMessage::Verified { words, errors } => {
                    self.rounds += 1;
                    self.words += words;
                    self.wrong_words += errors;
                }
                VmMessage::Failed { what } => return Err(self.vm.error(VmFault::Job(what))),
                _ => {}
            }
        }
    }
}
