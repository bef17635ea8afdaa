//! A VM as a domain of the lab's private libvirtd.
//!
//! The XML (`xml`) uses libvirt's own elements as far as possible, so that the host controller is tested with libvirt's
//! usual setup. Only the plugin and its shared memory are passed through.

mod daemon;
pub(super) mod process;
mod xml;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::child::VmChild;
use super::emulator::Emulator;
use super::qemu::Parts;
use super::qemu_check;
use super::tool;
use crate::error::Error;
use process::Domain;

pub use daemon::Daemon;

/// Starts a VM as the domain `name`.
pub fn start(
    parts: &Parts,
    daemon: &Arc<Daemon>,
    name: &str,
    limit: Duration,
) -> Result<VmChild, Error> {
    let folder = parts.folder;
    let emulator = tool::find(parts.qemu).ok_or_else(|| Error::Missing {
        what: format!("there is no {}", parts.qemu.display()),
        hint: qemu_check::HINT.into(),
    })?;
    // The daemon's user does not need access to our cache.
    let kernel = copied(parts.kernel, folder, "kernel")?;
    let plugin = copied(parts.plugin, folder, "plugin.so")?;
    let parts = Parts {
        qemu: &emulator,
        kernel: &kernel,
        plugin: &plugin,
        ..*parts
    };
    let socket = xml::link(folder);
    removed(&socket)?;
    let listener = UnixListener::bind(&socket)
        .and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    let listener = listener.map_err(Error::io("listen on", &socket))?;
    let output_log = parts.output_log();
    removed(&output_log)?;
    let link = std::os::unix::fs::symlink(daemon.log_of(name), &output_log);
    link.map_err(Error::io("create", &output_log))?;
    let description = folder.join("domain.xml");
    let text = xml::xml(&parts, name);
    let written = fresh(&description)?.write_all(text.as_bytes());
    written.map_err(Error::io("write", &description))?;
    daemon.give(folder)?;
    daemon.create(&description)?;
    let domain = Domain::open(daemon, name)?;
    // The emulator connected before libvirt reported that it runs.
    let (link, _) = listener
        .accept()
        .map_err(Error::io("hear the VM on", &socket))?;
    let emulator = Emulator::Domain(domain);
    VmChild::new(emulator, link, limit, parts.console_log(), output_log)
}

fn copied(from: &Path, folder: &Path, name: &str) -> Result<PathBuf, Error> {
    let to = folder.join(name);
    let mut file = File::open(from).map_err(Error::io("open", from))?;
    io::copy(&mut file, &mut fresh(&to)?).map_err(Error::io("copy", from))?;
    Ok(to)
}

/// Creates a new file. The folder belongs to the daemon's user, who may have put a link there.
fn fresh(path: &Path) -> Result<File, Error> {
    removed(path)?;
    let created = File::options().write(true).create_new(true).open(path);
    created.map_err(Error::io("create", path))
}

/// Removes a file of the VM's earlier run, if there is one.
fn removed(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}
