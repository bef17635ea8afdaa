//! `demeter host` in the host, which resizes the fast memory of guests that have agents.

use std::fs;
use std::time::{Duration, Instant};

use demeter_host_api::body::PolicyChoice;
use demeter_policy::Pid;
use demeter_policy::provision::Policy;

use super::Fault;
use crate::inside::agent::{AgentProcess, ask_controller, controllers_view};
use crate::inside::init::mount;
use crate::inside::rivals::Rival;
use crate::inside::testbed::Testbed;
use crate::link::{GUESTS_MEMORY_DIR, Totals};
use crate::provision::is_settled;

/// Time limit for a guest to reach its initial size, and the polling interval. Its driver is emulated twice.
const SIZE_LIMIT: Duration = Duration::from_secs(120);
const SIZE_LOOK: Duration = Duration::from_millis(200);

/// The controller. It starts before the guests, and each gets its size before it populates its memory.
#[derive(Debug)]
pub struct Balloons {
    controller: AgentProcess,
    /// The policy of the timed phase; until then guests keep their initial sizes.
    policy: Policy,
}

impl Balloons {
    /// Prepares the guests' memory, and starts the controller.
    pub fn start(bed: &Testbed<'_>, policy: Policy) -> Result<Self, Fault> {
        let dir = GUESTS_MEMORY_DIR;
        fs::create_dir_all(dir).map_err(Fault::io("create", dir))?;
        // The emulator requests huge pages. Small ones on demand cost a KVM fault each, more time than agents would
        // spend on migration.
        mount("tmpfs", dir, "size=100%,huge=advise")?;
        Ok(Self {
            controller: AgentProcess::start_controller(bed)?,
            policy,
        })
    }
}

impl Rival for Balloons {
    fn size(&mut self, guest: &str) -> Result<(), Fault> {
        let deadline = Instant::now() + SIZE_LIMIT;
        loop {
            self.controller.check()?;
            // The controller may still be starting.
            let view = controllers_view();
            let vm = view.as_ref().ok();
            let vm = vm.and_then(|view| view.vms.iter().find(|vm| vm.name == guest));
            if vm.is_some_and(is_settled) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let problem = vm.and_then(|vm| vm.problem.as_deref());
                return Err(Fault::Guest(format!(
                    "{guest} did not get its size within {} s: {}",
                    SIZE_LIMIT.as_secs(),
                    problem.unwrap_or("no reason given")
                )));
            }
            std::thread::sleep(SIZE_LOOK);
        }
    }

    fn begin(&mut self, _bed: &Testbed<'_>, _guest: Pid) -> Result<(), Fault> {
        let choice = PolicyChoice {
            policy: self.policy,
        };
        let body = serde_json::to_string(&choice);
        let body = body.map_err(|e| Fault::io("encode", "a policy")(e.into()))?;
        ask_controller("PUT /v1/policy", &body).map(drop)
    }

    fn pid(&self) -> Option<Pid> {
        Some(self.controller.pid())
    }

    fn check(&mut self) -> Result<(), Fault> {
        self.controller.check()
    }

    /// Guests migrate their own memory.
    fn moved_bytes(&mut self, _totals: &Totals) -> Option<(u64, u64)> {
        Some((0, 0))
    }

    fn stop(self: Box<Self>) -> Result<(), Fault> {
        self.controller.stop()
    }
}
