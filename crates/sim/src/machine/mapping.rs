//! The result of a translation.

use demeter_policy::GuestPhysAddr;

use super::radix::PageSize;

/// The reason that a walk found no translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The guest maps nothing at this address.
    Page,
    /// The guest marked the page to detect accesses.
    Hint,
    /// The hypervisor maps nothing at this guest-physical address.
    Violation(GuestPhysAddr),
    /// The hypervisor marked this guest-physical page to detect accesses.
    HostHint(GuestPhysAddr),
}

/// A page translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// The frame of the base page that holds the address.
    pub(crate) frame: u32,
    /// Page size: the smaller one of both dimensions.
    pub(crate) size: PageSize,
    /// Whether its dirty bits are set, so that stores need no extra walk.
    pub(crate) dirty: bool,
}
