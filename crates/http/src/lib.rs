//! HTTP on Unix sockets: [`bind`] makes the socket of a server, [`serve`] serves it within limits,
//! [`ask`] is the client.
//!
//! The guest's agent and the host's controller serve axum routers on such sockets; the command
//! line and the lab ask them, and the controller asks Cloud Hypervisor's. A client for one short question
//! needs no runtime and no library: an answer to HTTP/1.0 ends with its connection, or where its length
//! says, and is never chunked.

mod bind;
mod client;
mod serve;

pub use bind::{BindError, SocketFile, bind};
pub use client::{AskError, ask, ask_over};
pub use serve::{Limits, serve};
