//! The systems under test, each behind the trait [`Rival`], which switches it on and off. A rival is a file here and a
//! line of [`starter`].
//!
//! A rival is switched on before memory is populated, as an administrator would at boot. This matters: kswapd gives up
//! a full fast node without demotion after 16 failed rounds. If demotion is enabled later, the kernel rarely wakes
//! kswapd again.

mod damon;
mod demeter;
mod h_history;
mod linux;
mod unmanaged;

use std::fmt;

use demeter_outcome::Estimate;
use demeter_policy::Pid;
use demeter_scenario::{Settings, System};

use super::agent::AgentProcess;
use super::counters::Counters;
use super::testbed::Testbed;
use crate::fault::Fault;
use crate::link::Totals;
use damon::Damon;
use demeter::Demeter;
use h_history::HHistory;
use linux::{HLinux, Linux};
use unmanaged::Unmanaged;

/// A running system under test.
pub trait Rival: fmt::Debug {
    /// A host's guest has booted and waits for its size.
    fn size(&mut self, _guest: &str) -> Result<(), Fault> {
        Ok(())
    }

    /// Starts the timed phase. The workload is process `target` with its descendants.
    fn begin(&mut self, _bed: &Testbed<'_>, _target: Pid) -> Result<(), Fault> {
        Ok(())
    }

    /// Its PID, if it is a process.
    fn pid(&self) -> Option<Pid> {
        None
    }

    /// Fails if it no longer runs.
    fn check(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    /// Bytes promoted and demoted so far, if counted. `totals` are the VM's current counters.
    fn moved_bytes(&mut self, totals: &Totals) -> Option<(u64, u64)>;

    /// The VM's current counters, with the bytes that this system moved.
    fn totals(&mut self, counters: &Counters) -> Result<Totals, Fault> {
        let mut totals = counters.read()?;
        let moved = self.moved_bytes(&totals);
        totals.promoted_bytes = moved.map(|(promoted, _)| promoted);
        totals.demoted_bytes = moved.map(|(_, demoted)| demoted);
        Ok(totals)
    }

    /// Its estimate of the slowdown by size of fast memory, if it makes one.
    fn estimate(&self) -> Option<Estimate> {
        None
    }

    /// Switches it off.
    fn stop(self: Box<Self>) -> Result<(), Fault>;
}

/// Switches a system on, with settings.
type Start = fn(&Testbed<'_>, &Settings) -> Result<Box<dyn Rival>, Fault>;

/// The start function of a system; none if the lab does not run it.
fn starter(system: System) -> Option<Start> {
    Some(match system {
        System::None | System::Oracle => |_, _| Ok(Box::new(Unmanaged)),
        System::Linux | System::GLinux => {
            |bed, settings| Ok(Box::new(Linux::start(&bed.root, settings)?))
        }
        System::HLinux => |bed, settings| Ok(Box::new(HLinux::start(&bed.root, settings)?)),
        System::Damon | System::HDamon => {
            |bed, settings| Ok(Box::new(Damon::start(&bed.root, settings)?))
        }
        System::HHistory => |_, _| Ok(Box::<HHistory>::default()),
        System::Demeter | System::DemeterDamon => |_, _| Ok(Box::<Demeter>::default()),
        _ => return None,
    })
}

/// Switches on the system of `settings`.
pub fn start(bed: &Testbed<'_>, settings: &Settings) -> Result<Box<dyn Rival>, Fault> {
    let system = settings.system;
    let start = starter(system).ok_or_else(|| Fault::Unsupported {
        what: format!("the lab does not run {system}"),
        hint: "run the scenario with --on sim",
    })?;
    start(bed, settings)
}

#[cfg(test)]
mod tests {
    use demeter_scenario::Place;

    use super::*;

    #[test]
    fn what_the_catalogue_says_runs_in_the_lab_is_a_rival_and_nothing_else_is() {
        for &system in System::ALL {
            let is_rival = starter(system).is_some();
            let runs = system.runs_on(Place::Lab) || system.runs_on(Place::Host);
            assert_eq!(is_rival, runs, "{system}");
        }
    }

    #[test]
    fn without_management_nothing_moves() {
        let mut none = start(&Testbed::vm(), &Settings::new(System::None, "")).unwrap();
        assert_eq!(none.moved_bytes(&Totals::default()), Some((0, 0)));
    }
}
