//! The port to the host: virtio-serial, or else vsock.
//!
//! A virtio-serial port is a byte pipe that outlives both of its ends. Where the VM has no such port, the guest listens
//! on a vsock port, and the host calls it.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::vsock::{self, Calls};

/// The port's name, as the hypervisor gives it (QEMU: `virtserialport,name=org.demeter.0`).
pub const PORT_NAME: &str = "org.demeter.0";

const CLASS: &str = "sys/class/virtio-ports";

/// The result of a read or write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// Bytes that were transferred.
    Bytes(usize),
    /// The call would block.
    Later,
    /// The host's side is closed.
    HungUp,
}

/// An open port.
#[derive(Debug)]
pub struct Port(Kind);

#[derive(Debug)]
enum Kind {
    Pipe(File),
    Vsock(Calls),
}

impl Port {
    /// Opens the port named `name` below `root`, or else the vsock port; `None` if there is neither.
    pub fn open(root: &Path, name: &str) -> io::Result<Option<Self>> {
        let Some(device) = find(root, name)? else {
            let calls = Calls::listen(root)?;
            return Ok(calls.map(|calls| Self(Kind::Vsock(calls))));
        };
        let port = File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(root.join("dev").join(device))?;
        Ok(Some(Self(Kind::Pipe(port))))
    }

    /// Whether the host is connected. Accepts its call on a vsock port. Needs a port that has not hung up.
    pub fn is_connected(&mut self) -> io::Result<bool> {
        match &mut self.0 {
            Kind::Pipe(_) => Ok(true),
            Kind::Vsock(calls) => calls.answer(),
        }
    }

    /// Notes that the host has gone; it may come back.
    pub fn hang_up(&mut self) {
        if let Kind::Vsock(calls) = &mut self.0 {
            calls.hang_up();
        }
    }

    /// Reads available bytes.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<Transfer> {
        self.pipe()
            .map_or(Ok(Transfer::HungUp), |pipe| transfer(pipe.read(buffer)))
    }

    /// Writes as many bytes as possible.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<Transfer> {
        self.pipe()
            .map_or(Ok(Transfer::HungUp), |pipe| transfer(pipe.write(bytes)))
    }

    fn pipe(&mut self) -> Option<&mut File> {
        match &mut self.0 {
            Kind::Pipe(pipe) => Some(pipe),
            Kind::Vsock(calls) => calls.host(),
        }
    }

    /// A port that takes any caller for the host.
    #[cfg(test)]
    pub(super) fn listening(listener: OwnedFd) -> Self {
        Self(Kind::Vsock(Calls::on(listener, |_| true)))
    }
}

impl From<OwnedFd> for Port {
    /// A port over any non-blocking byte pipe.
    fn from(pipe: OwnedFd) -> Self {
        Self(Kind::Pipe(pipe.into()))
    }
}

impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Kind::Pipe(pipe) => pipe.as_fd(),
            Kind::Vsock(calls) => calls.as_fd(),
        }
    }
}

/// Whether there is a port to the host.
pub fn is_there(root: &Path) -> bool {
    matches!(find(root, PORT_NAME), Ok(Some(_))) || vsock::is_there(root)
}

/// Maps the driver's results: while the host's side is closed, it reads nothing and has no room
/// (drivers/char/virtio_console.c).
fn transfer(result: io::Result<usize>) -> io::Result<Transfer> {
    match result {
        Ok(0) => Ok(Transfer::HungUp),
        Ok(count) => Ok(Transfer::Bytes(count)),
        Err(e) => match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(Transfer::Later),
            io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::NotConnected => Ok(Transfer::HungUp),
            _ => Err(e),
        },
    }
}

/// Finds the device's name under /dev by the name that the hypervisor gave the port.
pub fn find(root: &Path, name: &str) -> io::Result<Option<String>> {
    let entries = match fs::read_dir(root.join(CLASS)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let told = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if told.trim() == name {
            return Ok(Some(entry.file_name().to_string_lossy().into_owned()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_is_found_by_its_name() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(find(root.path(), PORT_NAME).unwrap(), None);
        let class = root.path().join(CLASS);
        for (device, name) in [
            ("vport0p1", "org.qemu.guest_agent.0\n"),
            ("vport0p2", "org.demeter.0\n"),
        ] {
            fs::create_dir_all(class.join(device)).unwrap();
            fs::write(class.join(device).join("name"), name).unwrap();
        }
        assert_eq!(
            find(root.path(), PORT_NAME).unwrap().as_deref(),
            Some("vport0p2")
        );
        assert_eq!(find(root.path(), "org.demeter.1").unwrap(), None);
        // There is no device file.
        assert!(Port::open(root.path(), PORT_NAME).is_err());
    }
}
