//! Versions of the protocol.

/// The newest protocol version that this release speaks.
///
/// Hosts and guests are updated one after the other. So each release also speaks earlier
/// versions, and the host answers in the guest's version. A guest that is not welcomed in its own
/// version sends `Hello` in the previous one.
///
/// Version 2: a guest proves that it runs in the VM whose memory the host would take (`Prove`).
///
/// Version 3: a list is asked for in parts (`List`), and statistics include cost and benefit of
/// moves.
///
/// Version 4: statistics include the benefit of fast memory of each size.
pub const VERSION: u16 = 4;

/// The oldest protocol version that this release speaks.
pub const VERSION_MIN: u16 = 2;

/// First version with lists in parts; older versions send whole lists.
pub const LISTS_BY_PARTS: u16 = 3;
