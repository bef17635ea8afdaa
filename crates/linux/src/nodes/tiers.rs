//! Tiers as sets of nodes.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use demeter_policy::{LEVELS, Level, NodeId};
use serde::{Deserialize, Serialize};

/// Maximum number of tiers.
pub const TIERS_MAX: usize = LEVELS;

/// Maximum number of nodes.
pub const NODES_MAX: usize = 64;

/// The nodes of each tier, the fastest tier first.
///
/// There are two to [`TIERS_MAX`] tiers, each with at least one node, and each node is in one tier. In text, slashes
/// separate tiers and commas separate nodes: `0,1/2,3`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Tiers(Vec<Vec<NodeId>>);

/// The fast and the slow node where two are managed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// The first node of the fastest tier.
    pub fast: NodeId,
    /// The largest node of the slower tiers.
    pub slow: NodeId,
}

impl From<Pair> for Tiers {
    fn from(pair: Pair) -> Self {
        Self(vec![vec![pair.fast], vec![pair.slow]])
    }
}

/// An error in a list of tiers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TiersError {
    /// The text is no list of node numbers.
    #[error("`{0}` is not a node's number; give nodes by tier, the fastest first, such as 0,1/2,3")]
    NotANode(String),
    /// There are too few or too many tiers.
    #[error("{0} tier(s) are named; give two to {TIERS_MAX}, the fastest first, such as 0,1/2,3")]
    Count(usize),
    /// There are too many nodes.
    #[error("{0} nodes are more than {NODES_MAX}")]
    TooMany(usize),
    /// A node is listed twice.
    #[error("node {0} is named twice; give each node one tier")]
    Twice(NodeId),
}

impl Tiers {
    /// Tiers of these nodes, the fastest first.
    ///
    /// # Errors
    /// There are too few or too many, or a node is in two of them.
    pub fn new(tiers: Vec<Vec<NodeId>>) -> Result<Self, TiersError> {
        let nodes: usize = tiers.iter().map(Vec::len).sum();
        if !(2..=TIERS_MAX).contains(&tiers.len()) || tiers.iter().any(Vec::is_empty) {
            return Err(TiersError::Count(
                tiers.iter().filter(|tier| !tier.is_empty()).count(),
            ));
        }
        if nodes > NODES_MAX {
            return Err(TiersError::TooMany(nodes));
        }
        let mut seen = BTreeSet::new();
        match tiers.iter().flatten().find(|&&node| !seen.insert(node)) {
            Some(&twice) => Err(TiersError::Twice(twice)),
            None => Ok(Self(tiers)),
        }
    }

    /// Number of tiers.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The nodes of each tier, the fastest first.
    pub fn iter(&self) -> impl Iterator<Item = &[NodeId]> {
        self.0.iter().map(Vec::as_slice)
    }

    /// The nodes of the fastest tier.
    pub fn fastest(&self) -> &[NodeId] {
        &self.0[0]
    }

    /// The nodes of all slower tiers, the faster ones first.
    pub fn slower(&self) -> impl Iterator<Item = NodeId> {
        self.0[1..].iter().flatten().copied()
    }

    /// All nodes, the faster ones first.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.0.iter().flatten().copied()
    }

    /// A node's tier.
    pub fn of(&self, node: NodeId) -> Option<Level> {
        let mut tiers = Level::ALL.into_iter().zip(&self.0);
        tiers
            .find(|(_, tier)| tier.contains(&node))
            .map(|(level, _)| level)
    }

    /// The nodes of a tier; empty if there is no such tier.
    pub fn at(&self, level: Level) -> &[NodeId] {
        self.0.get(level.index()).map_or(&[], Vec::as_slice)
    }

    /// The slowest tier.
    pub fn slowest(&self) -> Level {
        Level::new(self.count() - 1).unwrap_or(Level::Fourth)
    }
}

impl FromStr for Tiers {
    type Err = TiersError;

    fn from_str(text: &str) -> Result<Self, TiersError> {
        let node = |word: &str| {
            let number = word.trim().parse();
            number
                .map(NodeId)
                .map_err(|_| TiersError::NotANode(word.trim().into()))
        };
        let tier = |part: &str| part.split(',').map(node).collect();
        Self::new(text.split('/').map(tier).collect::<Result<_, _>>()?)
    }
}

impl TryFrom<String> for Tiers {
    type Error = TiersError;

    fn try_from(text: String) -> Result<Self, TiersError> {
        text.parse()
    }
}

impl From<Tiers> for String {
    fn from(tiers: Tiers) -> Self {
        tiers.to_string()
    }
}

impl fmt::Display for Tiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tier = |tier: &Vec<NodeId>| {
            let nodes: Vec<String> = tier.iter().map(NodeId::to_string).collect();
            nodes.join(",")
        };
        let tiers: Vec<String> = self.0.iter().map(tier).collect();
        f.write_str(&tiers.join("/"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn tiers_are_read_and_written() {
        let tiers: Tiers = "0, 1/2,3".parse().unwrap();
        assert_eq!(tiers.to_string(), "0,1/2,3");
        assert_eq!(tiers.of(NodeId(3)), Some(Level::Second));
        assert_eq!(tiers.of(NodeId(4)), None);
    }

    #[test]
    fn what_makes_no_tiers_is_refused_in_a_line() {
        let many: Vec<String> = (0..65).map(|node| node.to_string()).collect();
        for (text, want) in [
            ("0,1/1", "node 1 is named twice"),
            ("0,1", "1 tier(s) are named; give two to 4"),
            ("0/1/2/3/4", "5 tier(s)"),
            ("0//1", "`` is not a node's number"),
            ("0/x", "`x` is not a node's number"),
            ("0/-1", "`-1` is not"),
            (
                &format!("{}/99", many.join(",")),
                "66 nodes are more than 64",
            ),
        ] {
            let error = text.parse::<Tiers>().unwrap_err().to_string();
            assert!(error.starts_with(want), "{text}: {error}");
            assert_eq!(error.lines().count(), 1);
        }
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "[0-9,/ x-]{0,40}") {
            if let Ok(tiers) = text.parse::<Tiers>() {
                prop_assert_eq!(tiers.to_string().parse::<Tiers>(), Ok(tiers));
            }
        }
    }
}
