//! States that are saved as numbers.

/// The numbers are no engine's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("number {0} is not valid in an engine's state")]
pub struct NotAState(pub usize);

/// Reads a sequence of numbers.
#[derive(Debug)]
pub struct Numbers<'a> {
    all: &'a [u64],
    at: usize,
}

impl<'a> Numbers<'a> {
    /// A reader of all of these.
    pub fn new(all: &'a [u64]) -> Self {
        Self { all, at: 0 }
    }

    /// The next number, at most `most`.
    ///
    /// # Errors
    /// It is larger, or there is none.
    pub fn next(&mut self, most: u64) -> Result<u64, NotAState> {
        let number = self.all.get(self.at).copied();
        let number = number.filter(|&n| n <= most).ok_or(NotAState(self.at))?;
        self.at += 1;
        Ok(number)
    }

    /// The next number, of 32 bits.
    ///
    /// # Errors
    /// It is larger, or there is none.
    pub fn next_u32(&mut self) -> Result<u32, NotAState> {
        Ok(self.next(u32::MAX.into())? as u32)
    }

    /// The next number as the bits of a finite float.
    ///
    /// # Errors
    /// It is not finite, or there is none.
    pub fn number(&mut self) -> Result<f64, NotAState> {
        let number = f64::from_bits(self.next(u64::MAX)?);
        self.known(Some(number).filter(|n| n.is_finite()))
    }

    /// `value`, or an error at the last number if it is `None`.
    ///
    /// # Errors
    /// `value` is `None`.
    pub fn known<T>(&self, value: Option<T>) -> Result<T, NotAState> {
        value.ok_or(NotAState(self.at.saturating_sub(1)))
    }
}

/// A state that can be saved as numbers between two epochs.
pub trait Saved {
    /// Appends its state.
    fn save(&self, to: &mut Vec<u64>);

    /// Restores a saved state into a new value.
    ///
    /// # Errors
    /// [`Self::save`] cannot have written these numbers.
    fn restore(&mut self, from: &mut Numbers<'_>) -> Result<(), NotAState>;
}
