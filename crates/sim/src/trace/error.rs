//! Errors of reading and writing traces.

use std::io;
use std::path::{Path, PathBuf};

/// An error of a trace.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An I/O error.
    #[error("cannot {verb} {}: {source}", path.display())]
    Io {
        /// The operation.
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Invalid content.
    #[error("{} at byte {offset}: {fault}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// Offset from the start, in bytes; after decompression for compressed files.
        offset: u64,
        /// The fault.
        fault: Fault,
    },
    /// The program touched more memory than a trace can describe.
    #[error("the program touches more than {blocks} separate blocks of 2 MiB; record less of it")]
    TooWide {
        /// The limit.
        blocks: usize,
    },
    /// A program without a recording.
    #[error(
        "the simulator runs no programs: record one with `demeter trace record` and name the file in \
         workload.trace, or use --on lab"
    )]
    NotRecorded,
    /// A trace without accesses.
    #[error("{}: no access to memory in it", path.display())]
    Empty {
        /// The source.
        path: PathBuf,
    },
}

/// A fault in the content of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The file is not a trace.
    #[error("this is not a trace; make one with `demeter trace record` or `demeter trace convert`")]
    Magic,
    /// The format version is newer than this program.
    #[error("format version {0}, but this demeter reads only {version}", version = super::VERSION)]
    Version(u16),
    /// A number is out of bounds.
    #[error("{0} is out of bounds")]
    Bounds(&'static str),
    /// Regions overlap or are out of order.
    #[error("regions are not in address order")]
    Order,
    /// A checksum does not match.
    #[error("the checksum does not match: the file is damaged")]
    Checksum,
    /// The file is truncated.
    #[error("the file ends early: it was cut off")]
    Truncated,
    /// Bytes follow the last frame.
    #[error("bytes follow the last frame")]
    Trailing,
    /// The count in the last frame is wrong.
    #[error("the last frame counts {said} accesses, but there were {seen}")]
    Count {
        /// Count in the last frame.
        said: u64,
        /// Number of accesses read.
        seen: u64,
    },
    /// A payload does not match its frame header.
    #[error("a payload does not match its frame header")]
    Payload,
    /// An access outside all regions.
    #[error("an access to {0:#x}, outside all regions")]
    Stray(u64),
    /// The file was modified during reading.
    #[error("the file changed while it was read")]
    Changed,
    /// A line that lackey does not print.
    #[error("not a line of `valgrind --tool=lackey --trace-mem=yes`")]
    Line,
}

impl Error {
    pub(super) fn io(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            verb,
            path: path.into(),
            source,
        }
    }

    pub(super) fn content(path: &Path, offset: u64, fault: Fault) -> Self {
        Self::Content {
            path: path.into(),
            offset,
            fault,
        }
    }
}
