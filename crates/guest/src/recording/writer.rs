//! Writes a recording within its size limit.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use demeter_policy::engine::{Engine, Input, Request};

use super::events::Encoder;
use super::format::{
    FRAME_BYTES_MAX, Header, KIND_END, KIND_EVENTS, KIND_HEADER, KIND_STATE, MAGIC, VERSION,
};

/// Upper bound of one epoch's bytes. A file with less space left is full.
const EPOCH_BYTES: u64 = 1 << 20;

/// Size at which a frame is written; the end of an epoch writes it, too.
const FRAME_BYTES: usize = 64 << 10;

/// An error of the recorder.
#[derive(Debug, thiserror::Error)]
pub enum RecorderError {
    /// A file cannot be created, written or renamed.
    #[error("cannot record to {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file exists and is no recording.
    #[error("{0} exists and is no recording; give --record another file")]
    Foreign(PathBuf),
    /// The engine's state alone exceeds the limit.
    #[error(
        "{path}: the agent's state alone takes {state_bytes} bytes, too many for a recording of \
         {limit_mib} MiB; give a larger --record-max-mib"
    )]
    Limit {
        /// The file.
        path: PathBuf,
        /// Size of the state.
        state_bytes: usize,
        /// Size limit of the recording.
        limit_mib: u64,
    },
}

/// Records to a file, and to its predecessor `FILE.1`.
#[derive(Debug)]
pub struct Recorder {
    path: PathBuf,
    /// Size limit of each of the two files, bytes.
    file_bytes_max: u64,
    header: Header,
    file: File,
    written: u64,
    encoder: Encoder,
    /// Events that are not written yet.
    frame: Vec<u8>,
}

impl Recorder {
    /// Starts to record an engine that sleeps or has not started.
    ///
    /// An earlier recording of the same name becomes the predecessor.
    ///
    /// # Errors
    /// The file cannot be created, or is no recording.
    pub fn start(
        path: &Path,
        limit_mib: u64,
        header: Header,
        engine: &Engine,
    ) -> Result<Self, RecorderError> {
        let mut recorder = Self {
            path: path.into(),
            file_bytes_max: limit_mib.saturating_mul(1 << 20) / 2,
            header,
            file: create(path)?,
            written: 0,
            encoder: Encoder::default(),
            frame: vec![],
        };
        recorder.begin(engine)?;
        Ok(recorder)
    }

    /// Records an input of the engine.
    #[inline]
    pub fn input(&mut self, input: Input<'_>) {
        self.encoder.input(input, &mut self.frame);
    }

    /// Records a request. `engine` is its present state.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn request(&mut self, request: Request<'_>, engine: &Engine) -> Result<(), RecorderError> {
        self.encoder.request(request, &mut self.frame);
        let is_asleep = matches!(request, Request::Sleep { .. });
        if is_asleep || self.frame.len() >= FRAME_BYTES {
            self.flush()?;
        }
        if is_asleep && self.written + EPOCH_BYTES > self.file_bytes_max {
            self.write(KIND_END, &[])?;
            self.file = create(&self.path)?;
            self.begin(engine)?;
        }
        Ok(())
    }

    /// Ends the recording.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn finish(mut self) -> Result<(), RecorderError> {
        self.flush()?;
        self.write(KIND_END, &[])
    }

    /// Writes the header and the state to a new file.
    fn begin(&mut self, engine: &Engine) -> Result<(), RecorderError> {
        self.written = 0;
        self.encoder = Encoder::default();
        let mut prefix = MAGIC.to_vec();
        prefix.extend(VERSION.to_le_bytes());
        self.write_all(&prefix)?;
        let header = serde_json::to_vec(&self.header).unwrap_or_default();
        self.write(KIND_HEADER, &header)?;
        let state = engine.save();
        let state = state.and_then(|state| postcard::to_allocvec(&state).ok());
        let state = state.unwrap_or_default();
        // With more, the next epoch would fill the file again.
        let most = self.file_bytes_max.min(FRAME_BYTES_MAX as u64) / 2;
        if state.len() as u64 > most {
            return Err(RecorderError::Limit {
                path: self.path.clone(),
                state_bytes: state.len(),
                limit_mib: self.file_bytes_max >> 19,
            });
        }
        self.write(KIND_STATE, &state)
    }

    /// Writes pending events as a frame.
    fn flush(&mut self) -> Result<(), RecorderError> {
        let mut frame = std::mem::take(&mut self.frame);
        let written = match frame.is_empty() {
            true => Ok(()),
            false => self.write(KIND_EVENTS, &frame),
        };
        frame.clear();
        self.frame = frame;
        written
    }

    fn write(&mut self, kind: u8, payload: &[u8]) -> Result<(), RecorderError> {
        let mut sum = crc32fast::Hasher::new();
        sum.update(&[kind]);
        sum.update(payload);
        let mut bytes = (payload.len() as u32).to_le_bytes().to_vec();
        bytes.extend(sum.finalize().to_le_bytes());
        bytes.push(kind);
        bytes.extend(payload);
        self.write_all(&bytes)
    }

    fn write_all(&mut self, bytes: &[u8]) -> Result<(), RecorderError> {
        self.written += bytes.len() as u64;
        self.file
            .write_all(bytes)
            .map_err(|source| failed(&self.path, source))
    }
}

fn failed(path: &Path, source: io::Error) -> RecorderError {
    RecorderError::Io {
        path: path.into(),
        source,
    }
}

/// Path of the previous recording.
fn predecessor(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// Creates a file that only its owner can read, because it has addresses. An earlier recording is renamed.
fn create(path: &Path) -> Result<File, RecorderError> {
    if let Ok(mut old) = File::open(path) {
        let mut magic = [0; MAGIC.len()];
        if old.read_exact(&mut magic).is_err() || &magic != MAGIC {
            return Err(RecorderError::Foreign(path.into()));
        }
        fs::rename(path, predecessor(path)).map_err(|source| failed(path, source))?;
    }
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|source| failed(path, source))
}
