//! The flight recorder: writes the engine's inputs and requests to a file.
//!
//! A user can send the file with a bug report. A recording is a sequence of frames after a header, see [`mod@format`].
//! The first frame is the engine's state at that moment, so that each file can be replayed by itself. The other frames
//! hold events, [`Input`](demeter_policy::engine::Input)s and [`Request`](demeter_policy::engine::Request)s in order,
//! one frame for each epoch. A full file is renamed, and the next begins.
//!
//! # Properties
//! - Reading returns exactly the events that were written.
//! - Reading is total: any bytes give events and then at most one error, with its offset.
//! - A replay makes the requests that the recorded engine made.
//! - Both files of a recording together keep to their limit.

mod events;
pub mod format;
mod reader;
mod recorded;
mod replay;
mod writer;

pub use events::RecordedEvent;
pub use format::{Fault, Header, RecordedTier};
pub use reader::{Reader, RecordingError};
pub use recorded::Recorded;
pub use replay::{Decision, Divergence, Replayed, replay};
pub use writer::{Recorder, RecorderError};

#[cfg(test)]
mod tests;
