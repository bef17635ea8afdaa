//! Decodes bytes from QEMU into messages.
//!
//! Decoding is total: any bytes give a message or an error. It buffers at most [`LINE_BYTES_MAX`]
//! and the latest input.

use demeter_proto::shown;
use serde_json::{Map, Value};

use crate::hypervisor::Event;

/// Maximum length of a line. The longest real one, a memory tree of a large VM, has some tens of
/// kilobytes.
pub const LINE_BYTES_MAX: usize = 1 << 20;

/// Reason why bytes are not QMP.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// A line is too long.
    #[error("a line is longer than {LINE_BYTES_MAX} bytes")]
    TooLong,
    /// A line is not a JSON object.
    #[error("a line is no JSON object: {0}")]
    NotAnObject(String),
    /// An object is no known message.
    #[error("an object is neither greeting nor answer nor event: {0}")]
    Unknown(String),
}

/// A message of QEMU.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// The first message.
    Greeting,
    /// The answer to a command that was carried out.
    Return {
        /// The command's number.
        id: u64,
        /// The returned value.
        value: Value,
    },
    /// The answer to a command that was refused.
    Error {
        /// The command's number.
        id: u64,
        /// QEMU's message for people.
        desc: String,
    },
    /// An event.
    Event(Notice),
}

/// Meaning of an event for this crate. Only the event's name is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// An event that the VM's manager must know.
    Tell(Event),
    /// A memory device or the virtio balloon changed its size.
    SizeChange,
    /// An event without meaning here.
    Other,
}

/// Splits a stream of bytes into lines and decodes them.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Leading bytes of `buffer` that contain no end of line.
    searched: usize,
}

impl Decoder {
    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next message, or `None` if more bytes are needed. After an error the stream is unusable.
    pub fn next_message(&mut self) -> Result<Option<Message>, DecodeError> {
        loop {
            let unseen = &self.buffer[self.searched..];
            let Some(end) = unseen.iter().position(|&byte| byte == b'\n') else {
                self.searched = self.buffer.len();
                return if self.searched > LINE_BYTES_MAX {
                    Err(DecodeError::TooLong)
                } else {
                    Ok(None)
                };
            };
            let end = self.searched + end;
            if end > LINE_BYTES_MAX {
                return Err(DecodeError::TooLong);
            }
            let message = match self.buffer[..end].trim_ascii() {
                [] => None,
                line => Some(message(line)),
            };
            self.buffer.drain(..=end);
            self.searched = 0;
            if let Some(message) = message {
                return message.map(Some);
            }
        }
    }
}

/// Decodes one line.
fn message(line: &[u8]) -> Result<Message, DecodeError> {
    let object = object(line)?;
    if let Some(name) = object.get("event") {
        return Ok(Message::Event(event(name.as_str())));
    }
    let id = object.get("id").and_then(Value::as_u64);
    answer(object, id)
}

/// Decodes QEMU's answer to the command `id`, as another protocol carries it.
pub(crate) fn answer_to(id: u64, text: &str) -> Result<Message, DecodeError> {
    answer(object(text.as_bytes())?, Some(id))
}

fn object(text: &[u8]) -> Result<Map<String, Value>, DecodeError> {
    serde_json::from_slice(text).map_err(|error| DecodeError::NotAnObject(error.to_string()))
}

fn answer(mut object: Map<String, Value>, id: Option<u64>) -> Result<Message, DecodeError> {
    match (object.remove("return"), object.get("error"), id) {
        (Some(value), None, Some(id)) => Ok(Message::Return { id, value }),
        (None, Some(error), Some(id)) => Ok(Message::Error {
            id,
            desc: brief(
                error["desc"].as_str().unwrap_or("no reason given"),
                DESC_CHARS_MAX,
            ),
        }),
        (None, None, _) if object.contains_key("QMP") => Ok(Message::Greeting),
        _ => {
            let keys: Vec<_> = object.keys().take(4).map(|key| brief(key, 20)).collect();
            Err(DecodeError::Unknown(keys.join(", ")))
        }
    }
}

/// Maximum length of a reason that is kept.
const DESC_CHARS_MAX: usize = 300;

/// Foreign text, cleaned and cut for an error message.
fn brief(text: &str, chars_max: usize) -> String {
    shown(&text.chars().take(chars_max).collect::<String>())
}

/// Meaning of an event of this name.
pub(crate) fn event(name: Option<&str>) -> Notice {
    match name {
        Some("RESET") => Notice::Tell(Event::Reset),
        Some(
            // Loading a snapshot stops and resumes the machine; it is no reset.
            "STOP" | "RESUME" | "MIGRATION" | "DEVICE_DELETED" | "ACPI_DEVICE_OST"
            | "MEM_UNPLUG_ERROR",
        ) => Notice::Tell(Event::Changed),
        Some("MEMORY_DEVICE_SIZE_CHANGE" | "BALLOON_CHANGE") => Notice::SizeChange,
        _ => Notice::Other,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(decoder: &mut Decoder) -> Result<Vec<Message>, DecodeError> {
        std::iter::from_fn(|| decoder.next_message().transpose()).collect()
    }

    fn decode(text: &str) -> Result<Vec<Message>, DecodeError> {
        let mut decoder = Decoder::default();
        decoder.push(text.as_bytes());
        all(&mut decoder)
    }

    const SESSION: &str = concat!(
        r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}}, "capabilities": ["oob"]}}"#,
        "\r\n\r\n",
        r#"{"return": {}, "id": 1}"#,
        "\r\n",
        r#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "RESET", "data": {"guest": true}}"#,
        "\n",
        r#"{"id": 2, "error": {"class": "GenericError", "desc": "no such device"}}"#,
        "\n",
        r#"{"event": "MEMORY_DEVICE_SIZE_CHANGE", "data": {"id": "vm0", "size": 4096, "qom-path": "/x"}}"#,
        "\n",
        r#"{"event": ["BALLOON_CHANGE"]}"#,
        "\n",
    );

    fn session() -> Vec<Message> {
        vec![
            Message::Greeting,
            Message::Return {
                id: 1,
                value: serde_json::json!({}),
            },
            Message::Event(Notice::Tell(Event::Reset)),
            Message::Error {
                id: 2,
                desc: "no such device".into(),
            },
            Message::Event(Notice::SizeChange),
            Message::Event(Notice::Other),
        ]
    }

    #[test]
    fn what_is_not_qmp_is_named() {
        for (text, want) in [
            ("HTTP/1.1 400 Bad Request\n", "no JSON object"),
            ("[]\n", "no JSON object"),
            ("{\"return\": {}}\n", "neither greeting nor answer"),
            ("{\"return\": 1, \"error\": 2, \"id\": 3}\n", "neither"),
            ("{\"id\": -1, \"return\": {}}\n", "neither"),
        ] {
            let said = decode(text).unwrap_err().to_string();
            assert!(said.contains(want), "{text}: {said}");
        }
        let endless = "x".repeat(LINE_BYTES_MAX + 1);
        assert_eq!(decode(&endless), Err(DecodeError::TooLong));
        assert_eq!(decode(&(endless + "\n")), Err(DecodeError::TooLong));
    }

    proptest! {
        #[test]
        fn any_split_of_the_bytes_decodes_the_same(cuts in prop::collection::vec(0..SESSION.len(), 0..20)) {
            let mut cuts = cuts;
            cuts.extend([0, SESSION.len()]);
            cuts.sort_unstable();
            let mut decoder = Decoder::default();
            let mut messages = vec![];
            for cut in cuts.windows(2) {
                decoder.push(&SESSION.as_bytes()[cut[0]..cut[1]]);
                messages.extend(all(&mut decoder).unwrap());
            }
            prop_assert_eq!(messages, session());
        }

        #[test]
        fn any_bytes_are_survived(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..8)) {
            let mut decoder = Decoder::default();
            for chunk in chunks {
                decoder.push(&chunk);
                if all(&mut decoder).is_err() {
                    break;
                }
                prop_assert!(!decoder.buffer.contains(&b'\n'));
            }
        }
    }
}
