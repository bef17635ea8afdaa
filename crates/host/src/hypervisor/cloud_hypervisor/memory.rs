//! Finds the guest's memory in a Cloud Hypervisor process: memfds named `ch_ram`, one for each
//! region (create_anonymous_file in Cloud Hypervisor's vmm/src/memory_manager.rs).

use std::io;
use std::path::Path;

use demeter_policy::{ByteCount, Pid};

use super::info::Region;
use crate::hypervisor::Mapping;
use crate::memory::{NamedFile, named_files};
use crate::outside::{self, MayWait};

/// Name of such a file in /proc/PID/maps.
const NAME: &str = "/memfd:ch_ram";

/// All such files of a process.
pub(super) fn files(root: &Path, pid: Pid, wait: &MayWait) -> io::Result<Vec<NamedFile>> {
    let path = root.join(format!("proc/{pid}/maps"));
    let maps = outside::text_of(&path, wait).map_err(|error| {
        let why = format!("cannot read {}: {error}; run as root", path.display());
        io::Error::new(error.kind(), why)
    })?;
    Ok(named_files(&maps, NAME))
}

/// Address of each region in the process: that of the file with the same size. The error is the
/// reason why the match is uncertain.
pub(super) fn places(regions: &[Region], files: &[NamedFile]) -> Result<Vec<Mapping>, String> {
    let place = |region: &Region| {
        let bytes = region.guest.len();
        let alike = regions.iter().filter(|other| other.guest.len() == bytes);
        let mut found = files.iter().filter(|file| ByteCount(file.bytes) == bytes);
        match (alike.count(), found.next(), found.next()) {
            (1, Some(file), None) => Ok(Mapping {
                guest: region.guest,
                host: file.at,
            }),
            (1, None, _) => Err(format!(
                "its process has no memory of {bytes}, as {} should be; is it private? Give its memory zone \
                 shared=on",
                region.guest
            )),
            _ => Err(format!(
                "two runs of its memory have {bytes} and cannot be distinguished; give its memory \
                 zones sizes of which no two are alike, below and above 3 GiB"
            )),
        }
    };
    regions.iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use demeter_policy::{GuestPhysAddr, MIB, PhysRange};

    use super::*;
    use crate::hypervisor::HostVirtAddr;
    use crate::outside::FileId;

    #[test]
    fn what_is_not_certain_is_not_guessed() {
        let region = |zone, start, bytes| {
            let guest = PhysRange::new(GuestPhysAddr(start), ByteCount(bytes)).unwrap();
            Region { zone, guest }
        };
        let file = |inode, bytes| NamedFile {
            file: FileId { device: 1, inode },
            at: HostVirtAddr(inode << 32),
            bytes,
        };
        let regions = [region(0, 0, MIB), region(1, MIB, 2 * MIB)];
        let found = places(
            &regions,
            &[file(7, 2 * MIB), file(9, MIB), file(8, 3 * MIB)],
        )
        .unwrap();
        let hosts: Vec<_> = found.iter().map(|of| of.host.0 >> 32).collect();
        assert_eq!(hosts, [9, 7]);
        for (regions, files, want) in [
            (&regions[..], vec![file(7, MIB)], "shared=on"),
            (
                &regions,
                vec![file(7, MIB), file(8, MIB), file(9, 2 * MIB)],
                "no two are alike",
            ),
            (
                &[region(0, 0, MIB), region(1, MIB, MIB)],
                vec![file(7, MIB), file(8, MIB)],
                "no two are alike",
            ),
            (
                &[region(0, 0, MIB), region(1, MIB, MIB)],
                vec![file(7, MIB)],
                "no two are alike",
            ),
        ] {
            let said = places(regions, &files).unwrap_err();
            assert!(said.contains(want), "{said}");
        }
    }
}
