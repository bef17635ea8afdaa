//! What the emulator's plugin counted: cache misses, and those of them that fell in no tier.
//!
//! The guest can write to these counts too: a wrong one spoils its own run, no more.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::VmFault;

/// The shared file's name in a VM's folder.
pub const SHARED: &str = "shared";

/// A run in which more misses than one in so many fell in no tier is not valid.
const MISSES_PER_STRAY: u64 = 100;

// As in plugin/shared_page.h.
const CONTROL_BYTES: u64 = 4096;
const RING_BYTES: u64 = 64 + 4096 * 32;
const VCPUS_MAX: u64 = 16;
/// Offset of `misses` in a ring's header; `strays` follows.
const MISSES_AT: u64 = 24;

/// Fails when too many misses of the VM in `folder` fell in no tier.
pub fn check(folder: &Path) -> Result<(), VmFault> {
    let (misses, strays) = counts(&folder.join(SHARED)).map_err(VmFault::Counts)?;
    tracing::debug!(misses, strays, "cache misses");
    match strays > misses / MISSES_PER_STRAY {
        true => Err(VmFault::Strays { strays, misses }),
        false => Ok(()),
    }
}

/// Misses and strays of all vCPUs.
fn counts(shared: &Path) -> io::Result<(u64, u64)> {
    let file = File::open(shared)?;
    let mut sums = [0u64; 2];
    for vcpu in 0..VCPUS_MAX {
        for (index, sum) in sums.iter_mut().enumerate() {
            let mut count = [0; 8];
            let at = CONTROL_BYTES + vcpu * RING_BYTES + MISSES_AT + 8 * index as u64;
            file.read_exact_at(&mut count, at)?;
            *sum = sum.saturating_add(u64::from_le_bytes(count));
        }
    }
    Ok((sums[0], sums[1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM's folder with these misses and strays of its last vCPU.
    fn checked(misses: u64, strays: u64) -> Result<(), VmFault> {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join(SHARED)).unwrap();
        file.set_len(4 << 20).unwrap();
        let at = CONTROL_BYTES + (VCPUS_MAX - 1) * RING_BYTES + MISSES_AT;
        file.write_all_at(&misses.to_le_bytes(), at).unwrap();
        file.write_all_at(&strays.to_le_bytes(), at + 8).unwrap();
        check(folder.path())
    }

    #[test]
    fn one_stray_in_a_hundred_misses_is_borne() {
        checked(0, 0).unwrap();
        checked(100_000, 1000).unwrap();
        let fault = checked(100_000, 1001).unwrap_err();
        assert!(
            matches!(
                fault,
                VmFault::Strays {
                    strays: 1001,
                    misses: 100_000
                }
            ),
            "{fault}"
        );
    }

    #[test]
    fn a_plugin_that_left_nothing_is_named() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(check(folder.path()), Err(VmFault::Counts(_))));
    }

    #[test]
    fn figures_agree_with_the_header() {
        let header = include_str!("../../plugin/shared_page.h");
        for define in [
            format!("DEMETER_CONTROL_BYTES {CONTROL_BYTES}u"),
            "DEMETER_RING_HEADER_BYTES 64u".into(),
            "DEMETER_RECORD_BYTES 32u".into(),
            "DEMETER_RING_RECORDS 4096u".into(),
            format!("DEMETER_MAX_VCPUS {VCPUS_MAX}u"),
        ] {
            assert!(header.contains(&define), "{define}");
        }
        let ring = header.split("struct demeter_ring {").nth(1).unwrap();
        let place = |field: &str| {
            ring.lines()
                .filter(|line| line.trim_start().starts_with("uint64_t"))
                .position(|line| line.contains(&format!(" {field};")))
        };
        assert_eq!(place("misses"), Some(MISSES_AT as usize / 8));
        assert_eq!(place("strays"), Some(MISSES_AT as usize / 8 + 1));
    }
}
