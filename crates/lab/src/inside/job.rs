//! One job from start to end: fill memory, switch the system on, watch, switch off, verify.
//!
//! Everything happens on one thread that is woken by the workload's own events; there is no
//! timer that could disagree with it, and the watching costs the same under every system.

use std::path::Path;

use demeter_policy::Pid;
use demeter_policy::provision::ProvisionerKind;

use super::agent::{self, Agent};
use super::counters::Counters;
use super::delay::Delay;
use super::fault::Fault;
use super::init::Link;
use super::kernel;
use super::modules;
use super::observer::Observer;
use super::rivals::{self, Rival};
use super::rounds;
use super::ticker::Ticker;
use super::workload::{Workload, hot_range};
use super::zones::node_free_mib;
use crate::link::{Interval, Job, Report, Totals};
use crate::workload::Event;

/// Runs the job; what it finds goes over the link.
pub fn run(link: &mut Link, job: &Job) -> Result<(), Fault> {
    if job.rounds {
        return rounds::run(link, job);
    }
    let root = Path::new("/");
    kernel::prepare(root, job.scenario.machine.thp)?;
    modules::load_all(root)?;
    let has_driver = job.provisioner == Some(ProvisionerKind::DemeterBalloon);
    let mut relay = has_driver.then(Agent::start_relay).transpose()?;
    link.send(&booted(root)?)?;
    if job.provisioner.is_some() {
        link.wait_for_go()?;
        link.send(&Report::Sized {
            fast_free_mib: node_free_mib(root, 0)?,
            slow_free_mib: node_free_mib(root, 1)?,
        })?;
    }
    if let Some(relay) = &mut relay {
        relay.check()?;
    }
    let _ticker = Ticker::start();
    let mut workload = Workload::start(job)?;
    let observer = match workload.next_event()? {
        Event::Ready {
            hot_start,
            hot_bytes,
            ..
        } => Observer::new(workload.pid(), hot_range(hot_start, hot_bytes)?),
        other => return Err(out_of_turn(&other)),
    };
    kernel::forget_accesses(root, workload.pid())?;
    let delay = Delay::arm(root)?;
    if job.system.has_agent()
        && let Some(relay) = relay.take()
    {
        // The agent takes over: the host's port has room for one.
        relay.stop()?;
    }
    let outcome = watch(link, job, &mut workload, observer);
    drop(delay);
    if job.system.has_agent() || has_driver {
        link.send(&Report::AgentLog {
            text: agent::log_tail(),
        })?;
        agent::send_recording(link)?;
    }
    outcome?;
    verify(link, &mut workload)
}

/// The timed phase, under the job's system.
fn watch(
    link: &mut Link,
    job: &Job,
    workload: &mut Workload,
    mut observer: Observer,
) -> Result<(), Fault> {
    let root = Path::new("/");
    let mut counters = Counters::new(root);
    counters.follow(Pid(std::process::id()), "observer");
    counters.follow(workload.pid(), "workload");
    counters.follow_kernel_threads()?;
    let before = counters.read()?;
    let mut rival = rivals::start(root, job.system, workload.pid())?;
    if let Some(pid) = rival.pid() {
        counters.follow(pid, "agent");
    }
    counters.follow_kernel_threads()?;
    let hot_in_fast = Some(observer.hot_in_fast()?);
    link.send(&Report::Start {
        hot_in_fast,
        totals: before,
    })?;
    if job.provisioner.is_some() {
        link.wait_for_go()?;
    }
    workload.go()?;
    let mut first = true;
    let (t_s, rate) = loop {
        let event = workload.next_event()?;
        rival.check()?;
        match event {
            Event::Interval { t_s, rate, .. } => {
                if std::mem::take(&mut first) {
                    // An agent's kdamond starts some time after the agent.
                    counters.follow_kernel_threads()?;
                }
                let hot_in_fast = Some(observer.hot_in_fast()?);
                let totals = read_totals(&counters, rival.as_mut())?;
                link.send(&Report::Interval(Interval {
                    t_s,
                    rate,
                    hot_in_fast,
                    totals,
                }))?;
            }
            Event::Shift {
                t_s,
                hot_start,
                hot_bytes,
            } => {
                observer = Observer::new(workload.pid(), hot_range(hot_start, hot_bytes)?);
                link.send(&Report::Shift { t_s })?;
            }
            Event::Done { t_s, rate, .. } => break (t_s, rate),
            other => return Err(out_of_turn(&other)),
        }
    };
    let totals = read_totals(&counters, rival.as_mut())?;
    rival.stop()?;
    link.send(&Report::Done { t_s, rate, totals })
}

fn read_totals(counters: &Counters, rival: &mut dyn Rival) -> Result<Totals, Fault> {
    let mut totals = counters.read()?;
    let moved = rival.moved_bytes(&totals);
    totals.promoted_bytes = moved.map(|(promoted, _)| promoted);
    totals.demoted_bytes = moved.map(|(_, demoted)| demoted);
    Ok(totals)
}

/// Lets the workload go on; gups then checks every word.
fn verify(link: &mut Link, workload: &mut Workload) -> Result<(), Fault> {
    if !workload.verifies() {
        return Ok(());
    }
    workload.go()?;
    match workload.next_event()? {
        Event::Verified { words, errors } => link.send(&Report::Verified { words, errors }),
        other => Err(out_of_turn(&other)),
    }
}

fn out_of_turn(event: &Event) -> Fault {
    Fault::Workload(format!("said {:?} out of turn", event.to_string()))
}

/// What the VM says of itself when it is up.
pub fn booted(root: &Path) -> Result<Report, Fault> {
    Ok(Report::Booted {
        kernel: kernel_release(root)?,
        fast_free_mib: node_free_mib(root, 0)?,
        slow_free_mib: node_free_mib(root, 1)?,
    })
}

fn kernel_release(root: &Path) -> Result<String, Fault> {
    let path = root.join("proc/sys/kernel/osrelease");
    let text = std::fs::read_to_string(&path).map_err(Fault::io("read", &path))?;
    Ok(text.trim().to_owned())
}
