//! Any bytes of a guest in the host's link, with questions and silence in between.
//!
//! Session and statistics are the guest's latest. An answer belongs to a question of this session,
//! no answer follows the last one, and no caller waits too long.
#![no_main]

use std::time::Duration;

use arbitrary::Arbitrary;
use demeter_fuzz::Said;
use demeter_host::agent::{AgentClient, Answers};
use demeter_policy::{ByteCount, GuestPhysAddr, NodeId, PAGE_SIZE};
use demeter_proto::{Decoder, Hello, Message, RequestId, SessionId, Stats};
use libfuzzer_sys::fuzz_target;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::time::{Instant, sleep, sleep_until, timeout};

#[derive(Debug, Arbitrary)]
enum Step {
    Say(Said),
    List(u8),
    Take,
    Tell(u8),
    Confirm(u8),
    Pass(u16),
}

const FIRST: u64 = 1 << 40;

/// The link's time limit for delivering an answer, and a little more.
const SETTLED: Duration = Duration::from_millis(2001);

/// Time limit of every call.
const SOON: Duration = Duration::from_secs(3);

/// Silence after which a guest may count as gone, and after which it must.
const SILENCE: [Duration; 2] = [Duration::from_secs(6), Duration::from_secs(14)];

/// The expected state of the link.
#[derive(Default)]
struct Known {
    decoder: Decoder,
    hello: Option<Hello>,
    stats: Option<Stats>,
    heard_at: Option<Instant>,
}

impl Known {
    fn hear(&mut self, bytes: &[u8]) {
        self.decoder.push(bytes);
        while let Some(found) = self.decoder.next().transpose() {
            let Ok(message) = found else { continue };
            self.heard_at = Some(Instant::now());
            match message {
                Message::Hello(hello) => {
                    let before = self.hello.as_ref().map(|hello| hello.session);
                    if before != Some(hello.session) {
                        self.stats = None;
                    }
                    self.hello = Some(hello);
                }
                Message::Stats(stats) if self.hello.is_some() => self.stats = Some(stats),
                _ => {}
            }
        }
    }

    /// Waits until it is certain whether the guest was silent for too long.
    async fn settle(&mut self) {
        if let Some(heard_at) = self.heard_at
            && Instant::now() > heard_at + SILENCE[0]
        {
            sleep_until(heard_at + SILENCE[1]).await;
            (self.hello, self.stats, self.heard_at) = (None, None, None);
        }
    }

    fn check(&self, agent: &AgentClient) {
        let peer = agent.peer().borrow().clone();
        let of = |hello: &Hello| (hello.boot_id, hello.session, hello.nodes.clone());
        assert_eq!(
            peer.map(|peer| (peer.boot_id, peer.session, peer.nodes)),
            self.hello.as_ref().map(of)
        );
        assert_eq!(*agent.stats().borrow(), self.stats);
    }
}

/// A question, and whether its last answer has come.
struct Open {
    request: RequestId,
    answers: Answers,
    is_answered: bool,
}

/// Checks that all messages of the host are valid.
async fn listen(mut host: ReadHalf<DuplexStream>) {
    let (mut decoder, mut bytes) = (Decoder::default(), [0; 4096]);
    while let Ok(read @ 1..) = host.read(&mut bytes).await {
        decoder.push(&bytes[..read]);
        while decoder.next().expect("a whole frame").is_some() {}
    }
}

async fn say(pipe: &mut WriteHalf<DuplexStream>, bytes: &[u8]) {
    let written = timeout(SOON, pipe.write_all(bytes)).await;
    written.expect("it is read").expect("the link is there");
}

async fn case(script: Vec<Step>) {
    let (host, guest) = tokio::io::duplex(1 << 16);
    let (hears, mut pipe) = tokio::io::split(guest);
    let listener = tokio::spawn(listen(hears));
    let mut agent = AgentClient::over(host, RequestId(FIRST));
    let (mut known, mut asked, mut open) = (Known::default(), FIRST, None::<Open>);
    for step in script.into_iter().take(64) {
        known.settle().await;
        match step {
            Step::Say(said) => {
                let bytes = said.bytes(asked);
                known.hear(&bytes);
                say(&mut pipe, &bytes).await;
                sleep(SETTLED).await;
                known.check(&agent);
            }
            Step::List(node) => {
                let node = NodeId(node.into());
                let from = GuestPhysAddr(0);
                let question = |request| Message::List {
                    request,
                    node,
                    from,
                };
                let answers = timeout(SOON, agent.ask(question)).await;
                let answers = answers.expect("in time").expect("the link is there");
                asked += 1;
                open = Some(Open {
                    request: RequestId(asked),
                    answers,
                    is_answered: false,
                });
            }
            Step::Take => {
                let Some(open) = &mut open else { continue };
                let Ok(Ok(answer)) = timeout(SETTLED, open.answers.next()).await else {
                    continue;
                };
                assert!(!open.is_answered, "{answer:?} after the last answer");
                let request = match &answer {
                    Message::Inflated(part) | Message::Held(part) => part.request,
                    Message::Done(done) => done.request,
                    Message::Proof { request, .. } => *request,
                    other => panic!("{other:?} is no answer"),
                };
                assert_eq!(request, open.request);
                open.is_answered = !matches!(answer, Message::Inflated(_) | Message::Held(_));
            }
            Step::Tell(pages) => {
                let oom = ByteCount(u64::from(pages) * PAGE_SIZE);
                let told = timeout(SOON, agent.tell(Message::Allow { oom })).await;
                let is_told = told.expect("in time").is_ok();
                assert_eq!(is_told, known.hello.is_some(), "told, or nobody is there");
            }
            Step::Confirm(session) => {
                let session = SessionId(session.into());
                asked += 1;
                open = None;
                // No answer comes meanwhile.
                let confirmed = timeout(SOON, agent.confirm(session)).await;
                assert!(!matches!(confirmed, Ok(Ok(()))), "confirmed by nobody");
            }
            Step::Pass(ms) => sleep(Duration::from_millis(ms.into())).await,
        }
    }
    drop(agent);
    listener.abort();
}

fuzz_target!(|script: Vec<Step>| demeter_fuzz::run(case(script)));
