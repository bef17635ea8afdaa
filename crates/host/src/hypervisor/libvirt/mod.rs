//! QEMU by way of libvirt: a domain's monitor, events and description over libvirt's own RPC, so that no
//! second QMP socket is needed.
//!
//! libvirt's C library cannot be linked into a static program, so this is a small client of its protocol
//! on its Unix socket instead. That protocol only ever grows: a procedure's number and types never
//! change. We use eleven of its procedures, all there since libvirt 1.2.3.
//!
//! `xdr` and `message` turn bytes into messages, `client` asks, `wire.rs` carries QMP, so that
//! all that is known of QEMU stays in [`qemu`](super::qemu). `domain` reads a domain's XML, and
//! `patch` says what it lacks.

mod client;
mod discover;
mod domain;
#[cfg(fuzzing)]
pub mod fuzz;
mod message;
mod patch;
#[cfg(test)]
mod tests;
mod wire;
mod xdr;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use demeter_policy::provision::ProvisionerKind;
use demeter_policy::{NodeId, PerTier, Pid};
use demeter_proto::shown;
use serde::{Deserialize, Serialize};

use super::qemu::{Limits, Qemu};
use super::{AgentSocket, Channel, Connection, HypervisorError};
use crate::outside::{self, MayWait, Outside};
use crate::process::{Opener, PeerProcess};
use client::{Client, Which};
use domain::Facts;
use wire::Monitor;

pub(crate) use discover::{Domains, LeftDomain, discover};
pub use patch::{HostTier, Patch, Speed, Wanted};
#[cfg(test)]
pub(crate) use {client::Domain, message::*, xdr::*};

/// The name of the agent's port.
const PORT: &str = "org.demeter.0";

/// Where daemons listen: the one for QEMU alone, and the one for all.
const SOCKETS: [&str; 2] = ["/run/libvirt/virtqemud-sock", "/run/libvirt/libvirt-sock"];

const URI: &str = "qemu:///system";

/// Which libvirt.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Libvirt {
    /// Its Unix socket; without it, `/run/libvirt/virtqemud-sock` or `/run/libvirt/libvirt-sock`, whichever
    /// is there.
    pub socket: Option<PathBuf>,
    /// Its driver; without it, `qemu:///system`. A user's own daemon has `qemu:///session`.
    pub uri: Option<String>,
    /// User that its daemon runs as, if neither root nor ours.
    pub owner_uid: Option<u32>,
}

impl Libvirt {
    fn uri(&self) -> &str {
        self.uri.as_deref().unwrap_or(URI)
    }

    fn socket(&self) -> PathBuf {
        let there = || SOCKETS.iter().map(PathBuf::from).find(|path| path.exists());
        let socket = self.socket.clone().or_else(there);
        socket.unwrap_or_else(|| SOCKETS[1].into())
    }
}

/// Why libvirt cannot be talked to, or a domain cannot be managed.
#[derive(Debug, thiserror::Error)]
pub enum LibvirtError {
    /// Nobody listens, or we may not connect.
    #[error(
        "cannot connect to libvirt at {}: {source}; does libvirtd (or virtqemud) run? Another socket \
         is named by libvirt.socket in the configuration", socket.display()
    )]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The listener belongs to somebody else.
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
    /// It lets us not in.
    #[error(
        "libvirt at {} does not let us in: {words}; run this as root, or let its user in (polkit's \
         org.libvirt.unix.manage, auth_unix_rw in libvirtd.conf)", socket.display()
    )]
    Access {
        /// The socket.
        socket: PathBuf,
        /// libvirt's words.
        words: String,
    },
    /// An answer does not come in time.
    #[error("libvirt at {} does not give {what} within {after:?}", socket.display())]
    Silent {
        /// The socket.
        socket: PathBuf,
        /// What it was asked for.
        what: String,
        /// How long we waited.
        after: Duration,
    },
    /// The connection has ended, or makes no sense.
    #[error("the connection to libvirt at {} has ended: {why}", socket.display())]
    Gone {
        /// The socket.
        socket: PathBuf,
        /// What ended it.
        why: String,
    },
    /// It says no.
    #[error("libvirt at {} refuses {what}: {words}", socket.display())]
    Refused {
        /// The socket.
        socket: PathBuf,
        /// What it was asked for.
        what: String,
        /// libvirt's words.
        words: String,
    },
    /// It does not know what we ask for.
    #[error("libvirt at {} is too old to give {what}; 1.2.3 is the first that does", socket.display())]
    Old {
        /// The socket.
        socket: PathBuf,
        /// What it was asked for.
        what: String,
    },
    /// The domain is not running, or not made so that it can be managed.
    #[error("domain {domain:?}: {why}")]
    Domain {
        /// Its name.
        domain: String,
        /// The fault, and how to repair it.
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

/// Connects to the QEMU of a running domain. `provisioner` and `nodes` say what the domain must have.
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
    // Before it is looked at: what changes afterwards is heard of.
    client.watch(Some(&domain)).await?;
    client.watch_monitor(&domain).await?;
    let xml = client.xml(&domain, Which::Running).await?;
    let facts = Facts::read(&xml).map_err(wrong)?;
    if !facts.running {
        return Err(wrong(format!("it does not run; virsh start {name}")));
    }
    facts.check(provisioner, nodes).map_err(|lack| {
        wrong(format!(
            "{lack}; `demeter host xml {name}` prints what its XML lacks"
        ))
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
    let (hypervisor, events) = Qemu::over(stream, wire, which, Limits::default().command);
    Ok(Connection {
        hypervisor,
        events,
        process,
        agent,
    })
}

/// Makes the patch of a domain's inactive XML with everything that sizing needs. Waits for libvirt.
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

/// The process of a running domain, by the file in which libvirt keeps its number: no call of its API
/// tells it.
fn process(socket: &Path, name: &str, uid: u32, wait: &MayWait) -> io::Result<PeerProcess> {
    if name.contains('/') {
        return Err(io::Error::other("its name holds a slash"));
    }
    let run = socket.parent().unwrap_or(Path::new("/"));
    // A system's daemon, and a user's own.
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
