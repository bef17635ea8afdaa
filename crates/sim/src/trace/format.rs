//! Binary encoding of the header and frame headers.

use demeter_policy::GuestVirtAddr;

use super::error::Fault;

/// The version of the format.
pub const VERSION: u16 = 1;

const MAGIC: &[u8; 8] = b"demtrace";
pub(super) const THREADS_MAX: u16 = 1024;
pub(super) const REGIONS_MAX: usize = 4096;
pub(super) const PREFIX_BYTES: usize = 16;
const SPAN_BYTES: usize = 16;
const CHECKSUM_BYTES: usize = 4;
pub(super) const FRAME_HEADER_BYTES: usize = 20;
/// Thread number of the last frame.
pub(super) const LAST: u16 = u16::MAX;

/// A region that the recorded program accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Its start in the recorded program.
    pub base: GuestVirtAddr,
    /// Its length, bytes.
    pub bytes: u64,
}

/// The header of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Number of recorded threads, 1 to 1024.
    pub threads: u16,
    /// The accessed regions in address order, at least one.
    pub regions: Vec<Span>,
}

impl Header {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.threads.to_le_bytes());
        bytes.extend((self.regions.len() as u32).to_le_bytes());
        for span in &self.regions {
            bytes.extend(span.base.0.to_le_bytes());
            bytes.extend(span.bytes.to_le_bytes());
        }
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }

    /// Number of bytes from the prefix to the first frame.
    pub(super) fn rest_bytes(prefix: &[u8; PREFIX_BYTES]) -> Result<usize, Fault> {
        if &prefix[..8] != MAGIC {
            return Err(Fault::Magic);
        }
        let version = u16_at(prefix, 8);
        if version != VERSION {
            return Err(Fault::Version(version));
        }
        if !(1..=THREADS_MAX).contains(&u16_at(prefix, 10)) {
            return Err(Fault::Bounds("the number of threads"));
        }
        let regions = u32_at(prefix, 12) as usize;
        if !(1..=REGIONS_MAX).contains(&regions) {
            return Err(Fault::Bounds("the number of regions"));
        }
        Ok(regions * SPAN_BYTES + CHECKSUM_BYTES)
    }

    /// Parses the header. The second part has [`Self::rest_bytes`] bytes.
    pub(super) fn parse(prefix: &[u8; PREFIX_BYTES], rest: &[u8]) -> Result<Self, Fault> {
        let (spans, sum) = rest.split_at(rest.len() - CHECKSUM_BYTES);
        if !cfg!(fuzzing) && u32_at(sum, 0) != checksum([prefix, spans]) {
            return Err(Fault::Checksum);
        }
        let mut regions: Vec<Span> = Vec::with_capacity(spans.len() / SPAN_BYTES);
        let mut free = 0;
        for span in spans.chunks_exact(SPAN_BYTES) {
            let (base, bytes) = (u64_at(span, 0), u64_at(span, 8));
            if base < free {
                return Err(Fault::Order);
            }
            free = match base.checked_add(bytes) {
                Some(end) if bytes > 0 && end <= 1 << 57 => end,
                _ => return Err(Fault::Bounds("a region")),
            };
            regions.push(Span {
                base: GuestVirtAddr(base),
                bytes,
            });
        }
        Ok(Self {
            threads: u16_at(prefix, 10),
            regions,
        })
    }

    /// Index of the region that holds `gva`.
    pub(super) fn region_of(&self, gva: GuestVirtAddr) -> Option<usize> {
        let index = self.regions.partition_point(|span| span.base <= gva);
        let span = self.regions.get(index.checked_sub(1)?)?;
        (gva.0 - span.base.0 < span.bytes).then_some(index - 1)
    }
}

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameHeader {
    pub(super) thread: u16,
    pub(super) accesses: u16,
    pub(super) payload_bytes: u32,
    pub(super) instructions: u64,
    checksum: u32,
}

impl FrameHeader {
    pub(super) fn new(thread: u16, accesses: u16, instructions: u64, payload: &[u8]) -> Self {
        let mut header = Self {
            thread,
            accesses,
            payload_bytes: payload.len() as u32,
            instructions,
            checksum: 0,
        };
        header.checksum = header.sum(payload);
        header
    }

    pub(super) fn to_bytes(self) -> [u8; FRAME_HEADER_BYTES] {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        bytes[..2].copy_from_slice(&self.thread.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.accesses.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.instructions.to_le_bytes());
        bytes[16..].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    pub(super) fn parse(bytes: &[u8; FRAME_HEADER_BYTES]) -> Self {
        Self {
            thread: u16_at(bytes, 0),
            accesses: u16_at(bytes, 2),
            payload_bytes: u32_at(bytes, 4),
            instructions: u64_at(bytes, 8),
            checksum: u32_at(bytes, 16),
        }
    }

    /// Whether the checksum matches this header and `payload`.
    pub(super) fn fits(&self, payload: &[u8]) -> bool {
        // A fuzzer would never get past a checksum.
        cfg!(fuzzing) || self.checksum == self.sum(payload)
    }

    fn sum(&self, payload: &[u8]) -> u32 {
        checksum([&self.to_bytes()[..16], payload])
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// CRC-32 of the concatenated parts.
fn checksum(parts: [&[u8]; 2]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    parts.iter().for_each(|part| crc.update(part));
    crc.finalize()
}
