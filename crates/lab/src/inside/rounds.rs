//! An endless job: the workload runs repeatedly, each time to its verified end, beside an agent that the host kills at
//! times. The host also kills and resets the whole VM, and ends the job.

use std::sync::{Arc, Mutex, PoisonError};

use demeter_workload::WorkloadEvent;

use super::agent::AgentProcess;
use super::host_link::{HostLink, Orders};
use super::own_program::OwnProgram;
use super::testbed::Testbed;
use super::{kernel, modules};
use crate::fault::Fault;
use crate::link::{Job, KILL_AGENT, VmMessage};
use crate::process_usage::{ProcessUsage, kernel_kib};

/// Runs rounds until the VM exits.
pub fn run(link: &mut HostLink, job: &Job) -> Result<(), Fault> {
    let bed = Testbed::vm();
    let root = &bed.root;
    kernel::prepare(root, job.scenario.machine.thp)?;
    modules::load_all(root)?;
    modules::online_for_all(root)?;
    let agent = Arc::new(Mutex::new(AgentProcess::start_for_all(&bed)?));
    obey(link.orders()?, Arc::clone(&agent));
    link.send(&bed.booted()?)?;
    loop {
        let mut workload = OwnProgram::start(&bed, job, 0)?;
        let verified = loop {
            match workload.next_event()? {
                WorkloadEvent::Ready { .. } | WorkloadEvent::Done { .. } => workload.go()?,
                WorkloadEvent::Loaded { .. }
                | WorkloadEvent::Interval { .. }
                | WorkloadEvent::Shift { .. } => {}
                WorkloadEvent::Verified { words, errors } => {
                    break VmMessage::Verified { words, errors };
                }
            }
            agent
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .check()?;
        };
        link.send(&verified)?;
        let agent = agent.lock().unwrap_or_else(PoisonError::into_inner).pid();
        // An agent that is just being killed is missed here, but not after the next round.
        if let Ok(agent) = ProcessUsage::of(root, agent) {
            let kernel_kib = kernel_kib(root).map_err(Fault::io("read", "/proc/meminfo"))?;
            link.send(&VmMessage::Uses { agent, kernel_kib })?;
        }
    }
}

/// Kills the agent with SIGKILL and starts another, at each order of the host. The thread ends with the link.
fn obey(mut orders: Orders, agent: Arc<Mutex<AgentProcess>>) {
    std::thread::spawn(move || {
        while let Ok(Some(order)) = orders.next_line() {
            if order != KILL_AGENT {
                continue;
            }
            let mut agent = agent.lock().unwrap_or_else(PoisonError::into_inner);
            agent.kill();
            match AgentProcess::start_for_all(&Testbed::vm()) {
                Ok(another) => *agent = another,
                Err(fault) => {
                    // The next check finds no agent, and the console has the cause.
                    eprintln!("lab-init: {fault}");
                    return;
                }
            }
        }
    });
}
