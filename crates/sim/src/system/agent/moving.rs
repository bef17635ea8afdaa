//! Carries the engine's moves out, batch by batch.

use demeter_policy::engine::{Direction, Engine, Input, Misuse, Request, Strategy};
use demeter_policy::{Block, Level, NodeId, Pid, Relocation, Rooms, Spread};

use super::SimulatedAgent;
use super::nodes::{id, place};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::memory::NodeIndex;

impl<S: Strategy> SimulatedAgent<S> {
    /// Executes the next batch of the plan, or lets reclaim free memory for it.
    pub(super) fn move_on(
        &mut self,
        engine: &mut Engine<S>,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) -> Result<(), Misuse> {
        if engine.request() == Request::ReadNodes {
            self.tell_nodes(engine, Cause::Migrate, guest, actor)?;
        }
        match engine.request() {
            Request::Move {
                pid,
                level,
                direction,
                blocks,
            } => {
                let began_ps = actor.now_ps();
                let way = (level, direction);
                let targets = self.targets(way, pid, blocks, guest, actor);
                let choosing_ps = actor.now_ps() - began_ps;
                let to_move: Vec<_> = blocks.iter().zip(targets).collect();
                let part = to_move.len().div_ceil(engine.movers());
                let mut parts = to_move.chunks(part.max(1));
                let mut places = Vec::with_capacity(blocks.len());
                let moving_ps = actor.side_by_side(parts.len(), |actor| {
                    let part = parts.next().unwrap_or_default().iter();
                    let move_one = |&(r, to): &(&Relocation, NodeIndex)| {
                        self.move_block(r.block, way, to, guest, actor)
                    };
                    places.extend(part.map(move_one));
                });
                let moved = Input::Moved {
                    placements: &places,
                    took_ns: (self.took_ns)(actor.now_ps() - began_ps),
                    cpu_ns: (self.took_ns)(choosing_ps + moving_ps),
                };
                self.push(engine, moved)
            }
            Request::Collapse { blocks, .. } => {
                let began_ps = actor.now_ps();
                for r in blocks {
                    guest.collapse(r.block, actor);
                }
                let took_ns = (self.took_ns)(actor.now_ps() - began_ps);
                let cpu_ns = took_ns;
                self.push(engine, Input::Collapsed { took_ns, cpu_ns })
            }
            Request::Reclaim => {
                guest.reclaim(actor, u64::MAX);
                self.push(engine, Input::Reclaimed)
            }
            _ => Ok(()),
        }
    }

    /// The target node of each block, as the live agent chooses it.
    fn targets(
        &self,
        (level, direction): (Level, Direction),
        pid: Pid,
        batch: &[Relocation],
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) -> Vec<NodeIndex> {
        let placer = &self.settings.placer;
        let nodes = guest.all_nodes();
        let mut rooms: Rooms = nodes.map(|node| (id(node), guest.usable(node))).collect();
        let near = NodeId(guest.socket_of(pid) as u32);
        let has_choice = placer.has_choice();
        if has_choice {
            let look_ups = match direction {
                Direction::Promotion => 0,
                Direction::Demotion => batch.len() as u64,
            };
            let look_ups_ps = look_ups * actor.costs.agent_lookup_ps;
            actor.charge(
                Cause::Migrate,
                actor.costs.agent_read_nodes_ps + look_ups_ps,
            );
        }
        let mut to = |r: &Relocation| {
            let node = match direction {
                Direction::Promotion => placer.promote(level, near, r.bytes, &mut rooms),
                Direction::Demotion => {
                    let from = has_choice
                        .then(|| guest.main_node(r.block, level))
                        .flatten();
                    placer.demote(level, from.map_or(near, id), r.bytes, &mut rooms)
                }
            };
            NodeIndex(node.0 as usize)
        };
        batch.iter().map(&mut to).collect()
    }

    /// Moves a block over the boundary below a tier; returns its new placement.
    fn move_block(
        &self,
        block: Block,
        (level, direction): (Level, Direction),
        to: NodeIndex,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) -> Spread {
        if direction == Direction::Promotion && guest.wants_huge() {
            guest.collapse(block, actor);
        }
        let pages = guest.pages_across(block, level, direction);
        if self.traits.moves_singly {
            guest.migrate_singly(&pages, to, actor);
        } else {
            guest.migrate_pages(&pages, to, actor);
        }
        place(block, guest)
    }
}
