//! The protocol between guest agent and host controller over virtio-serial.
//!
//! A byte pipe without connections carries frames (`frame.rs`), and a frame carries one
//! [`Message`]. Neither side trusts the other: decoding is total, and no received length or count
//! sizes an allocation.
//!
//! ```
//! use demeter_proto::{Decoder, Message, encode};
//!
//! let mut pipe = vec![];
//! encode(&Message::Ping { nonce: 7 }, &mut pipe)?;
//! let mut decoder = Decoder::default();
//! decoder.push(&pipe);
//! assert_eq!(decoder.next(), Ok(Some(Message::Ping { nonce: 7 })));
//! assert_eq!(decoder.next(), Ok(None));
//! # Ok::<(), demeter_proto::EncodeError>(())
//! ```

mod fields;
mod frame;
mod message;
mod text;
mod version;

pub use fields::BENEFIT_TOLD;
pub use frame::{DecodeError, Decoder, ENCODED_BYTES_MAX, PAYLOAD_BYTES_MAX, encode, encode_as};
pub use message::{
    BootId, Done, EncodeError, GpaRange, Hello, Message, NODES_MAX, NodeStats, NodeTotal, Nonce,
    Outcome, Permille, RANGES_MAX, REASON_BYTES_MAX, Ranges, Relocation, RequestId, Resize,
    SessionId, Stats,
};
pub use text::shown;
pub use version::{LISTS_BY_PARTS, VERSION, VERSION_MIN};

/// The guest's vsock port of the relay.
///
/// It is used with hypervisors that have vsock instead of named virtio-serial ports. Ports below
/// 1024 need CAP_NET_BIND_SERVICE in the guest (net/vmw_vsock/af_vsock.c).
pub const VSOCK_PORT: u32 = 1017;
