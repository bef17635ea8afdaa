//! Finds the file behind an address of another process, from /proc/PID/maps and fd.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use demeter_policy::{ByteCount, Pid};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::process::{PidfdGetfdFlags, geteuid, pidfd_getfd};

use crate::backing::FileOffset;
use crate::hypervisor::HostVirtAddr;
use crate::outside::{self, FileId, MayWait};
use crate::process::pidfd;

/// File and offset of a piece of a process's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapped {
    /// The file.
    pub file: FileId,
    /// Position in the file.
    pub offset: FileOffset,
}

/// Reason why a process's memory has no usable file.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// Its files in /proc cannot be read.
    #[error("cannot read {path}: {source}; run as root or as the user that QEMU runs as")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The process has not mapped the address.
    #[error(
        "process {pid} has nothing mapped at {:#x}; the QMP socket must be opened by QEMU itself (-qmp unix:PATH,server=on,wait=off)",
        addr.0
    )]
    NotMapped {
        /// The process that runs the VM.
        pid: Pid,
        /// The address in the process.
        addr: HostVirtAddr,
    },
    /// The mapping is private or has no file, so a hole would free nothing.
    #[error(
        "it is private memory of QEMU (process {0}); give its -object memory-backend-memfd or -file the option share=on"
    )]
    Private(Pid),
    /// The process may not write the file, so we must not punch it on its behalf.
    #[error("process {0} may only read it; give its -object memory-backend-* readonly=off")]
    ReadOnly(Pid),
    /// The process has no open descriptor of the mapped file.
    #[error("process {pid} has mapped {file} but has no open descriptor of it")]
    Closed {
        /// QEMU's process.
        pid: Pid,
        /// The file.
        file: FileId,
    },
    /// The process has more mappings than any VM needs.
    #[error("process {0} has more than {MAPPINGS_MAX} mappings, too many for a VM")]
    TooMany(Pid),
}

/// Maximum mappings of a process: four times Linux's default (vm.max_map_count).
const MAPPINGS_MAX: usize = 1 << 18;

/// Maximum number of descriptors that are searched.
pub(super) const DESCRIPTORS_MAX: usize = 1 << 16;

/// One line of /proc/PID/maps (proc(5)).
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) end: u64,
    shared: bool,
    writable: bool,
    pub(super) offset: u64,
    pub(super) file: FileId,
}

impl Mapping {
    pub(super) fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let rights = fields.next()?;
        let offset = fields.next()?;
        let (major, minor) = fields.next()?.split_once(':')?;
        let inode = fields.next()?.parse().ok()?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let number = |text| u32::from_str_radix(text, 16).ok();
        Some(Self {
            start: hex(start)?,
            end: hex(end)?,
            shared: rights.ends_with('s'),
            writable: rights.starts_with("rw"),
            offset: hex(offset)?,
            file: FileId {
                device: libc::makedev(number(major)?, number(minor)?),
                inode,
            },
        })
    }
}

/// A snapshot of a process's mappings.
#[derive(Debug)]
pub struct Maps {
    pid: Pid,
    text: String,
    /// Sorted by address, each with the position of its line in the text.
    mappings: Vec<(Mapping, usize)>,
}

impl Maps {
    /// Reads the mappings of a running process; `root` is the parent of /proc.
    pub(super) fn read(root: &Path, pid: Pid, wait: &MayWait) -> Result<Self, ProcessError> {
        let path = root.join(format!("proc/{pid}/maps"));
        let text = outside::text_of(&path, wait);
        let text = text.map_err(|source| ProcessError::Read { path, source })?;
        Self::parse(text, pid)
    }

    /// Parses the text of a maps file (proc(5)). Lines that are no mappings are skipped.
    ///
    /// # Errors
    /// If there are more mappings than a process may have.
    pub fn parse(text: String, pid: Pid) -> Result<Self, ProcessError> {
        let mut mappings: Vec<(Mapping, usize)> = vec![];
        let mut at = 0;
        for line in text.split_inclusive('\n') {
            let mapping = Mapping::parse(line);
            let end = mappings.last().map_or(0, |(last, _)| last.end);
            if let Some(mapping) = mapping.filter(|of| end <= of.start && of.start < of.end) {
                if mappings.len() == MAPPINGS_MAX {
                    return Err(ProcessError::TooMany(pid));
                }
                mappings.push((mapping, at));
            }
            at += line.len();
        }
        Ok(Self {
            pid,
            text,
            mappings,
        })
    }

    /// The file behind `[addr, addr + bytes)`. The kernel may split one mapping into several; they
    /// must be contiguous in one file.
    ///
    /// # Errors
    /// If any part is not shared, writable memory of one file.
    pub fn find(&self, addr: HostVirtAddr, bytes: ByteCount) -> Result<Mapped, ProcessError> {
        let pid = self.pid;
        let not_mapped = |addr| ProcessError::NotMapped {
            pid,
            addr: HostVirtAddr(addr),
        };
        let end = addr.0.checked_add(bytes.0);
        let end = end.ok_or_else(|| not_mapped(addr.0))?;
        let first = self.mappings.partition_point(|(of, _)| of.end <= addr.0);
        let mut found: Option<Mapped> = None;
        let mut at = addr.0;
        for (mapping, _) in &self.mappings[first..] {
            if at >= end || mapping.start > at {
                break;
            }
            if !mapping.shared || mapping.file.inode == 0 {
                return Err(ProcessError::Private(pid));
            }
            if !mapping.writable {
                return Err(ProcessError::ReadOnly(pid));
            }
            let here = mapping.offset.checked_add(at - mapping.start);
            let here = here.ok_or_else(|| not_mapped(at))?;
            let first = *found.get_or_insert(Mapped {
                file: mapping.file,
                offset: FileOffset(here),
            });
            if first.file != mapping.file || Some(here) != first.offset.0.checked_add(at - addr.0) {
                return Err(not_mapped(at));
            }
            at = mapping.end;
        }
        match found {
            Some(found) if at >= end => Ok(found),
            _ => Err(not_mapped(at)),
        }
    }

    /// The kernel's name of a mapped file; empty without one.
    fn name_of(&self, file: FileId) -> &str {
        let line = self.mappings.iter().find(|(of, _)| of.file == file);
        let line = line.and_then(|(_, at)| self.text[*at..].lines().next());
        // The name follows address, rights, offset, device and inode.
        let name = line.and_then(|line| line.splitn(6, ' ').nth(5));
        name.unwrap_or_default().trim_start()
    }
}

/// Reads memory of a process at `at`.
pub(super) fn read(
    root: &Path,
    pid: Pid,
    at: HostVirtAddr,
    into: &mut [u8],
    wait: &MayWait,
) -> io::Result<()> {
    let memory = outside::open(&root.join(format!("proc/{pid}/mem")), false, wait)?;
    memory.read_exact_at(into, at.0)
}

/// Duplicates the process's own descriptor of a mapped file that it may write (pidfd_getfd(2)). So
/// we can do nothing to the file that the process itself could not do.
///
/// Descriptors with the mapping's name are tried first. Other files of the process may lie on
/// storage that hangs, so they are touched only if needed.
pub(super) fn take(
    root: &Path,
    maps: &Maps,
    file: FileId,
    wait: &MayWait,
) -> Result<File, ProcessError> {
    let pid = maps.pid;
    let folder = root.join(format!("proc/{pid}/fd"));
    let error = |path: &Path| {
        let path = path.to_owned();
        |source| ProcessError::Read { path, source }
    };
    let process = pidfd(pid).map_err(error(&folder))?;
    let name = Path::new(maps.name_of(file));
    let mut descriptors =
        outside::entries_of(&folder, DESCRIPTORS_MAX, wait).map_err(error(&folder))?;
    descriptors
        .sort_by_cached_key(|path| outside::link_of(path, wait).is_ok_and(|target| target != name));
    let mut missing = ProcessError::Closed { pid, file };
    for path in descriptors {
        let number = path
            .file_name()
            .and_then(|name| name.to_str()?.parse().ok());
        let (Some(number), Ok(found)) = (number, outside::file_at(&path, wait)) else {
            // The descriptor may have been closed meanwhile.
            continue;
        };
        if found != file {
            continue;
        }
        let taken = match pidfd_getfd(&process, number, PidfdGetfdFlags::empty()) {
            Ok(taken) => File::from(taken),
            // Ubuntu forbids duplicating descriptors of other processes of the same user. Without
            // privileges we can open only files that this user may open anyway.
            Err(Errno::PERM) if !geteuid().is_root() => {
                outside::open(&path, true, wait).map_err(error(&path))?
            }
            Err(refused) => return Err(error(&path)(refused.into())),
        };
        // The descriptor may refer to another file by now.
        if !taken.metadata().is_ok_and(|meta| FileId::of(&meta) == file) {
            continue;
        }
        let flags = fcntl_getfl(&taken).map_err(|refused| error(&path)(refused.into()))?;
        if flags & OFlags::RWMODE == OFlags::RDWR {
            return Ok(taken);
        }
        missing = ProcessError::ReadOnly(pid);
    }
    Err(missing)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const WAIT: fn() -> MayWait = MayWait::in_a_test;

    const MAPS: &str = "\
7f0000000000-7f0040000000 rw-s 00000000 00:01 2061 /memfd:memory-backend-memfd (deleted)
7f0040000000-7f0050000000 rw-s 40000000 00:01 2061 /memfd:memory-backend-memfd (deleted)
7f0050000000-7f0060000000 rw-s 00000000 00:01 2062 /memfd:memory-backend-memfd (deleted)
7f0060000000-7f0070000000 rw-p 00000000 00:00 0
7f0070000000-7f0080000000 rw-p 00000000 08:01 77 /var/vm/memory
7f0080000000-7f0090000000 rw-s 00000000 00:01 2063 /a name with blanks
7f00a0000000-7f00b0000000 rw-s 20000000 00:01 2063 /a name with blanks
7f00c0000000-7f00d0000000 r--s 00000000 08:01 78 /etc/motd
7f00d0000000-7f00e0000000 -w-s 00000000 08:01 78 /etc/motd
nonsense
";

    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/9")).unwrap();
        fs::write(root.path().join("proc/9/maps"), MAPS).unwrap();
        root
    }

    #[test]
    fn memory_is_traced_to_file_and_offset() {
        let root = root();
        let maps = Maps::read(root.path(), Pid(9), &WAIT()).unwrap();
        let at = |addr, bytes| maps.find(HostVirtAddr(addr), ByteCount(bytes));
        let file = |inode| FileId {
            device: libc::makedev(0, 1),
            inode,
        };
        let found = at(0x7f00_1000_0000, 0x4000_0000).unwrap();
        assert_eq!(found.file, file(2061), "two pieces of one mapping");
        assert_eq!(found.offset, FileOffset(0x1000_0000));
        let found = at(0x7f00_a000_1000, 0x1000).unwrap();
        assert_eq!(found.offset, FileOffset(0x2000_1000));
        for (addr, bytes) in [
            (0x7f00_1000_0000, 0x4000_1000), // runs into another file
            (0x7f00_8000_0000, 0x3000_0000), // a gap
            (0x7f00_b000_0000, 0x1000),
            (0x7f00_a000_0000, 0x1000_1000),
            (0x1000, 0x1000),
            (u64::MAX, 0x1000),
        ] {
            let found = at(addr, bytes);
            assert!(
                matches!(found, Err(ProcessError::NotMapped { .. })),
                "{addr:#x}: {found:?}"
            );
        }
        for addr in [0x7f00_6000_0000, 0x7f00_7000_0000] {
            assert!(matches!(at(addr, 0x1000), Err(ProcessError::Private(_))));
        }
        for addr in [0x7f00_c000_0000, 0x7f00_d000_0000] {
            assert!(matches!(at(addr, 0x1000), Err(ProcessError::ReadOnly(_))));
        }
        let said = Maps::read(root.path(), Pid(8), &WAIT()).unwrap_err();
        assert!(said.to_string().contains("proc/8/maps"), "{said}");
    }

    #[test]
    fn a_name_of_any_bytes_hides_no_mapping() {
        let root = root();
        let path = root.path().join("proc/9/maps");
        let named = b"1000-2000 rw-s 00000000 08:01 78 /\xff\xfe\n";
        fs::write(&path, [&named[..], MAPS.as_bytes()].concat()).unwrap();
        let addr = HostVirtAddr(0x7f00_1000_0000);
        let maps = Maps::read(root.path(), Pid(9), &WAIT()).unwrap();
        let found = maps.find(addr, ByteCount(0x1000)).unwrap();
        assert_eq!(found.offset, FileOffset(0x1000_0000));
    }

    #[test]
    fn an_offset_beyond_all_offsets_is_no_memory() {
        let maps = "1000-3000 rw-s fffffffffffff000 00:01 7 /memfd:m\n";
        let maps = Maps::parse(maps.into(), Pid(9)).unwrap();
        let at = |addr, bytes| maps.find(HostVirtAddr(addr), ByteCount(bytes));
        assert!(at(0x1000, 0x1000).is_ok());
        assert!(matches!(
            at(0x2000, 0x1000),
            Err(ProcessError::NotMapped { .. })
        ));
    }

    #[test]
    fn a_file_is_taken_by_what_it_is_and_only_with_the_right_to_write() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        let file = File::options()
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        let id = FileId::of(&file.metadata().unwrap());
        let own = Pid(std::process::id());
        let text = format!(
            "1000-2000 rw-s 00000000 {:x}:{:x} {} {}\n",
            libc::major(id.device),
            libc::minor(id.device),
            id.inode,
            path.display()
        );
        let maps = Maps::parse(text, own).unwrap();
        assert_eq!(maps.name_of(id), path.to_str().unwrap());
        let taken = || take(Path::new("/"), &maps, id, &WAIT());
        assert!(
            matches!(taken(), Err(ProcessError::ReadOnly(_))),
            "mapping it takes both rights"
        );
        drop(file);
        // Root could open the file for writing, but its read-only holder must not have it written.
        let reader = File::open(&path).unwrap();
        assert!(matches!(taken(), Err(ProcessError::ReadOnly(_))));
        let both = File::options().read(true).write(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let opened = taken().unwrap();
        assert_eq!(FileId::of(&opened.metadata().unwrap()), id);
        drop((reader, both, opened));
        assert!(matches!(taken(), Err(ProcessError::Closed { .. })));
    }

    #[test]
    fn many_mappings_are_read_once_and_bounded() {
        let line = |i: u64| {
            let start = i * 0x2000;
            format!(
                "{start:x}-{:x} rw-s {start:x} 00:01 7 /memfd:m\n",
                start + 0x1000
            )
        };
        let all: String = (0..64_000).map(line).collect();
        let begun = std::time::Instant::now();
        let maps = Maps::parse(all, Pid(9)).unwrap();
        for i in (0..64_000).step_by(16) {
            let found = maps
                .find(HostVirtAddr(i * 0x2000), ByteCount(0x1000))
                .unwrap();
            assert_eq!(found.offset, FileOffset(i * 0x2000));
        }
        // Parsing the list again for each of 4000 searches would take minutes.
        assert!(begun.elapsed() < std::time::Duration::from_secs(10));
        let all: String = (0..=MAPPINGS_MAX as u64).map(line).collect();
        let said = Maps::parse(all, Pid(9)).unwrap_err();
        assert!(said.to_string().contains("mappings"), "{said}");
    }
}
