//! The sockets of a machine: which one each process runs on, and how much memory is free near each.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{ByteCount, Level, Pid};

/// A CPU socket, by the order of the nodes with CPUs. There are [`Socket::MAX`] at most: further ones count as the last.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(from = "u8")]
pub struct Socket(u8);

impl From<u8> for Socket {
    fn from(number: u8) -> Self {
        Self::new(number.into())
    }
}

impl Socket {
    /// The bound on sockets, that of nodes.
    pub const MAX: u8 = 64;

    /// The socket of this number, counted from 0.
    pub fn new(number: usize) -> Self {
        Self(number.min(usize::from(Self::MAX) - 1) as u8)
    }

    /// Its number.
    pub fn number(self) -> u8 {
        self.0
    }
}

/// A machine's sockets: empty if there is one only.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Sockets {
    /// The socket that each process runs on; the first if there is none.
    pub(crate) of: BTreeMap<Pid, Socket>,
    /// Free memory that moves may use, of each tier near each socket.
    pub(crate) rooms: BTreeMap<(Level, Socket), ByteCount>,
}

impl Sockets {
    /// The socket that a process runs on.
    pub fn of(&self, pid: Pid) -> Socket {
        self.of.get(&pid).copied().unwrap_or_default()
    }

    /// Takes note of a tier's free memory near a socket.
    pub(crate) fn set_room(&mut self, place: (Level, Socket), free: ByteCount) {
        self.rooms.insert(place, free);
    }

    /// Free memory of a tier near each socket.
    pub fn rooms_of(&self, level: Level) -> Rooms {
        let rooms = self.rooms.iter().filter(|((of, _), _)| *of == level);
        Rooms(rooms.map(|(&(_, socket), room)| (socket, room.0)).collect())
    }
}

/// Free memory of each tier near each socket, by its nodes. Nothing where all are near the first socket: there is no choice.
pub fn rooms_by_socket(
    nodes: impl IntoIterator<Item = (Level, Socket, ByteCount)>,
) -> BTreeMap<(Level, Socket), ByteCount> {
    let mut rooms: BTreeMap<_, ByteCount> = BTreeMap::new();
    for (level, socket, free) in nodes {
        let sum = rooms.entry((level, socket)).or_default();
        sum.0 = sum.0.saturating_add(free.0);
    }
    let is_first = |&(_, socket): &(Level, Socket)| socket == Socket::default();
    match rooms.keys().all(is_first) {
        true => BTreeMap::new(),
        false => rooms,
    }
}

/// Free memory of one tier near each socket, bytes. Unknown sockets are absent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rooms(BTreeMap<Socket, u64>);

impl Rooms {
    /// Whether memory fits near a socket, as far as is known.
    pub fn fits(&self, socket: Socket, bytes: u64) -> bool {
        self.0.get(&socket).is_none_or(|&room| room >= bytes)
    }

    /// Takes note that memory near a socket was taken.
    pub fn take(&mut self, socket: Socket, bytes: u64) {
        if let Some(room) = self.0.get_mut(&socket) {
            *room = room.saturating_sub(bytes);
        }
    }

    /// Takes note that memory near a socket was freed.
    pub fn give(&mut self, socket: Socket, bytes: u64) {
        if let Some(room) = self.0.get_mut(&socket) {
            *room = room.saturating_add(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rooms_are_summed_by_tier_and_socket() {
        let [one, two] = [0, 1].map(Socket::new);
        let node = |level, socket, free| (level, socket, ByteCount(free));
        let rooms = rooms_by_socket([
            node(Level::First, one, 1),
            node(Level::First, two, 2),
            node(Level::First, two, 4),
            node(Level::Second, one, 8),
        ]);
        let sums: Vec<u64> = rooms.values().map(|room| room.0).collect();
        assert_eq!(sums, [1, 6, 8]);
        assert!(rooms_by_socket([node(Level::First, one, 1)]).is_empty());
    }
}
