//! The emulator process of a guest.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Sender;

use demeter_guest::maps::{Vma, read_maps};
use demeter_policy::{NodeId, Pid, VirtRange};

use super::Fault;
use crate::inside::control_page::shared_memory;
use crate::inside::observer::Observer;
use crate::link::{GO, GuestStart, LineReader, VmMessage};
use crate::vm::dies_with_this_thread;

/// A report of a guest, by its number; none after its link has closed.
pub type OutputParser = (usize, Option<Result<VmMessage, Fault>>);

/// A guest's emulator; dropping it kills it.
#[derive(Debug)]
pub struct Guest {
    /// The guest's name.
    pub name: String,
    child: Child,
    orders: ChildStdin,
}

impl Guest {
    /// Starts the emulator. A thread reads its reports, as number `index`, until its link closes.
    pub fn start(
        root: &Path,
        start: &GuestStart,
        index: usize,
        sender: &Sender<OutputParser>,
    ) -> Result<Self, Fault> {
        let [program, args @ ..] = &start.command[..] else {
            return Err(Fault::Guest(format!("{} has no command", start.name)));
        };
        let mut command = Command::new(program);
        command.args(args);
        if start.has_unit {
            command.args(unit_args(&shared_memory(root)?)?);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        dies_with_this_thread(&mut command);
        let mut child = command.spawn().map_err(Fault::io("start", program))?;
        let (Some(orders), Some(reports)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Fault::Guest(format!("{} has no pipes", start.name)));
        };
        let (sender, name) = (sender.clone(), start.name.clone());
        std::thread::spawn(move || {
            let mut reports = LineReader::new(reports);
            loop {
                let report = match reports.next_line() {
                    // A VM's first line is empty.
                    Ok(Some(line)) if line.is_empty() => continue,
                    Ok(Some(line)) => Some(serde_json::from_str(&line).map_err(|error| {
                        Fault::Guest(format!("{name} sent {line:?}, not a report: {error}"))
                    })),
                    Ok(None) => None,
                    Err(error) => Some(Err(Fault::io("read from the guest", &name)(error))),
                };
                let is_last = !matches!(report, Some(Ok(_)));
                // The receiver is gone after the run.
                if sender.send((index, report)).is_err() || is_last {
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

    /// PID of the emulator.
    pub fn pid(&self) -> Pid {
        Pid(self.child.id())
    }

    /// Lets the guest continue from its wait.
    pub fn go(&mut self) -> Result<(), Fault> {
        writeln!(self.orders, "{GO}").map_err(Fault::io("write to the guest", &self.name))
    }

    /// Its exit as an error, after its link has closed.
    pub fn ended(&mut self) -> Fault {
        match self.child.wait() {
            Ok(status) => Fault::Guest(format!("{} ended early ({status})", self.name)),
            Err(error) => Fault::io("wait for the guest", &self.name)(error),
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Both fail only if it has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Arguments that give a guest the host's sample memory, in a device like the host's. Records have guest-virtual
/// addresses, which belong to the guest while it runs.
fn unit_args(shared: &Path) -> Result<[String; 4], Fault> {
    let bytes = fs::metadata(shared)
        .map_err(Fault::io("read", shared))?
        .len();
    let path = shared.display();
    Ok([
        "-object".into(),
        format!("memory-backend-file,id=unit,mem-path={path},size={bytes},share=on"),
        "-device".into(),
        "ivshmem-plain,memdev=unit".into(),
    ])
}

/// A guest's memory in its emulator's address space, without the emulator's own memory.
#[derive(Debug)]
pub struct GuestMemory {
    /// One observer per node, with the node's size in bytes.
    nodes: Vec<(Observer, u64)>,
}

impl GuestMemory {
    /// Finds the mappings of nodes with these sizes in process `pid`; `fast` are the nodes of the fast tier.
    pub fn find(root: &Path, pid: Pid, node_bytes: &[u64], fast: &[NodeId]) -> Result<Self, Fault> {
        let maps = read_maps(root, pid)
            .map_err(|error| Fault::Guest(format!("has no readable memory: {error}")))?;
        let nodes = nodes_among(&maps, node_bytes)?.into_iter();
        let nodes = nodes.map(|range| (Observer::new(pid, range, fast), range.len().0));
        Ok(Self {
            nodes: nodes.collect(),
        })
    }

    /// Estimates the guest's bytes in fast memory from a sample of pages.
    pub fn fast_bytes(&mut self) -> Result<u64, Fault> {
        self.nodes.iter_mut().try_fold(0, |sum, (node, bytes)| {
            Ok(sum + (node.in_fast()? * *bytes as f64) as u64)
        })
    }
}

/// The mappings with the sizes of these nodes.
fn nodes_among(maps: &[Vma], node_bytes: &[u64]) -> Result<Vec<VirtRange>, Fault> {
    let ranges = maps.iter().map(|vma| vma.range);
    let nodes: Vec<_> = ranges
        .filter(|range| node_bytes.contains(&range.len().0))
        .collect();
    match nodes.len() == node_bytes.len() {
        true => Ok(nodes),
        false => Err(Fault::Guest(format!(
            "has nodes of {node_bytes:?} bytes, and its emulator {} mappings of such sizes",
            nodes.len()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use demeter_guest::maps::parse_maps;

    use super::*;
    use crate::inside::control_page::tests::machine_with_plugin;

    fn start(script: &str) -> (Guest, mpsc::Receiver<OutputParser>) {
        let (sender, inbox) = mpsc::channel();
        let start = GuestStart {
            name: "a".into(),
            command: ["sh", "-c", script].map(String::from).into(),
            has_unit: false,
            node_bytes: vec![],
        };
        (
            Guest::start(Path::new("/"), &start, 7, &sender).unwrap(),
            inbox,
        )
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
    fn a_guest_is_given_the_whole_memory_of_the_unit() {
        let (root, memory) = machine_with_plugin();
        let bytes = fs::metadata(memory).unwrap().len();
        let args = unit_args(&shared_memory(root.path()).unwrap()).unwrap();
        let backend = args[1].split(',').collect::<Vec<_>>();
        assert!(backend.contains(&&format!("size={bytes}")[..]), "{args:?}");
        assert!(backend.contains(&"share=on"), "{args:?}");
    }

    #[test]
    fn a_guests_memory_is_what_has_the_size_of_a_node() {
        let maps = parse_maps(
            "10000-14000 rw-p 00000000 00:00 0 [heap]\n20000-28000 rw-p 00000000 00:00 0\n\
             30000-32000 rw-p 00000000 00:00 0\n40000-42000 ---p 00000000 00:00 0\n",
        );
        let starts = |node_bytes: &[u64]| {
            let nodes = nodes_among(&maps, node_bytes).map_err(|fault| fault.to_string())?;
            Ok::<_, String>(nodes.iter().map(|node| node.start().0).collect::<Vec<_>>())
        };
        assert_eq!(starts(&[0x8000]), Ok(vec![0x20000]));
        assert_eq!(starts(&[0x8000, 0x4000]), Ok(vec![0x10000, 0x20000]));
        assert!(starts(&[0x2000]).unwrap_err().contains("2 mappings"));
        assert!(starts(&[0x9000]).unwrap_err().contains("0 mappings"));
    }

    #[test]
    fn a_guest_that_talks_nonsense_is_no_report() {
        let (_guest, inbox) = start("echo hello");
        let said = inbox.recv().unwrap().1.unwrap().unwrap_err().to_string();
        assert!(said.contains("\"hello\""), "{said}");
    }
}
