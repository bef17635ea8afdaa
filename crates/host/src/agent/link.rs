//! The task that keeps the connection to one guest's agent.

use std::io;
use std::time::Duration;

use demeter_proto::{
    DecodeError, Decoder, Hello, Message, SessionId, Stats, VERSION, VSOCK_PORT, encode_as,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::{GuestSession, NotHeard};
use crate::hypervisor::{AgentSocket, Channel};
use crate::outside::Outside;

/// Silence after which a guest counts as gone; its agent reports every second.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Time limit for writing a message and for delivering an answer.
const WAIT_MAX: Duration = Duration::from_secs(2);

/// Retry interval of the connection.
const PAUSE: Duration = Duration::from_millis(250);

const READ_BYTES: usize = 16 * 1024;

/// Maximum length of the answer to a vsock CONNECT: `OK` and a number.
const DIALLED_BYTES_MAX: usize = 32;

/// Long-term rate limit of unsolicited messages; an agent reports once a second.
const UNASKED_EVERY: Duration = Duration::from_millis(5);

/// Burst allowance of that rate limit.
const BURST: Duration = Duration::from_secs(1);

/// Rate limiter of a guest's unsolicited messages.
#[derive(Debug)]
struct Pace {
    used_until: Instant,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            used_until: Instant::now(),
        }
    }
}

impl Pace {
    /// Counts a message.
    fn heard(&mut self, now: Instant) {
        self.used_until = self.used_until.max(now) + UNASKED_EVERY;
    }

    /// The time of the next read.
    fn not_before(&self) -> Instant {
        self.used_until - BURST
    }
}

/// A session id that no guest uses. It asks the guest to send Hello.
const NOBODY: SessionId = SessionId(0);

/// A message to send.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) message: Message,
    pub(super) then: Then,
}

/// The follow-up of a question. Dropping it reports that no agent is connected.
#[derive(Debug)]
pub(super) enum Then {
    /// Answers go to this channel.
    Answers(mpsc::Sender<Message>),
    /// There is no answer; sending is enough.
    Sent(oneshot::Sender<()>),
}

/// Identifies a question in its answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Request(u64),
    Nonce(u64),
}

impl Key {
    fn of(message: &Message) -> Option<Self> {
        Some(match message {
            Message::Inflate(resize) | Message::Deflate(resize) => Self::Request(resize.request.0),
            Message::List { request, .. }
            | Message::Prove { request, .. }
            | Message::Proof { request, .. } => Self::Request(request.0),
            Message::Inflated(ranges) | Message::Held(ranges) => Self::Request(ranges.request.0),
            Message::Done(done) => Self::Request(done.request.0),
            Message::Ping { nonce } | Message::Pong { nonce } => Self::Nonce(*nonce),
            _ => return None,
        })
    }
}

/// Channels on which a link publishes its state.
pub(super) type Told = (
    watch::Sender<Option<NotHeard>>,
    watch::Sender<Option<GuestSession>>,
    watch::Sender<Option<Stats>>,
);

pub(super) struct Link {
    socket: AgentSocket,
    outside: Outside,
    not_heard: watch::Sender<Option<NotHeard>>,
    asked: mpsc::Receiver<Question>,
    peer: watch::Sender<Option<GuestSession>>,
    stats: watch::Sender<Option<Stats>>,
    /// Protocol version of the guest's last message, used for answers.
    version: u16,
    /// The question that still waits for its last answer.
    open: Option<(Key, mpsc::Sender<Message>)>,
}

impl Link {
    pub(super) fn new(
        socket: AgentSocket,
        outside: Outside,
        asked: mpsc::Receiver<Question>,
        (not_heard, peer, stats): Told,
    ) -> Self {
        Self {
            socket,
            outside,
            not_heard,
            asked,
            peer,
            stats,
            version: VERSION,
            open: None,
        }
    }

    /// Connects again and again, until the client is dropped.
    pub(super) async fn run(mut self) {
        loop {
            if let Ok(stream) = self.connect().await {
                let ended = self.serve(stream).await;
                tracing::debug!("{}: {ended:?}", self.socket.path.display());
                self.part();
                if ended.is_ok() {
                    return;
                }
            }
            let again = Instant::now() + PAUSE;
            loop {
                tokio::select! {
                    // Dropping a question reports that no agent is connected.
                    question = self.asked.recv() => if question.is_none() { return },
                    () = sleep_until(again) => break,
                }
            }
        }
    }

    /// Connects to this VM's hypervisor only. Messages of another VM's guest must not be taken for
    /// this guest's.
    async fn connect(&self) -> io::Result<UnixStream> {
        let AgentSocket {
            path,
            opener,
            channel,
        } = &self.socket;
        let mut stream = self.outside.connect(path).await?;
        let foreign = opener.opened(&stream)?.err();
        let foreign = foreign.map(|found| NotHeard::Foreign {
            socket: path.clone(),
            found,
            wanted: opener.process.pid,
        });
        let refused = foreign.is_some();
        self.note(foreign);
        if refused {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if *channel == Channel::Vsock {
            timeout(WAIT_MAX, dial(&mut stream)).await??;
        }
        Ok(stream)
    }

    fn note(&self, why: Option<NotHeard>) {
        self.not_heard.send_if_modified(|known| {
            let changed = *known != why;
            *known = why;
            changed
        });
    }

    /// Serves the connection until it breaks (an error) or the client is dropped.
    pub(super) async fn serve(
        &mut self,
        mut stream: impl AsyncRead + AsyncWrite + Unpin,
    ) -> io::Result<()> {
        let mut decoder = Decoder::default();
        let mut bytes = vec![0; READ_BYTES];
        let mut silent_at = Instant::now() + SILENCE_MAX;
        let mut introduced = false;
        let mut pace = Pace::default();
        loop {
            let not_before = pace.not_before();
            // A guest that exceeds its rate is read later, so it has to wait.
            let read = async {
                sleep_until(not_before).await;
                timeout_at(silent_at.max(not_before), stream.read(&mut bytes)).await
            };
            tokio::select! {
                question = self.asked.recv() => {
                    let Some(question) = question else {
                        return Ok(());
                    };
                    self.ask(&mut stream, question).await?;
                }
                read = read => {
                    let Ok(read) = read else {
                        self.part();
                        introduced = false;
                        silent_at = Instant::now() + SILENCE_MAX;
                        continue;
                    };
                    let read = read?;
                    if read == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    decoder.push(&bytes[..read]);
                    loop {
                        match decoder.next() {
                            Ok(None) => break,
                            Ok(Some(message)) => {
                                if !self.is_awaited(&message) {
                                    pace.heard(Instant::now());
                                }
                                self.version = decoder.version().unwrap_or(VERSION);
                                silent_at = Instant::now() + SILENCE_MAX;
                                let known = self.peer.borrow().is_some();
                                if !known && !introduced && !matches!(message, Message::Hello(_)) {
                                    introduced = true;
                                    let nobody = Message::Welcome { session: NOBODY };
                                    self.write(&mut stream, &nobody).await?;
                                }
                                self.hear(&mut stream, message).await?;
                            }
                            Err(DecodeError::Version(found)) => {
                                pace.heard(Instant::now());
                                self.note(Some(NotHeard::Version { found }));
                            }
                            Err(error) => {
                                pace.heard(Instant::now());
                                tracing::debug!("{}: {error}", self.socket.path.display());
                            }
                        }
                    }
                }
            }
        }
    }

    async fn ask(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        question: Question,
    ) -> io::Result<()> {
        if self.peer.borrow().is_none() {
            return Ok(());
        }
        self.write(stream, &question.message).await?;
        match (Key::of(&question.message), question.then) {
            (Some(key), Then::Answers(answers)) => self.open = Some((key, answers)),
            // The asker may have stopped waiting.
            (_, Then::Sent(sent)) => drop(sent.send(())),
            (None, Then::Answers(_)) => {}
        }
        Ok(())
    }

    async fn hear(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        message: Message,
    ) -> io::Result<()> {
        match message {
            Message::Hello(hello) => {
                let session = hello.session;
                self.meet(hello);
                return self.write(stream, &Message::Welcome { session }).await;
            }
            // Ignore all messages until the guest has introduced itself.
            _ if self.peer.borrow().is_none() => {}
            Message::Stats(stats) => {
                self.stats.send_replace(Some(stats));
            }
            Message::Ping { nonce } => return self.write(stream, &Message::Pong { nonce }).await,
            Message::Inflated(_) | Message::Held(_) => self.answer(message, false).await,
            Message::Done(_) | Message::Proof { .. } | Message::Pong { .. } => {
                self.answer(message, true).await;
            }
            // Messages of a host only.
            Message::Welcome { .. }
            | Message::Inflate(_)
            | Message::Deflate(_)
            | Message::List { .. }
            | Message::Prove { .. }
            | Message::Allow { .. } => {}
        }
        Ok(())
    }

    /// Whether a message answers the open question.
    fn is_awaited(&self, message: &Message) -> bool {
        let open = self.open.as_ref().map(|(key, _)| *key);
        open.is_some() && Key::of(message) == open
    }

    /// Delivers an answer to the open question.
    async fn answer(&mut self, message: Message, last: bool) {
        let key = Key::of(&message);
        let Some((_, answers)) = self.open.as_ref().filter(|(open, _)| Some(*open) == key) else {
            return;
        };
        let taken = timeout(WAIT_MAX, answers.send(message)).await;
        if last || !matches!(taken, Ok(Ok(()))) {
            self.open = None;
        }
    }

    fn meet(&mut self, hello: Hello) {
        self.note(None);
        let peer = GuestSession {
            boot_id: hello.boot_id,
            session: hello.session,
            version: self.version,
            nodes: hello.nodes,
        };
        let before = self.peer.borrow().as_ref().map(|peer| peer.session);
        if before != Some(peer.session) {
            // Answers to questions of an earlier session will not come.
            self.open = None;
            self.stats.send_replace(None);
        }
        self.peer.send_if_modified(|known| {
            let changed = known.as_ref() != Some(&peer);
            *known = Some(peer);
            changed
        });
    }

    /// Writes a message. A guest that does not read for long counts as gone.
    async fn write(
        &self,
        stream: &mut (impl AsyncWrite + Unpin),
        message: &Message,
    ) -> io::Result<()> {
        let mut bytes = vec![];
        encode_as(self.version, message, &mut bytes).map_err(io::Error::other)?;
        timeout(WAIT_MAX, stream.write_all(&bytes)).await?
    }

    /// Ends the session.
    pub(super) fn part(&mut self) {
        self.open = None;
        self.stats.send_replace(None);
        self.peer.send_if_modified(|peer| peer.take().is_some());
    }
}

/// Asks the hypervisor to connect to the relay's vsock port in the guest.
async fn dial(stream: &mut UnixStream) -> io::Result<()> {
    stream
        .write_all(format!("CONNECT {VSOCK_PORT}\n").as_bytes())
        .await?;
    // Read byte by byte, because the guest's first message may follow the answer at once.
    let mut answer = vec![];
    while answer.last() != Some(&b'\n') {
        if answer.len() == DIALLED_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        answer.push(stream.read_u8().await?);
    }
    match answer.starts_with(b"OK ") {
        true => Ok(()),
        false => Err(io::ErrorKind::ConnectionRefused.into()),
    }
}
