//! Frame-by-frame trace reader. Any input yields a frame or an error.

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
    /// Thread number, from 0.
    pub thread: u16,
    /// Instructions executed meanwhile; 0 if unknown.
    pub instructions: u64,
    /// Its accesses in order, each in one of the header's regions.
    pub accesses: Vec<Access>,
}

/// Position of a frame in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FramePlace {
    offset: u64,
}

/// A sequential trace reader.
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
    /// When the file cannot be read, or does not begin with a valid header.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        Self::new(BufReader::new(file), path)
    }
}

impl<R: Read> Reader<R> {
    /// Reads the header from `source`; errors name `path`.
    ///
    /// # Errors
    /// When `source` fails, or does not begin with a valid header.
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

    /// The trace's header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Reads the next frame into `frame`; `None` after the last.
    ///
    /// # Errors
    /// When the source fails, or its content is invalid. The reader is then not at a frame boundary.
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
        // Check bounds before allocating a buffer.
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

    /// The first access outside all regions.
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
    /// Reads a frame again, at a `place` from [`Self::next_frame`].
    ///
    /// # Errors
    /// When the source fails, or now holds another frame there.
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

/// Reads into `bytes` until it is full or `source` ends; returns the number of bytes.
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

/// Fills all of `bytes`; an early end is an error with its offset.
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
