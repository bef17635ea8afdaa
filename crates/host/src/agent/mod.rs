//! The link to a guest's agent.
//!
//! The guest's end is a virtio-serial port or a vsock port, the host's end a Unix socket that the
//! hypervisor serves. A task of its own (`link.rs`) keeps the connection, answers what needs no decision
//! and passes the rest on; an [`AgentClient`] asks one thing at a time.

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

/// A guest that has introduced itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestSession {
    /// Another one than before: the guest was reset.
    pub boot_id: BootId,
    /// Another one than before: the agent was started anew.
    pub session: SessionId,
    /// The version of the protocol that its agent speaks.
    pub version: u16,
    /// The guest's nodes, as it says.
    pub nodes: Vec<NodeTotal>,
}

/// Why what comes from an agent's socket is not listened to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotHeard {
    /// The agent's socket is not the one of this VM.
    #[error(
        "the agent's socket {} belongs to process {found}, the VM is process {wanted}; give each VM \
         its own agent socket, opened by its hypervisor itself (-chardev socket,path=..,server=on)",
        socket.display()
    )]
    Foreign {
        /// The socket.
        socket: PathBuf,
        /// Who serves it.
        found: Pid,
        /// Who serves the VM's own socket.
        wanted: Pid,
    },
    /// The agent is older or newer than this controller.
    #[error(
        "the guest's agent speaks version {found} of the protocol, this controller {oldest} to {newest}; \
         until it speaks one of these the VM counts with all its memory; install the same release of \
         Demeter, and of its driver, in the guest and here",
        oldest = demeter_proto::VERSION_MIN,
        newest = demeter_proto::VERSION
    )]
    Version {
        /// What it speaks.
        found: u16,
    },
}

/// Nobody is there, or not for long enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the guest's agent is not there")]
pub struct Away;

/// A way to speak with one guest's agent. Dropped, it closes the connection.
#[derive(Debug)]
pub struct AgentClient {
    questions: mpsc::Sender<Question>,
    not_heard: watch::Receiver<Option<NotHeard>>,
    peer: watch::Receiver<Option<GuestSession>>,
    stats: watch::Receiver<Option<Stats>>,
    /// The last request's id. Starts anywhere: a guest that still remembers the requests of a
    /// controller before this one must not take ours for them.
    request: u64,
    outside: Outside,
    task: JoinHandle<()>,
}

impl AgentClient {
    /// Connects to the hypervisor's socket, now and whenever the connection breaks, as long as it
    /// is `opener` that opened it. `first` is where request ids start, best a random number.
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

    /// The same, whatever the socket leads to; `outside` is the VM's.
    pub fn to(socket: AgentSocket, outside: Outside, first: RequestId) -> Self {
        Self::by(socket, outside, first, Link::run)
    }

    /// The VM's way to its files.
    pub(crate) fn outside(&self) -> &Outside {
        &self.outside
    }

    /// Speaks over a stream that is there already, once. For fuzz targets.
    #[cfg(fuzzing)]
    pub fn over(
        stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
        first: RequestId,
    ) -> Self {
        // Nothing is connected to, so nobody serves it.
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

    /// Why what comes from the socket is not listened to, to look at and to wait for.
    pub fn not_heard(&self) -> watch::Receiver<Option<NotHeard>> {
        self.not_heard.clone()
    }

    /// Who is there, to look at and to wait for.
    pub fn peer(&self) -> watch::Receiver<Option<GuestSession>> {
        self.peer.clone()
    }

    /// What the guest has reported last, to look at and to wait for.
    pub fn stats(&self) -> watch::Receiver<Option<Stats>> {
        self.stats.clone()
    }

    /// Asks; the answers are taken from what is returned. Asking something else before the last
    /// answer has come gives up on it.
    ///
    /// # Errors
    /// When nobody can be asked.
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

    /// Says something that needs no answer. Has gone out when this returns: what is asked afterwards
    /// is heard afterwards.
    ///
    /// # Errors
    /// When nobody is there to be told.
    pub async fn tell(&mut self, message: Message) -> Result<(), Away> {
        let (sender, sent) = oneshot::channel();
        let question = Question {
            message,
            then: Then::Sent(sender),
        };
        self.questions.send(question).await.map_err(|_| Away)?;
        sent.await.map_err(|_| Away)
    }

    /// Makes sure that the guest is still in this session, by an answer that it gives now.
    ///
    /// # Errors
    /// When it is not, or does not answer.
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

/// Answers that wait to be taken. More than these, and the guest has to wait.
const ANSWERS_MAX: usize = 4;

/// The answers to one question, in order.
#[derive(Debug)]
pub struct Answers(mpsc::Receiver<Message>);

impl Answers {
    /// The next one.
    ///
    /// # Errors
    /// `Away` when the session ended, or after the last one.
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
