//! Counts of the emulator's plugin: cache misses, misses outside both tiers, time in which the host did not run the VM,
//! and loads of each block.
//!
//! The guest can also write these counts. A false count only spoils its own run.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::VmFault;

/// Name of the shared file in a VM's folder.
pub const SHARED: &str = "shared";

/// A run is invalid if more than one in this many misses is outside both tiers.
const MISSES_PER_STRAY: u64 = 100;

// Values of plugin/shared_page.h.
const CONTROL_BYTES: u64 = 4096;
const RING_BYTES: u64 = 64 + 4096 * 32;
const VCPUS_MAX: u64 = 16;
/// Offsets in a ring's header.
const MISSES_AT: u64 = 24;
const STRAYS_AT: u64 = 32;
const LAG_NS_AT: u64 = 40;
/// Counts of loads, one for each block.
const LOADS_AT: u64 = CONTROL_BYTES + VCPUS_MAX * RING_BYTES;
const LOADS_BLOCKS: usize = 65536;

/// Fails if too many misses of the VM in `folder` were outside both tiers.
pub fn check(folder: &Path) -> Result<(), VmFault> {
    let [misses, strays] = [MISSES_AT, STRAYS_AT].map(|at| sum(folder, at));
    let (misses, strays) = (misses?, strays?);
    tracing::debug!(misses, strays, "cache misses");
    match strays > misses / MISSES_PER_STRAY {
        true => Err(VmFault::Strays { strays, misses }),
        false => Ok(()),
    }
}

/// Seconds in which the host did not run the VM's vCPUs. `folder` is the VM's folder. Halted vCPUs do not count. It is
/// the sum over all vCPUs, since slow memory became slow.
pub fn lag_s(folder: &Path) -> Result<f64, VmFault> {
    Ok(sum(folder, LAG_NS_AT)? as f64 / 1e9)
}

/// Loads of user code that missed the caches unpredicted, as CSV: a line for each block of 2 MiB that has some. Blocks are
/// numbered by their virtual address, modulo 65536. `None` if the emulator does not count them.
pub fn loads(folder: &Path) -> Result<Option<String>, VmFault> {
    let mut bytes = vec![0; LOADS_BLOCKS * 8];
    File::open(folder.join(SHARED))
        .and_then(|file| file.read_exact_at(&mut bytes, LOADS_AT))
        .map_err(VmFault::Counts)?;
    let (counts, _) = bytes.as_chunks::<8>();
    let lines: String = counts
        .iter()
        .map(|count| u64::from_le_bytes(*count))
        .enumerate()
        .filter(|(_, count)| *count > 0)
        .map(|(block, count)| format!("{block},{count}\n"))
        .collect();
    Ok((!lines.is_empty()).then(|| format!("block,loads\n{lines}")))
}

/// A count, summed over all vCPUs.
fn sum(folder: &Path, at: u64) -> Result<u64, VmFault> {
    let of_vcpu = |file: &File, vcpu: u64| -> io::Result<u64> {
        let mut count = [0; 8];
        file.read_exact_at(&mut count, CONTROL_BYTES + vcpu * RING_BYTES + at)?;
        Ok(u64::from_le_bytes(count))
    };
    let file = File::open(folder.join(SHARED)).map_err(VmFault::Counts)?;
    let counts = (0..VCPUS_MAX).map(|vcpu| of_vcpu(&file, vcpu));
    let sum = counts.reduce(|sum, count| Ok(sum?.saturating_add(count?)));
    sum.unwrap_or(Ok(0)).map_err(VmFault::Counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM's folder in which the last vCPU has these misses and strays.
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
    fn lag_is_that_of_all_vcpus() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join(SHARED)).unwrap();
        file.set_len(4 << 20).unwrap();
        for (vcpu, ns) in [(0, 250_000_000u64), (VCPUS_MAX - 1, 1_000_000_000)] {
            let at = CONTROL_BYTES + vcpu * RING_BYTES + LAG_NS_AT;
            file.write_all_at(&ns.to_le_bytes(), at).unwrap();
        }
        assert_eq!(lag_s(folder.path()).unwrap(), 1.25);
    }

    #[test]
    fn blocks_with_loads_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join(SHARED)).unwrap();
        file.set_len(4 << 20).unwrap();
        assert_eq!(loads(folder.path()).unwrap(), None);
        for (block, count) in [(3, 7u64), (LOADS_BLOCKS as u64 - 1, 1 << 40)] {
            file.write_all_at(&count.to_le_bytes(), LOADS_AT + block * 8)
                .unwrap();
        }
        let text = "block,loads\n3,7\n65535,1099511627776\n";
        assert_eq!(loads(folder.path()).unwrap().as_deref(), Some(text));
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
            "DEMETER_LOADS_BLOCK_SHIFT 21 ".into(),
            format!("DEMETER_LOADS_BLOCKS {LOADS_BLOCKS}u"),
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
        for (name, at) in [
            ("misses", MISSES_AT),
            ("strays", STRAYS_AT),
            ("lag_ns", LAG_NS_AT),
        ] {
            assert_eq!(place(name), Some(at as usize / 8), "{name}");
        }
    }
}
