//! The flight recorder: what an agent's engine was told and what it asked for, in a file, so that a
//! person can send a recording instead of a story.
//!
//! A recording is a sequence of frames behind a header, see [`mod@format`]. The first frame is the
//! engine's state at that moment, so each file can be replayed by itself; the others are events,
//! [`Input`](demeter_policy::engine::Input)s and [`Request`](demeter_policy::engine::Request)s in
//! their order, one frame for each epoch. A file that is full moves aside, and the next begins.
//!
//! # Properties
//! - What is read is what was written.
//! - Reading is total: any bytes give events and then at most one error, with its offset.
//! - A replay asks for what the recorded engine asked for.
//! - Both files of a recording together keep to their limit.

mod events;
pub mod format;
mod reader;
mod recorded;
mod replay;
mod writer;

pub use events::Event;
pub use format::{Fault, Header, RecordedTier};
pub use reader::{Reader, RecordingError};
pub use recorded::Recorded;
pub use replay::{Decision, Divergence, Replayed, replay};
pub use writer::{Recorder, RecorderError};

#[cfg(test)]
mod tests;
