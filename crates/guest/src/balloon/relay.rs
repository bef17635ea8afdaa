//! The guest's side of the protocol with the host, without I/O and clock.
//!
//! It greets the host, carries requests out in order, one at a time, and answers each. A repeated request gets its old
//! answer and is not carried out again. [`link`](super::link) has the I/O.
//!
//! # Rules
//! - Only a host that has welcomed this session is served: older messages in the pipe are for another agent.
//! - From the start of an `Inflate` or a `List` until the host's next `Allow`, the driver returns no memory by itself:
//!   the host may be punching the pages that the answer names.
//! - If the driver did return memory by itself before, the host's list is wrong: it must `List` before it may
//!   `Inflate`.
//! - A repeated request gets its ranges again only if no memory was returned since.

mod active_request;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::mpsc::Sender;
use std::time::Instant;

use active_request::{ActiveRequest, Kind, Progress, Request};
use demeter_policy::{ByteCount, NodeId, PAGE_SIZE};
use demeter_proto::{Done, GpaRange, Hello, Message, Nonce, Outcome, Ranges, RequestId, Resize};

use super::{Balloon, BalloonError, NodeBalloon, join};
use crate::agent::Control;

/// Maximum number of queued requests.
const WAITING_MAX: usize = 64;

/// Number of answers kept for repeated requests.
const ANSWERS_MAX: usize = 64;

/// A function that opens the driver.
pub type Opener = Box<dyn FnMut() -> Result<Box<dyn Balloon>, BalloonError> + Send>;

/// An agent that can demote memory to make room in the fast node.
#[derive(Debug)]
pub struct RoomMaker {
    /// The agent's command channel.
    pub agent: Sender<Control>,
    /// The node that it can make room in.
    pub fast: NodeId,
}

/// The guest's side of the protocol. See the module's text.
pub struct Relay {
    hello: Hello,
    open: Opener,
    balloon: Option<Box<dyn Balloon>>,
    room: Option<RoomMaker>,
    /// The node from which the driver may return memory by itself.
    oom_node: NodeId,
    welcomed: bool,
    job: Option<ActiveRequest>,
    waiting: VecDeque<Request>,
    answers: VecDeque<Answer>,
    /// Per node: bytes that the driver had returned by itself when the host last listed the node.
    listed: BTreeMap<NodeId, ByteCount>,
    /// Number of deflation steps so far.
    deflations: u64,
}

/// A kept answer.
#[derive(Debug)]
struct Answer {
    done: Done,
    /// The ranges in it; `None` if they needed more than one message.
    ranges: Option<Vec<GpaRange>>,
    /// Memory that had been returned by then.
    released: (u64, ByteCount),
}

impl Relay {
    /// Creates a relay for the session of `hello`.
    ///
    /// The driver may return memory of `oom_node` by itself, as far as the host allows.
    pub fn new(hello: Hello, open: Opener, room: Option<RoomMaker>, oom_node: NodeId) -> Self {
        Self {
            hello,
            open,
            balloon: None,
            room,
            oom_node,
            welcomed: false,
            job: None,
            waiting: VecDeque::new(),
            answers: VecDeque::new(),
            listed: BTreeMap::new(),
            deflations: 0,
        }
    }

    /// The driver, opened if necessary.
    pub fn balloon(&mut self) -> Result<&mut (dyn Balloon + 'static), BalloonError> {
        match &mut self.balloon {
            Some(balloon) => Ok(&mut **balloon),
            none => Ok(&mut **none.insert((self.open)()?)),
        }
    }

    /// The driver, if it is open.
    pub fn opened(&mut self) -> Option<&mut (dyn Balloon + 'static)> {
        self.balloon.as_deref_mut()
    }

    /// The driver's event descriptor: readable after it returned memory by itself.
    pub fn event_fd(&self) -> Option<RawFd> {
        let fd = self.balloon.as_ref()?.event_fd()?;
        Some(fd.as_raw_fd())
    }

    /// Closes the driver after a failure. It is opened again when needed.
    pub fn close(&mut self) {
        self.balloon = None;
    }

    /// Whether the host has welcomed this session.
    pub fn is_welcomed(&self) -> bool {
        self.welcomed
    }

    /// Notes that the host connected, and greets it before anything else.
    pub fn connected(&mut self, out: &mut Vec<Message>) {
        self.welcomed = false;
        self.greet(out);
    }

    /// Notes that the host disconnected. The current request ends as it is, and its answer is kept.
    pub fn disconnected(&mut self) {
        self.welcomed = false;
        self.waiting.clear();
        if let Some(job) = self.job.take() {
            self.finish(
                job,
                Outcome::Partial,
                "the host went away".into(),
                &mut vec![],
            );
        }
    }

    /// Greets the host; repeated every second until it answers.
    pub fn greet(&mut self, out: &mut Vec<Message>) {
        self.hello.driver = self.balloon().is_ok();
        out.push(Message::Hello(self.hello.clone()));
    }

    /// Handles a message of the host. Answers come from here and from [`Self::step`].
    pub fn receive(&mut self, message: Message, out: &mut Vec<Message>) {
        match message {
            Message::Ping { nonce } => out.push(Message::Pong { nonce }),
            Message::Welcome { session } => {
                let knew = self.welcomed;
                self.welcomed = session == self.hello.session;
                if knew && !self.welcomed {
                    self.greet(out);
                }
            }
            _ if !self.welcomed => {}
            Message::Inflate(resize) => self.ask(Request::of(Kind::Inflate, resize), out),
            Message::Deflate(resize) => self.ask(Request::of(Kind::Deflate, resize), out),
            Message::Prove {
                request,
                node,
                nonce,
            } => out.push(self.prove(request, node, nonce)),
            Message::List {
                request,
                node,
                from,
            } => {
                let bytes = ByteCount(0);
                let resize = Resize {
                    request,
                    node,
                    bytes,
                };
                let whole = Request::of(Kind::List, resize);
                self.ask(Request { from, ..whole }, out);
            }
            // During a request the host may only lower the allowance.
            Message::Allow { oom } if oom.0 == 0 || self.is_idle() => self.allow(oom),
            // A guest's own message, or an answer to a question that the relay never asks.
            _ => {}
        }
    }

    /// When [`Self::step`] must be called; `None` if there is no work.
    pub fn wake_at(&self, now: Instant) -> Option<Instant> {
        match &self.job {
            Some(job) => Some(job.next),
            None => (!self.waiting.is_empty()).then_some(now),
        }
    }

    /// Does a bounded part of the pending work.
    pub fn step(&mut self, now: Instant, out: &mut Vec<Message>) {
        let Some(mut job) = self.job.take().or_else(|| self.start(now, out)) else {
            return;
        };
        if now < job.next {
            self.job = Some(job);
            return;
        }
        let node = job.request.node;
        let agent_helps = self.room.as_ref().is_some_and(|room| room.fast == node);
        let result = self
            .balloon()
            .and_then(|balloon| job.step(balloon, agent_helps, now, out));
        self.deflations += u64::from(job.request.kind == Kind::Deflate);
        match result {
            Ok(Progress::Ended(outcome, reason)) => self.finish(job, outcome, reason, out),
            Err(error) => self.fail(job, error, out),
            Ok(progress) => {
                if let Progress::Missing(bytes) = progress {
                    self.make_room(node, bytes);
                }
                self.job = Some(job);
            }
        }
    }

    /// Has the driver write the nonce. It moves no memory, so it need not wait for other requests.
    fn prove(&mut self, id: RequestId, node: NodeId, nonce: Nonce) -> Message {
        match self
            .balloon()
            .and_then(|balloon| balloon.prove(node, nonce))
        {
            Ok(page) => Message::Proof {
                request: id,
                node,
                page,
            },
            Err(error) => {
                let outcome = match error {
                    BalloonError::Unavailable { .. } => Outcome::NoDriver,
                    _ => Outcome::Refused,
                };
                tracing::warn!("{error}");
                self.close();
                Message::Done(Done {
                    request: id,
                    node,
                    moved: ByteCount(0),
                    held: ByteCount(0),
                    outcome,
                    reason: error.to_string(),
                })
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.job.is_none() && self.waiting.is_empty()
    }

    fn allow(&mut self, oom: ByteCount) {
        let node = self.oom_node;
        // Without a driver no memory is held, and none can be returned.
        let allowed = self.balloon().and_then(|b| b.allow_oom(node, oom));
        if let Err(error) = allowed {
            tracing::debug!("{error}");
        }
    }

    /// Queues a request. Answers a repeated one, or one too many, at once.
    fn ask(&mut self, request: Request, out: &mut Vec<Message>) {
        let under_way = self.job.iter().map(|job| &job.request);
        if under_way.chain(&self.waiting).any(|r| r.id == request.id) {
            return;
        }
        if self.repeat(&request, out) {
            return;
        }
        if self.waiting.len() == WAITING_MAX {
            let reason = format!("{WAITING_MAX} requests are waiting already");
            let moved = ByteCount(0);
            let done = self.done(&request, moved, Outcome::Refused, reason);
            out.push(Message::Done(done));
            return;
        }
        self.waiting.push_back(request);
    }

    /// Answers a request that was answered before. A list is made again.
    fn repeat(&mut self, request: &Request, out: &mut Vec<Message>) -> bool {
        let Some(place) = self
            .answers
            .iter()
            .position(|a| a.done.request == request.id)
        else {
            return false;
        };
        // The host may punch ranges that are named again.
        self.allow(ByteCount(0));
        let released = self.released(self.answers[place].done.node);
        let answer = &self.answers[place];
        match &answer.ranges {
            Some(ranges) if ranges.is_empty() || answer.released == released => {
                if !ranges.is_empty() {
                    out.push(Message::Inflated(Ranges {
                        request: request.id,
                        node: answer.done.node,
                        more: false,
                        ranges: ranges.clone(),
                    }));
                }
                out.push(Message::Done(answer.done.clone()));
            }
            _ => {
                let done = self.done(request, ByteCount(0), Outcome::Refused, LIST_FIRST.into());
                out.push(Message::Done(done));
            }
        }
        true
    }

    fn start(&mut self, now: Instant, out: &mut Vec<Message>) -> Option<ActiveRequest> {
        let request = self.waiting.pop_front()?;
        let job = ActiveRequest::new(request, now);
        match self.admit(&request) {
            Ok(None) => Some(job),
            Ok(Some(reason)) => {
                self.finish(job, Outcome::Refused, reason, out);
                None
            }
            Err(error) => {
                self.fail(job, error, out);
                None
            }
        }
    }

    /// The reason to refuse a request before it starts, if any.
    fn admit(&mut self, request: &Request) -> Result<Option<String>, BalloonError> {
        if !request.bytes.0.is_multiple_of(PAGE_SIZE) {
            return Ok(Some(format!(
                "{} bytes are not whole pages of {PAGE_SIZE}",
                request.bytes.0
            )));
        }
        let oom_node = self.oom_node;
        let balloon = self.balloon()?;
        if request.kind != Kind::Deflate {
            balloon.allow_oom(oom_node, ByteCount(0))?;
        }
        let stats = balloon.stats(request.node)?;
        if request.kind == Kind::List {
            self.listed.insert(request.node, stats.oom_returned);
            return Ok(None);
        }
        if stats == NodeBalloon::default() {
            // There is nothing to list: the host's list is complete.
            self.listed.insert(request.node, stats.oom_returned);
        }
        let is_known = self.listed.get(&request.node) == Some(&stats.oom_returned);
        let refused = request.kind == Kind::Inflate && !is_known;
        Ok(refused.then(|| LIST_FIRST.into()))
    }

    fn fail(&mut self, job: ActiveRequest, error: BalloonError, out: &mut Vec<Message>) {
        let outcome = match error {
            BalloonError::Unavailable { .. } => Outcome::NoDriver,
            _ if job.moved > 0 => Outcome::Partial,
            _ => Outcome::Refused,
        };
        tracing::warn!("{error}");
        self.close();
        self.finish(job, outcome, error.to_string(), out);
    }

    /// Answers a finished request, and keeps the answer.
    fn finish(
        &mut self,
        mut job: ActiveRequest,
        outcome: Outcome,
        reason: String,
        out: &mut Vec<Message>,
    ) {
        let request = job.request;
        if job.short || request.kind == Kind::Deflate {
            self.make_room(request.node, ByteCount(0));
        }
        let done = self.done(&request, ByteCount(job.moved), outcome, reason);
        job.ranges = join(job.ranges);
        if !job.ranges.is_empty() || job.told {
            out.push(Message::Inflated(job.part(job.ranges.clone(), false)));
        }
        out.push(Message::Done(done.clone()));
        if request.kind == Kind::List {
            return;
        }
        if self.answers.len() == ANSWERS_MAX {
            self.answers.pop_front();
        }
        let released = self.released(request.node);
        self.answers.push_back(Answer {
            done,
            ranges: (!job.told).then_some(job.ranges),
            released,
        });
    }

    fn done(
        &mut self,
        request: &Request,
        moved: ByteCount,
        outcome: Outcome,
        reason: String,
    ) -> Done {
        Done {
            request: request.id,
            node: request.node,
            moved,
            held: self.node_stats(request.node).held,
            outcome,
            reason,
        }
    }

    /// Memory returned so far: at the host's request, and by the driver itself.
    fn released(&mut self, node: NodeId) -> (u64, ByteCount) {
        (self.deflations, self.node_stats(node).oom_returned)
    }

    fn node_stats(&mut self, node: NodeId) -> NodeBalloon {
        let stats = self.balloon().and_then(|balloon| balloon.stats(node));
        stats.unwrap_or_default()
    }

    /// Asks the agent to make room in its fast node for the balloon.
    fn make_room(&self, node: NodeId, wanted: ByteCount) {
        if let Some(room) = self.room.as_ref().filter(|room| room.fast == node) {
            // An agent that has ended makes no room.
            let _ = room.agent.send(Control::MakeRoom(wanted));
        }
    }
}

/// The refusal of an `Inflate`, or of a repeated request, whose list is out of date.
const LIST_FIRST: &str = "list first: the driver has returned memory by itself since the last list";

#[cfg(test)]
mod tests;
