//! The format of recordings.
//!
//! ```text
//! file   = magic version:u16 frame(header) frame(state) frame(events)* frame(end)?
//! frame  = length:u32 crc32:u32 kind:u8 payload
//! ```
//!
//! Fixed-size numbers are little-endian. Numbers in payloads are LEB128 varints, and signed differences are
//! zigzag-coded. The state is postcard's encoding of a [`Snapshot`]. The checksum covers kind and payload. A file without an
//! end frame is still being written, or its writer was killed.

use serde::{Deserialize, Serialize};

#[cfg(doc)]
use demeter_policy::engine::Snapshot;
use demeter_policy::engine::{Config, Gain};
use demeter_policy::{ByLevel, ByteCount, Level, Tuning};

use crate::status::TierStatus;

/// The version that is written and read.
pub const VERSION: u16 = 20;

pub(super) const MAGIC: &[u8; 8] = b"demflght";
pub(super) const PREFIX_BYTES: usize = 10;
pub(super) const FRAME_HEADER_BYTES: usize = 8;

/// Maximum payload of a frame: the state of a process of about 10 TiB.
pub(super) const FRAME_BYTES_MAX: usize = 1 << 28;

pub(super) const KIND_HEADER: u8 = 0;
pub(super) const KIND_STATE: u8 = 1;
pub(super) const KIND_EVENTS: u8 = 2;
pub(super) const KIND_END: u8 = 3;

/// A recording's metadata.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// The version of the agent that wrote it.
    pub agent: String,
    /// The tracker that made the samples.
    pub tracker: String,
    /// The agent's tuning.
    pub tuning: Tuning,
    /// The tiers, the fastest first.
    pub tiers: Vec<RecordedTier>,
    /// Loads that one sample represents, if the tracker knows.
    pub loads_per_sample: Option<u32>,
    /// Upper bound of a program's assumed share of time that it waits for memory.
    pub waits: f64,
    /// CPUs of the machine.
    pub cpus: u32,
    /// Whether small pages may become huge ones in place.
    pub collapses: bool,
}

/// One tier of the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedTier {
    /// Its nodes.
    pub nodes: Vec<u32>,
    /// Its size, bytes.
    pub bytes: u64,
    /// Latency of a load from it, nanoseconds.
    pub latency_ns: u32,
}

impl From<TierStatus> for RecordedTier {
    fn from(tier: TierStatus) -> Self {
        Self {
            nodes: tier.nodes,
            bytes: tier.bytes,
            latency_ns: tier.latency_ns,
        }
    }
}

impl Header {
    /// The engine's settings.
    pub fn config(&self) -> Config {
        let tier = |level: Level| self.tiers.get(level.index());
        let sizes = |level| ByteCount(tier(level).map_or(0, |tier| tier.bytes));
        Config {
            sizes: ByLevel::from_fn(sizes),
            slowest: Level::new(self.tiers.len().saturating_sub(1)).unwrap_or(Level::Fourth),
            collapses: self.collapses,
            ..Config::new(&self.tuning, ByteCount(0))
        }
    }

    /// The assumed gain per sample.
    pub fn gain(&self) -> Gain {
        let tier = |level: Level| self.tiers.get(level.index());
        Gain {
            loads_per_sample: self.loads_per_sample,
            waits: self.waits,
            latency_ns: ByLevel::from_fn(|level| tier(level).map_or(0, |t| t.latency_ns)),
            cpus: self.cpus,
        }
    }
}

/// An error in a recording's bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The file has another magic number.
    #[error("this is no recording of an agent")]
    Magic,
    /// Another version of the format wrote the file.
    #[error(
        "the recording has format {0}, this program reads {VERSION}; replay it with the version \
         of demeter that wrote it"
    )]
    Version(u16),
    /// The file ends within a frame.
    #[error("the recording is cut off here")]
    CutOff,
    /// A frame's checksum is wrong.
    #[error("the recording was altered here: the checksum does not fit")]
    Checksum,
    /// A frame's content is impossible.
    #[error("the recording was altered here: {0}")]
    Malformed(&'static str),
}

/// Appends a number as a varint.
pub(super) fn put(to: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}

/// Appends the difference between two numbers, with wraparound if that is shorter.
pub(super) fn put_step(to: &mut Vec<u8>, from: u64, number: u64) {
    let step = number.wrapping_sub(from) as i64;
    put(to, (step << 1 ^ step >> 63) as u64);
}

/// Reads numbers from the front of a payload.
#[derive(Debug)]
pub(super) struct Bytes<'a>(pub(super) &'a [u8]);

impl Bytes<'_> {
    pub(super) fn byte(&mut self) -> Result<u8, Fault> {
        let (&first, rest) = self.0.split_first().ok_or(SHORT)?;
        self.0 = rest;
        Ok(first)
    }

    pub(super) fn number(&mut self) -> Result<u64, Fault> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return Err(LONG);
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(LONG)
    }

    pub(super) fn number_u32(&mut self) -> Result<u32, Fault> {
        u32::try_from(self.number()?).map_err(|_| LONG)
    }

    pub(super) fn step(&mut self, from: u64) -> Result<u64, Fault> {
        let coded = self.number()?;
        let step = (coded >> 1) as i64 ^ -((coded & 1) as i64);
        Ok(from.wrapping_add(step as u64))
    }

    /// Reads a number of elements, each of which takes at least one byte.
    pub(super) fn count(&mut self) -> Result<usize, Fault> {
        let count = self.number()?;
        let most = self.0.len() as u64;
        if count > most {
            return Err(Fault::Malformed("a list is longer than its frame"));
        }
        Ok(count as usize)
    }
}

const SHORT: Fault = Fault::Malformed("an event is longer than its frame");
const LONG: Fault = Fault::Malformed("a number is too large");
