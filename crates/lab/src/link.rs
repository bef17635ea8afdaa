//! Protocol between a lab VM and its host.
//!
//! The host packs a [`Job`] into the VM's initramfs. The VM sends one [`VmMessage`] per line, as JSON, over a
//! virtio-serial port. A VM that must be prepared by its host, such as a resizable one, waits until the host sends
//! [`GO`]. Neither side trusts the other: lines are bounded, and an invalid line is an error.

use std::collections::BTreeMap;
use std::io::{self, Read};

use demeter_outcome::Estimate;
use demeter_policy::provision::{Policy, ProvisionerKind};
use demeter_scenario::{Scenario, Settings};
use demeter_workload::Rate;
use serde::{Deserialize, Serialize};

use crate::launch::Launch;
use crate::process_usage::ProcessUsage;

/// Name of the virtio-serial port.
pub const PORT_NAME: &str = "org.demeter.lab";

/// Prefix of the console line that explains a failure without a link.
pub const LAST_WORDS: &str = "lab-init: ";

/// Path of the [`Job`] in the VM.
pub const JOB_PATH: &str = "/etc/demeter/job.json";

/// Path of the agent's configuration in the VM.
pub const AGENT_CONFIG_PATH: &str = "/etc/demeter/demeter.toml";

/// Path of the controller's configuration in a host.
pub const HOST_CONFIG_PATH: &str = "/etc/demeter/host.toml";

/// Folder for guests' memory in a host, if they have balloons. The memory is in unnamed files.
pub const GUESTS_MEMORY_DIR: &str = "/run/guests";

/// The controller's socket in a host.
pub const HOST_SOCKET_PATH: &str = "/run/demeter/host.sock";

/// The agent's socket in the VM.
pub const AGENT_SOCKET_PATH: &str = "/run/demeter/guest.sock";

/// Path of the agent's recording in the VM.
pub const AGENT_RECORDING_PATH: &str = "/run/demeter/agent.rec";

/// Order that lets a waiting VM continue.
pub const GO: &str = "go";

/// Order to kill the agent, for a VM that runs rounds.
pub const KILL_AGENT: &str = "kill-agent";

/// Folder of the kernel modules that the VM loads first.
pub const MODULES_DIR: &str = "/lib/modules";

/// Folder of the kernel modules that the link itself needs.
pub const EARLY_MODULES_DIR: &str = "/lib/modules-early";

/// Longest line on the link, bytes.
pub const LINE_MAX_BYTES: usize = 256 * 1024;

/// The job of one VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// The system that manages memory in this VM, and its settings.
    pub settings: Settings,
    /// The scenario that it runs.
    pub scenario: Scenario,
    /// The mechanism that resizes its memory. With one, it waits for [`GO`] after [`VmMessage::Booted`] and after
    /// [`VmMessage::Start`].
    #[serde(default)]
    pub provisioner: Option<ProvisionerKind>,
    /// Whether the VM runs the workload endlessly, to survive disruptions. It then waits for nothing and obeys
    /// [`KILL_AGENT`].
    #[serde(default)]
    pub rounds: bool,
    /// The programs to start, if the workload consists of programs.
    #[serde(default)]
    pub launches: Vec<Launch>,
    /// The VM's level of nesting.
    #[serde(default)]
    pub level: Nesting,
}

/// A VM's level of nesting.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Nesting {
    /// On the emulator, running the workload.
    #[default]
    Alone,
    /// On the emulator, as the host of guests that run the workload.
    Host {
        /// The guests.
        guests: Vec<GuestStart>,
        /// The controller's policy for fast memory in the timed phase, if guests have balloons.
        policy: Option<Policy>,
    },
    /// In such a host, which sends [`GO`] after [`VmMessage::Filled`] and [`VmMessage::Start`]. It does not see the
    /// emulator's plugin.
    Guest {
        /// Whether it has a node of each of the host's tiers, not just one.
        is_tiered: bool,
    },
}

/// Start parameters of a host's guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestStart {
    /// Its name, also in results.
    pub name: String,
    /// Its start command; standard input and output are its link.
    pub command: Vec<String>,
    /// Whether it gets the sampling unit of the host's emulator, which supports one reader.
    pub has_unit: bool,
    /// Size in bytes of each of its nodes that has memory. Its emulator maps each as one range of that size.
    pub node_bytes: Vec<u64>,
}

impl Nesting {
    /// Whether the VM is a host's guest.
    pub fn is_guest(&self) -> bool {
        matches!(self, Self::Guest { .. })
    }
}

/// One report from the VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "lowercase")]
pub enum VmMessage {
    /// The VM has booted.
    Booted {
        /// The kernel's release.
        kernel: String,
        /// Memory that programs can still allocate from the fast node, MiB.
        fast_free_mib: u64,
        /// Memory that programs can still allocate from the slow node, MiB.
        slow_free_mib: u64,
    },
    /// The VM's memory was resized before its workload started.
    Sized {
        /// Memory that programs can now allocate from the fast node, MiB.
        fast_free_mib: u64,
        /// Memory that programs can now allocate from the slow node, MiB.
        slow_free_mib: u64,
    },
    /// The workload in a host's guest has populated its memory. The guest waits for [`GO`] before its system is
    /// started; the host enables the slow memory delay meanwhile. The host does not forward this report.
    Filled,
    /// The workload has populated its memory; the timed phase begins.
    Start {
        /// Share of the hot set in fast memory, 0 to 1; none if the hot set is unknown.
        #[serde(default)]
        hot_in_fast: Option<f64>,
        /// Counters just before the timed phase.
        totals: Totals,
    },
    /// An interval of the timed phase has passed.
    Interval(Interval),
    /// The workload moved its hot set; from now on `hot_in_fast` refers to the new one.
    Shift {
        /// Seconds into the timed phase.
        t_s: f64,
    },
    /// The timed phase is over.
    Done {
        /// Its length, seconds.
        t_s: f64,
        /// The workload's speed over the whole phase.
        rate: Option<Rate>,
        /// The programs' figures, if the workload consists of programs.
        #[serde(default)]
        programs: Vec<ProgramFigure>,
        /// Counters at its end.
        totals: Totals,
        /// The agent's last estimate of the slowdown by size of fast memory, if it has one.
        #[serde(default)]
        estimate: Option<Estimate>,
    },
    /// The workload has verified its data.
    Verified {
        /// Words checked.
        words: u64,
        /// Words found wrong.
        errors: u64,
    },
    /// Resource usage of the agent and the kernel, after a round.
    Uses {
        /// The agent.
        agent: ProcessUsage,
        /// The kernel's own unreclaimable memory, KiB.
        kernel_kib: u64,
    },
    /// The last output of a program.
    Program(ProgramLog),
    /// The last lines of the agent's log.
    AgentLog {
        /// Its text.
        text: String,
    },
    /// The next bytes of the agent's recording.
    AgentRecording {
        /// In hexadecimal digits, see [`to_hex`].
        hex: String,
    },
    /// The job failed. Only [`VmMessage::AgentLog`], [`VmMessage::AgentRecording`] and [`VmMessage::Program`] follow.
    Failed {
        /// The error, in one line.
        what: String,
    },
    /// The job succeeded; the VM powers off.
    Finished,
}

/// One interval of the timed phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Its end, seconds into the timed phase.
    pub t_s: f64,
    /// Speed of the workload.
    pub rate: Option<Rate>,
    /// The programs' figures, if the workload consists of programs.
    #[serde(default)]
    pub programs: Vec<ProgramFigure>,
    /// Share of the hot set in fast memory at its end, 0 to 1; none if the hot set is unknown.
    #[serde(default)]
    pub hot_in_fast: Option<f64>,
    /// Counters at its end.
    pub totals: Totals,
}

/// A measured figure of one program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProgramFigure {
    /// Its name.
    pub name: String,
    /// The unit.
    pub unit: String,
    /// The figure; none if there is no data for it.
    pub value: Option<f64>,
    /// Whether it is the program's run time in seconds, not a speed.
    #[serde(default)]
    pub is_elapsed: bool,
    /// Fast memory in its cgroup, bytes, if it has one.
    #[serde(default)]
    pub fast_bytes: Option<u64>,
}

/// The last output of one program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProgramLog {
    /// Its name.
    pub name: String,
    /// The lines.
    pub text: String,
    /// Whether this program is the reason that the job failed.
    pub is_why: bool,
}

/// Counters since boot; only differences are meaningful.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Totals {
    /// System time of the whole VM, interrupts included, CPU seconds.
    pub system_s: f64,
    /// CPU seconds by cause: `agent_user`, `agent_system`, `kswapd`, ...
    pub cpu_s: BTreeMap<String, f64>,
    /// Counters of /proc/vmstat, by name, and KVM's, as `kvm_NAME`.
    pub vmstat: BTreeMap<String, u64>,
    /// Bytes moved from slow to fast memory, if counted.
    pub promoted_bytes: Option<u64>,
    /// Bytes moved from fast to slow memory, if counted.
    pub demoted_bytes: Option<u64>,
    /// Seconds in which the host did not run this VM's CPUs, summed over all CPUs. The VM cannot know this; its host
    /// fills it in.
    #[serde(default)]
    pub lag_s: f64,
}

impl Totals {
    /// The sum of two VMs' counters.
    #[must_use]
    pub(crate) fn plus(mut self, other: Self) -> Self {
        let sum = |a: Option<u64>, b: Option<u64>| a?.checked_add(b?);
        self.system_s += other.system_s;
        self.lag_s += other.lag_s;
        for (cause, cpu_s) in other.cpu_s {
            *self.cpu_s.entry(cause).or_default() += cpu_s;
        }
        for (name, count) in other.vmstat {
            let known = self.vmstat.entry(name).or_default();
            *known = known.saturating_add(count);
        }
        self.promoted_bytes = sum(self.promoted_bytes, other.promoted_bytes);
        self.demoted_bytes = sum(self.demoted_bytes, other.demoted_bytes);
        self
    }
}

impl VmMessage {
    /// Its counters, if it has any.
    pub(crate) fn totals_mut(&mut self) -> Option<&mut Totals> {
        match self {
            Self::Start { totals, .. } | Self::Done { totals, .. } => Some(totals),
            Self::Interval(interval) => Some(&mut interval.totals),
            _ => None,
        }
    }
}

/// Converts bytes to hexadecimal digits, two for each byte.
pub fn to_hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or_default();
    let digits = |byte: &u8| [digit(byte >> 4), digit(byte & 15)];
    bytes.iter().flat_map(digits).collect()
}

/// Converts hexadecimal digits to bytes; `None` if invalid.
pub fn from_hex(hex: &str) -> Option<Vec<u8>> {
    let digit = |digit: u8| char::from(digit).to_digit(16);
    let byte = |pair: &[u8]| match pair {
        &[high, low] => Some((digit(high)? << 4 | digit(low)?) as u8),
        _ => None,
    };
    hex.as_bytes().chunks(2).map(byte).collect()
}

/// Splits a byte stream into lines of at most [`LINE_MAX_BYTES`].
///
/// After a read timeout it can be called again; no data is lost.
#[derive(Debug)]
pub struct LineReader<R> {
    source: R,
    pending: Vec<u8>,
    searched: usize,
}

impl<R> LineReader<R> {
    /// The source of the lines.
    pub fn source(&self) -> &R {
        &self.source
    }
}

impl<R: Read> LineReader<R> {
    /// Reads lines from `source`.
    pub fn new(source: R) -> Self {
        Self {
            source,
            pending: Vec::new(),
            searched: 0,
        }
    }

    /// The next line without its end, or `None` when the source has ended.
    ///
    /// Drops an unfinished last line, as its writer died while writing it.
    pub fn next_line(&mut self) -> io::Result<Option<String>> {
        loop {
            if let Some(at) = self.pending[self.searched..]
                .iter()
                .position(|&b| b == b'\n')
            {
                let end = self.searched + at;
                let line = String::from_utf8_lossy(&self.pending[..end]).into_owned();
                self.pending.drain(..=end);
                self.searched = 0;
                return Ok(Some(line));
            }
            self.searched = self.pending.len();
            if self.pending.len() >= LINE_MAX_BYTES {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("a line is longer than {LINE_MAX_BYTES} bytes"),
                ));
            }
            let mut chunk = [0; 4096];
            match self.source.read(&mut chunk) {
                Ok(0) => return Ok(None),
                Ok(read) => self.pending.extend_from_slice(&chunk[..read]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns its bytes in the given pieces, with a timeout before each.
    struct Dribble {
        bytes: Vec<u8>,
        pieces: Vec<usize>,
        timed_out: bool,
    }

    impl Read for Dribble {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.timed_out = !self.timed_out;
            if self.timed_out {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let piece = self.pieces.pop().unwrap_or(usize::MAX);
            let take = piece.min(self.bytes.len()).min(into.len());
            into[..take].copy_from_slice(&self.bytes[..take]);
            self.bytes.drain(..take);
            Ok(take)
        }
    }

    proptest! {
        #[test]
        fn bytes_survive_as_digits(bytes: Vec<u8>, other in ".{0,8}") {
            let hex = to_hex(&bytes);
            prop_assert!(hex.len() == 2 * bytes.len() && hex.is_ascii());
            prop_assert_eq!(from_hex(&hex), Some(bytes));
            let is_hex = other.len() % 2 == 0 && other.bytes().all(|b| b.is_ascii_hexdigit());
            prop_assert_eq!(from_hex(&other).is_some(), is_hex);
        }

        /// For any fragmentation, the received lines equal those sent.
        #[test]
        fn lines_survive_any_chopping(
            lines in proptest::collection::vec("[a-z]{0,20}", 0..20),
            pieces in proptest::collection::vec(1usize..9, 0..60),
        ) {
            let bytes = lines.iter().flat_map(|l| format!("{l}\n").into_bytes()).collect();
            let mut reader = LineReader::new(Dribble { bytes, pieces, timed_out: false });
            let mut got = Vec::new();
            loop {
                match reader.next_line() {
                    Ok(Some(line)) => got.push(line),
                    Ok(None) => break,
                    Err(e) => prop_assert_eq!(e.kind(), io::ErrorKind::WouldBlock),
                }
            }
            prop_assert_eq!(got, lines);
        }
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut reader = LineReader::new(io::repeat(b'x'));
        assert_eq!(
            reader.next_line().unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }

    #[test]
    fn reports_come_back_as_they_went() {
        let report = VmMessage::Interval(Interval {
            t_s: 1.0,
            rate: Some(Rate::Mops(0.5)),
            programs: vec![],
            hot_in_fast: Some(0.25),
            totals: Totals::default(),
        });
        let line = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<VmMessage>(&line).unwrap(), report);
    }
}
