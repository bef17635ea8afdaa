//! HTTP on Unix sockets: [`bind`] creates a server's socket, [`serve`] serves it, [`ask`] is the
//! client.
//!
//! The guest's agent and the host's controller serve axum routers on such sockets. The command line
//! and the lab are their clients, and the controller asks Cloud Hypervisor's API. The client needs
//! no runtime and no library, because it asks one short question by HTTP/1.0. The answer is never
//! chunked and ends with its connection or at its stated length.

mod bind;
mod client;
mod serve;

pub use bind::{BindError, SocketFile, bind};
pub use client::{AskError, ask, ask_over};
pub use serve::{Limits, NamesPeer, Peer, serve};
