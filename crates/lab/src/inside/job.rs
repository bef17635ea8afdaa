//! One job from start to end: start the system, populate memory, measure, stop the system, verify.
//!
//! Everything runs on one thread, which the workload's own events wake. No separate timer can disagree with the
//! workload, and measuring costs the same under every system.

use demeter_policy::Pid;
use demeter_policy::provision::ProvisionerKind;

use super::agent::{self, AgentProcess};
use super::counters::Counters;
use super::delay::Delay;
use super::host_link::HostLink;
use super::kernel;
use super::loopback;
use super::modules;
use super::nested::{self, Balloons};
use super::observer::Observer;
use super::plugged;
use super::rivals::{self, Rival};
use super::rounds;
use super::testbed::Testbed;
use super::ticker::Ticker;
use super::workload::{HotSet, Next, Workload};
use super::zones::nodes_free_mib;
use crate::fault::Fault;
use crate::link::{Interval, Job, Nesting, VmMessage};

/// Runs the job and reports over the link.
pub fn run(link: &mut HostLink, job: &Job) -> Result<(), Fault> {
    if job.rounds {
        return rounds::run(link, job);
    }
    let bed = Testbed {
        agent_has_targets: job.scenario.workload.has_cgroups(),
        ..Testbed::vm_of(&job.scenario.machine)?
    };
    let root = &bed.root;
    kernel::prepare(root, job.scenario.machine.thp)?;
    modules::load_all(root)?;
    plugged::hold_back(root, &bed.plugs)?;
    let has_driver = job.provisioner == Some(ProvisionerKind::DemeterBalloon);
    let mut relay = has_driver
        .then(|| AgentProcess::start_relay(&bed))
        .transpose()?;
    if !job.level.is_guest() || job.provisioner.is_some() {
        link.send(&bed.booted()?)?;
    }
    if job.provisioner.is_some() {
        link.wait_for_go()?;
        link.send(&VmMessage::Sized {
            fast_free_mib: nodes_free_mib(root, bed.tiers.fastest().to_vec())?,
            slow_free_mib: nodes_free_mib(root, bed.tiers.slower())?,
        })?;
    }
    if let Some(relay) = &mut relay {
        relay.check()?;
    }
    let _ticker = Ticker::start();
    if !job.launches.is_empty() {
        loopback::up().map_err(Fault::io("switch on", "the loopback interface"))?;
    }
    if let Nesting::Host { guests, policy } = &job.level {
        let rival: Box<dyn Rival> = match policy {
            Some(policy) => Box::new(Balloons::start(&bed, *policy)?),
            None => rivals::start(&bed, &job.settings)?,
        };
        return nested::watch(link, &bed, guests, rival);
    }
    let rival = rivals::start(&bed, &job.settings)?;
    let mut workload = Workload::new(&bed, job)?;
    let outcome = populate_and_measure(link, &bed, job, &mut workload, relay, rival);
    for log in workload.logs(&outcome) {
        link.send(&VmMessage::Program(log))?;
    }
    outcome
}

/// Runs the job from the population of memory on.
fn populate_and_measure(
    link: &mut HostLink,
    bed: &Testbed<'_>,
    job: &Job,
    workload: &mut Workload<'_>,
    mut relay: Option<AgentProcess>,
    rival: Box<dyn Rival>,
) -> Result<(), Fault> {
    let mut hot = fill(bed, workload)?;
    if job.level == (Nesting::Guest { is_tiered: false }) {
        // With one node, the VM cannot see which memory is fast.
        hot = None;
    }
    let delay = match job.level.is_guest() {
        false => Some(Delay::arm(&bed.root)?),
        // Its host does that.
        true => {
            link.send(&VmMessage::Filled)?;
            link.wait_for_go()?;
            None
        }
    };
    say_placements(link, bed, job, workload)?;
    let has_driver = relay.is_some();
    if job.settings.system.has_agent()
        && let Some(relay) = relay.take()
    {
        // The agent replaces the relay, as the host's port accepts one connection.
        relay.stop()?;
    }
    let outcome = watch(bed, workload, hot, rival, &mut |report| {
        let is_awaited = job.provisioner.is_some() || job.level.is_guest();
        let waits = is_awaited && matches!(report, VmMessage::Start { .. });
        link.send(&report)?;
        match waits {
            true => link.wait_for_go(),
            false => Ok(()),
        }
    });
    drop(delay);
    if job.settings.system.has_agent() || has_driver {
        link.send(&VmMessage::AgentLog {
            text: agent::log_tail(bed),
        })?;
        agent::send_recording(link)?;
    }
    outcome?;
    say_placements(link, bed, job, workload)?;
    if let Some((words, errors)) = workload.verify()? {
        link.send(&VmMessage::Verified { words, errors })?;
    }
    Ok(())
}

/// On a machine of listed nodes, logs on which of them memory lies.
fn say_placements(
    link: &mut HostLink,
    bed: &Testbed<'_>,
    job: &Job,
    workload: &Workload<'_>,
) -> Result<(), Fault> {
    let machine = &job.scenario.machine;
    if machine.node.is_empty() {
        return Ok(());
    }
    let logs = workload.placements(bed, machine)?;
    let mut logs = logs.into_iter().map(VmMessage::Program);
    logs.try_for_each(|log| link.send(&log))
}

/// Waits until the workload has populated its memory; these accesses do not count. Returns its hot sets, if known.
pub fn fill(bed: &Testbed<'_>, workload: &mut Workload<'_>) -> Result<Option<Vec<HotSet>>, Fault> {
    let hot = workload.fill()?;
    for pid in workload.pids() {
        kernel::forget_accesses(&bed.root, pid)?;
    }
    Ok(hot)
}

/// Measures the timed phase under a running system. Passes all reports from [`VmMessage::Start`] to [`VmMessage::Done`]
/// to `say`.
pub fn watch(
    bed: &Testbed<'_>,
    workload: &mut Workload<'_>,
    hot: Option<Vec<HotSet>>,
    mut rival: Box<dyn Rival>,
    say: &mut dyn FnMut(VmMessage) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let root = &bed.root;
    let watched = |hot: Vec<HotSet>| -> Vec<Observer> {
        let all = hot.into_iter();
        all.map(|hot| Observer::new(hot.pid, hot.range, &hot.fast))
            .collect()
    };
    let mut observers = hot.map(watched);
    let mut counters = Counters::new(root);
    counters.follow(Pid(std::process::id()), "observer");
    counters.follow_workload(&workload.pids());
    counters.follow_kernel_threads()?;
    let before = rival.totals(&counters)?;
    rival.begin(bed, workload.target())?;
    if let Some(pid) = rival.pid() {
        counters.follow(pid, "agent");
    }
    counters.follow_kernel_threads()?;
    say(VmMessage::Start {
        hot_in_fast: hot_in_fast(&mut observers)?,
        totals: before,
    })?;
    workload.go()?;
    let mut first = true;
    let mut plugs = bed.plugs.iter().peekable();
    let (t_s, speed) = loop {
        let next = workload.next()?;
        rival.check()?;
        match next {
            Next::Interval(t_s, speed) => {
                while let Some(plug) = plugs.next_if(|plug| plug.at_s as f64 <= t_s) {
                    plug.apply(&bed.root)?;
                }
                if std::mem::take(&mut first) {
                    // An agent's kdamond starts some time after the agent.
                    counters.follow_kernel_threads()?;
                }
                counters.follow_workload(&workload.pids());
                say(VmMessage::Interval(Interval {
                    t_s,
                    rate: speed.rate,
                    programs: speed.programs,
                    hot_in_fast: hot_in_fast(&mut observers)?,
                    totals: rival.totals(&counters)?,
                }))?;
            }
            Next::Shift(t_s, hot) => {
                // If the first hot set's placement is not visible, that of the next is not either.
                observers = observers.map(|_| watched(hot));
                say(VmMessage::Shift { t_s })?;
            }
            Next::Done(t_s, speed) => break (t_s, speed),
        }
    };
    let (totals, estimate) = (rival.totals(&counters)?, rival.estimate());
    rival.stop()?;
    say(VmMessage::Done {
        t_s,
        rate: speed.rate,
        programs: speed.programs,
        totals,
        estimate,
    })
}

/// Share of the hot sets in fast memory, all alike.
fn hot_in_fast(observers: &mut Option<Vec<Observer>>) -> Result<Option<f64>, Fault> {
    let Some(observers) = observers else {
        return Ok(None);
    };
    let count = observers.len() as f64;
    let shares = observers.iter_mut().map(Observer::in_fast);
    let sum: f64 = shares.sum::<Result<_, _>>()?;
    Ok(Some(sum / count))
}
