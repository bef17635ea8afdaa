//! A VM's connection to its host: orders come in, reports go out.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use demeter_guest::balloon::port;

use crate::fault::Fault;
use crate::link::{GO, LINE_MAX_BYTES, LineReader, PORT_NAME, VmMessage};

/// Polling interval while the port is missing.
const PORT_TICK: Duration = Duration::from_millis(10);

/// Orders of the host, one per line.
pub type Orders = LineReader<File>;

/// The connection to the host.
#[derive(Debug)]
pub struct HostLink {
    port: File,
    orders: Orders,
    path: PathBuf,
}

impl HostLink {
    /// Opens the virtio-serial port named [`PORT_NAME`], waiting at most `patience` for it.
    pub fn open(root: &Path, patience: Duration) -> Result<Self, Fault> {
        let deadline = Instant::now() + patience;
        let name = loop {
            match find_port(root) {
                Err(_) if Instant::now() < deadline => thread::sleep(PORT_TICK),
                found => break found?,
            }
        };
        let path = root.join("dev").join(name);
        let port = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(Fault::io("open", &path))?;
        let mut link = Self {
            orders: LineReader::new(port.try_clone().map_err(Fault::io("duplicate", &path))?),
            port,
            path,
        };
        // After a reset, half a line from before may remain in the pipe.
        link.write(b"\n")?;
        Ok(link)
    }

    /// The host's orders, for another thread.
    pub fn orders(&self) -> Result<Orders, Fault> {
        let port = self.port.try_clone();
        Ok(LineReader::new(
            port.map_err(Fault::io("duplicate", &self.path))?,
        ))
    }

    /// Waits for the host's [`GO`]. The host's time limit bounds the wait.
    pub fn wait_for_go(&mut self) -> Result<(), Fault> {
        match self
            .orders
            .next_line()
            .map_err(Fault::io("read", &self.path))?
        {
            Some(order) if order == GO => Ok(()),
            order => Err(Fault::Order(order)),
        }
    }

    /// Sends one report.
    pub fn send(&mut self, report: &VmMessage) -> Result<(), Fault> {
        let mut line = serde_json::to_vec(report)
            .map_err(|e| Fault::io("encode for", &self.path)(e.into()))?;
        if line.len() >= LINE_MAX_BYTES {
            return Err(Fault::io("write", &self.path)(io::Error::other(
                "report too long",
            )));
        }
        line.push(b'\n');
        self.write(&line)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        self.port
            .write_all(bytes)
            .map_err(Fault::io("write", &self.path))
    }
}

/// The device name under /dev of the host's port.
fn find_port(root: &Path) -> Result<String, Fault> {
    let found = port::find(root, PORT_NAME).map_err(Fault::io("find the port", PORT_NAME))?;
    found.ok_or_else(|| Fault::Unsupported {
        what: format!("there is no virtio-serial port named {PORT_NAME}"),
        hint: "use a kernel with CONFIG_VIRTIO_CONSOLE=y, as linux-image-cloud-amd64 6.12",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_missing_is_named() {
        let root = tempfile::tempdir().unwrap();
        let said = find_port(root.path()).unwrap_err().to_string();
        assert!(
            said.contains(PORT_NAME) && said.contains("CONFIG_VIRTIO_CONSOLE"),
            "{said}"
        );
    }
}
