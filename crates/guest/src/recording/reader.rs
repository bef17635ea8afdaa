//! Reads a recording. Any bytes give an event or an error.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use demeter_policy::engine::Snapshot;

use super::events::{Decoder, RecordedEvent};
use super::format::{
    Bytes, FRAME_BYTES_MAX, FRAME_HEADER_BYTES, Fault, Header, KIND_END, KIND_EVENTS, KIND_HEADER,
    KIND_STATE, MAGIC, PREFIX_BYTES, VERSION,
};

/// An error in reading a recording.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The bytes at this offset are invalid.
    #[error("{path}, byte {offset}: {fault}")]
    Content {
        /// The file.
        path: PathBuf,
        /// The position in the file.
        offset: u64,
        /// The error.
        fault: Fault,
    },
}

/// Reads a recording from start to end.
#[derive(Debug)]
pub struct Reader<R> {
    path: PathBuf,
    source: R,
    header: Header,
    state: Option<Snapshot>,
    /// The source's position.
    offset: u64,
    /// The current frame, and the position within it.
    frame: Vec<u8>,
    behind: usize,
    decoder: Decoder,
    ended: Option<End>,
}

/// How a recording ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Marked,
    Open,
}

impl Reader<BufReader<File>> {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// The file cannot be read, or is no recording of this version.
    pub fn open(path: &Path) -> Result<Self, RecordingError> {
        let file = File::open(path).map_err(|source| RecordingError::Io {
            path: path.into(),
            source,
        })?;
        Self::new(BufReader::new(file), path)
    }
}

impl<R: Read> Reader<R> {
    /// Reads the header of `source`, which messages call `path`.
    ///
    /// # Errors
    /// The source cannot be read, or is no recording of this version.
    pub fn new(source: R, path: &Path) -> Result<Self, RecordingError> {
        let mut reader = Self {
            path: path.into(),
            source,
            header: Header {
                agent: String::new(),
                tracker: String::new(),
                tuning: Default::default(),
                tiers: vec![],
                loads_per_sample: None,
                waits: 0.0,
                cpus: 0,
                collapses: false,
            },
            state: None,
            offset: 0,
            frame: vec![],
            behind: 0,
            decoder: Decoder::default(),
            ended: None,
        };
        reader.read_beginning()?;
        Ok(reader)
    }

    /// The recording's metadata.
    pub fn header(&self) -> &Header {
        &self.header
    }

    #[cfg(test)]
    pub(super) fn header_mut(&mut self) -> &mut Header {
        &mut self.header
    }

    /// The engine's state at the beginning, see
    /// [`Engine::restore`](demeter_policy::engine::Engine::restore). It is there once.
    pub fn take_state(&mut self) -> Option<Snapshot> {
        self.state.take()
    }

    /// The next event's offset from the start, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset - (self.frame.len() - self.behind) as u64
    }

    /// Whether the writer has ended the recording properly.
    pub fn is_ended(&self) -> bool {
        self.ended == Some(End::Marked)
    }

    /// Reads the next event; `None` after the last.
    ///
    /// # Errors
    /// The source cannot be read, or its bytes are invalid. No events follow an error.
    pub fn next_event(&mut self) -> Result<Option<RecordedEvent<'_>>, RecordingError> {
        while self.behind == self.frame.len() {
            if self.ended.is_some() {
                return Ok(None);
            }
            self.read_next_frame()?;
        }
        let offset = self.offset();
        let mut bytes = Bytes(&self.frame[self.behind..]);
        match self.decoder.event(&mut bytes) {
            Ok(event) => {
                self.behind = self.frame.len() - bytes.0.len();
                Ok(Some(event))
            }
            Err(fault) => {
                self.ended = Some(End::Open);
                self.behind = self.frame.len();
                Err(RecordingError::Content {
                    path: self.path.clone(),
                    offset,
                    fault,
                })
            }
        }
    }

    fn read_beginning(&mut self) -> Result<(), RecordingError> {
        let mut prefix = [0; PREFIX_BYTES];
        let read = self.fill(&mut prefix)?;
        if !MAGIC.starts_with(&prefix[..read.min(MAGIC.len())]) {
            return Err(self.fault_at(0, Fault::Magic));
        }
        if read < PREFIX_BYTES {
            return Err(self.fault_at(self.offset, Fault::CutOff));
        }
        let version = u16::from_le_bytes([prefix[8], prefix[9]]);
        if version != VERSION {
            return Err(self.fault_at(MAGIC.len() as u64, Fault::Version(version)));
        }
        let at = self.offset;
        self.expect_frame(KIND_HEADER)?;
        self.header = serde_json::from_slice(&self.frame)
            .ok()
            .filter(|header: &Header| header.tuning.check().is_ok())
            .ok_or_else(|| self.fault_at(at, Fault::Malformed("a header that is none")))?;
        let at = self.offset;
        self.expect_frame(KIND_STATE)?;
        let frame = std::mem::take(&mut self.frame);
        match postcard::take_from_bytes(&frame) {
            Ok((state, [])) => self.state = Some(state),
            _ => return Err(self.fault_at(at, Fault::Malformed("a state that is none"))),
        }
        Ok(())
    }

    fn expect_frame(&mut self, kind: u8) -> Result<(), RecordingError> {
        let at = self.offset;
        match self.read_frame()? {
            Some(found) if found == kind => Ok(()),
            Some(_) => Err(self.fault_at(at, Fault::Malformed("a frame out of turn"))),
            None => Err(self.fault_at(at, Fault::CutOff)),
        }
    }

    fn read_next_frame(&mut self) -> Result<(), RecordingError> {
        let at = self.offset;
        self.frame.clear();
        self.behind = 0;
        let read = self.read_frame();
        // If no other frame of events follows, this is the end.
        self.ended = Some(End::Open);
        match read? {
            Some(KIND_EVENTS) => self.ended = None,
            Some(KIND_END) if self.frame.is_empty() => {
                self.ended = Some(End::Marked);
                if self.fill(&mut [0])? > 0 {
                    let fault = Fault::Malformed("something follows the end");
                    return Err(self.fault_at(self.offset - 1, fault));
                }
            }
            Some(_) => {
                self.frame.clear();
                return Err(self.fault_at(at, Fault::Malformed("a frame out of turn")));
            }
            None => {}
        }
        Ok(())
    }

    /// Reads a frame's payload and returns its kind; `None` at the end of the source.
    fn read_frame(&mut self) -> Result<Option<u8>, RecordingError> {
        let at = self.offset;
        let mut header = [0; FRAME_HEADER_BYTES + 1];
        let read = self.fill(&mut header)?;
        if read == 0 {
            return Ok(None);
        }
        if read < header.len() {
            return Err(self.fault_at(self.offset, Fault::CutOff));
        }
        let [l0, l1, l2, l3, s0, s1, s2, s3, kind] = header;
        let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if len > FRAME_BYTES_MAX {
            return Err(self.fault_at(at, Fault::Malformed("a frame longer than any")));
        }
        // Allocates no more memory than there are bytes, whatever the length field says.
        self.frame.clear();
        let mut part = Read::take(&mut self.source, len as u64);
        let result = part.read_to_end(&mut self.frame);
        self.offset += self.frame.len() as u64;
        if let Err(source) = result {
            self.frame.clear();
            return Err(self.io(source));
        }
        if self.frame.len() < len {
            self.frame.clear();
            return Err(self.fault_at(self.offset, Fault::CutOff));
        }
        let mut sum = crc32fast::Hasher::new();
        sum.update(&[kind]);
        sum.update(&self.frame);
        // A fuzzer would never get past a checksum.
        if !cfg!(fuzzing) && sum.finalize() != u32::from_le_bytes([s0, s1, s2, s3]) {
            self.frame.clear();
            return Err(self.fault_at(at, Fault::Checksum));
        }
        Ok(Some(kind))
    }

    /// Reads until `into` is full or the source ends. Returns the number of bytes.
    fn fill(&mut self, into: &mut [u8]) -> Result<usize, RecordingError> {
        let mut read = 0;
        while read < into.len() {
            match self.source.read(&mut into[read..]) {
                Ok(0) => break,
                Ok(n) => read += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(self.io(source)),
            }
        }
        self.offset += read as u64;
        Ok(read)
    }

    /// An error in the state before the first event.
    pub(super) fn content(&self, fault: Fault) -> RecordingError {
        self.fault_at(self.offset(), fault)
    }

    fn io(&self, source: io::Error) -> RecordingError {
        RecordingError::Io {
            path: self.path.clone(),
            source,
        }
    }

    fn fault_at(&self, offset: u64, fault: Fault) -> RecordingError {
        RecordingError::Content {
            path: self.path.clone(),
            offset,
            fault,
        }
    }
}
