//! A request in progress, carried out in bounded steps.

use std::time::{Duration, Instant};

use demeter_policy::{ByteCount, GuestPhysAddr, NodeId};
use demeter_proto::{GpaRange, Message, Outcome, RANGES_MAX, Ranges, RequestId, Resize};

use crate::balloon::{Balloon, BalloonError, Cursor, Stop, join};

/// How long a request may wait for free memory.
const PATIENCE: Duration = Duration::from_millis(1500);

/// When to ask the kernel to reclaim, if an agent was asked first.
const RECLAIM_AFTER: Duration = Duration::from_millis(1000);

/// Time between two checks for free memory.
const RETRY: Duration = Duration::from_millis(50);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Inflate,
    Deflate,
    List,
}

#[derive(Debug, Clone, Copy)]
pub struct Request {
    pub kind: Kind,
    pub id: RequestId,
    pub node: NodeId,
    pub bytes: ByteCount,
    /// Where a list starts.
    pub from: GuestPhysAddr,
}

impl Request {
    /// A request about all held memory of a node.
    pub fn of(kind: Kind, resize: Resize) -> Self {
        let Resize {
            request: id,
            node,
            bytes,
        } = resize;
        Self {
            kind,
            id,
            node,
            bytes,
            from: GuestPhysAddr(0),
        }
    }
}

/// The request in progress.
#[derive(Debug)]
pub struct ActiveRequest {
    pub request: Request,
    /// Bytes moved so far.
    pub moved: u64,
    /// Newly held ranges that were not sent yet.
    pub ranges: Vec<GpaRange>,
    /// Some ranges were sent already.
    pub told: bool,
    /// Earliest time of the next step.
    pub next: Instant,
    /// The node had no free memory.
    pub short: bool,
    cursor: Cursor,
    started: Instant,
}

/// The result of a step.
pub enum Progress {
    /// There is more to do.
    More,
    /// The node still lacks this much memory, and the request waits for it.
    Missing(ByteCount),
    /// It has ended.
    Ended(Outcome, String),
}

impl ActiveRequest {
    pub fn new(request: Request, now: Instant) -> Self {
        Self {
            request,
            moved: 0,
            ranges: vec![],
            told: false,
            next: now,
            short: false,
            cursor: Cursor(request.from.0),
            started: now,
        }
    }

    /// Does the next step. `agent_helps` if an agent makes room when memory is missing.
    pub fn step(
        &mut self,
        balloon: &mut dyn Balloon,
        agent_helps: bool,
        now: Instant,
        out: &mut Vec<Message>,
    ) -> Result<Progress, BalloonError> {
        match self.request.kind {
            Kind::Inflate => self.inflate(balloon, agent_helps, now, out),
            Kind::Deflate => self.deflate(balloon),
            Kind::List => self.list(balloon, out),
        }
    }

    fn left(&self) -> ByteCount {
        ByteCount(self.request.bytes.0.saturating_sub(self.moved))
    }

    fn inflate(
        &mut self,
        balloon: &mut dyn Balloon,
        agent_helps: bool,
        now: Instant,
        out: &mut Vec<Message>,
    ) -> Result<Progress, BalloonError> {
        let node = self.request.node;
        let waited = now.saturating_duration_since(self.started);
        // Free memory first, then memory that an agent demotes, then memory that the kernel reclaims.
        let reclaim = self.short && (!agent_helps || waited >= RECLAIM_AFTER);
        let part = balloon.inflate(node, self.left(), reclaim)?;
        self.moved += part.ranges.iter().map(|r| r.bytes.0).sum::<u64>();
        self.ranges.extend(part.ranges);
        self.tell_full_messages(out);
        self.next = now;
        match part.stop {
            Stop::Done => return Ok(Progress::Ended(Outcome::Ok, String::new())),
            Stop::Again => return Ok(Progress::More),
            Stop::NoMemory | Stop::Empty => {}
        }
        if waited >= PATIENCE {
            let reason = format!("node {node} has no more memory to spare");
            return Ok(Progress::Ended(Outcome::Partial, reason));
        }
        if agent_helps || reclaim {
            self.next = now + RETRY;
        }
        self.short = true;
        Ok(Progress::Missing(self.left()))
    }

    fn deflate(&mut self, balloon: &mut dyn Balloon) -> Result<Progress, BalloonError> {
        let part = balloon.deflate(self.request.node, self.left())?;
        self.moved += part.moved.0;
        let partial = |reason: &str| Progress::Ended(Outcome::Partial, reason.into());
        Ok(match part.stop {
            Stop::Done => Progress::Ended(Outcome::Ok, String::new()),
            Stop::Again => Progress::More,
            Stop::Empty => partial("no more is held"),
            Stop::NoMemory => partial("there is no memory to split a block with"),
        })
    }

    fn list(
        &mut self,
        balloon: &mut dyn Balloon,
        out: &mut Vec<Message>,
    ) -> Result<Progress, BalloonError> {
        let part = balloon.list(self.request.node, self.cursor)?;
        if let Some(next) = part.next.filter(|_| part.ranges.is_empty()) {
            // The host continues its list behind this range.
            self.cursor = next;
            return Ok(Progress::More);
        }
        let mut chunks: Vec<&[GpaRange]> = part.ranges.chunks(RANGES_MAX).collect();
        if chunks.is_empty() {
            chunks.push(&[]);
        }
        let last = chunks.len() - 1;
        for (i, chunk) in chunks.into_iter().enumerate() {
            let more = i < last || part.next.is_some();
            out.push(Message::Held(self.part(chunk.to_vec(), more)));
        }
        Ok(Progress::Ended(Outcome::Ok, String::new()))
    }

    /// A part of this request's answer.
    pub fn part(&self, ranges: Vec<GpaRange>, more: bool) -> Ranges {
        Ranges {
            request: self.request.id,
            node: self.request.node,
            more,
            ranges,
        }
    }

    /// Sends ranges in full messages, so that at most one message waits here.
    fn tell_full_messages(&mut self, out: &mut Vec<Message>) {
        if self.ranges.len() <= RANGES_MAX {
            return;
        }
        self.ranges = join(std::mem::take(&mut self.ranges));
        while self.ranges.len() > RANGES_MAX {
            let rest = self.ranges.split_off(RANGES_MAX);
            let full = std::mem::replace(&mut self.ranges, rest);
            out.push(Message::Inflated(self.part(full, true)));
            self.told = true;
        }
    }
}
