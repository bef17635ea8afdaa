//! Assigns colours to systems.

use std::collections::BTreeSet;

use demeter_outcome::RunResult;

use crate::draw::lines::SYSTEMS_MAX;
use crate::draw::palette;

/// The systems of a page, each with its class.
pub(crate) struct Legend<'a>(pub Vec<(&'a str, palette::Class)>);

impl<'a> Legend<'a> {
    /// All systems of a result and its cases, in order; at most twelve.
    pub(crate) fn of(result: &'a RunResult) -> Self {
        Self::first(SYSTEMS_MAX, result)
    }

    /// The first `most` systems.
    pub(crate) fn first(most: usize, result: &'a RunResult) -> Self {
        let mut seen = BTreeSet::new();
        let cases = result.cases.iter().flat_map(|case| &case.systems);
        let names: Vec<&str> = result
            .systems
            .iter()
            .chain(cases)
            .map(|system| system.name.as_str())
            .filter(|name| seen.insert(*name))
            .take(most)
            .collect();
        let classes = palette::systems(names.iter().copied());
        Self(names.into_iter().zip(classes).collect())
    }
}
