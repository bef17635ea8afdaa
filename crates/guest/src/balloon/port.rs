//! The virtio-serial port to the host: a byte pipe that outlives both of its ends.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The port's name, as the hypervisor gives it (QEMU: `virtserialport,name=org.demeter.0`).
pub const PORT_NAME: &str = "org.demeter.0";

const CLASS: &str = "sys/class/virtio-ports";

/// What became of reading or writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// So many bytes.
    Bytes(usize),
    /// Not now.
    Later,
    /// The host's side is closed.
    HungUp,
}

/// An open port.
#[derive(Debug)]
pub struct Port(File);

impl Port {
    /// Opens the port named `name` below `root`; `None` if there is none of that name.
    pub fn open(root: &Path, name: &str) -> io::Result<Option<Self>> {
        let Some(device) = find(root, name)? else {
            return Ok(None);
        };
        let port = File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(root.join("dev").join(device))?;
        Ok(Some(Self(port)))
    }

    /// Reads what has come.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<Transfer> {
        transfer(self.0.read(buffer))
    }

    /// Writes what fits.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<Transfer> {
        transfer(self.0.write(bytes))
    }
}

impl From<OwnedFd> for Port {
    /// Any byte pipe that does not block.
    fn from(pipe: OwnedFd) -> Self {
        Self(pipe.into())
    }
}

impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The driver (drivers/char/virtio_console.c) reads nothing while the host's side is closed, and
/// has no room then.
fn transfer(result: io::Result<usize>) -> io::Result<Transfer> {
    match result {
        Ok(0) => Ok(Transfer::HungUp),
        Ok(count) => Ok(Transfer::Bytes(count)),
        Err(e) => match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(Transfer::Later),
            io::ErrorKind::BrokenPipe => Ok(Transfer::HungUp),
            _ => Err(e),
        },
    }
}

/// The device's name under /dev, by the name that the hypervisor gave the port.
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
