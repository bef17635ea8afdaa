//! The connection to a guest's agent.
//!
//! The guest's end is a virtio-serial or vsock port. The host's end is a Unix socket that the
//! hypervisor serves. A task (`link.rs`) keeps the connection, handles messages that need no
//! decision and passes the rest on. An [`AgentClient`] asks one question at a time.

mod link;

use std::path::PathBuf;

use demeter_policy::{NodeId, Pid};
use demeter_proto::{BootId, Message, NodeTotal, RequestId, SessionId, Stats};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use crate::hypervisor::{AgentSocket, Channel};
use crate::outside::Outside;
use crate::process::Opener;
use link::{Link, Question, Then};

/// A session of a guest's agent that has introduced itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestSession {
    /// Id of the guest's boot; it changes with a reset.
    pub boot_id: BootId,
    /// Id of the agent's run; it changes with a restart.
    pub session: SessionId,
    /// Protocol version of the agent.
    pub version: u16,
    /// The guest's nodes, as the guest reports them.
    pub nodes: Vec<NodeTotal>,
}

/// Reason why an agent's messages are ignored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotHeard {
    /// The socket does not belong to this VM.
    #[error(
        "the agent's socket {} belongs to process {found}, the VM is process {wanted}; give each VM \
         its own agent socket, opened by its hypervisor itself (-chardev socket,path=..,server=on)",
        socket.display()
    )]
    Foreign {
        /// The socket.
        socket: PathBuf,
        /// The process that serves it.
        found: Pid,
        /// The VM's own process.
        wanted: Pid,
    },
    /// The agent's protocol version is not supported.
    #[error(
        "the guest's agent speaks version {found} of the protocol, this controller {oldest} to \
         {newest}, so the VM counts with all its memory; install the same release of Demeter and its \
         driver in the guest and on the host",
        oldest = demeter_proto::VERSION_MIN,
        newest = demeter_proto::VERSION
    )]
    Version {
        /// The agent's version.
        found: u16,
    },
}

/// No agent is connected, or its session has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the guest's agent is not connected")]
pub struct Away;

/// Client of one guest's agent. Dropping it closes the connection.
#[derive(Debug)]
pub struct AgentClient {
    questions: mpsc::Sender<Question>,
    not_heard: watch::Receiver<Option<NotHeard>>,
    peer: watch::Receiver<Option<GuestSession>>,
    stats: watch::Receiver<Option<Stats>>,
    /// Id of the last request. It starts at a random number, because a guest may remember the
    /// requests of an earlier controller.
    request: u64,
    outside: Outside,
    task: JoinHandle<()>,
}

impl AgentClient {
    /// Connects to the hypervisor's socket and reconnects when the connection breaks. The socket
    /// must have been opened by `opener`. `first` is the first request id, best a random number.
    ///
    /// Must be called within a tokio runtime.
    pub fn connect(socket: PathBuf, opener: Opener, first: RequestId) -> Self {
        let channel = Channel::Port;
        let socket = AgentSocket {
            path: socket,
            opener,
            channel,
        };
        Self::to(socket, Outside::default(), first)
    }

    /// Connects to an agent's socket of any kind; `outside` is the VM's.
    pub fn to(socket: AgentSocket, outside: Outside, first: RequestId) -> Self {
        Self::by(socket, outside, first, Link::run)
    }

    /// Access to the VM's files, which may hang.
    pub(crate) fn outside(&self) -> &Outside {
        &self.outside
    }

    /// Client over an open stream, which is not reconnected. For fuzz targets.
    #[cfg(fuzzing)]
    pub fn over(
        stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
        first: RequestId,
    ) -> Self {
        // No socket is opened, so no process serves it.
        let nobody = Opener::only(crate::process::PeerProcess {
            pid: Pid(0),
            uid: 0,
            started: 0,
        });
        let socket = AgentSocket {
            path: PathBuf::new(),
            opener: nobody,
            channel: Channel::Port,
        };
        Self::by(socket, Outside::default(), first, |mut link| async move {
            let _ = link.serve(stream).await;
            link.part();
        })
    }

    fn by<F>(
        socket: AgentSocket,
        outside: Outside,
        first: RequestId,
        run: impl FnOnce(Link) -> F,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (questions, asked) = mpsc::channel(1);
        let (peer_sender, peer) = watch::channel(None);
        let (stats_sender, stats) = watch::channel(None);
        let (not_heard_sender, not_heard) = watch::channel(None);
        let told = (not_heard_sender, peer_sender, stats_sender);
        let link = Link::new(socket, outside.clone(), asked, told);
        Self {
            questions,
            not_heard,
            peer,
            stats,
            request: first.0,
            outside,
            task: tokio::spawn(run(link)),
        }
    }

    /// Watches the reason why the agent's messages are ignored.
    pub fn not_heard(&self) -> watch::Receiver<Option<NotHeard>> {
        self.not_heard.clone()
    }

    /// Watches the connected session.
    pub fn peer(&self) -> watch::Receiver<Option<GuestSession>> {
        self.peer.clone()
    }

    /// Watches the guest's last report.
    pub fn stats(&self) -> watch::Receiver<Option<Stats>> {
        self.stats.clone()
    }

    /// Asks a question and returns its answers. A new question abandons the answers of the last
    /// one.
    ///
    /// # Errors
    /// If no agent is connected.
    pub async fn ask(
        &mut self,
        question: impl FnOnce(RequestId) -> Message,
    ) -> Result<Answers, Away> {
        self.request = self.request.wrapping_add(1);
        let message = question(RequestId(self.request));
        let (sender, answers) = mpsc::channel(ANSWERS_MAX);
        let question = Question {
            message,
            then: Then::Answers(sender),
        };
        self.questions.send(question).await.map_err(|_| Away)?;
        Ok(Answers(answers))
    }

    /// Sends a message without an answer. It has been written when this returns, so it precedes
    /// later questions.
    ///
    /// # Errors
    /// If no agent is connected.
    pub async fn tell(&mut self, message: Message) -> Result<(), Away> {
        let (sender, sent) = oneshot::channel();
        let question = Question {
            message,
            then: Then::Sent(sender),
        };
        self.questions.send(question).await.map_err(|_| Away)?;
        sent.await.map_err(|_| Away)
    }

    /// Confirms by a ping that the guest is still in this session.
    ///
    /// # Errors
    /// If it is not, or does not answer.
    pub async fn confirm(&mut self, session: SessionId) -> Result<(), Away> {
        let mut answers = self.ask(|id| Message::Ping { nonce: id.0 }).await?;
        answers.next().await?;
        let peer = self.peer.borrow();
        let same = peer.as_ref().is_some_and(|peer| peer.session == session);
        same.then_some(()).ok_or(Away)
    }
}

impl Drop for AgentClient {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Maximum number of queued answers; then the guest must wait.
const ANSWERS_MAX: usize = 4;

/// The answers to one question, in order.
#[derive(Debug)]
pub struct Answers(mpsc::Receiver<Message>);

impl Answers {
    /// The next answer.
    ///
    /// # Errors
    /// `Away` when the session has ended, or after the last answer.
    pub async fn next(&mut self) -> Result<Message, Away> {
        self.0.recv().await.ok_or(Away)
    }
}

impl GuestSession {
    /// Whether the guest has this node.
    pub fn has(&self, node: NodeId) -> bool {
        self.nodes.iter().any(|total| total.node == node)
    }
}

#[cfg(test)]
pub(crate) mod tests;
