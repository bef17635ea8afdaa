//! `demeter host --manage`: the controller in the host, as its own process, for a guest without an agent.

use demeter_policy::Pid;

use super::{AgentProcess, Fault, Rival, Testbed, Totals};

/// The controller, once there is a guest to manage.
#[derive(Debug, Default)]
pub struct HHistory(Option<AgentProcess>);

impl Rival for HHistory {
    fn begin(&mut self, bed: &Testbed<'_>, _guest: Pid) -> Result<(), Fault> {
        self.0 = Some(AgentProcess::start_controller(bed)?);
        Ok(())
    }

    fn pid(&self) -> Option<Pid> {
        self.0.as_ref().map(AgentProcess::pid)
    }

    fn check(&mut self) -> Result<(), Fault> {
        self.0.as_mut().map_or(Ok(()), AgentProcess::check)
    }

    /// It tells nobody; `pgmigrate_success` has what moved either way.
    fn moved_bytes(&mut self, _totals: &Totals) -> Option<(u64, u64)> {
        None
    }

    fn stop(self: Box<Self>) -> Result<(), Fault> {
        self.0.map_or(Ok(()), AgentProcess::stop)
    }
}
