//! Demeter: the agent, as its own process.

use demeter_policy::Pid;

use super::{Agent, Fault, Rival, Totals};

impl Rival for Agent {
    fn pid(&self) -> Option<Pid> {
        Some(Agent::pid(self))
    }

    fn check(&mut self) -> Result<(), Fault> {
        Agent::check(self)
    }

    fn moved_bytes(&mut self, _totals: &Totals) -> Option<(u64, u64)> {
        Agent::moved_bytes(self)
    }

    fn stop(self: Box<Self>) -> Result<(), Fault> {
        Agent::stop(*self)
    }
}
