//! Trace writer: the file is complete or absent.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::TraceEvent;
use super::codec::Encoder;
use super::error::{Error, Fault};
use super::footprint::{BLOCKS_MAX, Footprint};
use super::format::{FrameHeader, Header, LAST, THREADS_MAX};

/// Accesses in a full frame: enough to make its header and first jumps negligible.
const FRAME_ACCESSES: u32 = 8192;

/// A trace under construction.
///
/// Frames go to a temporary file beside the final one, because the header comes first but is known last.
/// [`Writer::finish`] joins both. If it is not reached, no file remains.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    frames: BufWriter<File>,
    /// By the recorder's thread number.
    threads: BTreeMap<u32, Thread>,
    /// Number of threads with a frame.
    framed: u16,
    footprint: Footprint,
    accesses: u64,
}

#[derive(Debug, Default)]
struct Thread {
    /// Its number in the trace, assigned with its first frame.
    id: Option<u16>,
    encoder: Encoder,
    instructions: u64,
}

/// Summary of a finished trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Accesses.
    pub accesses: u64,
    /// Threads.
    pub threads: u16,
    /// Bytes of the file.
    pub file_bytes: u64,
}

impl Writer {
    /// Starts a trace for the file `path`.
    ///
    /// # Errors
    /// When the folder is not writable.
    pub fn create(path: &Path) -> Result<Self, Error> {
        let frames = tempfile::tempfile_in(folder(path)).map_err(Error::io("write", path))?;
        Ok(Self {
            path: path.into(),
            frames: BufWriter::new(frames),
            threads: BTreeMap::new(),
            framed: 0,
            footprint: Footprint::new(),
            accesses: 0,
        })
    }

    /// Accesses so far.
    pub fn accesses(&self) -> u64 {
        self.accesses
    }

    /// Appends the next events of `thread` (any number that identifies it).
    ///
    /// # Errors
    /// When the disk is full, or the program has too many threads or touches too many blocks.
    pub fn push(
        &mut self,
        thread: u32,
        events: impl IntoIterator<Item = TraceEvent>,
    ) -> Result<(), Error> {
        if self.threads.len() >= usize::from(THREADS_MAX) && !self.threads.contains_key(&thread) {
            let fault = Fault::Bounds("the number of threads");
            return Err(Error::content(&self.path, 0, fault));
        }
        let thread = self.threads.entry(thread).or_default();
        for event in events {
            match event {
                TraceEvent::Instructions(count) => {
                    thread.instructions = thread.instructions.saturating_add(count);
                }
                TraceEvent::Access(access) => {
                    if !self.footprint.add(access.gva()) {
                        return Err(Error::TooWide { blocks: BLOCKS_MAX });
                    }
                    self.accesses += 1;
                    thread.encoder.push(access);
                    if thread.encoder.count() == FRAME_ACCESSES {
                        thread
                            .flush(&mut self.frames, &mut self.framed)
                            .map_err(Error::io("write", &self.path))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Completes the file.
    ///
    /// # Errors
    /// When the disk is full, or there is no access. No file is created then.
    pub fn finish(mut self) -> Result<Written, Error> {
        if self.accesses == 0 {
            return Err(Error::Empty { path: self.path });
        }
        let mut write = || -> io::Result<u64> {
            for thread in self.threads.values_mut() {
                thread.flush(&mut self.frames, &mut self.framed)?;
            }
            let last = FrameHeader::new(LAST, 0, self.accesses, &[]);
            self.frames.write_all(&last.to_bytes())?;
            self.frames.flush()?;
            let frames = self.frames.get_mut();
            frames.rewind()?;

            let header = Header {
                threads: self.framed,
                regions: self.footprint.regions(),
            };
            let header = header.to_bytes();
            let mut file = tempfile::Builder::new()
                .prefix(".demeter-")
                .permissions(fs::Permissions::from_mode(0o666))
                .tempfile_in(folder(&self.path))?;
            file.write_all(&header)?;
            let frame_bytes = io::copy(frames, file.as_file_mut())?;
            file.as_file().sync_all()?;
            file.persist(&self.path)?;
            Ok(header.len() as u64 + frame_bytes)
        };
        let file_bytes = write().map_err(Error::io("write", &self.path))?;
        Ok(Written {
            accesses: self.accesses,
            threads: self.framed,
            file_bytes,
        })
    }
}

impl Thread {
    /// Writes the buffered accesses as a frame; `framed` counts the threads with a frame.
    fn flush(&mut self, frames: &mut impl Write, framed: &mut u16) -> io::Result<()> {
        if self.encoder.count() == 0 {
            return Ok(());
        }
        let payload = self.encoder.bytes();
        // At most FRAME_ACCESSES, which fits into 16 bits.
        let accesses = self.encoder.count() as u16;
        let id = *self.id.get_or_insert_with(|| {
            *framed += 1;
            *framed - 1
        });
        let header = FrameHeader::new(id, accesses, self.instructions, payload);
        frames.write_all(&header.to_bytes())?;
        frames.write_all(payload)?;
        self.encoder.clear();
        self.instructions = 0;
        Ok(())
    }
}

/// The folder of a file.
fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}
