//! Running a recording through the engine again.

use std::io::Read;

use demeter_policy::RankedRange;
use demeter_policy::engine::{ByHeat, Engine, Figures, Request};

use super::events::Event;
use super::format::Fault;
use super::reader::{Reader, RecordingError};

/// Something that the engine decided, again.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decision<'a> {
    /// The epoch in which.
    pub epoch: u32,
    /// The ranges of all processes, hottest first, as of the last plan.
    pub ranking: &'a [RankedRange],
    /// What it asked for.
    pub request: Request<'a>,
}

/// What came of a replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replayed {
    /// The epoch at which the recording begins.
    pub first_epoch: u32,
    /// The one at which it ends.
    pub last_epoch: u32,
    /// Decisions that were compared.
    pub decisions: u64,
    /// What the engine counted, from the agent's start.
    pub figures: Figures,
    /// Whether the recording has an end that its writer made.
    pub is_ended: bool,
    /// Where it was left, if it was.
    pub divergence: Option<Divergence>,
}

/// Where the engine decided otherwise than it did when it was recorded. What follows cannot be
/// compared: it answers questions that were not asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Divergence {
    /// The epoch.
    pub epoch: u32,
    /// Where in the file, bytes from the start.
    pub offset: u64,
    /// What was recorded.
    pub recorded: String,
    /// What the engine made of it now.
    pub replayed: String,
}

/// Replays a recording up to its end or to the first decision that differs, and shows each
/// decision as it is made.
///
/// # Errors
/// When the recording cannot be read to its end, or begins with no state.
pub fn replay<R: Read>(
    reader: &mut Reader<R>,
    show: &mut dyn FnMut(Decision<'_>),
) -> Result<Replayed, RecordingError> {
    let header = reader.header();
    let config = header.config();
    let strategy = ByHeat::new(header.gain());
    let engine = Engine::restore(strategy, config, reader.state());
    let fault = Fault::Malformed("the state at the beginning is none");
    let mut engine = engine.map_err(|_| reader.content(fault))?;
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
            Event::Input(input) => {
                let pushed = engine.push(input);
                pushed
                    .err()
                    .map(|misuse| (format!("{input:?}"), misuse.to_string()))
            }
            Event::Request(recorded) => {
                let request = engine.request();
                let epoch = engine.epoch();
                show(Decision {
                    epoch,
                    ranking: engine.ranking(),
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
