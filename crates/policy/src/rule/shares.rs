//! Which group of processes may have how much of fast memory.
//!
//! Without shares the hottest memory has it. With shares fast memory is first divided between the groups
//! ([`divide_blocks`](crate::share::divide_blocks)): each wants the memory that it uses. A group that has less than its part is
//! due: it takes what a group above its part has, or what nobody uses, without being hotter. No group takes anything from
//! one that is within its part.

use std::collections::BTreeMap;

use crate::heat::{Estimate, Heat};
use crate::residency::CHUNK_BLOCKS;
use crate::share::divide_blocks;
use crate::{BLOCK_SIZE, Level, Pid, Share, Situation};

use super::unit::Unit;

/// Fast memory that a group has and uses, and its part of fast memory, bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Part {
    held: u64,
    part: u64,
}

/// Whether memory is used: at its rate in the shortest window, one event is expected in the time of the next longer one.
fn is_used(heat: &Heat, estimate: Estimate) -> bool {
    estimate.rate * heat.span_s(1) >= 1.0
}

impl Part {
    /// Whether a whole block is missing.
    fn is_short(&self) -> bool {
        self.held + BLOCK_SIZE <= self.part
    }

    fn is_over(&self) -> bool {
        self.held > self.part
    }
}

/// The parts of all groups; none where nobody has a share.
#[derive(Debug, Default)]
pub(super) struct Parts {
    groups: BTreeMap<u32, Part>,
    of: BTreeMap<Pid, u32>,
}

impl Parts {
    pub(super) fn new(situation: &Situation<'_>, heats: &[(Pid, &Heat)]) -> Self {
        if situation.shares.is_empty() {
            return Self::default();
        }
        let mut groups: BTreeMap<u32, (Share, u64, u64)> = BTreeMap::new();
        let mut of = BTreeMap::new();
        let mut in_fast = 0;
        let mut estimates = [Estimate::default(); CHUNK_BLOCKS];
        for &(pid, heat) in heats {
            let share = *situation.shares.get(&pid).unwrap_or(&Share::OTHERS);
            of.insert(pid, share.group);
            let (_, held, wants) = groups.entry(share.group).or_insert((share, 0, 0));
            for chunk in situation.residency.known_by_chunk(pid, Level::First) {
                heat.of_chunk(chunk.first).estimates(0, &mut estimates);
                for (known, estimate) in chunk.blocks().zip(&estimates) {
                    let placement = known.map(|k| k.placement()).unwrap_or_default();
                    in_fast += placement.fast.0;
                    if is_used(heat, *estimate) {
                        *held += placement.fast.0;
                        *wants += placement.total().0;
                    }
                }
            }
        }
        let room = &situation.room;
        let capacity = (in_fast + room.fast_free.0).saturating_sub(room.level().0);
        let wanted: Vec<(Share, u64)> = groups
            .values()
            .map(|&(share, _, wants)| (share, wants))
            .collect();
        let given = divide_blocks(capacity, &wanted);
        let part = |((group, (_, held, _)), part)| (group, Part { held, part });
        Self {
            groups: groups.into_iter().zip(given).map(part).collect(),
            of,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    fn of(&self, pid: Pid) -> Option<(u32, Part)> {
        let group = self.of.get(&pid)?;
        Some((*group, *self.groups.get(group)?))
    }

    /// Whether a process may take free fast memory.
    pub(super) fn may_fill(&self, pid: Pid) -> bool {
        self.is_empty()
            || self
                .of(pid)
                .is_some_and(|(_, group)| group.held < group.part)
    }

    /// Whether a unit's group is due what another one has beyond its part, or does not use.
    pub(super) fn is_due(&self, hot: &Unit<'_>, cold: &Unit<'_>) -> bool {
        let (Some((to, to_part)), Some((from, from_part))) = (self.of(hot.pid), self.of(cold.pid))
        else {
            return false;
        };
        let uses = |unit: &Unit<'_>| {
            let heat = unit.heat.whole();
            is_used(heat, heat.estimate(0, unit.block))
        };
        to != from && to_part.is_short() && (from_part.is_over() || !uses(cold)) && uses(hot)
    }

    /// Whether an exchange that pays takes nothing from a group within its part.
    pub(super) fn may_exchange(&self, hot: Pid, cold: Pid) -> bool {
        let (Some((to, _)), Some((from, from_part))) = (self.of(hot), self.of(cold)) else {
            return true;
        };
        to == from || from_part.is_over()
    }

    pub(super) fn promoted(&mut self, pid: Pid, bytes: u64) {
        self.change(pid, |group| group.held += bytes);
    }

    pub(super) fn demoted(&mut self, pid: Pid, bytes: u64) {
        self.change(pid, |group| group.held = group.held.saturating_sub(bytes));
    }

    fn change(&mut self, pid: Pid, by: impl FnOnce(&mut Part)) {
        let group = self
            .of
            .get(&pid)
            .and_then(|group| self.groups.get_mut(group));
        if let Some(group) = group {
            by(group);
        }
    }
}
