//! QEMU, by its machine protocol (QMP): a small asynchronous client that trusts nothing it reads.
//!
//! Lines of JSON over a Unix socket (QEMU's docs/interop/qmp-spec): the server greets, the client
//! negotiates capabilities, then commands are answered in order and events come in between.
//! [`decode`] turns bytes into messages, [`Qemu`] carries commands and events over a socket,
//! `commands.rs` makes a [`Hypervisor`](super::Hypervisor) of the few that we need, and [`mtree`]
//! reads the one answer that is text for people.

mod commands;
mod connection;
pub mod decode;
pub mod mtree;

pub(crate) use connection::Wire;
pub use connection::{Limits, Qemu, QmpError};

#[cfg(test)]
mod tests;
