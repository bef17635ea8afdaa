//! Nodes whose memory comes or goes in the timed phase.

use super::{Host, Vm};
use crate::error::SimError;
use crate::machine::cost::PS_PER_S;
use crate::machine::memory::NodeIndex;
use crate::program::Program;

/// When a node's memory comes online and goes offline, in seconds of the timed phase.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plug {
    pub(crate) node: NodeIndex,
    pub(crate) comes_at_s: Option<u64>,
    pub(crate) goes_at_s: Option<u64>,
}

impl Plug {
    /// Whether the memory is there when the timed phase begins.
    pub(crate) fn is_there_at_start(&self) -> bool {
        self.comes_at_s.is_none()
    }
}

impl<P: Program> Vm<P> {
    /// Does what is due in a second. The kernel works on an idle virtual CPU if there is one, or beside the first thread. Memory
    /// that could not be migrated is tried again each second.
    pub(crate) fn plug(
        &mut self,
        plug: &Plug,
        second: u64,
        host: &mut Host,
    ) -> Result<(), SimError> {
        if plug.comes_at_s == Some(second) {
            self.guest.come(plug.node);
        }
        if plug.goes_at_s.is_none_or(|at_s| second < at_s) || self.guest.frames_of(plug.node) == 0 {
            return Ok(());
        }
        let on = self.idle_at(self.start_ps + second * PS_PER_S).unwrap_or(0);
        let (_, mut ctx) = self.manager_on(on, host);
        ctx.guest.leave(plug.node, &mut ctx.actor);
        self.back_what_was_written(on, host)
    }
}
