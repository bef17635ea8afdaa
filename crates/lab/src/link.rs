//! What a lab VM and its host say to each other.
//!
//! The host packs a [`Job`] into the VM's initramfs; the VM answers with one [`VmMessage`] a line,
//! as JSON, over a virtio-serial port. A VM whose memory is changed from outside waits where its
//! host has something to do first, until the host sends [`GO`]. Neither side trusts the other:
//! lines are bounded, and what does not decode is an error, never a guess.

use std::collections::BTreeMap;
use std::io::{self, Read};

use demeter_policy::provision::{Policy, ProvisionerKind};
use demeter_scenario::{Scenario, Settings};
use serde::{Deserialize, Serialize};

use crate::program::Launch;
use crate::uses::Uses;
use crate::workload::Rate;

/// Name of the virtio-serial port.
pub const PORT_NAME: &str = "org.demeter.lab";

/// How the line on the console begins that says why a VM could not even open its link.
pub const LAST_WORDS: &str = "lab-init: ";

/// Where the VM finds its [`Job`].
pub const JOB_PATH: &str = "/etc/demeter/job.json";

/// Where the VM finds the agent's configuration.
pub const AGENT_CONFIG_PATH: &str = "/etc/demeter/demeter.toml";

/// Where a host finds its controller's configuration.
pub const HOST_CONFIG_PATH: &str = "/etc/demeter/host.toml";

/// Where a host has the memory of guests with balloons, as files without a name.
pub const GUESTS_MEMORY_DIR: &str = "/run/guests";

/// The controller's socket in a host.
pub const HOST_SOCKET_PATH: &str = "/run/demeter/host.sock";

/// The agent's socket in the VM.
pub const AGENT_SOCKET_PATH: &str = "/run/demeter/guest.sock";

/// Where the agent records in the VM, if it does.
pub const AGENT_RECORDING_PATH: &str = "/run/demeter/agent.rec";

/// What lets a VM go on that waits.
pub const GO: &str = "go";

/// What makes a VM that runs rounds kill its agent.
pub const KILL_AGENT: &str = "kill-agent";

/// Where the VM finds the kernel modules that it loads first.
pub const MODULES_DIR: &str = "/lib/modules";

/// Where those are that the kernel needs for the link itself.
pub const EARLY_MODULES_DIR: &str = "/lib/modules-early";

/// Longest line on the link, bytes.
pub const LINE_MAX_BYTES: usize = 256 * 1024;

/// What one VM is for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// The system that manages memory in this VM, and how it is set up.
    pub settings: Settings,
    /// The scenario that it runs.
    pub scenario: Scenario,
    /// What changes its memory from outside. It then waits for [`GO`] after [`VmMessage::Booted`]
    /// and after [`VmMessage::Start`].
    #[serde(default)]
    pub provisioner: Option<ProvisionerKind>,
    /// Whether the VM runs the workload again and again, to survive what is done to it; it then
    /// waits for nothing and answers [`KILL_AGENT`].
    #[serde(default)]
    pub rounds: bool,
    /// What to start, where the workload is made of programs.
    #[serde(default)]
    pub launches: Vec<Launch>,
    /// Where the VM stands.
    #[serde(default)]
    pub level: Level,
}

/// Where a job's VM stands.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Level {
    /// On the emulator, and the workload runs in it.
    #[default]
    Alone,
    /// On the emulator, as the host of guests in which the workload runs.
    Host {
        /// The guests.
        guests: Vec<GuestStart>,
        /// By what the controller divides fast memory in the timed phase, where guests have balloons.
        policy: Option<Policy>,
    },
    /// In such a host, which sends [`GO`] after [`VmMessage::Filled`] and [`VmMessage::Start`]. It sees nothing of the
    /// emulator's plugin.
    Guest {
        /// Whether it has a node of each of the host's tiers, or one only.
        is_tiered: bool,
    },
}

/// How a host starts a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestStart {
    /// Its name, also in results.
    pub name: String,
    /// What starts it; its standard input and output are its link.
    pub command: Vec<String>,
    /// Whether it is given the sampling unit of the host's own emulator, which has one reader.
    pub has_unit: bool,
    /// The size of each of its nodes that has memory, bytes: its emulator maps each as one range of that length.
    pub node_bytes: Vec<u64>,
}

impl Level {
    /// Whether the VM is a host's guest.
    pub fn is_guest(&self) -> bool {
        matches!(self, Self::Guest { .. })
    }
}

/// One line from the VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "lowercase")]
pub enum VmMessage {
    /// The VM is up.
    Booted {
        /// The kernel's release.
        kernel: String,
        /// Memory that programs can still take from the fast node, MiB.
        fast_free_mib: u64,
        /// The same for the slow node.
        slow_free_mib: u64,
    },
    /// The VM's memory was changed from outside before anything ran in it.
    Sized {
        /// Memory that programs can now take from the fast node, MiB.
        fast_free_mib: u64,
        /// The same for the slow node.
        slow_free_mib: u64,
    },
    /// The workload in a host's guest has filled its memory. The guest waits for [`GO`] before anything is
    /// switched on: the host makes slow memory slow meanwhile. Nobody but the host hears of it.
    Filled,
    /// The workload has filled its memory; the timed phase begins.
    Start {
        /// Share of the hot set in fast memory, 0 to 1; none where nobody knows the hot set.
        #[serde(default)]
        hot_in_fast: Option<f64>,
        /// Counters just before the timed phase.
        totals: Totals,
    },
    /// An interval of the timed phase has passed.
    Interval(Interval),
    /// The workload moved its hot set; `hot_in_fast` speaks of the new one from here on.
    Shift {
        /// Seconds into the timed phase.
        t_s: f64,
    },
    /// The timed phase is over.
    Done {
        /// Its length, seconds.
        t_s: f64,
        /// What the workload says of the whole phase.
        rate: Option<Rate>,
        /// The programs' figures, where the workload is made of programs.
        #[serde(default)]
        programs: Vec<ProgramFigure>,
        /// Counters at its end.
        totals: Totals,
    },
    /// The workload has checked its data.
    Verified {
        /// Words checked.
        words: u64,
        /// Words found wrong.
        errors: u64,
    },
    /// What the agent and the kernel use, after a round.
    Uses {
        /// The agent.
        agent: Uses,
        /// The kernel's own memory that it cannot give back, KiB.
        kernel_kib: u64,
    },
    /// What a program has printed last.
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
    /// The job went wrong; nothing follows but [`VmMessage::AgentLog`], [`VmMessage::AgentRecording`] and
    /// [`VmMessage::Program`].
    Failed {
        /// What, in one line.
        what: String,
    },
    /// The job went well; the VM powers off.
    Finished,
}

/// One interval of the timed phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Its end, seconds into the timed phase.
    pub t_s: f64,
    /// How fast the workload went.
    pub rate: Option<Rate>,
    /// The programs' figures, where the workload is made of programs.
    #[serde(default)]
    pub programs: Vec<ProgramFigure>,
    /// Share of the hot set in fast memory at its end, 0 to 1; none where nobody knows the hot
    /// set.
    #[serde(default)]
    pub hot_in_fast: Option<f64>,
    /// Counters at its end.
    pub totals: Totals,
}

/// What one program was measured to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProgramFigure {
    /// Its name.
    pub name: String,
    /// The unit.
    pub unit: String,
    /// The figure; none where there was nothing to make it of.
    pub value: Option<f64>,
    /// Whether it is how long the program took to its end, in seconds, and no speed.
    #[serde(default)]
    pub is_elapsed: bool,
    /// Fast memory that its cgroup holds, bytes, where it has one.
    #[serde(default)]
    pub fast_bytes: Option<u64>,
}

/// What one program has printed last.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProgramLog {
    /// Its name.
    pub name: String,
    /// The lines.
    pub text: String,
    /// Whether the job went wrong because of this program.
    pub is_why: bool,
}

/// Counters since boot; only their differences mean something.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Totals {
    /// System time of the whole VM, interrupts included, CPU seconds.
    pub system_s: f64,
    /// CPU seconds by cause: `agent_user`, `agent_system`, `kswapd`, ...
    pub cpu_s: BTreeMap<String, f64>,
    /// Counters of /proc/vmstat, by name, and KVM's, as `kvm_NAME`.
    pub vmstat: BTreeMap<String, u64>,
    /// Bytes moved from slow to fast memory, where somebody counts them.
    pub promoted_bytes: Option<u64>,
    /// Bytes moved from fast to slow memory, likewise.
    pub demoted_bytes: Option<u64>,
    /// Time in which the host ran something else than this VM's CPUs, all together, seconds. The
    /// VM does not know; its host puts it in.
    #[serde(default)]
    pub lag_s: f64,
}

impl Totals {
    /// Those of two VMs together.
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
    /// The counters in it, if it has any.
    pub(crate) fn totals_mut(&mut self) -> Option<&mut Totals> {
        match self {
            Self::Start { totals, .. } | Self::Done { totals, .. } => Some(totals),
            Self::Interval(interval) => Some(&mut interval.totals),
            _ => None,
        }
    }
}

/// Bytes as hexadecimal digits, two for each.
pub fn to_hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or_default();
    let digits = |byte: &u8| [digit(byte >> 4), digit(byte & 15)];
    bytes.iter().flat_map(digits).collect()
}

/// The bytes of hexadecimal digits; `None` if they are something else.
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
/// A source with a read timeout may be asked again: nothing is lost.
#[derive(Debug)]
pub struct LineReader<R> {
    source: R,
    pending: Vec<u8>,
    searched: usize,
}

impl<R> LineReader<R> {
    /// Where the lines come from.
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
    /// An unfinished last line is dropped: its writer died over it.
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

    /// Hands out its bytes in the given pieces, with a timeout before each.
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

        /// However the bytes arrive, the lines are those that were sent.
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
