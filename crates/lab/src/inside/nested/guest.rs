//! A guest's emulator: started, heard, told to go on, and gone with its value.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Sender;

use demeter_policy::{NodeId, Pid};

use super::Fault;
use crate::link::{GO, GuestStart, LineReader, VmMessage};
use crate::program::cgroup::{self, OwnCgroup};
use crate::vm::dies_with_this_thread;

/// Where a guest's cgroup is.
const CGROUPS: &str = "/sys/fs/cgroup";

/// What was heard of a guest, by its number: a report, or nothing more since its link has closed.
pub type Heard = (usize, Option<Result<VmMessage, Fault>>);

/// A guest's emulator; killed when dropped.
#[derive(Debug)]
pub struct Guest {
    /// The guest's name.
    pub name: String,
    child: Child,
    orders: ChildStdin,
}

impl Guest {
    /// Starts it in its cgroup. A thread hears it, as number `index`, until its link closes.
    pub fn start(
        start: &GuestStart,
        cgroup: Option<&OwnCgroup>,
        index: usize,
        heard: &Sender<Heard>,
    ) -> Result<Self, Fault> {
        let [program, args @ ..] = &start.command[..] else {
            return Err(Fault::Guest(format!("{} has no command", start.name)));
        };
        let mut command = Command::new(program);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        dies_with_this_thread(&mut command);
        if let Some(procs) = cgroup.map(OwnCgroup::open).transpose()? {
            // SAFETY: between fork and exec one async-signal-safe call is made.
            unsafe { command.pre_exec(move || cgroup::join(&procs)) };
        }
        let mut child = command.spawn().map_err(Fault::io("start", program))?;
        let (Some(orders), Some(reports)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Fault::Guest(format!("{} has no pipes", start.name)));
        };
        let (heard, name) = (heard.clone(), start.name.clone());
        std::thread::spawn(move || {
            let mut reports = LineReader::new(reports);
            loop {
                let report = match reports.next_line() {
                    // A VM begins with an empty line.
                    Ok(Some(line)) if line.is_empty() => continue,
                    Ok(Some(line)) => Some(serde_json::from_str(&line).map_err(|error| {
                        Fault::Guest(format!("{name} said {line:?}, which is no report: {error}"))
                    })),
                    Ok(None) => None,
                    Err(error) => Some(Err(Fault::io("read from the guest", &name)(error))),
                };
                let is_last = !matches!(report, Some(Ok(_)));
                // Nobody listens any more once the run is over.
                if heard.send((index, report)).is_err() || is_last {
                    return;
                }
            }
        });
        Ok(Self {
            name: start.name.clone(),
            child,
            orders,
        })
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        Pid(self.child.id())
    }

    /// Lets it go on from where it waits.
    pub fn go(&mut self) -> Result<(), Fault> {
        writeln!(self.orders, "{GO}").map_err(Fault::io("write to the guest", &self.name))
    }

    /// How it ended, once its link has closed.
    pub fn ended(&mut self) -> Fault {
        match self.child.wait() {
            Ok(status) => Fault::Guest(format!("{} ended early ({status})", self.name)),
            Err(error) => Fault::io("wait for the guest", &self.name)(error),
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Both fail only when it has ended already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A cgroup for a guest, so that the kernel counts what it has of each node.
pub fn own_cgroup(root: &Path, name: &str, fast: NodeId) -> Result<OwnCgroup, Fault> {
    OwnCgroup::make(root, &Path::new(CGROUPS).join(name), fast)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn start(script: &str) -> (Guest, mpsc::Receiver<Heard>) {
        let (heard, inbox) = mpsc::channel();
        let start = GuestStart {
            name: "a".into(),
            command: ["sh", "-c", script].map(String::from).into(),
        };
        (Guest::start(&start, None, 7, &heard).unwrap(), inbox)
    }

    #[test]
    fn a_guest_reports_and_goes_on_when_it_is_told_to() {
        let (mut guest, inbox) =
            start("echo; read order; test $order = go && echo '{\"report\":\"finished\"}'; exit 3");
        guest.go().unwrap();
        let (index, report) = inbox.recv().unwrap();
        assert_eq!((index, report.unwrap().unwrap()), (7, VmMessage::Finished));
        assert!(inbox.recv().unwrap().1.is_none());
        let said = guest.ended().to_string();
        assert!(
            said.contains("a ended early") && said.contains('3'),
            "{said}"
        );
    }

    #[test]
    fn a_guest_that_talks_nonsense_is_no_report() {
        let (_guest, inbox) = start("echo hello");
        let said = inbox.recv().unwrap().1.unwrap().unwrap_err().to_string();
        assert!(said.contains("\"hello\""), "{said}");
    }
}
