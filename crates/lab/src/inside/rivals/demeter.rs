//! Demeter: the agent, as a separate process.

use demeter_outcome::Estimate;
use demeter_policy::Pid;

use super::{AgentProcess, Fault, Rival, Testbed, Totals};

/// The agent, once there is a process to manage.
#[derive(Debug, Default)]
pub struct Demeter(Option<AgentProcess>);

impl Rival for Demeter {
    fn begin(&mut self, bed: &Testbed<'_>, target: Pid) -> Result<(), Fault> {
        let agent = self.0.insert(AgentProcess::start(bed, target)?);
        agent.await_up()
    }

    fn pid(&self) -> Option<Pid> {
        self.0.as_ref().map(AgentProcess::pid)
    }

    fn check(&mut self) -> Result<(), Fault> {
        self.0.as_mut().map_or(Ok(()), AgentProcess::check)
    }

    fn moved_bytes(&mut self, _totals: &Totals) -> Option<(u64, u64)> {
        self.0
            .as_mut()
            .map_or(Some((0, 0)), AgentProcess::moved_bytes)
    }

    fn estimate(&self) -> Option<Estimate> {
        self.0.as_ref()?.estimate()
    }

    fn stop(self: Box<Self>) -> Result<(), Fault> {
        self.0.map_or(Ok(()), AgentProcess::stop)
    }
}
