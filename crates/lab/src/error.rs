//! What can go wrong on the host's side of the lab.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use demeter_scenario::System;

/// Why a run failed. Each message names the thing and, where there is one, what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program or file that the lab needs is not there.
    #[error("{what}; {hint}")]
    Missing {
        /// What is missing.
        what: String,
        /// What the person can do.
        hint: String,
    },
    /// The user-mode emulator cannot tell what a program touches.
    #[error(
        "{} was built without plugins, as Debian 13 does: set DEMETER_QEMU_USER to a qemu-x86_64 \
         with plugins, as Debian 12's, or see `demeter trace convert` for traces by valgrind",
        qemu.display()
    )]
    NoPlugins {
        /// The emulator.
        qemu: PathBuf,
    },
    /// This machine cannot do it, or not now.
    #[error("{what}; {hint}")]
    Unfit {
        /// What stands against it.
        what: String,
        /// What the person can do.
        hint: String,
    },
    /// A run on this machine went wrong.
    #[error("{system}: {what}{}", last_words(said))]
    Here {
        /// What ran.
        system: System,
        /// What went wrong.
        what: String,
        /// The last line that the agent said, where it was the agent.
        said: String,
    },
    /// Only the simulator can do it: which workload, or what else.
    #[error("the lab cannot run {0}: use --on sim")]
    SimOnly(&'static str),
    /// The scenario needs more memory than this machine has left.
    #[error(
        "the scenario needs {need_mib} MiB for its VM but this machine has {have_mib} MiB \
         available; stop other programs or shrink the tiers"
    )]
    Memory {
        /// What the VM takes.
        need_mib: u64,
        /// What is available.
        have_mib: u64,
    },
    /// The system refused something.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried, on which file.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// A program that we called failed.
    #[error("{program} failed: {said}; {hint}")]
    Tool {
        /// Its name.
        program: String,
        /// The last thing it said.
        said: String,
        /// What the person can do.
        hint: String,
    },
    /// More virtual CPUs than the plugin's shared page has rings for.
    #[error("machine.vcpus = {0}: the lab has at most 16; lower it, or use --on sim")]
    Vcpus(u32),
    /// A system that exists only as a model.
    #[error("the lab cannot run {0}: leave it out with --system, or use --on sim")]
    SimulatedOnly(System),
    /// A VM went wrong.
    #[error("{run}: {fault}; logs kept in {}", logs.display())]
    Vm {
        /// What ran in it: the system's name, or that of the run and the VM.
        run: String,
        /// What went wrong.
        fault: VmFault,
        /// The folder with its console log and the agent's.
        logs: PathBuf,
    },
    /// A run said that it had finished but not what it had measured.
    #[error("{0}: it finished without a full report; build all programs anew")]
    Incomplete(String),
    /// The host controller does not do what the run needs.
    #[error("the host controller {0}; --keep-logs keeps its log")]
    Controller(String),
    /// What must not grow did.
    #[error("something grew while nothing called for it: {0}; --json keeps all figures")]
    Grew(String),
    /// The person asked us to stop.
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// For `map_err`: names the operation and the file.
    pub(crate) fn io(verb: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let what = format!("{verb} {}", path.as_ref().display());
        move |source| Self::Io { what, source }
    }
}

/// How a VM went wrong.
#[derive(Debug, thiserror::Error)]
pub enum VmFault {
    /// It did not end in time.
    #[error("the VM did not end within {} s (duration_s and lab.timeout_s) and was killed; it {doing}", limit.as_secs())]
    TimeLimit {
        /// The limit.
        limit: Duration,
        /// The last thing it was known to do.
        doing: String,
    },
    /// It said nothing any more while its workload ran.
    #[error("the VM said nothing for {} s and was killed; it {doing}; run it again with --keep-logs", limit.as_secs())]
    Silent {
        /// How long it was waited for.
        limit: Duration,
        /// The last thing it was known to do.
        doing: String,
    },
    /// It ended without saying why.
    #[error("the VM ended early ({status}){}", last_words(said))]
    Ended {
        /// How, as far as it is known.
        status: String,
        /// What QEMU said last.
        said: String,
    },
    /// Its kernel panicked.
    #[error("the VM's kernel panicked: {0}")]
    Panicked(String),
    /// It said something that is no report, or too much.
    #[error("the VM sent nonsense: {0}")]
    Nonsense(String),
    /// The job inside failed.
    #[error("{0}")]
    Job(String),
    /// The link broke.
    #[error("cannot read the VM's reports: {0}")]
    Link(io::Error),
    /// What the VM said cannot be kept.
    #[error("cannot write the VM's logs: {0}")]
    Log(io::Error),
    /// The plugin's counts cannot be read.
    #[error("cannot read what the emulator's plugin counted: {0}")]
    Counts(io::Error),
    /// The plugin could not tell in which tier too many accesses fell.
    #[error(
        "{strays} of {misses} cache misses fell in no memory tier, so that its figures mean \
         nothing; set DEMETER_QEMU to another QEMU, 7.2 and 10.0 are known to work"
    )]
    Strays {
        /// Cache misses that fell in no tier.
        strays: u64,
        /// All of them.
        misses: u64,
    },
    /// The person asked us to stop.
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
