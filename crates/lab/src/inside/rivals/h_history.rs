//! `demeter host --manage`: the controller in the host, as a separate process, for a guest without an agent.

use demeter_host_api::view::HostView;
use demeter_policy::Pid;

use super::{AgentProcess, Fault, Rival, Testbed, Totals};
use crate::inside::agent::controllers_view;
use crate::inside::kernel;

/// Debian's kernels boot with 3, which denies tracepoints to a process that only has CAP_PERFMON, as the controller
/// does.
const PERF_EVENT_PARANOID: (&str, &str) = ("proc/sys/kernel/perf_event_paranoid", "2");

/// The controller, once there is a guest to manage.
#[derive(Debug, Default)]
pub struct HHistory(Option<AgentProcess>);

impl Rival for HHistory {
    fn begin(&mut self, bed: &Testbed<'_>, _guest: Pid) -> Result<(), Fault> {
        let (setting, value) = PERF_EVENT_PARANOID;
        kernel::write(&bed.root, setting, value)?;
        self.0 = Some(AgentProcess::start_controller(bed)?);
        Ok(())
    }

    fn pid(&self) -> Option<Pid> {
        self.0.as_ref().map(AgentProcess::pid)
    }

    fn check(&mut self) -> Result<(), Fault> {
        self.0.as_mut().map_or(Ok(()), AgentProcess::check)
    }

    /// Unknown: the controller does not report it, and `pgmigrate_success` counts both directions.
    fn moved_bytes(&mut self, _totals: &Totals) -> Option<(u64, u64)> {
        None
    }

    /// Fails if the guest was not managed, since the result would be misleading.
    fn stop(self: Box<Self>) -> Result<(), Fault> {
        check_managed(&controllers_view()?)?;
        self.0.map_or(Ok(()), AgentProcess::stop)
    }
}

/// Fails if a controller with this view does not manage all its VMs by histories.
fn check_managed(view: &HostView) -> Result<(), Fault> {
    let unmanaged = |why: String| Err(Fault::Guest(format!("was not managed: {why}")));
    let mut others = view
        .vms
        .iter()
        .filter(|vm| vm.managed_by.as_deref() != Some("history"));
    match (view.vms.is_empty(), others.next()) {
        (true, _) => unmanaged("the controller knows no VM".into()),
        (false, None) => Ok(()),
        (false, Some(vm)) => unmanaged(vm.problem.clone().unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use demeter_host_api::view::VmView;

    use super::*;

    #[test]
    fn a_guest_that_was_left_alone_is_told_of() {
        let said = |managed_by: Option<&str>| {
            let vm = VmView {
                managed_by: managed_by.map(str::to_owned),
                problem: Some("no DAMON".into()),
                ..VmView::default()
            };
            let view = HostView {
                vms: vec![vm],
                ..HostView::default()
            };
            check_managed(&view).map_err(|e| e.to_string())
        };
        assert_eq!(said(Some("history")), Ok(()));
        assert!(said(None).unwrap_err().contains("no DAMON"));
        assert!(check_managed(&HostView::default()).is_err());
    }
}
