//! Entry points of the fuzz targets for all parsers of libvirt's data.

use std::collections::VecDeque;

use demeter_policy::provision::ProvisionerKind;

use super::client::{Domain, domains, life};
use super::message::{DecodeError, Decoder, Message};
use super::patch::{Wanted, patch};
use super::wire::Monitor;
use super::xdr::Reader;
use crate::hypervisor::qemu::Wire;

/// Decodes any bytes of a daemon. They give the same messages in pieces as whole, and each message
/// encodes to the same bytes.
pub fn rpc(piece: usize, bytes: &[u8]) {
    let whole = read([bytes]);
    let pieces = bytes.chunks(piece.max(1));
    assert_eq!(read(pieces), whole);
    let written: Vec<u8> = whole.0.iter().flat_map(Message::bytes).collect();
    assert!(bytes.starts_with(&written));
    for message in &whole.0 {
        assert_eq!(message.error().lines().count(), 1);
        let _ = life(&message.body);
        let _ = domains(&message.body);
        let _ = Reader(&message.body).optional_text();
    }
    let Some(domain) = whole
        .0
        .iter()
        .find_map(|first| Domain::read(&mut Reader(&first.body)).ok())
    else {
        return;
    };
    let mut monitor = Monitor {
        domain,
        decoder: Decoder::default(),
        earlier: VecDeque::from(whole.0),
    };
    while let Ok(Some(_)) = monitor.next_message() {}
}

/// The messages of a stream, and the error that ended it.
fn read<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<Message>, Option<DecodeError>) {
    let mut decoder = Decoder::default();
    let mut messages = vec![];
    for piece in pieces {
        decoder.push(piece);
        loop {
            match decoder.next_message() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(error) => return (messages, Some(error)),
            }
        }
    }
    (messages, None)
}

/// Reads any text as a domain's XML. The patched XML must lack nothing, or the error must be one
/// line.
pub fn xml(text: &str) {
    for provisioner in [ProvisionerKind::DemeterBalloon, ProvisionerKind::VirtioMem] {
        let wanted = Wanted {
            provisioner,
            fast: None,
            slow: None,
            cells: None,
            host: None,
        };
        if let Err(why) = patch("db", text, wanted) {
            assert_eq!(why.lines().count(), 1, "{why}");
        }
    }
}
