//! `demeter host` in the host, which gives guests with agents of their own their fast memory.

use std::fs;
use std::time::{Duration, Instant};

use demeter_host::api::PolicyChoice;
use demeter_policy::Pid;
use demeter_policy::provision::Policy;

use super::Fault;
use crate::inside::agent::{AgentProcess, ask_controller, controllers_view};
use crate::inside::init::mount;
use crate::inside::rivals::Rival;
use crate::inside::testbed::Testbed;
use crate::link::{GUESTS_MEMORY_DIR, Totals};
use crate::provision::is_settled;

/// How long a guest may take to get the size that it begins with, and between two looks at it. Its driver is emulated twice.
const SIZE_LIMIT: Duration = Duration::from_secs(120);
const SIZE_LOOK: Duration = Duration::from_millis(200);

/// The controller. It is there before the guests, and each has its size before it fills its memory.
#[derive(Debug)]
pub struct Balloons {
    controller: AgentProcess,
    /// By what it divides fast memory in the timed phase; until then guests keep what they begin with.
    policy: Policy,
}

impl Balloons {
    /// Makes room for the guests' memory, and starts the controller.
    pub fn start(bed: &Testbed<'_>, policy: Policy) -> Result<Self, Fault> {
        let dir = GUESTS_MEMORY_DIR;
        fs::create_dir_all(dir).map_err(Fault::io("create", dir))?;
        // The emulator advises huge pages. Backing small ones on demand took a fault of KVM each, and more time than
        // agents are willing to spend on moving.
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
            // It may not be up yet.
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

    /// Guests move their memory themselves.
    fn moved_bytes(&mut self, _totals: &Totals) -> Option<(u64, u64)> {
        Some((0, 0))
    }

    fn stop(self: Box<Self>) -> Result<(), Fault> {
        self.controller.stop()
    }
}
