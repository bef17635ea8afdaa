//! The inside of a host: its guests, and what they report.
//!
//! A guest is a lab VM itself, whose job measures as everywhere. The host is between its guests and the
//! link: it makes slow memory slow when all have filled their memory, lets them begin together, starts its own clock,
//! puts its own counters in the place of theirs, and says what each has of fast memory.

mod balloons;
mod guest;
mod lineup;

use std::sync::mpsc::{self, Receiver, Sender};

use demeter_policy::Pid;

pub use balloons::Balloons;

use super::agent;
use super::counters::Counters;
use super::delay::Delay;
use super::fault::Fault;
use super::init::Link;
use super::job::read_totals;
use super::kernel;
use super::rivals::Rival;
use super::testbed::Testbed;
use crate::link::{GuestStart, Totals, VmMessage};
use guest::{Guest, GuestMemory, Heard};
use lineup::{Lineup, merge};

/// Boots, as long as a guest has not filled its memory: its kernel panics in some, with an interrupt that comes
/// while interrupts are off. The emulator's virtualization does that, whatever manages memory.
const BOOTS: u32 = 3;

/// Starts the guests by their command lines and sends on what they report, until they have finished. The host
/// is managed by `rival`.
pub fn watch(
    link: &mut Link,
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
    link: &mut Link,
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
                    // A controller's kdamond starts some time after it.
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

/// Guests side by side.
struct Guests<'a> {
    bed: &'a Testbed<'a>,
    starts: &'a [GuestStart],
    running: Vec<Guest>,
    /// The memory of each, where there are several, once all have filled theirs.
    memories: Vec<GuestMemory>,
    /// How often each was booted.
    boots: Vec<u32>,
    heard: Sender<Heard>,
    inbox: Receiver<Heard>,
    lineup: Lineup,
    has_filled: bool,
}

impl<'a> Guests<'a> {
    fn start(bed: &'a Testbed<'a>, starts: &'a [GuestStart]) -> Result<Self, Fault> {
        let (heard, inbox) = mpsc::channel();
        let numbered = starts.iter().enumerate();
        let running = numbered
            .map(|(index, start)| Guest::start(&bed.root, start, index, &heard))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            bed,
            starts,
            running,
            memories: vec![],
            boots: vec![1; starts.len()],
            heard,
            inbox,
            lineup: Lineup::new(starts.len()),
            has_filled: false,
        })
    }

    /// What all have reported next. The host's own time limit bounds the wait.
    fn next_report(&mut self, rival: &mut dyn Rival) -> Result<VmMessage, Fault> {
        loop {
            if let Some(reports) = self.lineup.next()? {
                let names: Vec<&str> = self.starts.iter().map(|start| &start.name[..]).collect();
                let fast = match reports.first() {
                    Some(VmMessage::Interval(_) | VmMessage::Done { .. }) => self.fast_bytes()?,
                    // After that a guest may be gone before another has finished.
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
            let heard = self.inbox.recv();
            let (index, report) = heard.map_err(|_| Fault::Guest("is not heard".into()))?;
            match report {
                Some(Ok(VmMessage::Failed { what })) => {
                    let name = &self.starts[index].name;
                    return Err(Fault::Guest(format!("{name} has failed: {what}")));
                }
                // A guest that is booted again is sized again.
                Some(Ok(VmMessage::Booted { .. })) => {
                    rival.size(&self.starts[index].name)?;
                    self.running[index].go()?;
                }
                Some(Ok(VmMessage::Sized { .. })) => {}
                // Each moves its own hot set: of all together that says nothing.
                Some(Ok(VmMessage::Shift { .. })) if self.running.len() > 1 => {}
                Some(Ok(report)) => self.lineup.push(index, report)?,
                Some(Err(fault)) => return Err(fault),
                None if self.lineup.has_finished(index) => {}
                None => self.boot_again(index)?,
            }
        }
    }

    /// Boots a guest again that has ended before all had filled their memory.
    fn boot_again(&mut self, index: usize) -> Result<(), Fault> {
        let ended = self.running[index].ended();
        if self.has_filled || self.boots[index] == BOOTS {
            return Err(ended);
        }
        self.lineup.forget(index);
        self.boots[index] += 1;
        self.running[index] =
            Guest::start(&self.bed.root, &self.starts[index], index, &self.heard)?;
        Ok(())
    }

    /// Fast memory that each has, where there are several.
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

/// The host's counters, and its guests' of the same moment where agents manage memory: bytes moved in either,
/// and the CPU time of agents, which to the host is the guests' own. The kernel counts a guest's time by ticks, and in some
/// runs half of it as its emulator's system time: all of that is the guest's here, also what faults and hints cost.
fn totals_of_host(
    counters: &Counters,
    rival: &mut dyn Rival,
    guests: &Totals,
) -> Result<Totals, Fault> {
    let mut totals = read_totals(counters, rival)?;
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

/// Causes of CPU time in a guest that are its agent's.
const MANAGEMENT: [&str; 3] = ["agent_user", "agent_system", "kdamond"];
