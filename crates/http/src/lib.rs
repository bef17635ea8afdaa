//! HTTP on Unix sockets: [`bind`] makes the socket of a server, [`serve`] serves it within limits,
//! [`ask`] is the client.
//!
//! The guest's agent and the host's controller serve axum routers on such sockets; the command
//! line and the lab ask them. A client for one short question needs no runtime and no library: an
//! HTTP/1.0 answer ends with its connection and is never chunked.

mod bind;
mod client;
mod serve;

pub use bind::{BindError, SocketFile, bind};
pub use client::{AskError, ask};
pub use serve::{Limits, serve};
