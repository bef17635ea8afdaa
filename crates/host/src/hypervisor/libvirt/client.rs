//! One connection to a libvirt daemon: authentication, domain lists, XML and events.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::LibvirtError;
use super::message::{DecodeError, Decoder, EVENT, Message, OK, Procedure, REPLY};
use super::xdr::{Malformed, Reader, Writer};
use crate::config::Libvirt;
use crate::outside::Outside;

/// Time limit of an answer.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Capacity of the event queue.
const EVENTS_MAX: usize = 256;

/// Maximum number of listed domains (libvirt's own limit is higher).
const DOMAINS_MAX: u32 = 4096;

/// Authentication methods (`remote_auth_type`).
const AUTH_NONE: u32 = 0;
const AUTH_POLKIT: u32 = 2;

/// `VIR_CONNECT_LIST_DOMAINS_ACTIVE`.
const ACTIVE: u32 = 1;

/// `VIR_DOMAIN_EVENT_ID_LIFECYCLE`, and its events for a started and a stopped domain.
const LIFECYCLE: i32 = 0;
const STARTED: i32 = 2;
const STOPPED: i32 = 5;

/// Selects one of a domain's two descriptions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    /// The running domain, or the next start's description if it is not running.
    Running,
    /// The description for the next start (`VIR_DOMAIN_XML_INACTIVE`).
    Next,
}

/// A domain's identity in libvirt's messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Domain {
    pub name: String,
    uuid: [u8; 16],
    id: i32,
}

impl Domain {
    pub(crate) fn read(body: &mut Reader) -> Result<Self, Malformed> {
        Ok(Self {
            name: body.text()?.into(),
            uuid: body.fixed()?,
            id: body.i32()?,
        })
    }

    pub(crate) fn write(&self, body: Writer) -> Writer {
        body.text(&self.name).fixed(&self.uuid).i32(self.id)
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        self.uuid == other.uuid
    }

    #[cfg(test)]
    pub(crate) fn new(name: &str, id: i32) -> Self {
        let name = name.into();
        let uuid = [5; 16];
        Self { name, uuid, id }
    }
}

/// A change in a domain's lifecycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    Started,
    Stopped,
    Other,
}

/// Parses a lifecycle event.
pub(super) fn life(body: &[u8]) -> Result<(Domain, Life), Malformed> {
    let mut body = Reader(body);
    let _callback = body.i32()?;
    let domain = Domain::read(&mut body)?;
    let life = match body.i32()? {
        STARTED => Life::Started,
        STOPPED => Life::Stopped,
        _ => Life::Other,
    };
    Ok((domain, life))
}

/// Parses the answer to [`Procedure::LIST_DOMAINS`].
pub(super) fn domains(body: &[u8]) -> Result<Vec<Domain>, Malformed> {
    let mut body = Reader(body);
    let count = body.u32()?;
    if count > DOMAINS_MAX {
        return Err(Malformed);
    }
    (0..count).map(|_| Domain::read(&mut body)).collect()
}

/// A connection with one question at a time.
#[derive(Debug)]
pub(crate) struct Client {
    socket: PathBuf,
    stream: UnixStream,
    decoder: Decoder,
    /// Events that arrived while an answer was awaited.
    events: VecDeque<Message>,
    /// User that the daemon runs as.
    pub(super) uid: u32,
}

impl Client {
    /// Connects, checks the listener and opens QEMU's driver.
    pub(crate) async fn connect(
        libvirt: &Libvirt,
        outside: &Outside,
    ) -> Result<Self, LibvirtError> {
        let socket = libvirt.socket();
        let connected = timeout(ANSWER_MAX, outside.connect(&socket)).await;
        let connected = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        let peer = connected.and_then(|stream| {
            let uid = socket_peercred(&stream)?.uid.as_raw();
            Ok((stream, uid))
        });
        let (stream, uid) = match peer {
            Ok(peer) => peer,
            Err(source) => return Err(LibvirtError::Connect { socket, source }),
        };
        let own_uid = rustix::process::geteuid().as_raw();
        if ![own_uid, 0].contains(&uid) && libvirt.owner_uid != Some(uid) {
            return Err(LibvirtError::Foreign { socket, uid });
        }
        let mut client = Self {
            socket,
            stream,
            decoder: Decoder::default(),
            events: VecDeque::new(),
            uid,
        };
        client.be_let_in().await?;
        let name = Writer::default().u32(1).text(libvirt.uri()).u32(0);
        let open = format!("a connection to {}", libvirt.uri());
        client.call(Procedure::OPEN, &open, name).await?;
        Ok(client)
    }

    async fn be_let_in(&mut self) -> Result<(), LibvirtError> {
        let what = "its authentication methods";
        let ways = self.call(Procedure::AUTH_LIST, what, Writer::default());
        let ways = ways.await?;
        let mut body = Reader(&ways);
        let count = self.read(what, body.u32())?;
        // libvirt's own limit.
        for _ in 0..count.min(20) {
            match self.read(what, body.u32())? {
                AUTH_NONE => return Ok(()),
                AUTH_POLKIT => {
                    let polkit = self.call(Procedure::AUTH_POLKIT, "us", Writer::default());
                    return polkit.await.map(drop).map_err(|error| self.kept_out(error));
                }
                _ => {}
            }
        }
        Err(self.kept_out(LibvirtError::Refused {
            socket: self.socket.clone(),
            what: "us".into(),
            words: "it asks for a password (SASL)".into(),
        }))
    }

    fn kept_out(&self, error: LibvirtError) -> LibvirtError {
        match error {
            LibvirtError::Refused { words, .. } => LibvirtError::Access {
                socket: self.socket.clone(),
                words,
            },
            other => other,
        }
    }

    /// Finds a domain by name.
    pub(crate) async fn find(&mut self, name: &str) -> Result<Domain, LibvirtError> {
        let what = format!("domain {name:?}");
        let body = Writer::default().text(name);
        let found = self.call(Procedure::LOOKUP_BY_NAME, &what, body).await?;
        self.read(&what, Domain::read(&mut Reader(&found)))
    }

    /// Lists all running domains.
    pub(crate) async fn running(&mut self) -> Result<Vec<Domain>, LibvirtError> {
        let what = "the list of domains";
        let body = Writer::default().i32(1).u32(ACTIVE);
        let listed = self.call(Procedure::LIST_DOMAINS, what, body).await?;
        self.read(what, domains(&listed))
    }

    /// A domain's XML.
    pub(crate) async fn xml(
        &mut self,
        domain: &Domain,
        which: Which,
    ) -> Result<String, LibvirtError> {
        let what = format!("the XML of domain {:?}", domain.name);
        let flags = match which {
            Which::Running => 0,
            Which::Next => 2,
        };
        let body = domain.write(Writer::default()).u32(flags);
        let said = self.call(Procedure::XML, &what, body).await?;
        let text = Reader(&said).text().map(str::to_owned);
        self.read(&what, text)
    }

    /// Subscribes to lifecycle events of one domain, or of all.
    pub(crate) async fn watch(&mut self, domain: Option<&Domain>) -> Result<(), LibvirtError> {
        let body = optional(Writer::default().i32(LIFECYCLE), domain);
        let what = "events of domains";
        self.call(Procedure::WATCH_DOMAINS, what, body).await?;
        Ok(())
    }

    /// Subscribes to the QEMU monitor's events of a domain.
    pub(crate) async fn watch_monitor(&mut self, domain: &Domain) -> Result<(), LibvirtError> {
        // No event name selects all events.
        let body = optional(Writer::default(), Some(domain)).u32(0).u32(0);
        let what = "events of QEMU's monitor";
        self.call(Procedure::WATCH_MONITOR, what, body).await?;
        Ok(())
    }

    /// The next lifecycle change.
    pub(crate) async fn next_life(&mut self) -> Result<Life, LibvirtError> {
        loop {
            let message = match self.events.pop_front() {
                Some(event) => event,
                None => self.receive().await?,
            };
            if message.kind == EVENT && message.procedure == Procedure::LIFECYCLE {
                let event = life(&message.body);
                return Ok(self.read("events of domains", event)?.1);
            }
        }
    }

    /// The connection and the messages that arrived already.
    pub(super) fn into_parts(self) -> (UnixStream, Decoder, VecDeque<Message>) {
        (self.stream, self.decoder, self.events)
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Asks and waits for the answer. `what` names the wanted data in messages.
    async fn call(
        &mut self,
        procedure: Procedure,
        what: &str,
        body: Writer,
    ) -> Result<Vec<u8>, LibvirtError> {
        let bytes = Message::call(procedure, 0, body);
        let answered = async {
            if let Err(error) = self.stream.write_all(&bytes).await {
                return Err(self.gone(error.to_string()));
            }
            loop {
                let message = self.receive().await?;
                match message.kind {
                    REPLY if message.procedure == procedure => return Ok(message),
                    EVENT if self.events.len() < EVENTS_MAX => self.events.push_back(message),
                    EVENT => return Err(self.gone("events come faster than answers".into())),
                    _ => return Err(self.gone("it answers what was not asked".into())),
                }
            }
        };
        let Ok(answered) = timeout(ANSWER_MAX, answered).await else {
            return Err(LibvirtError::Silent {
                socket: self.socket.clone(),
                what: what.into(),
                after: ANSWER_MAX,
            });
        };
        let message = answered?;
        if message.status == OK {
            return Ok(message.body);
        }
        let words = message.error();
        let socket = self.socket.clone();
        let what = what.into();
        Err(if words.contains("unknown procedure") {
            LibvirtError::Old { socket, what }
        } else {
            LibvirtError::Refused {
                socket,
                what,
                words,
            }
        })
    }

    async fn receive(&mut self) -> Result<Message, LibvirtError> {
        let mut bytes = [0; 16 << 10];
        loop {
            let next = self.decoder.next_message();
            let next = next.map_err(|error: DecodeError| self.gone(error.to_string()))?;
            if let Some(message) = next {
                return Ok(message);
            }
            match self.stream.read(&mut bytes).await {
                Ok(0) => return Err(self.gone("it closed it".into())),
                Ok(count) => self.decoder.push(&bytes[..count]),
                Err(error) => return Err(self.gone(error.to_string())),
            }
        }
    }

    fn gone(&self, why: String) -> LibvirtError {
        LibvirtError::Gone {
            socket: self.socket.clone(),
            why,
        }
    }

    fn read<T>(&self, what: &str, read: Result<T, Malformed>) -> Result<T, LibvirtError> {
        read.map_err(|Malformed| self.gone(format!("its answer about {what} is invalid")))
    }
}

fn optional(body: Writer, domain: Option<&Domain>) -> Writer {
    match domain {
        Some(domain) => domain.write(body.u32(1)),
        None => body.u32(0),
    }
}
