//! One connection to a QEMU process: commands out, answers and events in, through a [`Wire`].
//!
//! A task reads and writes the stream, so a caller that stops waiting leaves no half-written
//! command behind. The connection ends with its last [`Qemu`] handle, when QEMU exits, or when QEMU
//! sends invalid data. Every waiting caller gets the reason. A reconnect is a new
//! [`Connection`](crate::hypervisor::Connection), because earlier facts may be stale.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use demeter_proto::shown;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::timeout;

use super::decode::{Decoder, Message, Notice};
use crate::hypervisor::{Connection, Event, Events, HypervisorError};
use crate::outside::Outside;
use crate::process::PeerProcess;

/// Capacity of the command queue, and maximum number of unanswered commands.
const COMMANDS_MAX: usize = 16;

/// Capacity of the event queue.
const EVENTS_MAX: usize = 256;

/// Time limits of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// Time limit for the connection and the greeting.
    pub greeting: Duration,
    /// Time limit for the answer to a command.
    pub command: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            greeting: Duration::from_secs(5),
            command: Duration::from_secs(5),
        }
    }
}

/// Reason why QEMU cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket cannot be connected to.
    #[error(
        "cannot connect to QEMU at {path}: {source}; start the VM with -qmp unix:{path},server=on,wait=off"
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The listener runs as an untrusted user.
    #[error(
        "the socket {path} belongs to user {uid}, who is neither root nor us; if QEMU runs as that user, set owner_uid = {uid} for this VM"
    )]
    Foreign {
        /// The socket.
        path: PathBuf,
        /// The user behind it.
        uid: u32,
    },
    /// No greeting came in time.
    #[error(
        "QEMU at {path} does not greet within {after:?}: another client holds this socket; give Demeter one of its own (a second -qmp option)"
    )]
    Silent {
        /// The socket.
        path: PathBuf,
        /// How long we waited.
        after: Duration,
    },
    /// A command got no answer in time.
    #[error("{qemu} does not answer {command} within {after:?}; is the VM's process stopped?")]
    Timeout {
        /// The QEMU process.
        qemu: String,
        /// The command.
        command: &'static str,
        /// How long we waited.
        after: Duration,
    },
    /// The connection has ended.
    #[error("the connection to {qemu} has ended: {why}")]
    Gone {
        /// The QEMU process.
        qemu: String,
        /// The cause.
        why: String,
    },
    /// QEMU refused a command.
    #[error("{qemu} refuses {command}: {desc}")]
    Refused {
        /// The QEMU process.
        qemu: String,
        /// The command.
        command: &'static str,
        /// QEMU's message.
        desc: String,
    },
    /// QEMU's answer does not match its documentation.
    #[error("{qemu} answers {command} with something unknown: {what}")]
    Answer {
        /// The QEMU process.
        qemu: String,
        /// The command.
        command: &'static str,
        /// The fault of the answer.
        what: String,
    },
}

impl From<QmpError> for HypervisorError {
    fn from(error: QmpError) -> Self {
        let text = error.to_string();
        match error {
            QmpError::Timeout { .. } => Self::Timeout(text),
            QmpError::Gone { .. } => Self::Gone(text),
            _ => Self::Failed(text),
        }
    }
}

/// A handle for commands; clones share the connection.
#[derive(Debug, Clone)]
pub struct Qemu {
    shared: Arc<Shared>,
    calls: mpsc::Sender<Call>,
}

#[derive(Debug)]
struct Shared {
    /// Name for messages.
    name: String,
    command_timeout: Duration,
    /// Reason why the connection has ended.
    ended: OnceLock<String>,
    /// Number of events sent, plus one after the end.
    told: AtomicU64,
    /// Woken whenever a size may have changed.
    size_change: Notify,
}

/// A command in flight.
#[derive(Debug)]
struct Call {
    name: &'static str,
    arguments: Value,
    answer: Answer,
}

/// Channel for an answer: the returned value, or QEMU's reason for refusing.
type Answer = oneshot::Sender<Result<Value, String>>;

impl Qemu {
    /// Connects, checks the listener and negotiates. `owner_uid` is a trusted user besides root and
    /// our own.
    pub async fn connect(
        path: &Path,
        outside: &Outside,
        owner_uid: Option<u32>,
        limits: Timeouts,
    ) -> Result<Connection<Self>, QmpError> {
        let handshake = async {
            let connect_error = |source| QmpError::Connect {
                path: path.into(),
                source,
            };
            let mut stream = outside.connect(path).await.map_err(connect_error)?;
            let peer = PeerProcess::of(&stream).map_err(connect_error)?;
            let own_uid = rustix::process::geteuid().as_raw();
            if !peer.is_trusted(own_uid, owner_uid) {
                return Err(QmpError::Foreign {
                    path: path.into(),
                    uid: peer.uid,
                });
            }
            let gone = |why: String| QmpError::Gone {
                qemu: at(path),
                why,
            };
            let mut decoder = Decoder::default();
            match first_message(&mut stream, &mut decoder).await {
                Ok(Message::Greeting) => Ok((stream, peer, decoder)),
                Ok(_) => Err(gone("it does not greet first".into())),
                Err(why) => Err(gone(why)),
            }
        };
        let (stream, peer, decoder) =
            timeout(limits.greeting, handshake)
                .await
                .unwrap_or_else(|_| {
                    Err(QmpError::Silent {
                        path: path.into(),
                        after: limits.greeting,
                    })
                })?;
        let (hypervisor, events) = Self::over(stream, decoder, at(path), limits.command);
        let _: Value = hypervisor.execute("qmp_capabilities", json!({})).await?;
        // QEMU reports migrations only with this capability. If QEMU lacks it, it has no
        // migrations.
        let told = json!({"capabilities": [{"capability": "events", "state": true}]});
        match hypervisor
            .execute::<Value>("migrate-set-capabilities", told)
            .await
        {
            Ok(_) | Err(QmpError::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
        Ok(Connection {
            hypervisor,
            events,
            process: peer,
            agent: None,
        })
    }

    /// Uses a stream that is ready for commands. `name` identifies the QEMU process in messages;
    /// `answer` is the time limit of an answer.
    pub(crate) fn over(
        stream: UnixStream,
        wire: impl Wire,
        name: String,
        answer: Duration,
    ) -> (Self, Events) {
        let shared = Arc::new(Shared {
            name,
            command_timeout: answer,
            ended: OnceLock::new(),
            told: AtomicU64::new(0),
            size_change: Notify::new(),
        });
        let (calls, received) = mpsc::channel(COMMANDS_MAX);
        let (events_in, events) = mpsc::channel(EVENTS_MAX);
        let task = Task {
            shared: shared.clone(),
            stream,
            wire,
            events: events_in,
            pending: BTreeMap::new(),
            last_id: 0,
        };
        tokio::spawn(task.run(received));
        (Self { shared, calls }, Events::new(events))
    }
}

/// The name of a QEMU by its socket.
fn at(path: &Path) -> String {
    format!("QEMU at {}", path.display())
}

/// Encoding of commands and messages: QMP itself, or another protocol that carries it.
pub(crate) trait Wire: Send + 'static {
    /// Adds received bytes.
    fn push(&mut self, bytes: &[u8]);

    /// The next message, or `None` if more bytes are needed. After an error the stream is unusable.
    fn next_message(&mut self) -> Result<Option<Message>, String>;

    /// Encodes a command; its answer has the same `id`.
    fn command(&self, id: u64, name: &str, arguments: Value) -> Result<Vec<u8>, String>;
}

impl Wire for Decoder {
    fn push(&mut self, bytes: &[u8]) {
        self.push(bytes);
    }

    fn next_message(&mut self) -> Result<Option<Message>, String> {
        self.next_message().map_err(|error| error.to_string())
    }

    fn command(&self, id: u64, name: &str, arguments: Value) -> Result<Vec<u8>, String> {
        let command = json!({"execute": name, "arguments": arguments, "id": id});
        Ok(format!("{command}\n").into_bytes())
    }
}

async fn first_message(stream: &mut UnixStream, decoder: &mut Decoder) -> Result<Message, String> {
    loop {
        if let Some(message) = Wire::next_message(decoder)? {
            return Ok(message);
        }
        read_some(stream, decoder).await?;
    }
}

async fn read_some(stream: &mut UnixStream, wire: &mut impl Wire) -> Result<(), String> {
    let mut bytes = [0; 16 << 10];
    match stream.read(&mut bytes).await {
        Ok(0) => Err("the other side closed it".into()),
        Ok(count) => {
            wire.push(&bytes[..count]);
            Ok(())
        }
        Err(error) => Err(error.to_string()),
    }
}

impl Qemu {
    /// Name of the QEMU process, for messages.
    pub(super) fn which(&self) -> &str {
        &self.shared.name
    }

    /// Runs a command and parses its answer as `T`. If the caller stops waiting, QEMU may still
    /// carry the command out; other callers are not affected.
    pub async fn execute<T: DeserializeOwned>(
        &self,
        command: &'static str,
        arguments: Value,
    ) -> Result<T, QmpError> {
        let qemu = || self.shared.name.clone();
        let gone = || QmpError::Gone {
            qemu: qemu(),
            why: self
                .shared
                .ended
                .get()
                .map_or("too many commands wait for an answer", String::as_str)
                .into(),
        };
        let answered = async {
            let (answer, waiting) = oneshot::channel();
            let call = Call {
                name: command,
                arguments,
                answer,
            };
            self.calls.send(call).await.map_err(|_| gone())?;
            waiting.await.map_err(|_| gone())
        };
        let after = self.shared.command_timeout;
        let answer = timeout(after, answered)
            .await
            .map_err(|_| QmpError::Timeout {
                qemu: qemu(),
                command,
                after,
            })??
            .map_err(|desc| QmpError::Refused {
                qemu: qemu(),
                command,
                desc,
            })?;
        serde_json::from_value(answer).map_err(|error| self.unknown(command, error.to_string()))
    }

    /// Number of events sent, plus one after the end.
    pub(super) fn told(&self) -> u64 {
        self.shared.told.load(Ordering::Relaxed)
    }

    /// Woken whenever a size may have changed.
    pub(super) fn size_changes(&self) -> &Notify {
        &self.shared.size_change
    }

    /// The error for an invalid answer. `what` may quote parts of it.
    pub(super) fn unknown(&self, command: &'static str, what: String) -> QmpError {
        QmpError::Answer {
            qemu: self.shared.name.clone(),
            command,
            what: shown(&what),
        }
    }
}

/// The task that owns the stream.
struct Task<W> {
    shared: Arc<Shared>,
    stream: UnixStream,
    wire: W,
    events: mpsc::Sender<Event>,
    pending: BTreeMap<u64, Answer>,
    last_id: u64,
}

impl<W: Wire> Task<W> {
    /// Works until the connection ends. Stores the reason before waiting callers are woken.
    async fn run(mut self, mut calls: mpsc::Receiver<Call>) {
        // Handle messages that arrived with the last answer before this task started.
        let mut step = self.take_in();
        let why = loop {
            if let Err(why) = step {
                break why;
            }
            step = tokio::select! {
                call = calls.recv() => match call {
                    Some(call) => self.send(call).await,
                    None => Err("the last handle was dropped".into()),
                },
                read = read_some(&mut self.stream, &mut self.wire) => match read {
                    Ok(()) => self.take_in(),
                    error => error,
                },
            };
        };
        tracing::debug!("{}: {why}", self.shared.name);
        self.shared.ended.get_or_init(|| why);
        self.shared.told.fetch_add(1, Ordering::Relaxed);
        // `pending` is dropped only now, which wakes the callers that wait for an answer.
    }

    async fn send(&mut self, call: Call) -> Result<(), String> {
        self.pending.retain(|_, answer| !answer.is_closed());
        if self.pending.len() >= COMMANDS_MAX {
            // Dropping the call and its `answer` reports the failure to the caller.
            return Ok(());
        }
        self.last_id += 1;
        let bytes = self.wire.command(self.last_id, call.name, call.arguments)?;
        self.pending.insert(self.last_id, call.answer);
        let limit = self.shared.command_timeout;
        match timeout(limit, self.stream.write_all(&bytes)).await {
            Ok(written) => written.map_err(|error| error.to_string()),
            Err(_) => Err("the other side does not read".into()),
        }
    }

    /// Handles all complete messages.
    fn take_in(&mut self) -> Result<(), String> {
        while let Some(message) = self.wire.next_message()? {
            let (id, result) = match message {
                Message::Return { id, value } => (id, Ok(value)),
                Message::Error { id, desc } => (id, Err(desc)),
                Message::Event(Notice::Other) => continue,
                Message::Event(Notice::SizeChange) => {
                    self.shared.size_change.notify_waiters();
                    continue;
                }
                Message::Event(Notice::Tell(event)) => {
                    // Count the event before any later answer is delivered, so that the receiver of
                    // that answer sees it.
                    self.shared.told.fetch_add(1, Ordering::Relaxed);
                    // The lost event may be a reset. A new connection asks for everything again.
                    if let Err(mpsc::error::TrySendError::Full(_)) = self.events.try_send(event) {
                        return Err("events come faster than they are handled".into());
                    }
                    continue;
                }
                Message::Greeting => return Err("it greets twice".into()),
            };
            match self.pending.remove(&id) {
                // The caller may have stopped waiting.
                Some(answer) => drop(answer.send(result)),
                // A late answer: its caller stopped waiting long ago.
                None if id <= self.last_id => {}
                None => return Err("it answers what was not asked".into()),
            }
        }
        Ok(())
    }
}
