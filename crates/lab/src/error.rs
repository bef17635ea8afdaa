//! Errors on the host's side of the lab.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use demeter_scenario::System;

/// The error of a run. Each message names the object and, if possible, a remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program or file that the lab needs is missing.
    #[error("{what}; {hint}")]
    Missing {
        /// The missing item.
        what: String,
        /// A hint for the user.
        hint: String,
    },
    /// The user-mode emulator does not support plugins.
    #[error(
        "{} was built without plugins, as Debian 13 does: set DEMETER_QEMU_USER to a qemu-x86_64 \
         with plugins, as Debian 12's, or see `demeter trace convert` for traces by valgrind",
        qemu.display()
    )]
    NoPlugins {
        /// The emulator.
        qemu: PathBuf,
    },
    /// This machine cannot run it, or not now.
    #[error("{what}; {hint}")]
    Unfit {
        /// The obstacle.
        what: String,
        /// A hint for the user.
        hint: String,
    },
    /// A run on this machine failed.
    #[error("{system}: {what}{}", last_words(said))]
    Here {
        /// The system of the run.
        system: System,
        /// The error.
        what: String,
        /// The agent's last output line, if the agent failed.
        said: String,
    },
    /// A feature that only the simulator supports.
    #[error("the lab cannot run {0}: use --on sim")]
    SimOnly(&'static str),
    /// The scenario needs more memory than is available.
    #[error(
        "the scenario needs {need_mib} MiB for its VM but this machine has {have_mib} MiB \
         available; stop other programs or shrink the tiers"
    )]
    Memory {
        /// Memory of the VM.
        need_mib: u64,
        /// Available memory.
        have_mib: u64,
    },
    /// A case of the scenario is invalid.
    #[error(transparent)]
    Scenario(demeter_scenario::Error),
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    Io {
        /// The operation and its file.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// A program that we ran failed.
    #[error("{program} failed: {said}; {hint}")]
    Tool {
        /// Its name.
        program: String,
        /// Its last output.
        said: String,
        /// A hint for the user.
        hint: String,
    },
    /// More virtual CPUs than rings in the plugin's shared page.
    #[error("machine.vcpus = {0}: the lab has at most 16; lower it, or use --on sim")]
    Vcpus(u32),
    /// A system that exists only in the simulator.
    #[error("the lab cannot run {0}: leave it out with --system, or use --on sim")]
    SimulatedOnly(System),
    /// A VM failed.
    #[error("{run}: {fault}; logs kept in {}", logs.display())]
    Vm {
        /// Name of the run: the system, or the run and the VM.
        run: String,
        /// The fault.
        fault: VmFault,
        /// Folder with its console log and the agent's log.
        logs: PathBuf,
    },
    /// A run finished without complete measurements.
    #[error("{0}: it finished without a full report; rebuild all programs")]
    Incomplete(String),
    /// The host controller does not do what the run requires.
    #[error("the host controller {0}; --keep-logs keeps its log")]
    Controller(String),
    /// Resource usage grew that must not grow.
    #[error("resource usage grew: {0}; --json keeps all figures")]
    Grew(String),
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// Adds the operation and the file to an I/O error, for `map_err`.
    pub(crate) fn io(verb: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let what = format!("{verb} {}", path.as_ref().display());
        move |source| Self::Io { what, source }
    }
}

/// A fault of a VM.
#[derive(Debug, thiserror::Error)]
pub enum VmFault {
    /// It did not finish in time.
    #[error("the VM did not end within {} s (duration_s and lab.timeout_s) and was killed; it {doing}", limit.as_secs())]
    TimeLimit {
        /// The limit.
        limit: Duration,
        /// Its last known action.
        doing: String,
    },
    /// It sent no report while its workload ran.
    #[error("the VM sent no report for {} s and was killed; it {doing}; run it again with --keep-logs", limit.as_secs())]
    Silent {
        /// Time without a report.
        limit: Duration,
        /// Its last known action.
        doing: String,
    },
    /// It exited without a reason.
    #[error("the VM ended early ({status}){}", last_words(said))]
    Ended {
        /// Its exit status, if known.
        status: String,
        /// QEMU's last output.
        said: String,
    },
    /// Its kernel panicked.
    #[error("the VM's kernel panicked: {0}")]
    Panicked(String),
    /// It sent an invalid or too long line.
    #[error("the VM sent an invalid report: {0}")]
    Nonsense(String),
    /// The job inside failed.
    #[error("{0}")]
    Job(String),
    /// The link failed.
    #[error("cannot read the VM's reports: {0}")]
    Link(io::Error),
    /// Its logs cannot be written.
    #[error("cannot write the VM's logs: {0}")]
    Log(io::Error),
    /// The plugin's counts cannot be read.
    #[error("cannot read the counts of the emulator's plugin: {0}")]
    Counts(io::Error),
    /// The plugin could not assign too many accesses to a tier.
    #[error(
        "{strays} of {misses} cache misses fell in no memory tier, so that its figures mean \
         nothing; set DEMETER_QEMU to another QEMU, 7.2 and 10.0 are known to work"
    )]
    Strays {
        /// Cache misses outside both tiers.
        strays: u64,
        /// All cache misses.
        misses: u64,
    },
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
}

fn last_words(said: &str) -> String {
    if said.is_empty() {
        String::new()
    } else {
        format!(": {said}")
    }
}
