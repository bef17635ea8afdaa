//! Messages of libvirt's RPC: a length, a head of six words, and XDR.
//!
//! The format is in libvirt's docs/internals/rpc, src/rpc/virnetprotocol.x and
//! src/remote/*_protocol.x. Decoding is total: any bytes give a message or an error. It buffers at
//! most [`MESSAGE_BYTES_MAX`] and the latest input.

use demeter_proto::shown;

use super::xdr::{Malformed, Reader, Writer};

/// Maximum length of a message. libvirt's own limit is 32 MiB; a domain's XML or memory tree has
/// some tens of kilobytes.
pub(crate) const MESSAGE_BYTES_MAX: usize = 4 << 20;

/// Bytes of length and head.
const HEAD_BYTES: usize = 28;

/// Version of both programs; unchanged since 2010 and 2011.
const VERSION: u32 = 1;

/// Message types: a call, its reply, and an unsolicited event.
pub(crate) const CALL: u32 = 0;
pub(crate) const REPLY: u32 = 1;
pub(crate) const EVENT: u32 = 2;

/// Status of a successful reply.
pub(crate) const OK: u32 = 0;

/// A procedure: its program and number. Their meaning never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Procedure(pub u32, pub u32);

impl Procedure {
    const REMOTE: u32 = 0x2000_8086;
    const QEMU: u32 = 0x2000_8087;

    pub(crate) const OPEN: Self = Self(Self::REMOTE, 1);
    pub(crate) const XML: Self = Self(Self::REMOTE, 14);
    pub(crate) const LOOKUP_BY_NAME: Self = Self(Self::REMOTE, 23);
    pub(crate) const AUTH_LIST: Self = Self(Self::REMOTE, 66);
    pub(crate) const AUTH_POLKIT: Self = Self(Self::REMOTE, 70);
    pub(crate) const LIST_DOMAINS: Self = Self(Self::REMOTE, 273);
    pub(crate) const WATCH_DOMAINS: Self = Self(Self::REMOTE, 316);
    pub(crate) const LIFECYCLE: Self = Self(Self::REMOTE, 318);
    pub(crate) const MONITOR_COMMAND: Self = Self(Self::QEMU, 1);
    pub(crate) const WATCH_MONITOR: Self = Self(Self::QEMU, 4);
    pub(crate) const MONITOR_EVENT: Self = Self(Self::QEMU, 6);
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    pub procedure: Procedure,
    /// [`CALL`], [`REPLY`] or [`EVENT`].
    pub kind: u32,
    /// Serial number; a reply has that of its call.
    pub serial: u32,
    /// [`OK`], or another value for an error.
    pub status: u32,
    /// XDR body, by procedure and type.
    pub body: Vec<u8>,
}

impl Message {
    /// Encodes a call.
    pub(crate) fn call(procedure: Procedure, serial: u32, body: Writer) -> Vec<u8> {
        let call = Self {
            procedure,
            kind: CALL,
            serial,
            status: OK,
            body: body.0,
        };
        call.bytes()
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let Procedure(program, number) = self.procedure;
        Writer::default()
            .u32((HEAD_BYTES + self.body.len()) as u32)
            .u32(program)
            .u32(VERSION)
            .u32(number)
            .u32(self.kind)
            .u32(self.serial)
            .u32(self.status)
            .fixed(&self.body)
            .0
    }

    /// The text of an error reply (`virNetMessageError`).
    pub(crate) fn error(&self) -> String {
        let text = || -> Result<&str, Malformed> {
            let mut body = Reader(&self.body);
            let _code = body.i32()?;
            let _domain = body.i32()?;
            let text = body.optional_text()?.unwrap_or_default();
            Ok(match text {
                "" => "no reason given",
                text => text,
            })
        };
        let text = text().unwrap_or("no reason that can be read");
        shown(&text.chars().take(300).collect::<String>())
    }
}

/// Reason why bytes are not messages of libvirt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DecodeError {
    #[error("a message of {0} bytes: this is not libvirt's protocol")]
    Length(usize),
    #[error("version {0} of the protocol; only version {VERSION} is supported")]
    Version(u32),
}

/// Splits a stream of bytes into messages.
#[derive(Debug, Default)]
pub(crate) struct Decoder(Vec<u8>);

impl Decoder {
    /// Adds received bytes.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The next message, or `None` if more bytes are needed. After an error the stream is unusable.
    pub(crate) fn next_message(&mut self) -> Result<Option<Message>, DecodeError> {
        let mut head = Reader(&self.0);
        let Ok(length) = head.u32() else {
            return Ok(None);
        };
        let length = length as usize;
        if !(HEAD_BYTES..=MESSAGE_BYTES_MAX).contains(&length) || !length.is_multiple_of(4) {
            return Err(DecodeError::Length(length));
        }
        if self.0.len() < length {
            return Ok(None);
        }
        let message = || -> Result<(u32, Message), Malformed> {
            let program = head.u32()?;
            let version = head.u32()?;
            let message = Message {
                procedure: Procedure(program, head.u32()?),
                kind: head.u32()?,
                serial: head.u32()?,
                status: head.u32()?,
                body: self.0[HEAD_BYTES..length].to_vec(),
            };
            Ok((version, message))
        }();
        self.0.drain(..length);
        match message {
            Ok((VERSION, message)) => Ok(Some(message)),
            Ok((version, _)) => Err(DecodeError::Version(version)),
            Err(Malformed) => Err(DecodeError::Length(length)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(serial: u32, words: usize) -> Message {
        Message {
            procedure: Procedure::XML,
            kind: REPLY,
            serial,
            status: OK,
            body: vec![serial as u8; words * 4],
        }
    }

    #[test]
    fn what_is_not_libvirt_is_told() {
        for (bytes, want) in [
            (&b"{\"QMP\": {}}"[..], "not libvirt's protocol"),
            (&[0, 0, 0, 4], "a message of 4 bytes"),
            (&[0, 0, 0, 29], "a message of 29 bytes"),
            (&[255, 0, 0, 0], "not libvirt's protocol"),
        ] {
            let mut decoder = Decoder::default();
            decoder.push(bytes);
            let said = decoder.next_message().unwrap_err().to_string();
            assert!(said.contains(want), "{said}");
        }
        let mut bytes = message(1, 0).bytes();
        bytes[11] = 2;
        let mut decoder = Decoder::default();
        decoder.push(&bytes);
        assert_eq!(decoder.next_message(), Err(DecodeError::Version(2)));
    }

    #[test]
    fn an_error_has_words() {
        let error = |body| Message {
            body,
            ..message(1, 0)
        };
        let words = Writer::default().i32(45).i32(7).u32(1).text("refused\n");
        assert_eq!(error(words.0).error(), "refused?");
        let silent = Writer::default().i32(45).i32(7).u32(1).text("");
        for body in [vec![], silent.0] {
            assert!(error(body).error().contains("no reason"));
        }
    }

    proptest! {
        #[test]
        fn any_split_of_the_bytes_decodes_the_same(
            words in prop::collection::vec(0usize..5, 0..5), step in 1usize..40
        ) {
            let sent: Vec<_> = (1..).zip(words).map(|(serial, words)| message(serial, words)).collect();
            let bytes: Vec<u8> = sent.iter().flat_map(Message::bytes).collect();
            let mut decoder = Decoder::default();
            let mut received = vec![];
            for bytes in bytes.chunks(step) {
                decoder.push(bytes);
                while let Some(message) = decoder.next_message().unwrap() {
                    received.push(message);
                }
            }
            prop_assert_eq!(received, sent);
        }

        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            while let Ok(Some(message)) = decoder.next_message() {
                let _ = message.error();
            }
        }
    }
}
