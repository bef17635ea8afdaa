//! QEMU's machine protocol (QMP): a small asynchronous client that trusts nothing it reads.
//!
//! Lines of JSON over a Unix socket (QEMU's docs/interop/qmp-spec): the server greets, the client
//! negotiates capabilities, then commands are answered in order and events come in between.
//! [`decode`] turns bytes into messages, [`Connection`] carries commands and events over a
//! socket, [`commands`] gives the few commands that we need their types, and [`mtree`] reads the
//! one answer that is text for people.

pub mod commands;
mod connection;
pub mod decode;
pub mod mtree;
mod socket;

pub use connection::{Connection, Events, Limits, Qmp, QmpError};
pub use decode::{Event, Message};
pub use socket::Peer;

#[cfg(test)]
mod tests;
