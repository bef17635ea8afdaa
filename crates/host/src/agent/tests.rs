use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use demeter_policy::{ByteCount, GuestPhysAddr, PAGE_SIZE};
use demeter_proto::{Decoder, Hello, Nonce, encode_as};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use crate::process::PeerProcess;

use super::*;

/// Shows a nonce in a page of the guest's node; `None` if it cannot.
pub(crate) type Prover = Box<dyn FnMut(NodeId, Nonce) -> Option<GuestPhysAddr> + Send>;

/// The guest's end of a connection, for tests. It answers proofs by itself.
pub(crate) struct Pipe {
    stream: UnixStream,
    decoder: Decoder,
    /// Protocol version that it speaks.
    pub(crate) version: u16,
    prover: Prover,
}

/// Pages from this address on lie in no file; [`shown`] has their content.
const SHOWN_FROM: u64 = 1 << 46;

static SHOWN: Mutex<Vec<Nonce>> = Mutex::new(vec![]);

fn show(nonce: Nonce) -> GuestPhysAddr {
    let mut all = SHOWN.lock().unwrap();
    all.push(nonce);
    GuestPhysAddr(SHOWN_FROM + (all.len() as u64 - 1) * PAGE_SIZE)
}

/// The nonce at such an address, for test doubles of a VM's memory.
pub(crate) fn shown(page: GuestPhysAddr) -> Option<Nonce> {
    let index = page.0.checked_sub(SHOWN_FROM)? / PAGE_SIZE;
    SHOWN.lock().unwrap().get(index as usize).copied()
}

impl Pipe {
    /// Waits for the host to connect.
    pub(crate) async fn accept(listener: &UnixListener) -> Self {
        let (stream, _) = soon(listener.accept()).await.unwrap();
        Self {
            stream,
            decoder: Decoder::default(),
            version: demeter_proto::VERSION,
            prover: Box::new(|_, nonce| Some(show(nonce))),
        }
    }

    /// Sets how it answers proofs.
    pub(crate) fn prove_by(&mut self, prover: Prover) {
        self.prover = prover;
    }

    /// Waits for the host to connect, and introduces this guest.
    pub(crate) async fn welcomed(listener: &UnixListener, hello: Hello) -> Self {
        let mut pipe = Self::accept(listener).await;
        let session = hello.session;
        pipe.say(&Message::Hello(hello)).await;
        assert_eq!(pipe.hear().await, Some(Message::Welcome { session }));
        pipe
    }

    pub(crate) async fn say(&mut self, message: &Message) {
        let mut bytes = vec![];
        encode_as(self.version, message, &mut bytes).unwrap();
        // The host may have hung up.
        let _ = self.stream.write_all(&bytes).await;
    }

    /// Sends bytes that are no message.
    pub(crate) async fn say_raw(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes).await;
    }

    /// The host's next message except for proofs; `None` when it has hung up.
    pub(crate) async fn hear(&mut self) -> Option<Message> {
        let mut bytes = [0; 4096];
        loop {
            match self.decoder.next().unwrap() {
                Some(Message::Prove {
                    request,
                    node,
                    nonce,
                }) => {
                    if let Some(page) = (self.prover)(node, nonce) {
                        let proof = Message::Proof {
                            request,
                            node,
                            page,
                        };
                        self.say(&proof).await;
                    }
                    continue;
                }
                Some(message) => {
                    assert_eq!(self.decoder.version(), Some(self.version), "{message:?}");
                    return Some(message);
                }
                None => {}
            }
            match self.stream.read(&mut bytes).await {
                Ok(read) if read > 0 => self.decoder.push(&bytes[..read]),
                _ => return None,
            }
        }
    }
}

/// A time limit that no test should reach.
pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), future)
        .await
        .expect("in time")
}

pub(crate) fn hello(boot: u8, session: u64) -> Hello {
    Hello {
        boot_id: BootId([boot; 16]),
        session: SessionId(session),
        driver: true,
        nodes: [0, 1]
            .map(|node| NodeTotal {
                node: NodeId(node),
                total: ByteCount(1 << 30),
            })
            .to_vec(),
    }
}

pub(crate) fn own_process() -> PeerProcess {
    let (own, _) = UnixStream::pair().unwrap();
    PeerProcess::of(own).unwrap()
}

fn listen(dir: &Path) -> (UnixListener, AgentClient) {
    let socket = dir.join("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    (
        listener,
        AgentClient::connect(socket, Opener::only(own_process()), RequestId(100)),
    )
}

async fn present(agent: &AgentClient, there: bool) {
    let mut peer = agent.peer();
    soon(peer.wait_for(|peer| peer.is_some() == there))
        .await
        .unwrap();
}

fn stats(oom_returned: u64) -> Message {
    Message::Stats(Stats {
        psi_some: Default::default(),
        psi_full: Default::default(),
        fast_hit: None,
        relocation: None,
        benefit: None,
        oom_returned: ByteCount(oom_returned),
        nodes: vec![],
    })
}

fn list(request: RequestId) -> Message {
    Message::List {
        request,
        node: NodeId(0),
        from: GuestPhysAddr(0),
    }
}

#[tokio::test]
async fn a_guest_that_is_not_known_is_told_to_introduce_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, agent) = listen(dir.path());
    let mut pipe = Pipe::accept(&listener).await;
    pipe.say(&stats(7)).await;
    let session = SessionId(0);
    assert_eq!(soon(pipe.hear()).await, Some(Message::Welcome { session }));
    assert_eq!(*agent.stats().borrow(), None);

    pipe.say(&Message::Hello(hello(1, 42))).await;
    let session = SessionId(42);
    assert_eq!(soon(pipe.hear()).await, Some(Message::Welcome { session }));
    pipe.say(&stats(7)).await;
    pipe.say(&Message::Ping { nonce: 5 }).await;
    assert_eq!(soon(pipe.hear()).await, Some(Message::Pong { nonce: 5 }));
    let known = agent.peer().borrow().clone().unwrap();
    assert_eq!((known.session, known.nodes.len()), (session, 2));
    let reported = agent.stats().borrow().clone().unwrap();
    assert_eq!(reported.oom_returned, ByteCount(7));
}

#[tokio::test]
async fn a_broken_connection_is_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, mut agent) = listen(dir.path());
    for session in 1..4 {
        let pipe = Pipe::welcomed(&listener, hello(1, session)).await;
        present(&agent, true).await;
        drop(pipe);
        present(&agent, false).await;
        let mut answers = agent.ask(list).await.unwrap();
        assert_eq!(soon(answers.next()).await, Err(Away));
    }
}

#[tokio::test]
async fn what_nobody_was_told_is_not_taken_for_told() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, mut agent) = listen(dir.path());
    let allow = |oom| Message::Allow {
        oom: ByteCount(oom),
    };
    let mut pipe = Pipe::accept(&listener).await;
    assert_eq!(soon(agent.tell(allow(1))).await, Err(Away));
    // The same guest a moment later: a punch must not rely on a message that was lost.
    pipe.say(&Message::Hello(hello(1, 1))).await;
    present(&agent, true).await;
    assert_eq!(soon(agent.tell(allow(2))).await, Ok(()));
    let heard = [soon(pipe.hear()).await, soon(pipe.hear()).await];
    let session = SessionId(1);
    assert_eq!(heard, [Some(Message::Welcome { session }), Some(allow(2))]);
}

#[tokio::test]
async fn only_answers_to_the_question_of_this_session_are_passed_on() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, mut agent) = listen(dir.path());
    let mut pipe = Pipe::welcomed(&listener, hello(1, 1)).await;
    present(&agent, true).await;
    let held = |request, ranges| {
        Message::Held(demeter_proto::Ranges {
            request,
            node: NodeId(0),
            more: false,
            ranges,
        })
    };
    let mut answers = agent.ask(list).await.unwrap();
    let Some(Message::List { request, .. }) = soon(pipe.hear()).await else {
        panic!("no question");
    };
    assert_eq!(request, RequestId(101));
    for stale in [99, 100, 102] {
        pipe.say(&held(RequestId(stale), vec![])).await;
    }
    pipe.say(&held(request, vec![])).await;
    assert_eq!(soon(answers.next()).await, Ok(held(request, vec![])));
    // In a new session, no answer to this question will come.
    pipe.say(&Message::Hello(hello(1, 2))).await;
    pipe.say(&held(request, vec![])).await;
    assert_eq!(soon(answers.next()).await, Err(Away));
}

#[tokio::test]
async fn a_pong_of_another_session_confirms_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, mut agent) = listen(dir.path());
    let mut pipe = Pipe::welcomed(&listener, hello(1, 1)).await;
    present(&agent, true).await;
    let guest = async {
        for restart in [false, true] {
            let Some(Message::Ping { nonce }) = pipe.hear().await else {
                panic!("no ping");
            };
            if restart {
                pipe.say(&Message::Hello(hello(2, 2))).await;
            }
            pipe.say(&Message::Pong { nonce }).await;
        }
        pipe
    };
    let host = async {
        assert_eq!(agent.confirm(SessionId(1)).await, Ok(()));
        assert_eq!(agent.confirm(SessionId(1)).await, Err(Away));
    };
    soon(async { tokio::join!(guest, host) }).await;
}

#[tokio::test]
async fn a_flood_of_valid_frames_is_heard_at_a_rate() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, agent) = listen(dir.path());
    let pipe = Pipe::welcomed(&listener, hello(1, 1)).await;
    present(&agent, true).await;
    let mut ping = vec![];
    encode_as(
        demeter_proto::VERSION,
        &Message::Ping { nonce: 7 },
        &mut ping,
    )
    .unwrap();
    let flood = ping.repeat(1000);
    let begun = std::time::Instant::now();
    let (mut reads, mut writes) = pipe.stream.into_split();
    let flooding = tokio::spawn(async move { while writes.write_all(&flood).await.is_ok() {} });
    let (mut heard, mut bytes) = (0, vec![0; 1 << 20]);
    while begun.elapsed() < Duration::from_secs(2) {
        let read = timeout(Duration::from_millis(100), reads.read(&mut bytes)).await;
        heard += read.map_or(0, |read| read.unwrap());
    }
    flooding.abort();
    let pongs = heard / ping.len();
    let allowed = 200.0 * (begun.elapsed().as_secs_f64() + 1.0);
    // All frames of one read are handled.
    let at_once = READ_BYTES_MAX / ping.len();
    assert!(pongs > 100, "it is heard: {pongs}");
    assert!(pongs < allowed as usize + at_once, "{pongs} of {allowed}");
}

/// Maximum number of bytes that the link reads at once.
const READ_BYTES_MAX: usize = 16 << 10;

#[tokio::test]
async fn a_socket_of_another_process_is_not_spoken_to() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    for other in [
        PeerProcess {
            pid: Pid(1),
            ..own_process()
        },
        // An earlier process with the same number.
        PeerProcess {
            started: own_process().started - 1,
            ..own_process()
        },
    ] {
        let agent = AgentClient::connect(socket.clone(), Opener::only(other), RequestId(0));
        let mut foreign = agent.not_heard();
        let said = soon(foreign.wait_for(Option::is_some)).await.unwrap();
        let said = said.as_ref().unwrap().to_string();
        let own = std::process::id();
        assert!(
            said.contains(&format!("belongs to process {own}")),
            "{said}"
        );
        // The guest must not be introduced to this host.
        let mut pipe = Pipe::accept(&listener).await;
        assert_eq!(soon(pipe.hear()).await, None);
        assert!(agent.peer().borrow().is_none());
    }
}

#[tokio::test]
async fn an_agent_of_another_version_is_told_apart_from_none() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, agent) = listen(dir.path());
    let mut pipe = Pipe::accept(&listener).await;
    // A whole frame of version 1: version, kind 1, checksum, no zero byte in between.
    let mut frame = vec![1, 0, 1, 0];
    frame.extend(crc32fast::hash(&frame).to_le_bytes());
    assert!(!frame[4..].contains(&0));
    let stuffed = [&[0, 2, 1, 2, 1, 5][..], &frame[4..], &[0]].concat();
    pipe.stream.write_all(&stuffed).await.unwrap();
    let mut not_heard = agent.not_heard();
    // Do not keep the borrow, because the link would block on it.
    let said = {
        let why = soon(not_heard.wait_for(Option::is_some)).await.unwrap();
        why.as_ref().unwrap().to_string()
    };
    assert!(said.contains("speaks version 1 of the protocol"), "{said}");
    assert!(agent.peer().borrow().is_none());
    // The agent was updated.
    pipe.say(&Message::Hello(hello(1, 42))).await;
    present(&agent, true).await;
    assert_eq!(*agent.not_heard().borrow(), None);
}
