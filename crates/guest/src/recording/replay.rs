//! Replays a recording through the engine.

use std::io::Read;

use demeter_policy::RankedRange;
use demeter_policy::engine::{Balance, ByHeat, Engine, Figures, Request};

use super::events::RecordedEvent;
use super::format::Fault;
use super::reader::{Reader, RecordingError};

/// A decision of the engine in a replay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decision<'a> {
    /// Its epoch.
    pub epoch: u32,
    /// Ranges of all processes at the last plan, the hottest first.
    pub ranking: &'a [RankedRange],
    /// Cost and benefit of moves so far.
    pub balance: Balance,
    /// The engine's request.
    pub request: Request<'a>,
}

/// The result of a replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replayed {
    /// First epoch of the recording.
    pub first_epoch: u32,
    /// Last epoch of the recording.
    pub last_epoch: u32,
    /// Number of compared decisions.
    pub decisions: u64,
    /// The engine's counters since the agent's start.
    pub figures: Figures,
    /// Whether the writer has ended the recording properly.
    pub is_ended: bool,
    /// Where the replay differs from the recording, if it does.
    pub divergence: Option<Divergence>,
}

/// The first decision that differs from the recorded one.
///
/// Later events cannot be compared: they answer requests that the replay did not make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Divergence {
    /// The epoch.
    pub epoch: u32,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// The recorded decision.
    pub recorded: String,
    /// The decision in the replay.
    pub replayed: String,
}

/// Replays a recording up to its end or the first different decision.
///
/// `show` gets each decision.
///
/// # Errors
/// The recording cannot be read to its end, or does not begin with a state.
pub fn replay<R: Read>(
    reader: &mut Reader<R>,
    show: &mut dyn FnMut(Decision<'_>),
) -> Result<Replayed, RecordingError> {
    let header = reader.header();
    let config = header.config();
    let strategy = ByHeat::new(header.gain());
    let state = reader.take_state();
    let engine = state.and_then(|state| Engine::restore(&strategy, config, state).ok());
    let fault = Fault::Malformed("the state at the beginning is none");
    let mut engine = engine.ok_or_else(|| reader.content(fault))?;
    let mut replayed = Replayed {
        first_epoch: engine.epoch(),
        last_epoch: engine.epoch(),
        decisions: 0,
        figures: engine.figures(),
        is_ended: false,
        divergence: None,
    };
    loop {
        let offset = reader.offset();
        let Some(event) = reader.next_event()? else {
            break;
        };
        let differs = match event {
            RecordedEvent::Input(input) => {
                let pushed = engine.push(input);
                pushed
                    .err()
                    .map(|misuse| (format!("{input:?}"), misuse.to_string()))
            }
            RecordedEvent::Request(recorded) => {
                let request = engine.request();
                let epoch = engine.epoch();
                show(Decision {
                    epoch,
                    ranking: engine.ranking(),
                    balance: engine.balance(),
                    request,
                });
                replayed.decisions += 1;
                (recorded != request).then(|| (format!("{recorded:?}"), format!("{request:?}")))
            }
        };
        if let Some((recorded, now)) = differs {
            replayed.divergence = Some(Divergence {
                epoch: engine.epoch(),
                offset,
                recorded,
                replayed: now,
            });
            break;
        }
    }
    replayed.last_epoch = engine.epoch();
    replayed.figures = engine.figures();
    replayed.is_ended = reader.is_ended();
    Ok(replayed)
}
