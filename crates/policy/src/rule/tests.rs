mod collapse;
mod exchanges;
mod machine;
mod machines;
mod properties;
mod shares;
mod sockets;
mod tokens;

use std::collections::BTreeMap;

use super::*;
use crate::engine::conformance::HARDWARE;
use crate::{
    Block, FillThreshold, Heat, MoveBudget, Pid, Plan, ResidencyMap, Room, Share, Situation,
    Socket, Sockets, Spread, TierBytes, VirtRange,
};

const FIRST: u64 = 1 << 20;

fn blocks(n: u64) -> ByteCount {
    ByteCount(n * BLOCK_SIZE)
}

/// A machine with several processes, whose blocks have any places and events.
#[derive(Debug, Clone)]
struct World {
    heats: Vec<(Pid, Heat)>,
    residency: ResidencyMap,
    shares: BTreeMap<Pid, Share>,
    sockets: Sockets,
    room: Room,
    rule: Rule,
    epoch: u32,
    collapses: bool,
}

fn place(in_fast: bool) -> TierBytes {
    TierBytes {
        fast: blocks(u64::from(in_fast)),
        slow: blocks(u64::from(!in_fast)),
    }
}

impl World {
    /// Processes with a pid, blocks in fast memory and blocks in slow memory each.
    fn new(processes: &[(u32, u64, u64)], fast_free: u64) -> Self {
        let mut world = Self {
            heats: vec![],
            residency: ResidencyMap::default(),
            shares: BTreeMap::new(),
            sockets: Sockets::default(),
            room: Room {
                fast_free: blocks(fast_free),
                fast_reserve: ByteCount(0),
                fast_missing: ByteCount(0),
                fast_low: ByteCount(0),
                slow_free: blocks(1 << 20),
                batch: blocks(1 << 20),
            },
            rule: Rule::new(HARDWARE),
            epoch: 0,
            collapses: false,
        };
        for &(pid, fast, slow) in processes {
            world.add(Pid(pid), fast + slow, |b| place(b < fast).into());
        }
        world
    }

    /// Adds a process, whose blocks lie at these places.
    fn add(&mut self, pid: Pid, blocks: u64, place: impl Fn(u64) -> Spread) {
        let mut heat = Heat::default();
        let (start, end) = (Block(FIRST).start(), Block(FIRST + blocks).start());
        heat.set_space(&[VirtRange::new(start, end).unwrap()]);
        for b in 0..blocks {
            self.residency.set(pid, Block(FIRST + b), place(b));
        }
        self.heats.push((pid, heat));
    }

    /// An epoch in which each block has as many samples as `events` says.
    fn epoch(&mut self, events: impl Fn(Pid, u64) -> u32) -> Plan {
        self.epoch += 1;
        let mut rate = 0.0;
        for (pid, heat) in &mut self.heats {
            for (block, _) in self.residency.all(*pid) {
                let events = events(*pid, block.0 - FIRST);
                heat.add(block, events);
                self.rule
                    .saw(self.residency.away_of(*pid, block), events, None);
            }
            heat.end_epoch(self.epoch, 0.5, usize::MAX);
            rate += heat.rate(0);
        }
        self.rule.end_epoch(&EpochEnd {
            epoch: self.epoch,
            elapsed_s: 0.5,
            is_repeat: false,
            away: self.residency.away(),
            rate,
        });
        self.plan()
    }

    fn plan(&mut self) -> Plan {
        let heats: Vec<_> = self.heats.iter().map(|(pid, heat)| (*pid, heat)).collect();
        let situation = Situation {
            ranking: &[],
            residency: &self.residency,
            shares: &self.shares,
            sockets: &self.sockets,
            level: Level::First,
            planned: &[],
            room: self.room,
            fill: FillThreshold(0.0),
            budget: MoveBudget::NONE,
            balloon_waits: false,
            epoch: self.epoch,
            epoch_ms: 500,
            collapses: self.collapses,
        };
        plan(&mut self.rule, &situation, &heats)
    }

    /// Carries a plan out at the price of hardware.
    fn apply(&mut self, plan: &Plan) {
        let both = [
            (&plan.demotions, Direction::Demotion),
            (&plan.promotions, Direction::Promotion),
        ];
        for (relocations, direction) in both {
            for r in relocations {
                let to_fast = direction == Direction::Promotion;
                let way = (Level::First, direction);
                let below = self.residency.get(r.pid, r.block).unwrap();
                let below = match direction {
                    Direction::Promotion => below,
                    Direction::Demotion => place(false).into(),
                };
                let heat = &self.heats.iter().find(|(pid, _)| *pid == r.pid).unwrap().1;
                self.rule.crossed(heat, r.block, way, &below);
                self.residency
                    .moved(r.pid, r.block, way, place(to_fast).into());
                let free = &mut self.room.fast_free.0;
                *free = if to_fast {
                    *free - r.bytes.0
                } else {
                    *free + r.bytes.0
                };
                self.rule.moved(direction, r.bytes, 700_000, false);
            }
        }
    }

    /// Carries collapses out, which take `took_ns` each.
    fn collapse(&mut self, plan: &Plan, took_ns: u64) {
        for r in &plan.collapses {
            self.residency.collapsed(r.pid, r.block);
            self.rule.spent(took_ns);
        }
    }

    fn in_fast(&self, pid: u32) -> u64 {
        let known = self.residency.all(Pid(pid));
        known
            .iter()
            .filter(|(_, known)| known.placement().fast.0 > 0)
            .count() as u64
    }
}
