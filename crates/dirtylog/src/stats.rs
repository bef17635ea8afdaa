//! KVM's counters of a VM and of each virtual CPU (KVM_GET_STATS_FD, Linux 5.14).
//!
//! A header contains the offsets of descriptors and data, and a descriptor the name of its numbers. All values are
//! checked, and invalid entries are skipped.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::fs::FileExt;

use crate::error::Error;

/// `_IO(KVMIO, 0xce)` (linux/kvm.h).
const KVM_GET_STATS_FD: libc::Ioctl = 0xAECE;
/// Size of `struct kvm_stats_header`: six u32.
const HEADER_BYTES: usize = 24;
/// Size of `struct kvm_stats_desc` before the name.
const DESC_BYTES: usize = 16;
/// Maximum number of descriptors of a VM or virtual CPU; kernels have less than a hundred.
const COUNTERS_MAX: usize = 1024;
/// Maximum length of a name; the kernel uses 48 bytes.
const NAME_MAX: usize = 256;

/// The counters of one VM or virtual CPU.
pub struct Stats {
    file: File,
    /// Offset of each counter in the file.
    places: BTreeMap<String, u64>,
}

impl Stats {
    /// Opens the counters of a VM or virtual CPU.
    pub fn of(kvm: &impl AsRawFd) -> Result<Self, Error> {
        // SAFETY: the call takes no argument and accesses no memory of ours.
        let fd: RawFd = unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_GET_STATS_FD) };
        if fd < 0 {
            return Err(Error::last("open KVM's counters"));
        }
        // SAFETY: the kernel has just created this descriptor for us, and nothing else owns it.
        let file = unsafe { File::from_raw_fd(fd) };
        let places = places(&file).map_err(|source| Error::Call {
            what: "read which counters KVM has",
            source,
        })?;
        Ok(Self { file, places })
    }

    /// Adds the present values to `totals`.
    pub fn add_to(&self, totals: &mut Counters) {
        for (name, &place) in &self.places {
            if let Some(value) = number(&self.file, place) {
                let total = totals.entry(name.clone()).or_default();
                *total = total.wrapping_add(value);
            }
        }
    }
}

/// Counters by KVM's names.
pub type Counters = BTreeMap<String, u64>;

/// Offsets of the counters that consist of a single number.
fn places(file: &impl FileExt) -> io::Result<BTreeMap<String, u64>> {
    let mut header = [0; HEADER_BYTES];
    file.read_exact_at(&mut header, 0)?;
    let field = |index: usize| u32_at(&header, index * 4).unwrap_or(0);
    let (name_bytes, count) = (field(1) as usize, field(2) as usize);
    let (descs_at, data_at) = (u64::from(field(4)), u64::from(field(5)));
    if name_bytes > NAME_MAX || count > COUNTERS_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "their header makes no sense",
        ));
    }
    let each = DESC_BYTES + name_bytes;
    let mut descs = vec![0; each * count];
    file.read_exact_at(&mut descs, descs_at)?;
    let place = |desc: &[u8]| {
        // Histograms have several numbers.
        let one = u16_at(desc, 6)? == 1;
        let name = desc.get(DESC_BYTES..)?.split(|&byte| byte == 0).next()?;
        let name = str::from_utf8(name)
            .ok()
            .filter(|name| one && !name.is_empty())?;
        Some((name.to_owned(), data_at + u64::from(u32_at(desc, 8)?)))
    };
    Ok(descs.chunks_exact(each).filter_map(place).collect())
}

fn number(file: &impl FileExt, place: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, place).ok()?;
    Some(u64::from_ne_bytes(bytes))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    /// A file in the kernel's format: a header, descriptors with names of 16 bytes, data.
    fn file(counters: &[(&str, u16, u64)]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        let data_at = (HEADER_BYTES + counters.len() * (DESC_BYTES + 16)) as u32;
        let header = [
            0,
            16,
            counters.len() as u32,
            0,
            HEADER_BYTES as u32,
            data_at,
        ];
        let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
        for (index, (name, size, _)) in counters.iter().enumerate() {
            bytes.extend(0u32.to_ne_bytes());
            bytes.extend(0i16.to_ne_bytes());
            bytes.extend(size.to_ne_bytes());
            bytes.extend((index as u32 * 8).to_ne_bytes());
            bytes.extend(0u32.to_ne_bytes());
            let mut padded = [0; 16];
            padded[..name.len()].copy_from_slice(name.as_bytes());
            bytes.extend(padded);
        }
        bytes.extend(
            counters
                .iter()
                .flat_map(|(_, _, value)| value.to_ne_bytes()),
        );
        file.write_all(&bytes).unwrap();
        file
    }

    #[test]
    fn counters_are_read_by_name_and_add_up() {
        let file = file(&[("pf_taken", 1, 7), ("histogram", 5, 9), ("exits", 1, 3)]);
        let places = places(&file).unwrap();
        let stats = Stats { file, places };
        let mut totals = Counters::new();
        stats.add_to(&mut totals);
        stats.add_to(&mut totals);
        let expected = [("exits".to_owned(), 6), ("pf_taken".to_owned(), 14)];
        assert_eq!(totals, Counters::from(expected));
    }

    proptest! {
        /// Any file gives counters or an error.
        #[test]
        fn any_bytes_are_an_error_or_counters(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&bytes).unwrap();
            if let Ok(places) = places(&file) {
                prop_assert!(places.len() <= COUNTERS_MAX);
            }
        }

        /// Any descriptors after a valid header are decoded or skipped.
        #[test]
        fn any_descriptors_are_left_out_or_taken(descs in prop::collection::vec(any::<u8>(), 64)) {
            let mut file = tempfile::tempfile().unwrap();
            let header: [u32; 6] = [0, 16, 2, 0, HEADER_BYTES as u32, 0];
            let header: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
            file.write_all(&header).unwrap();
            file.write_all(&descs).unwrap();
            let places = places(&file).unwrap();
            let stats = Stats { file, places };
            stats.add_to(&mut Counters::new());
        }
    }
}
