//! QEMU through libvirt: a domain's monitor, events and XML, without a second QMP socket.
//!
//! libvirt's C library cannot be linked into a static program. So this is a small client of its RPC
//! protocol over its Unix socket. The protocol is stable: a procedure's number and types never
//! change. We use eleven procedures, all available since libvirt 1.2.3.
//!
//! `xdr` and `message` encode and decode messages, `client` asks questions, and `wire.rs` carries
//! QMP, so that all knowledge of QEMU stays in [`qemu`](super::qemu). `domain` parses a domain's
//! XML, and `patch` adds what it lacks.

mod client;
mod discover;
mod domain;
#[cfg(fuzzing)]
pub mod fuzz;
mod message;
mod metadata;
mod patch;
#[cfg(test)]
mod tests;
mod wire;
mod xdr;
mod xml;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use demeter_policy::provision::ProvisionerKind;
use demeter_policy::{NodeId, PerTier, Pid};
use demeter_proto::shown;

use super::qemu::{Qemu, Timeouts};
use super::{AgentSocket, Channel, Connection, HypervisorError};
use crate::config::Libvirt;
use crate::outside::{self, MayWait, Outside};
use crate::process::{Opener, PeerProcess};
use client::{Client, Which};
use domain::{Facts, Lack};
use wire::Monitor;

pub(crate) use discover::{Domains, FoundDomain, LeftDomain, discover};
pub use patch::{HostTier, Patch, Speed, Wanted};
#[cfg(test)]
pub(crate) use {client::Domain, message::*, xdr::*};

/// Name of the agent's port.
const PORT: &str = "org.demeter.0";

/// Reason why libvirt cannot be used, or a domain cannot be managed.
#[derive(Debug, thiserror::Error)]
pub enum LibvirtError {
    /// The socket cannot be connected to.
    #[error(
        "cannot connect to libvirt at {}: {source}; does libvirtd (or virtqemud) run? Set \
         libvirt.socket in the configuration for another socket", socket.display()
    )]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The listener runs as an untrusted user.
    #[error(
        "libvirt's socket {} belongs to user {uid}, who is neither root nor us; if that is right, set \
         libvirt.owner_uid = {uid}", socket.display()
    )]
    Foreign {
        /// The socket.
        socket: PathBuf,
        /// The user behind it.
        uid: u32,
    },
    /// Permission denied.
    #[error(
        "libvirt at {} denies access: {words}; run this as root, or grant access to its user \
         (polkit's org.libvirt.unix.manage, auth_unix_rw in libvirtd.conf)", socket.display()
    )]
    Access {
        /// The socket.
        socket: PathBuf,
        /// libvirt's message.
        words: String,
    },
    /// No answer came in time.
    #[error("libvirt at {} does not give {what} within {after:?}", socket.display())]
    Silent {
        /// The socket.
        socket: PathBuf,
        /// The wanted data.
        what: String,
        /// How long we waited.
        after: Duration,
    },
    /// The connection has ended or sent invalid data.
    #[error("the connection to libvirt at {} has ended: {why}", socket.display())]
    Gone {
        /// The socket.
        socket: PathBuf,
        /// The cause.
        why: String,
    },
    /// libvirt refused.
    #[error("libvirt at {} refuses {what}: {words}", socket.display())]
    Refused {
        /// The socket.
        socket: PathBuf,
        /// The wanted data.
        what: String,
        /// libvirt's message.
        words: String,
    },
    /// libvirt does not have the procedure.
    #[error("libvirt at {} is too old to give {what}; 1.2.3 is the first that does", socket.display())]
    Old {
        /// The socket.
        socket: PathBuf,
        /// The wanted data.
        what: String,
    },
    /// The domain is not running or not set up to be managed.
    #[error("domain {domain:?}: {why}")]
    Domain {
        /// Its name.
        domain: String,
        /// The fault and its fix.
        why: String,
    },
}

impl From<LibvirtError> for HypervisorError {
    fn from(error: LibvirtError) -> Self {
        let text = error.to_string();
        match error {
            LibvirtError::Silent { .. } => Self::Timeout(text),
            LibvirtError::Gone { .. } => Self::Gone(text),
            _ => Self::Failed(text),
        }
    }
}

/// Connects to the QEMU of a running domain. Checks that the domain supports `provisioner` on
/// `nodes`.
pub async fn connect(
    libvirt: &Libvirt,
    outside: &Outside,
    name: &str,
    provisioner: ProvisionerKind,
    nodes: PerTier<NodeId>,
) -> Result<Connection<Qemu>, LibvirtError> {
    let mut client = Client::connect(libvirt, outside).await?;
    let wrong = |why: String| LibvirtError::Domain {
        domain: shown(name),
        why,
    };
    let domain = client.find(name).await?;
    // Subscribe before inspecting, so that no later change is missed.
    client.watch(Some(&domain)).await?;
    client.watch_monitor(&domain).await?;
    let xml = client.xml(&domain, Which::Running).await?;
    let facts = Facts::read(&xml).map_err(wrong)?;
    if !facts.running {
        return Err(wrong(format!("it does not run; virsh start {name}")));
    }
    facts.check(provisioner, nodes).map_err(|lack| match lack {
        Lack::Confidential(_) => wrong(lack.to_string()),
        _ => wrong(format!(
            "{lack}; `demeter host xml {name}` prints what its XML lacks"
        )),
    })?;
    let uid = client.uid;
    let (socket, of) = (client.socket().to_owned(), name.to_owned());
    let asked = outside.ask("libvirt's pid file", move |wait| {
        process(&socket, &of, uid, wait)
    });
    let process = asked.await.unwrap_or_else(|stuck| Err(stuck.into()));
    let process = process.map_err(|why| wrong(why.to_string()))?;
    let opener = Opener {
        process,
        user: Some(uid),
    };
    let agent = facts.agent.map(|path| AgentSocket {
        path,
        opener,
        channel: Channel::Port,
    });
    let which = format!(
        "domain {:?} of libvirt at {}",
        name,
        client.socket().display()
    );
    let (stream, decoder, earlier) = client.into_parts();
    let wire = Monitor {
        domain,
        decoder,
        earlier,
    };
    let (hypervisor, events) = Qemu::over(stream, wire, which, Timeouts::default().command);
    Ok(Connection {
        hypervisor,
        events,
        process,
        agent,
    })
}

/// Makes the patch that adds everything for sizing to a domain's inactive XML. Blocks on libvirt.
pub fn lacks(libvirt: &Libvirt, name: &str, wanted: Wanted) -> Result<Patch, LibvirtError> {
    let wrong = |why: String| LibvirtError::Domain {
        domain: shown(name),
        why,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| wrong(format!("cannot wait for libvirt: {error}")))?;
    let xml = runtime.block_on(async {
        let mut client = Client::connect(libvirt, &Outside::default()).await?;
        let domain = client.find(name).await?;
        client.xml(&domain, Which::Next).await
    })?;
    patch::patch(name, &xml, wanted).map_err(wrong)
}

/// The process of a running domain, from libvirt's PID file; the API does not report it.
fn process(socket: &Path, name: &str, uid: u32, wait: &MayWait) -> io::Result<PeerProcess> {
    if name.contains('/') {
        return Err(io::Error::other("its name holds a slash"));
    }
    let run = socket.parent().unwrap_or(Path::new("/"));
    // Locations for a system daemon and for a user's own.
    let places = [run.join("qemu"), run.join("qemu/run")].map(|at| at.join(format!("{name}.pid")));
    let found = places
        .iter()
        .find_map(|path| Some((path, outside::owner_of(path, wait).ok()?)));
    let Some((path, owner)) = found else {
        let why = format!("libvirt keeps no {}", places[0].display());
        return Err(io::Error::other(why));
    };
    let failed = |error: io::Error| io::Error::other(format!("{}: {error}", path.display()));
    if owner != uid {
        let why = format!("it belongs to user {owner}, libvirt runs as {uid}");
        return Err(failed(io::Error::other(why)));
    }
    let text = outside::text_of(path, wait).map_err(failed)?;
    let pid = text
        .trim()
        .parse()
        .map_err(|_| failed(io::ErrorKind::InvalidData.into()))?;
    let pid = Pid(pid);
    let user = outside::owner_of(format!("/proc/{pid}").as_ref(), wait).map_err(failed)?;
    PeerProcess::running(pid, user).map_err(failed)
}
