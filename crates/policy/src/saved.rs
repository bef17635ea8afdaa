//! Bounds of saved states: what a type alone does not rule out.

use serde::{Deserialize, Deserializer, de::Error};

use crate::{ByLevel, ByteCount};

/// More memory than any machine has. Sums of amounts up to this cannot overflow.
pub(crate) const BYTES_MAX: u64 = 1 << 56;

/// The data are no engine's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not possible in an engine's state")]
pub struct NotAState(pub(crate) &'static str);

/// `Ok` if a condition holds for a part of the state.
pub(crate) fn check(part: &'static str, is_possible: bool) -> Result<(), NotAState> {
    is_possible.then_some(()).ok_or(NotAState(part))
}

/// Numbers, alone or in arrays.
pub(crate) trait Numbers {
    fn are_finite(&self) -> bool;
}

impl Numbers for f64 {
    fn are_finite(&self) -> bool {
        self.is_finite()
    }
}

impl<T: Numbers, const N: usize> Numbers for [T; N] {
    fn are_finite(&self) -> bool {
        self.iter().all(T::are_finite)
    }
}

impl<T: Numbers> Numbers for ByLevel<T> {
    fn are_finite(&self) -> bool {
        self.0.are_finite()
    }
}

/// Deserializes finite numbers.
pub(crate) fn finite<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Numbers,
{
    let numbers = T::deserialize(from)?;
    match numbers.are_finite() {
        true => Ok(numbers),
        false => Err(D::Error::custom("a number is not finite")),
    }
}

/// Whether amounts of memory are less than any machine has.
pub(crate) fn are_bounded<'a>(bytes: impl IntoIterator<Item = &'a ByteCount>) -> bool {
    bytes.into_iter().all(|bytes| bytes.0 <= BYTES_MAX)
}
