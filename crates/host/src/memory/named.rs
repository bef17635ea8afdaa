//! Files that a process has mapped, found by their name in its maps.

use super::process::Mapping;
use crate::hypervisor::HostVirtAddr;
use crate::outside::FileId;

/// A named file that a process has mapped from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NamedFile {
    /// The file.
    pub file: FileId,
    /// Address of its first byte in the process.
    pub at: HostVirtAddr,
    /// Bytes that are mapped there contiguously.
    pub bytes: u64,
}

/// All mapped files of this name in a process; `maps` is the text of /proc/PID/maps.
pub(crate) fn named_files(maps: &str, name: &str) -> Vec<NamedFile> {
    let mut found: Vec<NamedFile> = vec![];
    for line in maps.lines() {
        let Some(mapping) = line.contains(name).then(|| Mapping::parse(line)).flatten() else {
            continue;
        };
        // The name follows address, rights, offset, device and inode.
        if line.split_ascii_whitespace().nth(5) != Some(name) || mapping.end <= mapping.start {
            continue;
        }
        let bytes = mapping.end - mapping.start;
        match found.last_mut() {
            // The kernel may split one mapping into several.
            Some(last)
                if last.file == mapping.file
                    && last.at.0.checked_add(last.bytes) == Some(mapping.start)
                    && last.bytes == mapping.offset =>
            {
                last.bytes += bytes;
            }
            _ if mapping.offset == 0 => found.push(NamedFile {
                file: mapping.file,
                at: HostVirtAddr(mapping.start),
                bytes,
            }),
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_keeps_in_pieces_is_one_file() {
        let maps = "\
7f0000000000-7f0000001000 rw-s 00000000 00:01 5 /memfd:ch_ram (deleted)
7f0000001000-7f0000004000 rw-s 00001000 00:01 5 /memfd:ch_ram (deleted)
7f0000004000-7f0000005000 rw-s 00000000 00:01 6 /memfd:ch_ram (deleted)
7f0000006000-7f0000007000 rw-s 00001000 00:01 6 /memfd:ch_ram (deleted)
7f0000008000-7f0000009000 rw-s 00000000 00:01 7 /memfd:ch_ram2 (deleted)
7f000000a000-7f000000b000 rw-p 00000000 00:00 0 [heap]
nonsense /memfd:ch_ram
";
        let found = named_files(maps, "/memfd:ch_ram");
        let found: Vec<_> = found
            .iter()
            .map(|of| (of.file.inode, of.at.0, of.bytes))
            .collect();
        let want = [(5, 0x7f00_0000_0000, 0x4000), (6, 0x7f00_0000_4000, 0x1000)];
        assert_eq!(found, want);
    }
}
