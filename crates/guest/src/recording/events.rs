//! Codes events as bytes.

use demeter_policy::engine::{Direction, Input, NodeFacts, Request};
use demeter_policy::{
    BLOCK_SIZE, Block, ByLevel, ByteCount, GuestVirtAddr, LEVELS, Level, Observation, Pid,
    Relocation, Sample, Share, Socket, Spread, VirtRange,
};

use super::format::{Bytes, Fault, put, put_step};

/// A recorded event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordedEvent<'a> {
    /// The engine got an input.
    Input(Input<'a>),
    /// The engine made a request.
    Request(Request<'a>),
}

mod tag {
    pub(super) const EPOCH: u8 = 0;
    pub(super) const STARTED: u8 = 1;
    pub(super) const ENDED: u8 = 2;
    pub(super) const SPACE: u8 = 3;
    pub(super) const BALLOON_WANTS: u8 = 4;
    pub(super) const PAUSED: u8 = 5;
    pub(super) const RESUMED: u8 = 6;
    pub(super) const REFRESHED: u8 = 7;
    /// One sample, of the same process as the sample before.
    pub(super) const SAMPLE: u8 = 8;
    pub(super) const SAMPLE_OF: u8 = 9;
    pub(super) const SAMPLES_END: u8 = 10;
    pub(super) const LOCATED: u8 = 11;
    pub(super) const LOOK_UP_FAILED: u8 = 12;
    pub(super) const NODES: u8 = 13;
    pub(super) const MOVED: u8 = 14;
    pub(super) const MOVE_FAILED: u8 = 15;
    pub(super) const RECLAIMED: u8 = 16;
    pub(super) const SHARE: u8 = 17;
    pub(super) const NO_SHARE: u8 = 18;
    pub(super) const LOOKED: u8 = 19;
    pub(super) const NEAR: u8 = 20;
    pub(super) const MACHINE: u8 = 21;
    pub(super) const COLLAPSED: u8 = 22;
    pub(super) const THINNED: u8 = 23;
    pub(super) const ROOM: u8 = 24;

    pub(super) const REFRESH: u8 = 32;
    pub(super) const SAMPLES: u8 = 33;
    pub(super) const LOOK_UP: u8 = 34;
    pub(super) const READ_NODES: u8 = 35;
    pub(super) const PROMOTE: u8 = 36;
    pub(super) const DEMOTE: u8 = 37;
    pub(super) const RECLAIM: u8 = 38;
    pub(super) const SLEEP: u8 = 39;
    pub(super) const COLLAPSE: u8 = 40;
}

/// The previous sample, to which the next one is a difference.
#[derive(Debug, Clone, Copy, Default)]
struct LastSample {
    pid: u32,
    addr: u64,
}

fn space(pid: Pid, vmas: &[VirtRange], to: &mut Vec<u8>) {
    tagged(to, tag::SPACE, [pid.0.into(), vmas.len() as u64]);
    let mut end = 0;
    for vma in vmas {
        put_step(to, end, vma.start().0);
        put(to, vma.len().0);
        end = vma.end().0;
    }
}

/// Encodes events.
#[derive(Debug, Default)]
pub(super) struct Encoder {
    last: LastSample,
}

impl Encoder {
    pub(super) fn input(&mut self, input: Input<'_>, to: &mut Vec<u8>) {
        match input {
            Input::Epoch => to.push(tag::EPOCH),
            Input::Started(pid) => tagged(to, tag::STARTED, [pid.0.into()]),
            Input::Ended(pid) => tagged(to, tag::ENDED, [pid.0.into()]),
            Input::Space { pid, vmas } => space(pid, vmas, to),
            Input::Share {
                pid,
                share: Some(share),
            } => {
                let (group, weight) = (share.group.into(), share.weight.into());
                tagged(
                    to,
                    tag::SHARE,
                    [pid.0.into(), group, share.guarantee.0, weight],
                );
            }
            Input::Share { pid, share: None } => tagged(to, tag::NO_SHARE, [pid.0.into()]),
            Input::Machine { sizes, cpus } => {
                tagged(to, tag::MACHINE, sizes.0.map(|bytes| bytes.0));
                put(to, cpus.into());
            }
            Input::Near { pid, socket } => {
                tagged(to, tag::NEAR, [pid.0.into(), socket.number().into()])
            }
            Input::Room {
                place: (level, socket),
                free,
            } => {
                let numbers = [level.index() as u64, socket.number().into(), free.0];
                tagged(to, tag::ROOM, numbers);
            }
            Input::BalloonWants(bytes) => tagged(to, tag::BALLOON_WANTS, [bytes.0]),
            Input::Thinned(thinning) => tagged(to, tag::THINNED, [thinning.into()]),
            Input::Paused(true) => to.push(tag::PAUSED),
            Input::Paused(false) => to.push(tag::RESUMED),
            Input::Refreshed => to.push(tag::REFRESHED),
            Input::Sample(sample) => self.sample(sample, to),
            Input::Looked(it) => {
                let (pid, events) = (it.pid.0.into(), it.events.into());
                let is_least = u64::from(it.is_least);
                let numbers = [pid, it.block.0, events, it.exposure_ns, is_least];
                tagged(to, tag::LOOKED, numbers);
            }
            Input::SamplesEnd {
                lost,
                rejected,
                is_repeat,
            } => tagged(to, tag::SAMPLES_END, [lost, rejected, is_repeat.into()]),
            Input::Located(placements) => {
                to.push(tag::LOCATED);
                put_placements(to, placements);
            }
            Input::LookUpFailed => to.push(tag::LOOK_UP_FAILED),
            Input::Nodes(facts) => {
                to.push(tag::NODES);
                for tier in facts.0 {
                    put(to, tier.free.0);
                    put(to, tier.kept.0);
                    put(to, tier.latency_ns.unwrap_or(0).into());
                }
            }
            Input::Moved {
                placements,
                took_ns,
                cpu_ns,
            } => {
                tagged(to, tag::MOVED, [took_ns, cpu_ns]);
                put_placements(to, placements);
            }
            Input::MoveFailed => to.push(tag::MOVE_FAILED),
            Input::Collapsed { took_ns, cpu_ns } => tagged(to, tag::COLLAPSED, [took_ns, cpu_ns]),
            Input::Reclaimed => to.push(tag::RECLAIMED),
        }
    }

    fn sample(&mut self, sample: Sample, to: &mut Vec<u8>) {
        if sample.pid.0 == self.last.pid && sample.weight == 1 {
            to.push(tag::SAMPLE);
        } else {
            let (pid, weight) = (sample.pid.0, sample.weight);
            tagged(to, tag::SAMPLE_OF, [pid.into(), weight.into()]);
        }
        put_step(to, self.last.addr, sample.addr.0);
        self.last = LastSample {
            pid: sample.pid.0,
            addr: sample.addr.0,
        };
    }

    pub(super) fn request(&mut self, request: Request<'_>, to: &mut Vec<u8>) {
        match request {
            Request::Refresh => to.push(tag::REFRESH),
            Request::Samples { most, wanted } => {
                tagged(to, tag::SAMPLES, [most as u64, wanted.len() as u64]);
                let mut last = 0;
                for (pid, block) in wanted {
                    put(to, pid.0.into());
                    put_step(to, last, block.0);
                    last = block.0;
                }
            }
            Request::LookUp { pid, blocks } => {
                tagged(to, tag::LOOK_UP, [pid.0.into(), blocks.len() as u64]);
                let mut next = 0;
                for block in blocks {
                    put_step(to, next, block.0);
                    next = block.0.wrapping_add(1);
                }
            }
            Request::ReadNodes => to.push(tag::READ_NODES),
            Request::Move {
                pid,
                level,
                direction,
                blocks,
            } => {
                let tag = match direction {
                    Direction::Promotion => tag::PROMOTE,
                    Direction::Demotion => tag::DEMOTE,
                };
                let level = level.index() as u64;
                tagged(to, tag, [pid.0.into(), level]);
                put_relocations(to, blocks);
            }
            Request::Collapse { pid, blocks } => {
                tagged(to, tag::COLLAPSE, [pid.0.into()]);
                put_relocations(to, blocks);
            }
            Request::Reclaim => to.push(tag::RECLAIM),
            Request::Sleep { epochs } => tagged(to, tag::SLEEP, [epochs.into()]),
        }
    }
}

fn tagged<const N: usize>(to: &mut Vec<u8>, tag: u8, numbers: [u64; N]) {
    to.push(tag);
    numbers.into_iter().for_each(|number| put(to, number));
}

/// Encodes blocks with their bytes.
fn put_relocations(to: &mut Vec<u8>, blocks: &[Relocation]) {
    put(to, blocks.len() as u64);
    let mut next = 0;
    for r in blocks {
        put_step(to, next, r.block.0);
        put(to, r.bytes.0);
        next = r.block.0.wrapping_add(1);
    }
}

/// A block that is spread over several tiers, or only partly resident.
const SPREAD: u8 = 1 + LEVELS as u8;

/// Number of kinds of placements: absent, in one tier, and spread.
const KINDS: u64 = 2 + LEVELS as u64;

/// Encodes placements: the kind, and [`KINDS`] times the socket. On a machine of a few sockets, a block in one tier, or an
/// absent one, takes one byte.
fn put_placements(to: &mut Vec<u8>, spreads: &[Spread]) {
    put(to, spreads.len() as u64);
    for spread in spreads {
        let whole = (0..SPREAD).find(|&whole| in_one(whole) == spread.bytes);
        let kind = u64::from(whole.unwrap_or(SPREAD));
        put(to, kind + KINDS * u64::from(spread.socket.number()));
        if whole.is_none() {
            spread.bytes.0.iter().for_each(|bytes| put(to, bytes.0));
        }
    }
}

/// A whole block in a tier, counted from 1 for the fastest; 0 means an absent block.
fn in_one(whole: u8) -> ByLevel<ByteCount> {
    let is_there = |level: Level| level.index() + 1 == usize::from(whole);
    let bytes = |level| ByteCount(if is_there(level) { BLOCK_SIZE } else { 0 });
    ByLevel::from_fn(bytes)
}

/// Decodes events. Its buffers hold the lists that events borrow.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    last: LastSample,
    vmas: Vec<VirtRange>,
    placements: Vec<Spread>,
    blocks: Vec<Block>,
    wanted: Vec<(Pid, Block)>,
    relocations: Vec<Relocation>,
}

impl Decoder {
    /// Decodes the next event.
    pub(super) fn event(&mut self, from: &mut Bytes<'_>) -> Result<RecordedEvent<'_>, Fault> {
        let tag = from.byte()?;
        let input = match tag {
            tag::EPOCH => Input::Epoch,
            tag::STARTED => Input::Started(pid(from)?),
            tag::ENDED => Input::Ended(pid(from)?),
            tag::SPACE => {
                let pid = pid(from)?;
                self.read_vmas(from)?;
                let vmas = &self.vmas;
                Input::Space { pid, vmas }
            }
            tag::SHARE => Input::Share {
                pid: pid(from)?,
                share: Some(Share {
                    group: from.number_u32()?,
                    guarantee: bytes(from)?,
                    weight: from.number_u32()?,
                }),
            },
            tag::NO_SHARE => Input::Share {
                pid: pid(from)?,
                share: None,
            },
            tag::MACHINE => machine(from)?,
            tag::NEAR => Input::Near {
                pid: pid(from)?,
                socket: known_socket(from.number()?)?,
            },
            tag::ROOM => Input::Room {
                place: (known_level(from.number()?)?, known_socket(from.number()?)?),
                free: bytes(from)?,
            },
            tag::BALLOON_WANTS => Input::BalloonWants(bytes(from)?),
            tag::THINNED => Input::Thinned(from.number_u32()?),
            tag::PAUSED => Input::Paused(true),
            tag::RESUMED => Input::Paused(false),
            tag::REFRESHED => Input::Refreshed,
            tag::SAMPLE => Input::Sample(self.read_sample(Pid(self.last.pid), 1, from)?),
            tag::SAMPLE_OF => {
                let (pid, weight) = (pid(from)?, from.number_u32()?);
                Input::Sample(self.read_sample(pid, weight, from)?)
            }
            tag::LOOKED => Input::Looked(Observation {
                pid: pid(from)?,
                block: Block(from.number()?),
                events: from.number_u32()?,
                exposure_ns: from.number()?,
                is_least: from.number()? != 0,
            }),
            tag::SAMPLES_END => Input::SamplesEnd {
                lost: from.number()?,
                rejected: from.number()?,
                is_repeat: from.number()? != 0,
            },
            tag::LOCATED => Input::Located(self.read_placements(from)?),
            tag::LOOK_UP_FAILED => Input::LookUpFailed,
            tag::NODES => {
                let mut facts = ByLevel::<NodeFacts>::default();
                for tier in &mut facts.0 {
                    (tier.free, tier.kept) = (bytes(from)?, bytes(from)?);
                    tier.latency_ns = Some(from.number_u32()?).filter(|&ns| ns > 0);
                }
                Input::Nodes(facts)
            }
            tag::MOVED => Input::Moved {
                took_ns: from.number()?,
                cpu_ns: from.number()?,
                placements: self.read_placements(from)?,
            },
            tag::MOVE_FAILED => Input::MoveFailed,
            tag::COLLAPSED => Input::Collapsed {
                took_ns: from.number()?,
                cpu_ns: from.number()?,
            },
            tag::RECLAIMED => Input::Reclaimed,
            _ => return self.request(tag, from).map(RecordedEvent::Request),
        };
        Ok(RecordedEvent::Input(input))
    }

    fn request(&mut self, tag: u8, from: &mut Bytes<'_>) -> Result<Request<'_>, Fault> {
        Ok(match tag {
            tag::REFRESH => Request::Refresh,
            tag::SAMPLES => {
                let most = from.number_u32()? as usize;
                self.wanted.clear();
                let mut last = 0;
                for _ in 0..from.count()? {
                    let pid = pid(from)?;
                    last = from.step(last)?;
                    self.wanted.push((pid, Block(last)));
                }
                let wanted = &self.wanted;
                Request::Samples { most, wanted }
            }
            tag::LOOK_UP => {
                let pid = pid(from)?;
                self.blocks.clear();
                let mut next = 0;
                for _ in 0..from.count()? {
                    let block = from.step(next)?;
                    self.blocks.push(Block(block));
                    next = block.wrapping_add(1);
                }
                let blocks = &self.blocks;
                Request::LookUp { pid, blocks }
            }
            tag::READ_NODES => Request::ReadNodes,
            tag::PROMOTE | tag::DEMOTE => {
                let pid = pid(from)?;
                let level = known_level(from.number()?)?;
                let blocks = self.read_relocations(pid, from)?;
                Request::Move {
                    pid,
                    level,
                    direction: match tag {
                        tag::PROMOTE => Direction::Promotion,
                        _ => Direction::Demotion,
                    },
                    blocks,
                }
            }
            tag::COLLAPSE => {
                let pid = pid(from)?;
                let blocks = self.read_relocations(pid, from)?;
                Request::Collapse { pid, blocks }
            }
            tag::RECLAIM => Request::Reclaim,
            tag::SLEEP => Request::Sleep {
                epochs: from.number_u32()?,
            },
            _ => return Err(Fault::Malformed("an event of an unknown kind")),
        })
    }

    fn read_sample(
        &mut self,
        pid: Pid,
        weight: u32,
        from: &mut Bytes<'_>,
    ) -> Result<Sample, Fault> {
        let addr = from.step(self.last.addr)?;
        self.last = LastSample { pid: pid.0, addr };
        let addr = GuestVirtAddr(addr);
        Ok(Sample { pid, addr, weight })
    }

    fn read_vmas(&mut self, from: &mut Bytes<'_>) -> Result<(), Fault> {
        self.vmas.clear();
        let mut end = 0;
        for _ in 0..from.count()? {
            let start = from.step(end)?;
            let len = from.number()?;
            let vma = start
                .checked_add(len)
                .and_then(|end| VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(end)))
                .ok_or(Fault::Malformed("a mapping that ends before it begins"))?;
            end = vma.end().0;
            self.vmas.push(vma);
        }
        Ok(())
    }

    fn read_relocations(&mut self, pid: Pid, from: &mut Bytes<'_>) -> Result<&[Relocation], Fault> {
        self.relocations.clear();
        let mut next = 0;
        for _ in 0..from.count()? {
            let (block, bytes) = (Block(from.step(next)?), bytes(from)?);
            self.relocations.push(Relocation { pid, block, bytes });
            next = block.0.wrapping_add(1);
        }
        Ok(&self.relocations)
    }

    fn read_placements(&mut self, from: &mut Bytes<'_>) -> Result<&[Spread], Fault> {
        self.placements.clear();
        for _ in 0..from.count()? {
            let number = from.number()?;
            let (socket, kind) = (number / KINDS, (number % KINDS) as u8);
            let mut by_level = in_one(kind);
            if kind == SPREAD {
                for part in &mut by_level.0 {
                    *part = bytes(from)?;
                }
            }
            self.placements.push(Spread {
                bytes: by_level,
                socket: known_socket(socket)?,
            });
        }
        Ok(&self.placements)
    }
}

fn machine(from: &mut Bytes<'_>) -> Result<Input<'static>, Fault> {
    let mut sizes = ByLevel::<ByteCount>::default();
    for size in &mut sizes.0 {
        *size = bytes(from)?;
    }
    let cpus = from.number_u32()?;
    Ok(Input::Machine { sizes, cpus })
}

fn pid(from: &mut Bytes<'_>) -> Result<Pid, Fault> {
    Ok(Pid(from.number_u32()?))
}

/// A tier by its number.
fn known_level(number: u64) -> Result<Level, Fault> {
    let level = usize::try_from(number).ok().and_then(Level::new);
    level.ok_or(Fault::Malformed("a tier that no machine has"))
}

/// A socket by its number.
fn known_socket(number: u64) -> Result<Socket, Fault> {
    match number < Socket::MAX.into() {
        true => Ok(Socket::new(number as usize)),
        false => Err(Fault::Malformed("a socket beyond the last one")),
    }
}

fn bytes(from: &mut Bytes<'_>) -> Result<ByteCount, Fault> {
    Ok(ByteCount(from.number()?))
}
