//! An engine whose every input and request may be recorded.

use std::ops::Deref;

use demeter_policy::engine::{Engine, Input, Misuse};

use super::writer::{Recorder, RecorderError};

/// An engine, and a recorder if there is one. Reads go to the engine.
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
    /// An engine that nobody records yet.
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

    /// Tells the engine. What it asks for then is recorded, too. An error of the recorder ends the
    /// recording, not the agent.
    ///
    /// # Errors
    /// Those of the engine, whose inputs are not recorded.
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

    /// What ended the recording, once.
    pub fn take_error(&mut self) -> Option<RecorderError> {
        self.error.take()
    }

    /// Ends the recording.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn finish(&mut self) -> Result<(), RecorderError> {
        self.recorder.take().map_or(Ok(()), Recorder::finish)
    }
}
