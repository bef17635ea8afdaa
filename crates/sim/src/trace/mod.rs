//! Traces: the accesses of a recorded program in a file.
//!
//! # Format, version 1
//! All numbers are little-endian. A *checksum* is the CRC-32 of IEEE 802.3 over the bytes named.
//!
//! | header | bytes |
//! |---|---|
//! | `demtrace` | 8 |
//! | version, 1 | 2 |
//! | threads, 1 to 1024 | 2 |
//! | regions, 1 to 4096 | 4 |
//! | for each region, by address: base, length (bytes, at least 1) | 8, 8 |
//! | checksum of all of the above | 4 |
//!
//! Frames follow, each with the next accesses of one thread:
//!
//! | frame | bytes |
//! |---|---|
//! | thread | 2 |
//! | accesses, 1 to 65,535 | 2 |
//! | bytes of the payload | 4 |
//! | instructions that the thread ran meanwhile, 0 if not known | 8 |
//! | checksum of the above and the payload | 4 |
//! | payload | as said |
//!
//! The last frame has thread 65,535, no access and no payload. Its instruction field holds the number of all accesses
//! in the file. A file without it was truncated.
//!
//! A payload encodes word addresses (byte address / 8; the byte within a word is dropped). The coder remembers four
//! words, 0 at a frame's start. An access is the difference to one of these words, which it then replaces:
//!
//! | bits of the first byte | meaning |
//! |---|---|
//! | 0 | store |
//! | 1-2 | which of the four |
//! | 3-6 | lowest bits of the difference, zigzag (0, -1, 1, -2, ...) |
//! | 7 | more bits in the next byte: 7 and again such a bit, up to 9 bytes |
//!
//! A word near one of the four thus costs one byte, a jump in 16 GiB five.

mod champsim;
mod codec;
mod error;
mod footprint;
mod format;
mod lackey;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

pub use champsim::champsim;
pub use error::{Error, Fault};
pub use format::{Header, Span, VERSION};
pub use lackey::lackey;
pub use reader::{Frame, FramePlace, Reader};
pub use writer::{Writer, Written};

/// An event of a recorded thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceEvent {
    /// A number of instructions.
    Instructions(u64),
    /// A memory access.
    Access(crate::Access),
}
