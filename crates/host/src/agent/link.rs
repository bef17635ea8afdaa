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

/// A guest that says nothing for so long is not there: its agent reports every second.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// How long a message may wait to be written, or an answer to be taken.
const WAIT_MAX: Duration = Duration::from_secs(2);

/// The pause before connecting again.
const PAUSE: Duration = Duration::from_millis(250);

const READ_BYTES: usize = 16 * 1024;

/// The longest answer to a call to a vsock port: `OK` and a number.
const DIALLED_BYTES_MAX: usize = 32;

/// How often a guest may say what it was not asked for, in the long run; an agent reports once a second.
const UNASKED_EVERY: Duration = Duration::from_millis(5);

/// Time by which a guest may be ahead of that rate.
const BURST: Duration = Duration::from_secs(1);

/// Keeps what a guest says unasked to a rate, by the time that it has used up.
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

    /// When to listen again.
    fn not_before(&self) -> Instant {
        self.used_until - BURST
    }
}

/// A session that no guest has: "I do not know you, say Hello".
const NOBODY: SessionId = SessionId(0);

/// Something to say.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) message: Message,
    pub(super) then: Then,
}

/// What follows when it is said. Dropped, it tells its asker that nobody is there.
#[derive(Debug)]
pub(super) enum Then {
    /// Answers go there.
    Answers(mpsc::Sender<Message>),
    /// There are none; it is enough that it went out.
    Sent(oneshot::Sender<()>),
}

/// What names a question in its answers.
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

/// Where a link tells what it hears.
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
    /// The version in which the guest spoke last, and in which it is answered.
    version: u16,
    /// The question whose last answer has not come.
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

    /// Connects again and again, until nobody asks any more.
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
                    // Dropped, a question tells its asker that nobody is there.
                    question = self.asked.recv() => if question.is_none() { return },
                    () = sleep_until(again) => break,
                }
            }
        }
    }

    /// Connects to the hypervisor of this VM, and to nobody else: what another one's guest says
    /// must not be taken for this one's word.
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

    /// Speaks with the guest until the connection breaks (an error) or nobody asks any more.
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
            // A guest that says more than it has reason to is heard later, and has to wait.
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
            // Whoever does not wait for it any more does not mind.
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
            // Whatever it says, it has to introduce itself first.
            _ if self.peer.borrow().is_none() => {}
            Message::Stats(stats) => {
                self.stats.send_replace(Some(stats));
            }
            Message::Ping { nonce } => return self.write(stream, &Message::Pong { nonce }).await,
            Message::Inflated(_) | Message::Held(_) => self.answer(message, false).await,
            Message::Done(_) | Message::Proof { .. } | Message::Pong { .. } => {
                self.answer(message, true).await;
            }
            // What only a host says.
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

    /// Passes an answer on, if it answers the open question.
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
            // Answers to what was asked in another session will not come.
            self.open = None;
            self.stats.send_replace(None);
        }
        self.peer.send_if_modified(|known| {
            let changed = known.as_ref() != Some(&peer);
            *known = Some(peer);
            changed
        });
    }

    /// Writes a message. A guest that does not read for long is as good as gone.
    async fn write(
        &self,
        stream: &mut (impl AsyncWrite + Unpin),
        message: &Message,
    ) -> io::Result<()> {
        let mut bytes = vec![];
        encode_as(self.version, message, &mut bytes).map_err(io::Error::other)?;
        timeout(WAIT_MAX, stream.write_all(&bytes)).await?
    }

    /// Nobody is there any more.
    pub(super) fn part(&mut self) {
        self.open = None;
        self.stats.send_replace(None);
        self.peer.send_if_modified(|peer| peer.take().is_some());
    }
}

/// Has the hypervisor connect to the relay's port in the guest.
async fn dial(stream: &mut UnixStream) -> io::Result<()> {
    stream
        .write_all(format!("CONNECT {VSOCK_PORT}\n").as_bytes())
        .await?;
    // What follows the answer's end is the guest's first word, so it is read byte by byte.
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
