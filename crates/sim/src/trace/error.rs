//! Why a trace cannot be read or written.

use std::io;
use std::path::{Path, PathBuf};

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused.
    #[error("cannot {verb} {}: {source}", path.display())]
    Io {
        /// What was tried.
        verb: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The content is wrong.
    #[error("{} at byte {offset}: {fault}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// Where in it, bytes from the start; after decompression, if it is compressed.
        offset: u64,
        /// What is wrong there.
        fault: Fault,
    },
    /// The program touched more memory than a trace can describe.
    #[error("the program touches more than {blocks} separate blocks of 2 MiB; record less of it")]
    TooWide {
        /// The limit.
        blocks: usize,
    },
    /// A program that was not recorded.
    #[error(
        "the simulator runs no programs: record one with `demeter trace record` and name the file in \
         workload.trace, or use --on lab"
    )]
    NotRecorded,
    /// Nothing to keep.
    #[error("{}: no access to memory in it", path.display())]
    Empty {
        /// The source.
        path: PathBuf,
    },
}

/// What is wrong in a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It is something else.
    #[error("this is no trace; make one with `demeter trace record` or `demeter trace convert`")]
    Magic,
    /// A later format.
    #[error("format version {0}, but this demeter reads only {version}", version = super::VERSION)]
    Version(u16),
    /// A number in the header is out of bounds.
    #[error("{0} is out of bounds")]
    Bounds(&'static str),
    /// Regions overlap or are not in order.
    #[error("regions are not in order of their addresses")]
    Order,
    /// Bytes changed.
    #[error("the checksum does not fit: the file was damaged")]
    Checksum,
    /// It ends before its end.
    #[error("the file ends early: it was cut off")]
    Truncated,
    /// Bytes behind the end.
    #[error("bytes follow the last frame")]
    Trailing,
    /// The last frame counts other accesses than there were.
    #[error("the last frame counts {said} accesses, but there were {seen}")]
    Count {
        /// What the last frame says.
        said: u64,
        /// What was read.
        seen: u64,
    },
    /// A payload codes something else than its frame says.
    #[error("a payload does not code the accesses that its frame announces")]
    Payload,
    /// An access that no region holds.
    #[error("an access to {0:#x}, which lies in no region")]
    Stray(u64),
    /// It is not the file that it was a moment ago.
    #[error("the file changed while it was read")]
    Changed,
    /// A line of text that is not lackey's.
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
