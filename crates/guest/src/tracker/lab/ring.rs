//! The layout of the lab's shared memory; every field is checked.
//!
//! The constants are those of `crates/lab/plugin/shared_page.h`; a test compares them.

use demeter_policy::{GuestPhysAddr, GuestVirtAddr};

pub(super) const MAGIC: u32 = 0x3152_5444;
pub(super) const VERSION: u32 = 1;
pub(super) const CONTROL_BYTES: usize = 4096;
pub(super) const RING_HEADER_BYTES: usize = 64;
pub(super) const RECORD_BYTES: usize = 32;
pub(super) const MAX_VCPUS: u32 = 16;
/// Maximum number of records in a ring: 16 MiB of them.
pub(super) const MAX_RING_RECORDS: u32 = 1 << 19;

/// Offsets in the control page.
pub(super) mod control {
    pub const PERIOD: usize = 20;
    pub const THRESHOLD_NS: usize = 24;
    /// Number of bytes that [`super::Layout::parse`] reads.
    pub const BYTES: usize = 32;
}

/// Offsets in a ring's header.
pub(super) mod header {
    pub const HEAD: usize = 0;
    pub const TAIL: usize = 8;
    pub const DROPPED: usize = 16;
}

/// The positions of the rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Number of rings, 1 to 16.
    pub vcpus: u32,
    /// Records in each, a power of two.
    pub ring_records: u32,
}

impl Layout {
    /// Checks the control page of a memory of `len` bytes; needs its first 32 bytes.
    ///
    /// The error names the wrong field.
    pub fn parse(control: &[u8], len: u64) -> Result<Self, String> {
        let field = |index: usize| {
            let bytes = control.get(index * 4..index * 4 + 4);
            let bytes: Option<[u8; 4]> = bytes.and_then(|bytes| bytes.try_into().ok());
            bytes
                .map(u32::from_le_bytes)
                .ok_or("the control page is cut short")
        };
        let (magic, version) = (field(0)?, field(1)?);
        let layout = Self {
            vcpus: field(2)?,
            ring_records: field(3)?,
        };
        if magic != MAGIC {
            return Err(format!("magic is {magic:#x}, not {MAGIC:#x}"));
        }
        if version != VERSION {
            return Err(format!("version is {version}, this reader knows {VERSION}"));
        }
        if !(1..=MAX_VCPUS).contains(&layout.vcpus) {
            return Err(format!("{} vCPUs, expected 1 to {MAX_VCPUS}", layout.vcpus));
        }
        if !layout.ring_records.is_power_of_two() || layout.ring_records > MAX_RING_RECORDS {
            return Err(format!("{} records per ring", layout.ring_records));
        }
        if layout.bytes() as u64 > len {
            return Err(format!(
                "{} bytes of rings in {len} bytes of memory",
                layout.bytes()
            ));
        }
        Ok(layout)
    }

    /// Size of the control page and all rings.
    pub fn bytes(&self) -> usize {
        self.ring(self.vcpus)
    }

    /// Offset of a ring's header.
    pub(super) fn ring(&self, vcpu: u32) -> usize {
        let ring_bytes = RING_HEADER_BYTES + self.ring_records as usize * RECORD_BYTES;
        CONTROL_BYTES + vcpu as usize * ring_bytes
    }
}

/// A sampled load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Virtual address of the load.
    pub gva: GuestVirtAddr,
    /// Guest-physical address of the load.
    pub gpa: GuestPhysAddr,
}

/// Splits `bytes` into 32-byte records. `None` is a record that no user program caused: its address is null or the
/// kernel's.
pub fn records(bytes: &[u8]) -> impl Iterator<Item = Option<Record>> {
    bytes.chunks_exact(RECORD_BYTES).map(|bytes| {
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[index * 8..index * 8 + 8]);
            u64::from_le_bytes(word)
        };
        let record = Record {
            gva: GuestVirtAddr(word(0)),
            gpa: GuestPhysAddr(word(1)),
        };
        crate::tracker::is_user_address(record.gva).then_some(record)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn control(fields: [u32; 4]) -> Vec<u8> {
        let mut bytes: Vec<u8> = fields
            .iter()
            .flat_map(|field| field.to_le_bytes())
            .collect();
        bytes.resize(control::BYTES, 0);
        bytes
    }

    #[test]
    fn figures_agree_with_the_header() {
        let header = include_str!("../../../../lab/plugin/shared_page.h");
        let defined = |name: &str| {
            let line = header
                .lines()
                .find(|line| line.split_whitespace().nth(1) == Some(name))
                .unwrap_or_else(|| panic!("{name} is not defined"));
            let value = line
                .split_whitespace()
                .nth(2)
                .unwrap()
                .trim_end_matches('u');
            value
                .strip_prefix("0x")
                .map_or_else(|| value.parse(), |hex| u32::from_str_radix(hex, 16))
                .unwrap()
        };
        assert_eq!(defined("DEMETER_MAGIC"), MAGIC);
        assert_eq!(defined("DEMETER_VERSION"), VERSION);
        assert_eq!(defined("DEMETER_CONTROL_BYTES"), CONTROL_BYTES as u32);
        assert_eq!(
            defined("DEMETER_RING_HEADER_BYTES"),
            RING_HEADER_BYTES as u32
        );
        assert_eq!(defined("DEMETER_RECORD_BYTES"), RECORD_BYTES as u32);
        assert_eq!(defined("DEMETER_MAX_VCPUS"), MAX_VCPUS);
        assert!(defined("DEMETER_RING_RECORDS") <= MAX_RING_RECORDS);
        // Offsets of the fields: 32-bit fields in the control page, 64-bit fields in a ring's header.
        let place = |text: &str, field: &str| {
            text.lines()
                .filter(|line| line.trim_start().starts_with("uint"))
                .position(|line| line.contains(&format!(" {field};")))
                .unwrap_or_else(|| panic!("no field {field}"))
        };
        let page = header.split("struct demeter_control {").nth(1).unwrap();
        assert_eq!(place(page, "period") * 4, control::PERIOD);
        assert_eq!(place(page, "threshold_ns") * 4, control::THRESHOLD_NS);
        let ring = header.split("struct demeter_ring {").nth(1).unwrap();
        assert_eq!(place(ring, "head") * 8, header::HEAD);
        assert_eq!(place(ring, "tail") * 8, header::TAIL);
        assert_eq!(place(ring, "dropped") * 8, header::DROPPED);
    }

    #[test]
    fn each_wrong_field_is_named() {
        let len = 1 << 30;
        let wrong = |fields, len| Layout::parse(&control(fields), len).unwrap_err();
        assert!(Layout::parse(&control([MAGIC, 1, 2, 4096]), len).is_ok());
        assert!(wrong([1, 1, 2, 4096], len).contains("magic"));
        assert!(wrong([MAGIC, 9, 2, 4096], len).contains("version"));
        assert!(wrong([MAGIC, 1, 0, 4096], len).contains("vCPUs"));
        assert!(wrong([MAGIC, 1, 17, 4096], len).contains("vCPUs"));
        assert!(wrong([MAGIC, 1, 2, 0], len).contains("records"));
        assert!(wrong([MAGIC, 1, 2, 4095], len).contains("records"));
        assert!(wrong([MAGIC, 1, 2, 1 << 31], len).contains("records"));
        assert!(wrong([MAGIC, 1, 2, 4096], 100_000).contains("memory"));
        assert!(Layout::parse(&[], len).is_err());
    }

    #[test]
    fn implausible_records_are_rejected() {
        let bytes: Vec<u8> = [
            [0x7000_0010, 0x9010, 1, 0],
            [0, 0, 1, 0],
            [0xffff_8000_0000_0000, 0, 1, 0],
        ]
        .iter()
        .flatten()
        .flat_map(|word: &u64| word.to_le_bytes())
        .collect();
        let found: Vec<_> = records(&bytes).collect();
        let first = Record {
            gva: GuestVirtAddr(0x7000_0010),
            gpa: GuestPhysAddr(0x9010),
        };
        assert_eq!(found, [Some(first), None, None]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..300), len: u64) {
            if let Ok(layout) = Layout::parse(&bytes, len) {
                prop_assert!(layout.bytes() as u64 <= len);
            }
            prop_assert_eq!(records(&bytes).count(), bytes.len() / RECORD_BYTES);
        }
    }
}
