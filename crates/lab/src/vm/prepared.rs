//! A VM that is ready to start, and the handling of its reports and logs.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use demeter_host_api::config::Libvirt;
use demeter_scenario::{Clock, Scenario};

use super::child::VmChild;
use super::domain::{self, Daemon};
use super::elastic::Elastic;
use super::memory::{VmNode, check_host};
use super::{counts, qemu};
use crate::error::{Error, VmFault};
use crate::link::{VmMessage, from_hex};

/// Name of the initramfs in a VM's folder.
pub const INITRAMFS: &str = "initramfs";

/// Possible logs in a VM's folder.
const LOGS: [&str; 6] = [
    "console.log",
    "qemu.log",
    "agent.log",
    RECORDING,
    "programs.log",
    "reports.jsonl",
];

/// Name of the emulator's own counts of loads among the logs.
const LOADS: &str = "loads.csv";

/// A VM that is ready to start.
#[derive(Debug)]
pub struct PreparedVm {
    pub(super) run: String,
    pub(super) scenario: Scenario,
    pub(super) qemu: PathBuf,
    pub(super) cpu_properties: Vec<String>,
    pub(super) plugin: PathBuf,
    pub(super) kernel: PathBuf,
    pub(super) nodes: Vec<VmNode>,
    pub(super) elastic: Option<Elastic>,
    /// Whether all its memory is backed from the start.
    pub prealloc: bool,
    /// Time limit of its life.
    pub limit: Duration,
    /// The libvirtd that runs it as a domain; without one, the lab starts the emulator.
    pub daemon: Option<Arc<Daemon>>,
    pub(super) folder: tempfile::TempDir,
    pub(super) keep_logs: Option<PathBuf>,
}

impl PreparedVm {
    /// Its name in messages.
    pub fn run(&self) -> &str {
        &self.run
    }

    /// The error for a fault of this VM. Its logs are kept, in a new folder unless the user has named one.
    pub fn error(&self, fault: VmFault) -> Error {
        if matches!(fault, VmFault::Interrupted) {
            return Error::Interrupted;
        }
        let folder = match &self.keep_logs {
            Some(kept) => Ok(kept.clone()),
            None => tempfile::Builder::new()
                .prefix("demeter-logs-")
                .tempdir()
                .map(tempfile::TempDir::keep)
                .map_err(Error::io("create", "a folder for logs")),
        };
        let kept = folder.and_then(|logs| self.keep_logs(&logs).map(|()| logs));
        match kept {
            Ok(logs) => Error::Vm {
                run: self.run.clone(),
                fault,
                logs,
            },
            Err(error) => error,
        }
    }

    /// Its private folder on the host, removed when this is dropped.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Its resize parameters, if its memory is resizable.
    pub fn elastic(&self) -> Option<&Elastic> {
        self.elastic.as_ref()
    }

    /// Its libvirt name, if libvirt runs it: that of its folder.
    pub fn domain(&self) -> Option<String> {
        self.daemon.as_ref()?;
        let name = self.folder().file_name()?;
        Some(name.to_string_lossy().into_owned())
    }

    /// The libvirt that runs it; the system's if none does.
    pub fn libvirt(&self) -> Libvirt {
        let daemon = self.daemon.as_deref();
        daemon.map_or_else(Libvirt::default, Daemon::libvirt)
    }

    /// Maximum memory that it uses, MiB.
    pub fn memory_mib(&self) -> u64 {
        self.nodes.iter().map(VmNode::most_mib).sum()
    }

    /// Starts it.
    pub fn start(&self) -> Result<VmChild, Error> {
        check_host(Path::new("/"), self.memory_mib())?;
        let parts = qemu::Parts {
            qemu: &self.qemu,
            plugin: &self.plugin,
            kernel: &self.kernel,
            initramfs: &self.folder().join(INITRAMFS),
            machine: &self.scenario.machine,
            cpu_properties: &self.cpu_properties,
            dilation: self.scenario.lab.dilation,
            clock: self.scenario.lab.clock,
            tlb: self.scenario.sim.cpu.tlb(),
            nodes: &self.nodes,
            elastic: self.elastic.as_ref(),
            prealloc: self.prealloc,
            has_events: self
                .scenario
                .provision
                .as_ref()
                .is_some_and(|p| p.crashes.is_some()),
            folder: self.folder(),
        };
        if let (Some(daemon), Some(name)) = (&self.daemon, self.domain()) {
            return domain::start(&parts, daemon, &name, self.limit);
        }
        let output_log = parts.output_log();
        let command = parts.command();
        let mut vm = VmChild::start(command, self.limit, parts.console_log(), output_log)?;
        if self.scenario.lab.clock == Clock::Model {
            vm.allow_silence();
        }
        Ok(vm)
    }

    /// Passes each report to `on_report` until the VM has finished. Keeps its logs if requested.
    pub fn listen(
        &self,
        mut vm: VmChild,
        stop: &AtomicBool,
        on_report: &mut dyn FnMut(VmMessage) -> Result<(), VmFault>,
    ) -> Result<(), Error> {
        let mut outcome = listen(&mut vm, stop, self.folder(), on_report);
        match &outcome {
            Ok(()) => {
                vm.finish();
                outcome = counts::check(self.folder());
            }
            Err(_) => drop(vm),
        }
        // `error` keeps the logs of a failure.
        if let (Ok(()) | Err(VmFault::Interrupted), Some(kept)) = (&outcome, &self.keep_logs) {
            self.keep_logs(kept)?;
        }
        outcome.map_err(|fault| self.error(fault))
    }

    /// Copies the logs to `kept`, named after scenario and run.
    pub fn keep_logs(&self, kept: &Path) -> Result<(), Error> {
        fs::create_dir_all(kept).map_err(Error::io("create", kept))?;
        let run = self.run.replace([' ', '/'], "-");
        let to = |name| kept.join(format!("{}-{run}-{name}", self.scenario.name));
        for name in LOGS {
            let from = self.folder().join(name);
            if from.exists() {
                let to = to(name);
                fs::copy(&from, &to).map_err(Error::io("create", &to))?;
            }
        }
        // A VM that did not start has no counts.
        if let Ok(Some(loads)) = counts::loads(self.folder()) {
            let to = to(LOADS);
            fs::write(&to, loads).map_err(Error::io("create", &to))?;
        }
        Ok(())
    }
}

/// Name of the agent's recording among the logs.
const RECORDING: &str = "agent.rec";

/// Upper bound of a recording from a VM's agent, bytes.
const RECORDING_BYTES_MAX: u64 = 64 << 20;

/// Passes reports on until the VM has finished. All reports are written to a file; the agent's log and programs' output
/// go to separate files.
fn listen(
    vm: &mut VmChild,
    stop: &AtomicBool,
    folder: &Path,
    on_report: &mut dyn FnMut(VmMessage) -> Result<(), VmFault>,
) -> Result<(), VmFault> {
    let mut reports = File::create(folder.join("reports.jsonl")).map_err(VmFault::Log)?;
    loop {
        let mut report = vm.next_message(stop)?;
        if let Some(totals) = report.totals_mut() {
            totals.lag_s = counts::lag_s(folder)?;
        }
        if let VmMessage::AgentRecording { hex } = &report {
            record(&folder.join(RECORDING), hex)?;
            continue;
        }
        serde_json::to_writer(&reports, &report).map_err(|e| VmFault::Log(e.into()))?;
        reports.write_all(b"\n").map_err(VmFault::Log)?;
        match report {
            VmMessage::AgentLog { text } => {
                // A host's guests may have sent theirs before.
                append(&folder.join("agent.log"), &text)?;
            }
            VmMessage::Program(log) => {
                let text = format!("== {}\n{}\n", log.name, log.text);
                append(&folder.join("programs.log"), &text)?;
                on_report(VmMessage::Program(log))?;
            }
            VmMessage::Failed { what } => return Err(VmFault::Job(what)),
            VmMessage::Finished => return Ok(()),
            report => on_report(report)?,
        }
    }
}

/// Appends text to a log.
fn append(path: &Path, text: &str) -> Result<(), VmFault> {
    let file = File::options().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(VmFault::Log)
}

/// Appends bytes to the agent's recording.
fn record(path: &Path, hex: &str) -> Result<(), VmFault> {
    let nonsense = || VmFault::Nonsense("an invalid recording".into());
    let bytes = from_hex(hex).ok_or_else(nonsense)?;
    let file = File::options().create(true).append(true).open(path);
    let mut file = file.map_err(VmFault::Log)?;
    if file.metadata().map_err(VmFault::Log)?.len() > RECORDING_BYTES_MAX {
        return Err(nonsense());
    }
    file.write_all(&bytes).map_err(VmFault::Log)
}
