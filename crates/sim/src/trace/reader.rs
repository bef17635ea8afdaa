//! Reading a trace frame by frame. Total: whatever the bytes are, there is a frame or an error.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::codec::{ACCESS_BYTES_MAX, decode};
use super::error::{Error, Fault};
use super::format::{FRAME_HEADER_BYTES, FrameHeader, Header, LAST, PREFIX_BYTES};
use crate::Access;

/// The next accesses of one thread.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Frame {
    /// Which thread, from 0.
    pub thread: u16,
    /// Instructions that it ran meanwhile; 0 if not known.
    pub instructions: u64,
    /// What it touched, in order, each in one of the header's regions.
    pub accesses: Vec<Access>,
}

/// Where a frame lies in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FramePlace {
    offset: u64,
}

/// A trace that is read from its start to its end.
#[derive(Debug)]
pub struct Reader<R> {
    path: PathBuf,
    source: R,
    header: Header,
    offset: u64,
    /// Accesses read so far.
    seen: u64,
    ended: bool,
    payload: Vec<u8>,
}

impl Reader<BufReader<File>> {
    /// Opens a trace file and reads its header.
    ///
    /// # Errors
    /// When it cannot be read, or has no header of this format.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        Self::new(BufReader::new(file), path)
    }
}

impl<R: Read> Reader<R> {
    /// Reads the header from `source`, which messages call `path`.
    ///
    /// # Errors
    /// When `source` fails, or begins with no header of this format.
    pub fn new(mut source: R, path: &Path) -> Result<Self, Error> {
        let mut prefix = [0; PREFIX_BYTES];
        let read = fill(&mut source, &mut prefix).map_err(Error::io("read", path))?;
        if read < PREFIX_BYTES {
            let fault = match b"demtrace".starts_with(&prefix[..read.min(8)]) {
                true => Fault::Truncated,
                false => Fault::Magic,
            };
            return Err(Error::content(path, read as u64, fault));
        }
        let at = |offset, fault| Error::content(path, offset, fault);
        let rest_bytes = Header::rest_bytes(&prefix).map_err(|fault| at(0, fault))?;
        let mut rest = vec![0; rest_bytes];
        let read = fill(&mut source, &mut rest).map_err(Error::io("read", path))?;
        let offset = (PREFIX_BYTES + read) as u64;
        if read < rest_bytes {
            return Err(at(offset, Fault::Truncated));
        }
        let header =
            Header::parse(&prefix, &rest).map_err(|fault| at(PREFIX_BYTES as u64, fault))?;
        Ok(Self {
            path: path.into(),
            source,
            header,
            offset,
            seen: 0,
            ended: false,
            payload: Vec::new(),
        })
    }

    /// What the trace says of itself.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Reads the next frame into `frame`; `None` after the last.
    ///
    /// # Errors
    /// When the source fails, or its bytes are not what a trace has there. Afterwards the reader
    /// is at no frame's start.
    pub fn next_frame(&mut self, frame: &mut Frame) -> Result<Option<FramePlace>, Error> {
        if self.ended {
            return Ok(None);
        }
        let place = FramePlace {
            offset: self.offset,
        };
        let at_place = |fault| Error::content(&self.path, place.offset, fault);
        let mut bytes = [0; FRAME_HEADER_BYTES];
        fill_all(&mut self.source, &mut bytes, &self.path, &mut self.offset)?;
        let header = FrameHeader::parse(&bytes);
        if header.thread == LAST {
            if !header.fits(&[]) || header.accesses != 0 || header.payload_bytes != 0 {
                return Err(at_place(Fault::Checksum));
            }
            if header.instructions != self.seen {
                return Err(at_place(Fault::Count {
                    said: header.instructions,
                    seen: self.seen,
                }));
            }
            let behind = fill(&mut self.source, &mut [0]).map_err(Error::io("read", &self.path))?;
            if behind > 0 {
                return Err(Error::content(&self.path, self.offset, Fault::Trailing));
            }
            self.ended = true;
            return Ok(None);
        }
        // Bounds before a buffer of that size is made.
        if header.thread >= self.header.threads {
            return Err(at_place(Fault::Bounds("a frame's thread")));
        }
        let accesses = usize::from(header.accesses);
        let payload_bytes = header.payload_bytes as usize;
        if accesses == 0 || !(accesses..=accesses * ACCESS_BYTES_MAX).contains(&payload_bytes) {
            return Err(at_place(Fault::Bounds("a frame's size")));
        }
        self.payload.resize(payload_bytes, 0);
        fill_all(
            &mut self.source,
            &mut self.payload,
            &self.path,
            &mut self.offset,
        )?;
        if !header.fits(&self.payload) {
            return Err(at_place(Fault::Checksum));
        }
        decode(&self.payload, accesses, &mut frame.accesses)
            .ok_or_else(|| at_place(Fault::Payload))?;
        if let Some(stray) = self.first_stray(&frame.accesses) {
            return Err(at_place(Fault::Stray(stray.gva().0)));
        }
        frame.thread = header.thread;
        frame.instructions = header.instructions;
        self.seen += accesses as u64;
        Ok(Some(place))
    }

    /// The first access that lies in no region.
    fn first_stray(&self, accesses: &[Access]) -> Option<Access> {
        let mut region = 0;
        accesses.iter().copied().find(|access| {
            let span = self.header.regions[region];
            if access.gva().0.wrapping_sub(span.base.0) < span.bytes {
                return false;
            }
            match self.header.region_of(access.gva()) {
                Some(found) => {
                    region = found;
                    false
                }
                None => true,
            }
        })
    }
}

impl<R: Read + Seek> Reader<R> {
    /// Reads the frame at `place`, where [`Self::next_frame`] found one before.
    ///
    /// # Errors
    /// When the source fails, or holds another frame there now.
    pub fn frame_at(&mut self, place: FramePlace, frame: &mut Frame) -> Result<(), Error> {
        self.source
            .seek(SeekFrom::Start(place.offset))
            .map_err(Error::io("read", &self.path))?;
        self.offset = place.offset;
        self.ended = false;
        match self.next_frame(frame)? {
            Some(_) => Ok(()),
            None => Err(Error::content(&self.path, place.offset, Fault::Changed)),
        }
    }
}

/// Fills `bytes` from `source` as far as it goes; says how far.
fn fill(source: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < bytes.len() {
        match source.read(&mut bytes[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Fills all of `bytes`, or says where the source ended.
fn fill_all(
    source: &mut impl Read,
    bytes: &mut [u8],
    path: &Path,
    offset: &mut u64,
) -> Result<(), Error> {
    let read = fill(source, bytes).map_err(Error::io("read", path))?;
    *offset += read as u64;
    if read < bytes.len() {
        return Err(Error::content(path, *offset, Fault::Truncated));
    }
    Ok(())
}
