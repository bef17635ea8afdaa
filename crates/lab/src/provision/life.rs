//! A VM that runs its workload again and again, and what it has said.

use std::time::Instant;

use super::fleet::Run;
use crate::error::{Error, VmFault};
use crate::link::VmMessage;
use crate::vm::{PreparedVm, VmChild};

/// The life of such a VM.
pub struct Life<'a> {
    /// What it is made of.
    pub vm: &'a PreparedVm,
    /// Its emulator.
    pub child: VmChild,
    /// Rounds that it has verified.
    pub rounds: u64,
    /// Words that it has checked.
    pub words: u64,
    /// Words that were wrong.
    pub wrong_words: u64,
    /// Whether it may start anew, or break off in the middle of a line.
    pub may_boot: bool,
    /// Whether a line may begin in its middle: the VM was taken back to an earlier time.
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

    /// Takes in what it says until then. What is no count of its own goes to `take`.
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
                // Half a line of a life that was cut off.
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
