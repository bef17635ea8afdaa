//! Sizes in human notation: `800MiB`.

use std::fmt;
use std::str::FromStr;

/// A number of bytes given as a whole number of KiB, MiB or GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size {
    /// The number of bytes.
    pub bytes: u64,
}

/// Units, largest first.
const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// The reason that a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The unit is missing or unknown.
    #[error("needs a unit: KiB, MiB or GiB, as in 800MiB")]
    Unit,
    /// The part before the unit is not an integer.
    #[error("needs a whole number before the unit, as in 800MiB")]
    Number,
    /// The number of bytes exceeds 64 bits.
    #[error("is too large")]
    TooLarge,
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let (number, unit_bytes) = UNITS
            .iter()
            .find_map(|&(unit, bytes)| Some((text.strip_suffix(unit)?, bytes)))
            .ok_or(SizeError::Unit)?;
        if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
            return Err(SizeError::Number);
        }
        let count: u64 = number.parse().map_err(|_| SizeError::TooLarge)?;
        let bytes = count.checked_mul(unit_bytes).ok_or(SizeError::TooLarge)?;
        if bytes > isize::MAX as u64 {
            return Err(SizeError::TooLarge);
        }
        Ok(Self { bytes })
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = UNITS
            .iter()
            .find(|(_, bytes)| self.bytes >= *bytes && self.bytes.is_multiple_of(*bytes));
        match whole {
            Some((unit, bytes)) => write!(f, "{}{unit}", self.bytes / bytes),
            None => write!(f, "{} bytes", self.bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units_are_binary_and_required() {
        assert_eq!("800MiB".parse(), Ok(Size { bytes: 800 << 20 }));
        assert_eq!("1GiB".parse(), Ok(Size { bytes: 1 << 30 }));
        assert_eq!("4KiB".parse(), Ok(Size { bytes: 4096 }));
        for bad in ["800", "800MB", "800M", "", "MiBs"] {
            assert_eq!(bad.parse::<Size>(), Err(SizeError::Unit), "{bad}");
        }
        for bad in ["MiB", "-1MiB", "+1MiB", "1.5GiB", " 1MiB"] {
            assert_eq!(bad.parse::<Size>(), Err(SizeError::Number), "{bad}");
        }
        for bad in ["99999999999999999999MiB", "17179869184GiB", "8589934592GiB"] {
            assert_eq!(bad.parse::<Size>(), Err(SizeError::TooLarge), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn what_is_shown_reads_back(kib in 1u64..1 << 40) {
            let size = Size { bytes: kib << 10 };
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }
    }
}
