//! Frames: borders of messages in a byte pipe without connections.
//!
//! # Problem
//! A virtio-serial port outlives both of its sides. After a restart of one side, half a frame may
//! lie in the pipe, followed by the next whole frame. A reader that trusted the length in the half
//! frame's header would swallow that frame and many after it. At a hundred bytes a second, a lost
//! 64 KiB frame would block the reader for minutes.
//!
//! # Approach
//! There is a zero byte before and after every frame, and none inside. Consistent overhead byte
//! stuffing replaces each zero by the distance to the next one, at a cost of one byte in 254. So
//! the zero before a whole frame ends any remains of an earlier one.
//!
//! A frame contains version (u16), kind (u16), CRC-32 over version, kind and payload (u32), and the
//! payload. Integers are little-endian.
//!
//! # Properties
//! - An encoded message is decoded, however the pipe cuts it.
//! - Any bytes: no panic, and no more memory than one frame and the latest input.
//! - After any bytes, a whole frame is decoded as soon as its last byte has arrived.
//! - A frame with a changed or lost byte is an error, not another message.

use std::mem;

use crate::fields::{self, Malformed};
use crate::message::{EncodeError, Message};
use crate::version::{VERSION, VERSION_MIN};

/// Maximum length of a payload.
pub const PAYLOAD_BYTES_MAX: usize = 64 * 1024;

/// Length of version, kind and CRC.
const HEADER_BYTES: usize = 8;

/// Maximum number of bytes between two zeros of the pipe.
pub const ENCODED_BYTES_MAX: usize =
    HEADER_BYTES + PAYLOAD_BYTES_MAX + (HEADER_BYTES + PAYLOAD_BYTES_MAX) / 254 + 1;

/// Reason why bytes between two zeros are no message. The decoder skips them and continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Half a frame, or one that was damaged in transit.
    #[error("a frame is damaged")]
    Damaged,
    /// A frame is too long.
    #[error("a frame is longer than {ENCODED_BYTES_MAX} bytes")]
    TooLong,
    /// The version is not supported.
    #[error(
        "the other side speaks version {0} of the protocol, we speak {VERSION_MIN} to {VERSION}; update one"
    )]
    Version(u16),
    /// The kind is unknown.
    #[error("a message has the unknown kind {0}")]
    Kind(u16),
    /// The fields do not fit the kind, or a value is invalid.
    #[error("a message of kind {0} has fields that it cannot have")]
    Fields(u16),
}

/// Appends a message in the newest version to `out`.
pub fn encode(message: &Message, out: &mut Vec<u8>) -> Result<(), EncodeError> {
    encode_as(VERSION, message, out)
}

/// Appends a message in a given version, one of [`VERSION_MIN`] to [`VERSION`].
pub fn encode_as(version: u16, message: &Message, out: &mut Vec<u8>) -> Result<(), EncodeError> {
    let mut frame = vec![0; HEADER_BYTES];
    let kind = fields::write(version, message, &mut frame)?;
    let (header, payload) = frame.split_at_mut(HEADER_BYTES);
    header[..2].copy_from_slice(&version.to_le_bytes());
    header[2..4].copy_from_slice(&kind.to_le_bytes());
    let crc = checksum(&header[..4], payload);
    header[4..].copy_from_slice(&crc.to_le_bytes());
    out.push(0);
    stuff(&frame, out);
    out.push(0);
    Ok(())
}

/// Decodes messages from the bytes of a pipe.
///
/// After each [`push`](Self::push), call [`next`](Self::next) until it returns `Ok(None)`. Then at
/// most one frame stays in memory.
#[derive(Debug, Default)]
pub struct Decoder {
    /// Received bytes; those before `start` are decoded.
    buffer: Vec<u8>,
    start: usize,
    /// Bytes from `start` on that contain no zero.
    scanned: usize,
    /// Whether the rest of a frame that is too long is being skipped.
    overlong: bool,
    /// Version of the last message.
    version: Option<u16>,
}

impl Decoder {
    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend(bytes);
    }

    /// The version of the last message, if any.
    pub fn version(&self) -> Option<u16> {
        self.version
    }

    /// The next message; `Ok(None)` if more bytes are needed. After an error, the next call
    /// continues behind the bad frame.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator would end at None"
    )]
    pub fn next(&mut self) -> Result<Option<Message>, DecodeError> {
        loop {
            let pending = &self.buffer[self.start..];
            let Some(zero) = pending[self.scanned..].iter().position(|&b| b == 0) else {
                self.scanned = pending.len();
                if self.overlong {
                    self.skip(self.scanned);
                } else if self.scanned > ENCODED_BYTES_MAX {
                    self.skip(self.scanned);
                    self.overlong = true;
                    return Err(DecodeError::TooLong);
                }
                return Ok(None);
            };
            let len = self.scanned + zero;
            let result = match len {
                _ if mem::take(&mut self.overlong) => None,
                0 => None,
                1..=ENCODED_BYTES_MAX => Some(decode(&pending[..len])),
                _ => Some(Err(DecodeError::TooLong)),
            };
            self.skip(len + 1);
            if let Some(result) = result {
                let (version, message) = result?;
                self.version = Some(version);
                return Ok(Some(message));
            }
        }
    }

    fn skip(&mut self, bytes: usize) {
        self.start += bytes;
        self.scanned = 0;
    }
}

/// Decodes the bytes between two zeros.
fn decode(stuffed: &[u8]) -> Result<(u16, Message), DecodeError> {
    let frame = unstuff(stuffed).ok_or(DecodeError::Damaged)?;
    let (header, payload) = frame
        .split_first_chunk::<HEADER_BYTES>()
        .ok_or(DecodeError::Damaged)?;
    let [v0, v1, k0, k1, crc @ ..] = *header;
    // A fuzzer could not produce valid checksums.
    if !cfg!(fuzzing) && u32::from_le_bytes(crc) != checksum(&header[..4], payload) {
        return Err(DecodeError::Damaged);
    }
    let (version, kind) = (u16::from_le_bytes([v0, v1]), u16::from_le_bytes([k0, k1]));
    if !(VERSION_MIN..=VERSION).contains(&version) {
        return Err(DecodeError::Version(version));
    }
    match fields::read(version, kind, payload) {
        Ok(message) => Ok((version, message)),
        Err(Malformed::Kind) => Err(DecodeError::Kind(kind)),
        Err(Malformed::Fields) => Err(DecodeError::Fields(kind)),
    }
}

fn checksum(head: &[u8], payload: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(head);
    crc.update(payload);
    crc.finalize()
}

/// Appends `frame` in stuffed form, without zeros.
///
/// Runs of up to 254 nonzero bytes are each preceded by their length plus one. A run shorter than
/// 254 includes the zero after it.
fn stuff(frame: &[u8], out: &mut Vec<u8>) {
    let mut rest = frame;
    loop {
        let limit = rest.len().min(254);
        let run = rest[..limit].iter().position(|&b| b == 0).unwrap_or(limit);
        out.push(run as u8 + 1);
        out.extend(&rest[..run]);
        rest = match run {
            _ if run == rest.len() => return,
            254 => &rest[run..],
            _ => &rest[run + 1..],
        };
    }
}

/// The inverse of [`stuff`].
fn unstuff(mut stuffed: &[u8]) -> Option<Vec<u8>> {
    let mut frame = Vec::with_capacity(stuffed.len());
    while let Some((&length, rest)) = stuffed.split_first() {
        let run = usize::from(length).checked_sub(1)?;
        frame.extend(rest.get(..run)?);
        stuffed = &rest[run..];
        if run < 254 && !stuffed.is_empty() {
            frame.push(0);
        }
    }
    Some(frame)
}
