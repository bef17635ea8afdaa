//! Encoding of a message's fields in a payload.
//!
//! Integers are little-endian at fixed places. A list comes last, without a count: its length
//! follows from the payload's.

use demeter_policy::benefit::{Benefit, BenefitPoint, POINTS_MAX, Waits};
use demeter_policy::{ByteCount, GuestPhysAddr, NodeId, PerTier};

use crate::message::{
    BootId, Done, EncodeError, GpaRange, Hello, Message, NODES_MAX, NodeStats, NodeTotal, Nonce,
    Outcome, Permille, RANGES_MAX, REASON_BYTES_MAX, Ranges, Relocation, RequestId, Resize,
    SessionId, Stats,
};
use crate::text::shown;
use crate::version::LISTS_BY_PARTS;

/// Value of `fast_hit` if it is unknown.
const UNKNOWN: u16 = 0xffff;

/// First version whose statistics include cost and benefit of moves.
const RELOCATION_TOLD: u16 = 3;

/// First version whose statistics include the benefit of fast memory.
pub const BENEFIT_TOLD: u16 = 4;

/// Appends the payload in the format of `version` and returns its kind.
pub(crate) fn write(
    version: u16,
    message: &Message,
    out: &mut Vec<u8>,
) -> Result<u16, EncodeError> {
    let mut w = Writer(out);
    Ok(match message {
        Message::Hello(hello) => {
            w.hello(hello)?;
            1
        }
        Message::Stats(stats) => {
            w.stats(version, stats)?;
            2
        }
        Message::Inflated(ranges) => {
            w.ranges(ranges)?;
            3
        }
        Message::Held(ranges) => {
            w.ranges(ranges)?;
            4
        }
        Message::Done(done) => {
            w.done(done);
            5
        }
        Message::Proof {
            request,
            node,
            page,
        } => {
            w.asked(*request, *node);
            w.u64(page.0);
            6
        }
        Message::Welcome { session } => {
            w.u64(session.0);
            64
        }
        Message::Inflate(resize) => {
            w.resize(resize);
            65
        }
        Message::Deflate(resize) => {
            w.resize(resize);
            66
        }
        Message::List {
            request,
            node,
            from,
        } => {
            w.asked(*request, *node);
            if version >= LISTS_BY_PARTS {
                w.u64(from.0);
            }
            67
        }
        Message::Allow { oom } => {
            w.u64(oom.0);
            68
        }
        Message::Prove {
            request,
            node,
            nonce,
        } => {
            w.asked(*request, *node);
            w.0.extend(nonce.0);
            69
        }
        Message::Ping { nonce } => {
            w.u64(*nonce);
            128
        }
        Message::Pong { nonce } => {
            w.u64(*nonce);
            129
        }
    })
}

/// Error: a payload is no valid message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Malformed {
    Kind,
    Fields,
}

/// Parses the payload of a message of this kind, in the format of `version`.
pub(crate) fn read(version: u16, kind: u16, payload: &[u8]) -> Result<Message, Malformed> {
    let mut r = Reader(payload);
    let message = match kind {
        1 => r.hello().map(Message::Hello),
        2 => r.stats(version).map(Message::Stats),
        3 => r.ranges().map(Message::Inflated),
        4 => r.ranges().map(Message::Held),
        5 => r.done().map(Message::Done),
        6 => r.proof(),
        64 => r.u64().map(|id| Message::Welcome {
            session: SessionId(id),
        }),
        65 => r.resize().map(Message::Inflate),
        66 => r.resize().map(Message::Deflate),
        67 => r.list_from(version),
        68 => r.bytes().map(|oom| Message::Allow { oom }),
        69 => r.prove(),
        128 => r.u64().map(|nonce| Message::Ping { nonce }),
        129 => r.u64().map(|nonce| Message::Pong { nonce }),
        _ => return Err(Malformed::Kind),
    };
    message.filter(|_| r.0.is_empty()).ok_or(Malformed::Fields)
}

/// The first characters of `text`, at most `bytes_max` bytes.
fn cut(text: &str, bytes_max: usize) -> &str {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn at_most_nodes<T>(nodes: &[T]) -> Result<&[T], EncodeError> {
    match nodes.len() {
        0..=NODES_MAX => Ok(nodes),
        n => Err(EncodeError::Nodes(n)),
    }
}

struct Writer<'a>(&'a mut Vec<u8>);

impl Writer<'_> {
    fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// The request that a message makes or answers, and its node.
    fn asked(&mut self, request: RequestId, node: NodeId) {
        self.u64(request.0);
        self.u32(node.0);
    }

    fn hello(&mut self, hello: &Hello) -> Result<(), EncodeError> {
        self.0.extend(hello.boot_id.0);
        self.u64(hello.session.0);
        self.0.push(hello.driver.into());
        for node in at_most_nodes(&hello.nodes)? {
            self.u32(node.node.0);
            self.u64(node.total.0);
        }
        Ok(())
    }

    fn stats(&mut self, version: u16, stats: &Stats) -> Result<(), EncodeError> {
        self.u16(stats.psi_some.get());
        self.u16(stats.psi_full.get());
        self.u16(stats.fast_hit.map_or(UNKNOWN, Permille::get));
        if version >= RELOCATION_TOLD {
            let relocation = stats.relocation.unwrap_or_default();
            self.0.push(stats.relocation.is_some().into());
            self.u64(relocation.cost_ms);
            self.u64(relocation.benefit_ms.cast_unsigned());
            self.0.push(relocation.is_resting.into());
        }
        if version >= BENEFIT_TOLD {
            self.benefit(stats.benefit.as_ref());
        }
        self.u64(stats.oom_returned.0);
        for node in at_most_nodes(&stats.nodes)? {
            self.u32(node.node.0);
            self.u64(node.total.0);
            self.u64(node.free.0);
            self.u64(node.held.0);
            self.u64(node.working_set.0);
        }
        Ok(())
    }

    fn done(&mut self, done: &Done) {
        self.asked(done.request, done.node);
        self.u64(done.moved.0);
        self.u64(done.held.0);
        self.0.push(match done.outcome {
            Outcome::Ok => 0,
            Outcome::Partial => 1,
            Outcome::NoDriver => 2,
            Outcome::Refused => 3,
        });
        let reason = shown(&done.reason);
        self.0.extend(cut(&reason, REASON_BYTES_MAX).as_bytes());
    }

    fn resize(&mut self, resize: &Resize) {
        self.asked(resize.request, resize.node);
        self.u64(resize.bytes.0);
    }

    /// The number of points comes first, since a list of nodes follows; 0 means unknown.
    fn benefit(&mut self, benefit: Option<&Benefit>) {
        let Some(benefit) = benefit else {
            self.0.push(0);
            return;
        };
        // A benefit has at most POINTS_MAX points.
        self.0.push(benefit.points().len() as u8);
        for point in benefit.points() {
            self.u64(point.fast.0);
            self.u16(point.served_permille);
        }
        self.u32(benefit.latency_ns().fast);
        self.u32(benefit.latency_ns().slow);
        self.u32(benefit.running_ms());
        self.u16(benefit.waits().min_permille);
        self.u16(benefit.waits().max_permille);
    }

    fn ranges(&mut self, ranges: &Ranges) -> Result<(), EncodeError> {
        if ranges.ranges.len() > RANGES_MAX {
            return Err(EncodeError::Ranges(ranges.ranges.len()));
        }
        self.asked(ranges.request, ranges.node);
        self.0.push(ranges.more.into());
        for range in &ranges.ranges {
            self.u64(range.start.0);
            self.u64(range.bytes.0);
        }
        Ok(())
    }
}

/// Reads values from the front of a payload; `None` means malformed.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*array)
    }

    fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    /// The rest as a list of at most `max` records of `bytes` each.
    fn list<T>(
        &mut self,
        bytes: usize,
        max: usize,
        record: impl Fn(&mut Self) -> Option<T>,
    ) -> Option<Vec<T>> {
        let fits = self.0.len().is_multiple_of(bytes) && self.0.len() / bytes <= max;
        let rest = self.rest();
        if !fits {
            return None;
        }
        rest.chunks_exact(bytes)
            .map(|chunk| record(&mut Reader(chunk)))
            .collect()
    }

    fn bool(&mut self) -> Option<bool> {
        match self.array()? {
            [0] => Some(false),
            [1] => Some(true),
            _ => None,
        }
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn bytes(&mut self) -> Option<ByteCount> {
        self.u64().map(ByteCount)
    }

    fn node(&mut self) -> Option<NodeId> {
        self.u32().map(NodeId)
    }

    fn request(&mut self) -> Option<RequestId> {
        self.u64().map(RequestId)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn permille(&mut self) -> Option<Permille> {
        let value = self.u16()?;
        (value <= 1000).then(|| Permille::new(value))
    }

    fn hello(&mut self) -> Option<Hello> {
        Some(Hello {
            boot_id: BootId(self.array()?),
            session: SessionId(self.u64()?),
            driver: self.bool()?,
            nodes: self.list(12, NODES_MAX, |r| {
                Some(NodeTotal {
                    node: r.node()?,
                    total: r.bytes()?,
                })
            })?,
        })
    }

    fn stats(&mut self, version: u16) -> Option<Stats> {
        Some(Stats {
            psi_some: self.permille()?,
            psi_full: self.permille()?,
            fast_hit: if self.0.starts_with(&UNKNOWN.to_le_bytes()) {
                self.array::<2>()?;
                None
            } else {
                Some(self.permille()?)
            },
            relocation: match version {
                RELOCATION_TOLD.. => self.relocation()?,
                _ => None,
            },
            benefit: match version {
                BENEFIT_TOLD.. => self.benefit()?,
                _ => None,
            },
            oom_returned: self.bytes()?,
            nodes: self.list(36, NODES_MAX, |r| {
                Some(NodeStats {
                    node: r.node()?,
                    total: r.bytes()?,
                    free: r.bytes()?,
                    held: r.bytes()?,
                    working_set: r.bytes()?,
                })
            })?,
        })
    }

    /// The outer `None` means malformed, the inner one unknown.
    fn relocation(&mut self) -> Option<Option<Relocation>> {
        let is_known = self.bool()?;
        let relocation = Relocation {
            cost_ms: self.u64()?,
            benefit_ms: self.u64()?.cast_signed(),
            is_resting: self.bool()?,
        };
        match is_known {
            true => Some(Some(relocation)),
            false => (relocation == Relocation::default()).then_some(None),
        }
    }

    /// The outer `None` means malformed, the inner one unknown. A benefit whose fields contradict
    /// each other is malformed.
    fn benefit(&mut self) -> Option<Option<Benefit>> {
        let [count] = self.array()?;
        let count = usize::from(count);
        if count == 0 {
            return Some(None);
        }
        if count > POINTS_MAX {
            return None;
        }
        let point = |_| {
            Some(BenefitPoint {
                fast: self.bytes()?,
                served_permille: self.u16()?,
            })
        };
        let points = (0..count).map(point).collect::<Option<Vec<_>>>()?;
        let latency_ns = PerTier {
            fast: self.u32()?,
            slow: self.u32()?,
        };
        let running_ms = self.u32()?;
        let waits = Waits {
            min_permille: self.u16()?,
            max_permille: self.u16()?,
        };
        Benefit::new(points, latency_ns, running_ms, waits)
            .ok()
            .map(Some)
    }

    fn ranges(&mut self) -> Option<Ranges> {
        Some(Ranges {
            request: self.request()?,
            node: self.node()?,
            more: self.bool()?,
            ranges: self.list(16, RANGES_MAX, |r| {
                Some(GpaRange {
                    start: GuestPhysAddr(r.u64()?),
                    bytes: r.bytes()?,
                })
            })?,
        })
    }

    fn resize(&mut self) -> Option<Resize> {
        Some(Resize {
            request: self.request()?,
            node: self.node()?,
            bytes: self.bytes()?,
        })
    }

    fn list_from(&mut self, version: u16) -> Option<Message> {
        Some(Message::List {
            request: self.request()?,
            node: self.node()?,
            from: match version {
                LISTS_BY_PARTS.. => GuestPhysAddr(self.u64()?),
                _ => GuestPhysAddr(0),
            },
        })
    }

    fn proof(&mut self) -> Option<Message> {
        Some(Message::Proof {
            request: self.request()?,
            node: self.node()?,
            page: GuestPhysAddr(self.u64()?),
        })
    }

    fn prove(&mut self) -> Option<Message> {
        Some(Message::Prove {
            request: self.request()?,
            node: self.node()?,
            nonce: Nonce(self.array()?),
        })
    }

    fn done(&mut self) -> Option<Done> {
        Some(Done {
            request: self.request()?,
            node: self.node()?,
            moved: self.bytes()?,
            held: self.bytes()?,
            outcome: match self.array()? {
                [0] => Outcome::Ok,
                [1] => Outcome::Partial,
                [2] => Outcome::NoDriver,
                [3] => Outcome::Refused,
                _ => return None,
            },
            reason: match self.rest() {
                reason if reason.len() <= REASON_BYTES_MAX => {
                    shown(std::str::from_utf8(reason).ok()?)
                }
                _ => return None,
            },
        })
    }
}
