//! An engine whose inputs and requests can be recorded.

use std::ops::Deref;

use demeter_policy::engine::{Engine, Input, Misuse};

use super::writer::{Recorder, RecorderError};

/// An engine with an optional recorder. Reads go to the engine.
#[derive(Debug)]
pub struct Recorded {
    engine: Engine,
    recorder: Option<Recorder>,
    error: Option<RecorderError>,
}

impl Deref for Recorded {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl Recorded {
    /// Wraps an engine without a recorder.
    pub fn new(engine: Engine) -> Self {
        Self {
            engine,
            recorder: None,
            error: None,
        }
    }

    /// Records from now on.
    pub fn record(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
    }

    /// Passes an input to the engine, and records it with the requests that follow.
    ///
    /// An error of the recorder ends the recording only.
    ///
    /// # Errors
    /// The engine's errors. Such inputs are not recorded.
    #[inline]
    pub fn push(&mut self, input: Input<'_>) -> Result<(), Misuse> {
        self.engine.push(input)?;
        if let Some(recorder) = &mut self.recorder {
            recorder.input(input);
            let is_part = matches!(
                input,
                Input::Sample(_) | Input::Looked(_) | Input::Started(_) | Input::Space { .. }
            );
            if !is_part {
                let recorded = recorder.request(self.engine.request(), &self.engine);
                if let Err(error) = recorded {
                    self.recorder = None;
                    self.error = Some(error);
                }
            }
        }
        Ok(())
    }

    /// Takes the error that ended the recording.
    pub fn take_error(&mut self) -> Option<RecorderError> {
        self.error.take()
    }

    /// Ends the recording.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn finish(&mut self) -> Result<(), RecorderError> {
        self.recorder.take().map_or(Ok(()), Recorder::finish)
    }
}
