//! CRC-32 (IEEE 802.3), a byte at a time by a table.

const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            // The polynomial, lowest bit first.
            crc = (crc >> 1) ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
}

/// The checksum of the parts, one after the other.
pub(super) fn checksum(parts: &[&[u8]]) -> u32 {
    let bytes = parts.iter().copied().flatten();
    !bytes.fold(!0, |crc, byte| {
        (crc >> 8) ^ TABLE[usize::from(crc as u8 ^ byte)]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standards_check_value() {
        assert_eq!(checksum(&[b"123456789"]), 0xcbf4_3926);
        assert_eq!(checksum(&[b"1234", b"", b"56789"]), 0xcbf4_3926);
    }
}
