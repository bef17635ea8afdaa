//! The connection to libvirt.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Default sockets: the daemon for QEMU alone, and the one for all drivers.
const SOCKETS: [&str; 2] = ["/run/libvirt/virtqemud-sock", "/run/libvirt/libvirt-sock"];

const URI: &str = "qemu:///system";

/// Connection to a libvirt daemon.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Libvirt {
    /// Unix socket of the daemon; by default `/run/libvirt/virtqemud-sock` or
    /// `/run/libvirt/libvirt-sock`, whichever exists.
    pub socket: Option<PathBuf>,
    /// URI of the driver; by default `qemu:///system`. A user's own daemon has `qemu:///session`.
    pub uri: Option<String>,
    /// User that the daemon runs as, if neither root nor the controller's own user.
    pub owner_uid: Option<u32>,
}

impl Libvirt {
    /// URI of the driver.
    pub fn uri(&self) -> &str {
        self.uri.as_deref().unwrap_or(URI)
    }

    /// The daemon's socket.
    pub fn socket(&self) -> PathBuf {
        let there = || SOCKETS.iter().map(PathBuf::from).find(|path| path.exists());
        let socket = self.socket.clone().or_else(there);
        socket.unwrap_or_else(|| SOCKETS[1].into())
    }
}
