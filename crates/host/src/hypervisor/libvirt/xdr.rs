//! XDR (RFC 4506), the part that libvirt's protocol needs. Decoding is total.

/// Maximum length of a text or list.
pub(crate) const LENGTH_MAX: usize = 4 << 20;

/// Encodes values one after another.
#[derive(Debug, Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(crate) fn i32(self, value: i32) -> Self {
        self.u32(value.cast_unsigned())
    }

    /// Bytes of a fixed length, a multiple of four.
    pub(crate) fn fixed(mut self, bytes: &[u8]) -> Self {
        debug_assert!(bytes.len().is_multiple_of(4));
        self.0.extend(bytes);
        self
    }

    /// A text, at most as long as 32 bits can count.
    pub(crate) fn text(mut self, text: &str) -> Self {
        self = self.u32(text.len() as u32);
        self.0.extend(text.as_bytes());
        let padding = text.len().next_multiple_of(4) - text.len();
        self.0.extend(&[0; 3][..padding]);
        self
    }
}

/// Error: a value is truncated, too long or no text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a message does not match its type")]
pub(crate) struct Malformed;

/// Decodes values from the front.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        let (value, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = rest;
        Ok(u32::from_be_bytes(*value))
    }

    pub(crate) fn i32(&mut self) -> Result<i32, Malformed> {
        Ok(self.u32()?.cast_signed())
    }

    pub(crate) fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*bytes)
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, Malformed> {
        let length = self.u32()? as usize;
        if length > LENGTH_MAX {
            return Err(Malformed);
        }
        let (bytes, rest) = self
            .0
            .split_at_checked(length.next_multiple_of(4))
            .ok_or(Malformed)?;
        self.0 = rest;
        std::str::from_utf8(&bytes[..length]).map_err(|_| Malformed)
    }

    /// An optional text.
    pub(crate) fn optional_text(&mut self) -> Result<Option<&'a str>, Malformed> {
        match self.u32()? {
            0 => Ok(None),
            _ => self.text().map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(number in any::<u32>(), text in "\\PC{0,20}", more in "\\PC{0,20}") {
            let bytes = Writer::default().u32(number).text(&text).fixed(&[7; 16]).text(&more).0;
            prop_assert!(bytes.len().is_multiple_of(4));
            let mut reader = Reader(&bytes);
            prop_assert_eq!(reader.u32(), Ok(number));
            prop_assert_eq!(reader.text(), Ok(&*text));
            prop_assert_eq!(reader.fixed(), Ok([7; 16]));
            prop_assert_eq!(reader.text(), Ok(&*more));
            prop_assert_eq!(reader.u32(), Err(Malformed));
        }

        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let _ = Reader(&bytes).text();
            let _ = Reader(&bytes).optional_text();
        }
    }
}
