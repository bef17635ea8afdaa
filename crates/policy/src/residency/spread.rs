//! Where one block lies, and where it came from.

use serde::{Deserialize, Serialize};

use crate::{ByLevel, ByteCount, Level, Socket, TierBytes};

/// Where one block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Spread {
    /// Its bytes in each tier. Absent memory counts in none.
    pub bytes: ByLevel<ByteCount>,
    /// The socket nearest to the node with most of its bytes.
    pub socket: Socket,
}

impl Spread {
    /// The bytes on both sides of the boundary below a tier: in that tier, and in all slower ones. Memory in a still
    /// faster tier is not counted.
    pub fn at(&self, level: Level) -> TierBytes {
        let slower = level.slower().map(|slower| self.bytes.get(slower).0);
        TierBytes {
            fast: *self.bytes.get(level),
            slow: ByteCount(slower.fold(0, u64::saturating_add)),
        }
    }

    /// Resident bytes.
    pub fn resident(&self) -> ByteCount {
        ByteCount(
            self.bytes
                .0
                .iter()
                .fold(0, |sum, b| b.0.saturating_add(sum)),
        )
    }

    /// The tier, of `among`, with most of its bytes; if equal the second, else the faster.
    pub(crate) fn main_of(&self, among: impl Fn(Level) -> bool) -> Level {
        let bytes = |level: Level| self.bytes.get(level).0;
        let others = [Level::Third, Level::Fourth, Level::First];
        let mut main = Level::Second;
        for level in others.into_iter().filter(|&level| among(level)) {
            if bytes(level) > bytes(main) || !among(main) {
                main = level;
            }
        }
        main
    }

    /// The tier with most of its bytes.
    pub(crate) fn main(&self) -> Level {
        self.main_of(|_| true)
    }
}

impl From<ByLevel<ByteCount>> for Spread {
    /// On a machine of one socket.
    fn from(bytes: ByLevel<ByteCount>) -> Self {
        let socket = Socket::default();
        Self { bytes, socket }
    }
}

impl From<TierBytes> for Spread {
    /// On a machine of one socket and two tiers.
    fn from(TierBytes { fast, slow }: TierBytes) -> Self {
        ByLevel([fast, slow, ByteCount(0), ByteCount(0)]).into()
    }
}

/// A moved block: its first tier and its present one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Away {
    /// The tier in which it was first found.
    pub home: Level,
    /// The tier to which it was moved.
    pub now: Level,
}
