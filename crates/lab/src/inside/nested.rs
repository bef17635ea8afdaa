//! The inside of a host: its one guest, and what that reports.
//!
//! The guest is a lab VM itself, whose job measures as everywhere. The host is between it and the
//! link: it makes slow memory slow when the guest has filled its memory, starts its own clock, and puts its own
//! counters in the place of the guest's.

use std::io::Write;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use demeter_policy::Pid;

use super::agent;
use super::counters::Counters;
use super::delay::Delay;
use super::fault::Fault;
use super::init::Link;
use super::job::read_totals;
use super::kernel;
use super::rivals::Rival;
use super::testbed::Testbed;
use crate::link::{GO, LineReader, Totals, VmMessage};
use crate::vm::dies_with_this_thread;

/// Boots, as long as a guest has not filled its memory: its kernel panics in some, with an interrupt that comes
/// while interrupts are off. The emulator's virtualization does that, whatever manages memory.
const BOOTS: u32 = 3;

/// Starts the guest by its command line and sends on what it reports, until it has finished. The host
/// is managed by `rival`.
pub fn watch(
    link: &mut Link,
    bed: &Testbed<'_>,
    command: &[String],
    rival: Box<dyn Rival>,
) -> Result<(), Fault> {
    let outcome = relay(link, bed, command, rival);
    let text = agent::log_tail(bed);
    if !text.is_empty() {
        link.send(&VmMessage::AgentLog { text })?;
    }
    outcome
}

fn relay(
    link: &mut Link,
    bed: &Testbed<'_>,
    command: &[String],
    mut rival: Box<dyn Rival>,
) -> Result<(), Fault> {
    let mut guest = Guest::start(command)?;
    let mut counters = Counters::new(&bed.root);
    let mut delay = None;
    let mut first = true;
    let mut boots = 1;
    loop {
        let mut report = match guest.next_report() {
            Err(Fault::Guest(_)) if delay.is_none() && boots < BOOTS => {
                guest = Guest::start(command)?;
                boots += 1;
                continue;
            }
            report => report?,
        };
        match &mut report {
            VmMessage::Filled => {
                kernel::forget_accesses(&bed.root, guest.pid())?;
                delay = Some(Delay::arm(&bed.root)?);
                guest.go()?;
                continue;
            }
            VmMessage::Start { totals, .. } => {
                counters.follow(Pid(std::process::id()), "observer");
                counters.follow_workload(&[guest.pid()]);
                rival.begin(bed, guest.pid())?;
                if let Some(pid) = rival.pid() {
                    counters.follow(pid, "agent");
                }
                counters.follow_kernel_threads()?;
                *totals = totals_of_host(&counters, rival.as_mut(), totals)?;
                link.send(&report)?;
                guest.go()?;
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
            VmMessage::Failed { what } => {
                return Err(Fault::Guest(format!("has failed: {what}")));
            }
            VmMessage::Finished => break,
            _ => {}
        }
        link.send(&report)?;
    }
    drop(delay);
    rival.stop()
}

/// The host's counters, and the guest's of the same moment where its agent manages memory: bytes moved in either,
/// and the CPU time of the agent, which to the host is the guest's own.
fn totals_of_host(
    counters: &Counters,
    rival: &mut dyn Rival,
    guest: &Totals,
) -> Result<Totals, Fault> {
    let mut totals = read_totals(counters, rival)?;
    totals.vmstat.append(&mut counters.kvm());
    let sum = |ours: Option<u64>, guests: Option<u64>| Some(ours? + guests?);
    totals.promoted_bytes = sum(totals.promoted_bytes, guest.promoted_bytes);
    totals.demoted_bytes = sum(totals.demoted_bytes, guest.demoted_bytes);
    let of_agent = |(cause, s): (&String, &f64)| MANAGEMENT.contains(&&cause[..]).then_some(*s);
    let agent_s: f64 = guest.cpu_s.iter().filter_map(of_agent).sum();
    *totals.cpu_s.entry("agent_user".into()).or_default() += agent_s;
    *totals.cpu_s.entry("workload_user".into()).or_default() -= agent_s;
    Ok(totals)
}

/// Causes of CPU time in a guest that are its agent's.
const MANAGEMENT: [&str; 3] = ["agent_user", "agent_system", "kdamond"];

/// A guest's emulator; killed when dropped.
#[derive(Debug)]
struct Guest {
    child: Child,
    orders: ChildStdin,
    reports: LineReader<ChildStdout>,
}

impl Guest {
    fn start(command: &[String]) -> Result<Self, Fault> {
        let [program, args @ ..] = command else {
            return Err(Fault::Guest("has no command".into()));
        };
        let mut command = Command::new(program);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        dies_with_this_thread(&mut command);
        let mut child = command.spawn().map_err(Fault::io("start", program))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(orders), Some(reports)) => Ok(Self {
                child,
                orders,
                reports: LineReader::new(reports),
            }),
            _ => Err(Fault::Guest("has no pipes".into())),
        }
    }

    fn pid(&self) -> Pid {
        Pid(self.child.id())
    }

    /// Waits for its next report. The host's own time limit bounds the wait.
    fn next_report(&mut self) -> Result<VmMessage, Fault> {
        let line = loop {
            match self.reports.next_line() {
                // A VM begins with an empty line.
                Ok(Some(line)) if line.is_empty() => {}
                line => break line.map_err(Fault::io("read from", "the guest"))?,
            }
        };
        match line {
            Some(line) => serde_json::from_str(&line)
                .map_err(|e| Fault::Guest(format!("said {line:?}, which is no report: {e}"))),
            None => {
                let status = self.child.wait();
                let status = status.map_err(Fault::io("wait for", "the guest"))?;
                Err(Fault::Guest(format!("ended early ({status})")))
            }
        }
    }

    fn go(&mut self) -> Result<(), Fault> {
        writeln!(self.orders, "{GO}").map_err(Fault::io("write to", "the guest"))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Both fail only when it has ended already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(script: &str) -> Guest {
        Guest::start(&["sh".into(), "-c".into(), script.into()]).unwrap()
    }

    #[test]
    fn a_guest_reports_and_goes_on_when_it_is_told_to() {
        let mut guest =
            guest("echo; read order; test $order = go && echo '{\"report\":\"finished\"}'; exit 3");
        guest.go().unwrap();
        assert_eq!(guest.next_report().unwrap(), VmMessage::Finished);
        let said = guest.next_report().unwrap_err().to_string();
        assert!(said.contains("ended early") && said.contains('3'), "{said}");
    }

    #[test]
    fn a_guest_that_talks_nonsense_is_no_report() {
        let said = guest("echo hello").next_report().unwrap_err().to_string();
        assert!(said.contains("\"hello\""), "{said}");
    }
}
