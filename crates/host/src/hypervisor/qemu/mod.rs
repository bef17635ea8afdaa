//! QEMU, by its machine protocol (QMP): a small asynchronous client that trusts nothing it reads.
//!
//! QMP is lines of JSON over a Unix socket (QEMU's docs/interop/qmp-spec). The server greets and
//! the client negotiates capabilities. Then commands are answered in order, and events come in
//! between.
//!
//! [`decode`] turns bytes into messages, and [`Qemu`] carries commands and events over a socket.
//! `commands.rs` implements [`Hypervisor`](super::Hypervisor) with a few commands, and [`mtree`]
//! parses the one answer that is text for people.

mod commands;
mod connection;
pub mod decode;
pub mod mtree;

pub(crate) use connection::Wire;
pub use connection::{Qemu, QmpError, Timeouts};

#[cfg(test)]
mod tests;
