//! The inside of a host VM: its guests and their reports.
//!
//! A guest is a lab VM itself and runs an ordinary job. The host sits between its guests and the link. It enables the
//! slow memory delay when all guests have populated their memory, and starts them together. It uses its own clock,
//! replaces their counters by its own, and reports each guest's fast memory.

mod balloons;
mod guest;
mod merged_reports;

use std::sync::mpsc::{self, Receiver, Sender};

use demeter_policy::Pid;

pub use balloons::Balloons;

use super::agent;
use super::counters::Counters;
use super::delay::Delay;
use super::host_link::HostLink;
use super::kernel;
use super::rivals::Rival;
use super::testbed::Testbed;
use crate::fault::Fault;
use crate::link::{GuestStart, Totals, VmMessage};
use guest::{Guest, GuestMemory, OutputParser};
use merged_reports::{ReportQueues, merge};

/// Attempts to boot a guest until it has populated its memory. In some boots, its kernel panics on an interrupt that
/// arrives while interrupts are disabled. The emulator's virtualization causes that, under any system.
const BOOTS: u32 = 3;

/// Starts the guests and forwards their reports until they have finished. `rival` manages the host.
pub fn watch(
    link: &mut HostLink,
    bed: &Testbed<'_>,
    starts: &[GuestStart],
    rival: Box<dyn Rival>,
) -> Result<(), Fault> {
    let outcome = Guests::start(bed, starts).and_then(|guests| relay(link, bed, guests, rival));
    let text = agent::log_tail(bed);
    if !text.is_empty() {
        let text = format!("== host\n{text}");
        link.send(&VmMessage::AgentLog { text })?;
    }
    outcome
}

fn relay(
    link: &mut HostLink,
    bed: &Testbed<'_>,
    mut guests: Guests<'_>,
    mut rival: Box<dyn Rival>,
) -> Result<(), Fault> {
    let mut counters = Counters::new(&bed.root);
    let mut delay = None;
    let mut first = true;
    loop {
        let mut report = guests.next_report(rival.as_mut())?;
        match &mut report {
            VmMessage::Filled => {
                for guest in &guests.running {
                    kernel::forget_accesses(&bed.root, guest.pid())?;
                }
                delay = Some(Delay::arm(&bed.root)?);
                guests.go()?;
                continue;
            }
            VmMessage::Start { totals, .. } => {
                counters.follow(Pid(std::process::id()), "observer");
                let pids: Vec<Pid> = guests.running.iter().map(Guest::pid).collect();
                counters.follow_workload(&pids);
                if let Some(&pid) = pids.first() {
                    rival.begin(bed, pid)?;
                }
                if let Some(pid) = rival.pid() {
                    counters.follow(pid, "agent");
                }
                counters.follow_kernel_threads()?;
                *totals = totals_of_host(&counters, rival.as_mut(), totals)?;
                link.send(&report)?;
                guests.go()?;
                continue;
            }
            VmMessage::Interval(interval) => {
                rival.check()?;
                if std::mem::take(&mut first) {
                    // A controller's kdamond starts some time after the controller.
                    counters.follow_kernel_threads()?;
                }
                interval.totals = totals_of_host(&counters, rival.as_mut(), &interval.totals)?;
            }
            VmMessage::Done { totals, .. } => {
                *totals = totals_of_host(&counters, rival.as_mut(), totals)?;
                delay = None;
            }
            VmMessage::Finished => break,
            _ => {}
        }
        link.send(&report)?;
    }
    drop(delay);
    rival.stop()
}

/// The guests of a host.
struct Guests<'a> {
    bed: &'a Testbed<'a>,
    starts: &'a [GuestStart],
    running: Vec<Guest>,
    /// The memory of each guest, if there are several, once all have populated theirs.
    memories: Vec<GuestMemory>,
    /// Number of boots of each guest.
    boots: Vec<u32>,
    reports: Sender<OutputParser>,
    inbox: Receiver<OutputParser>,
    queues: ReportQueues,
    has_filled: bool,
}

impl<'a> Guests<'a> {
    fn start(bed: &'a Testbed<'a>, starts: &'a [GuestStart]) -> Result<Self, Fault> {
        let (reports, inbox) = mpsc::channel();
        let numbered = starts.iter().enumerate();
        let running = numbered
            .map(|(index, start)| Guest::start(&bed.root, start, index, &reports))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            bed,
            starts,
            running,
            memories: vec![],
            boots: vec![1; starts.len()],
            reports,
            inbox,
            queues: ReportQueues::new(starts.len()),
            has_filled: false,
        })
    }

    /// The next merged report of all guests. The host's own time limit bounds the wait.
    fn next_report(&mut self, rival: &mut dyn Rival) -> Result<VmMessage, Fault> {
        loop {
            if let Some(reports) = self.queues.next()? {
                let names: Vec<&str> = self.starts.iter().map(|start| &start.name[..]).collect();
                let fast = match reports.first() {
                    Some(VmMessage::Interval(_) | VmMessage::Done { .. }) => self.fast_bytes()?,
                    // After that, a guest may exit before the others have finished.
                    _ => vec![],
                };
                if let Some(report) = merge(&names, &fast, reports) {
                    if report == VmMessage::Filled {
                        self.has_filled = true;
                        self.find_memories()?;
                    }
                    return Ok(report);
                }
            }
            let received = self.inbox.recv();
            let (index, report) =
                received.map_err(|_| Fault::Guest("has closed its link".into()))?;
            match report {
                Some(Ok(VmMessage::Failed { what })) => {
                    let name = &self.starts[index].name;
                    return Err(Fault::Guest(format!("{name} has failed: {what}")));
                }
                // A rebooted guest gets its size again.
                Some(Ok(VmMessage::Booted { .. })) => {
                    rival.size(&self.starts[index].name)?;
                    self.running[index].go()?;
                }
                Some(Ok(VmMessage::Sized { .. })) => {}
                // With several guests, the hot set of one says nothing about all.
                Some(Ok(VmMessage::Shift { .. })) if self.running.len() > 1 => {}
                Some(Ok(report)) => self.queues.push(index, report)?,
                Some(Err(fault)) => return Err(fault),
                None if self.queues.has_finished(index) => {}
                None => self.boot_again(index)?,
            }
        }
    }

    /// Reboots a guest that exited before all had populated their memory.
    fn boot_again(&mut self, index: usize) -> Result<(), Fault> {
        let ended = self.running[index].ended();
        if self.has_filled || self.boots[index] == BOOTS {
            return Err(ended);
        }
        self.queues.forget(index);
        self.boots[index] += 1;
        self.running[index] =
            Guest::start(&self.bed.root, &self.starts[index], index, &self.reports)?;
        Ok(())
    }

    /// Fast memory of each guest, if there are several.
    fn fast_bytes(&mut self) -> Result<Vec<u64>, Fault> {
        let each = self.memories.iter_mut();
        each.map(GuestMemory::fast_bytes).collect()
    }

    fn find_memories(&mut self) -> Result<(), Fault> {
        let is_fleet = self.starts.len() > 1;
        let fleet = self.starts.iter().zip(&self.running).filter(|_| is_fleet);
        let memories = fleet.map(|(start, guest)| {
            GuestMemory::find(
                &self.bed.root,
                guest.pid(),
                &start.node_bytes,
                self.bed.tiers.fastest(),
            )
        });
        self.memories = memories.collect::<Result<_, _>>()?;
        Ok(())
    }

    fn go(&mut self) -> Result<(), Fault> {
        self.running.iter_mut().try_for_each(Guest::go)
    }
}

/// The host's counters, with those of its guests at the same time if agents manage memory. From guests come bytes
/// moved, and the agents' CPU time, which the host sees as guest time. The kernel counts guest time by ticks. In some
/// runs it attributes half of it to the emulator's system time. All of that counts as guest time here, including the
/// cost of faults and hints.
fn totals_of_host(
    counters: &Counters,
    rival: &mut dyn Rival,
    guests: &Totals,
) -> Result<Totals, Fault> {
    let mut totals = rival.totals(counters)?;
    totals.vmstat.append(&mut counters.kvm());
    let sum = |ours: Option<u64>, theirs: Option<u64>| Some(ours? + theirs?);
    totals.promoted_bytes = sum(totals.promoted_bytes, guests.promoted_bytes);
    totals.demoted_bytes = sum(totals.demoted_bytes, guests.demoted_bytes);
    let of_agent = |(cause, s): (&String, &f64)| MANAGEMENT.contains(&&cause[..]).then_some(*s);
    let agent_s: f64 = guests.cpu_s.iter().filter_map(of_agent).sum();
    *totals.cpu_s.entry("agent_user".into()).or_default() += agent_s;
    let system_s = totals.cpu_s.remove("workload_system").unwrap_or_default();
    totals.system_s -= system_s;
    *totals.cpu_s.entry("workload_user".into()).or_default() += system_s - agent_s;
    Ok(totals)
}

/// Causes of CPU time in a guest that belong to its agent.
const MANAGEMENT: [&str; 3] = ["agent_user", "agent_system", "kdamond"];
