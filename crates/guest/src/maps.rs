//! A process's address space, as `/proc/PID/maps` tells it (proc(5)).

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use demeter_policy::{GuestVirtAddr, Pid, VirtRange};

/// Most mappings that are read of one process: twice the kernel's default `vm.max_map_count`.
pub const MAX_VMAS: usize = 1 << 17;

/// Most bytes that are read of one maps file.
const MAX_MAPS_BYTES: u64 = 32 << 20;

/// One mapping (virtual memory area) of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vma {
    /// The addresses that it covers.
    pub range: VirtRange,
    /// The process may read it.
    pub readable: bool,
    /// The process may write it.
    pub writable: bool,
    /// What backs it.
    pub kind: VmaKind,
}

/// What backs a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmaKind {
    /// Private anonymous memory, the heap included.
    Anonymous,
    /// Shared memory: shared anonymous, memfd, System V, /dev/shm.
    Shmem,
    /// A file, private or shared; hugetlbfs too.
    File,
    /// The main thread's stack.
    Stack,
    /// The kernel's own: vdso, vvar, vsyscall, uprobes.
    Special,
}

/// Why a process's mappings could not be read.
#[derive(Debug, thiserror::Error)]
pub enum MapsError {
    /// The process has ended.
    #[error("process {0} has gone")]
    Gone(Pid),
    /// The file is there, the system refused to read it.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The maps file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Reads `ROOT/proc/PID/maps`; see [`parse_maps`] for what the result promises.
pub fn read_maps(root: &Path, pid: Pid) -> Result<Vec<Vma>, MapsError> {
    let path = root.join(format!("proc/{pid}/maps"));
    let mut bytes = Vec::new();
    match File::open(&path).and_then(|file| file.take(MAX_MAPS_BYTES).read_to_end(&mut bytes)) {
        Ok(_) => Ok(parse_maps(&String::from_utf8_lossy(&bytes))),
        Err(error)
            if error.kind() == io::ErrorKind::NotFound
                || error.raw_os_error() == Some(libc::ESRCH) =>
        {
            Err(MapsError::Gone(pid))
        }
        Err(source) => Err(MapsError::Io { path, source }),
    }
}

/// The mappings in the text of a maps file: sorted, disjoint, at most [`MAX_VMAS`].
///
/// Lines that are malformed or overlap an earlier one are passed over: the kernel writes the
/// file page by page while the process goes on mapping.
pub fn parse_maps(text: &str) -> Vec<Vma> {
    let mut vmas: Vec<Vma> = Vec::new();
    for vma in text.lines().filter_map(parse_line) {
        if vmas.len() == MAX_VMAS {
            break;
        }
        let in_order = vmas
            .last()
            .is_none_or(|last| last.range.end() <= vma.range.start());
        if in_order {
            vmas.push(vma);
        }
    }
    vmas
}

/// `START-END PERMS OFFSET DEV INODE [PATH]`
fn parse_line(line: &str) -> Option<Vma> {
    let mut rest = line;
    let (start, end) = next_field(&mut rest)?.split_once('-')?;
    let perms = next_field(&mut rest)?.as_bytes();
    for _offset_dev_inode in 0..3 {
        next_field(&mut rest)?;
    }
    let &[read, write, _, sharing] = perms else {
        return None;
    };
    Some(Vma {
        range: VirtRange::new(address(start)?, address(end)?)?,
        readable: read == b'r',
        writable: write == b'w',
        kind: kind_of(rest.trim_start(), sharing == b's'),
    })
}

fn next_field<'a>(rest: &mut &'a str) -> Option<&'a str> {
    let text = rest.trim_start();
    let end = text.find(char::is_whitespace).unwrap_or(text.len());
    let (field, tail) = text.split_at(end);
    *rest = tail;
    (!field.is_empty()).then_some(field)
}

fn address(hex: &str) -> Option<GuestVirtAddr> {
    u64::from_str_radix(hex, 16).ok().map(GuestVirtAddr)
}

fn kind_of(path: &str, shared: bool) -> VmaKind {
    let is_shmem = path.starts_with("[anon_shmem:")
        || path.starts_with("/memfd:")
        || path.starts_with("/SYSV")
        || path.starts_with("/dev/shm/");
    match path {
        "" | "[heap]" => VmaKind::Anonymous,
        "[stack]" => VmaKind::Stack,
        _ if path.starts_with("[anon:") => VmaKind::Anonymous,
        // Shared anonymous memory shows as /dev/zero; a private mapping of it is anonymous.
        _ if path.starts_with("/dev/zero") && !shared => VmaKind::Anonymous,
        _ if path.starts_with("/dev/zero") || is_shmem => VmaKind::Shmem,
        _ if path.starts_with('[') => VmaKind::Special,
        _ => VmaKind::File,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SAMPLE: &str = "\
55d0c8a00000-55d0c8a02000 r--p 00000000 08:01 131 /usr/bin/cat
55d0c8a02000-55d0c8a03000 rw-p 00002000 08:01 131 /usr/bin/a name (deleted)
55d0c9000000-55d0c9021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0040000000 rw-p 00000000 00:00 0 
7f0040000000-7f0050000000 rw-s 00000000 00:01 1025                       /dev/zero (deleted)
7f0050000000-7f0060000000 rw-s 00000000 00:01 7 /memfd:guest ram (deleted)
7f0060000000-7f0061000000 rw-p 00000000 00:00 0 [anon:stack of a thread]
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
7ffd00030000-7ffd00032000 r-xp 00000000 00:00 0                          [vdso]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";

    #[test]
    fn every_kind_is_told_apart() {
        use VmaKind::*;
        let vmas = parse_maps(SAMPLE);
        let kinds: Vec<_> = vmas.iter().map(|vma| vma.kind).collect();
        assert_eq!(
            kinds,
            [
                File, File, Anonymous, Anonymous, Shmem, Shmem, Anonymous, Stack, Special, Special
            ]
        );
        assert_eq!(vmas[3].range.start(), GuestVirtAddr(0x7f00_0000_0000));
        assert_eq!(vmas[3].range.end(), GuestVirtAddr(0x7f00_4000_0000));
        assert!(vmas[0].readable && !vmas[0].writable);
        assert!(!vmas[9].readable);
    }

    #[test]
    fn malformed_and_overlapping_lines_are_passed_over() {
        let text = "\
nonsense
2000-1000 rw-p 0 00:00 0
1000-3000 rw-p 0 00:00 0
2000-4000 rw-p 0 00:00 0
4000-5000 rw 0 00:00 0
5000-6000 rw-p 0
6000-7000 rw-p 0 00:00 0";
        let starts: Vec<_> = parse_maps(text)
            .iter()
            .map(|vma| vma.range.start().0)
            .collect();
        assert_eq!(starts, [0x1000, 0x6000]);
    }

    #[test]
    fn own_maps_hold_an_own_variable() {
        let here = Box::new(0u8);
        let addr = GuestVirtAddr(&raw const *here as u64);
        let vmas = read_maps(Path::new("/"), Pid(std::process::id())).unwrap();
        let vma = vmas.iter().find(|vma| vma.range.contains(addr)).unwrap();
        assert_eq!(vma.kind, VmaKind::Anonymous);
        assert!(vma.readable && vma.writable);
    }

    #[test]
    fn a_gone_process_is_said_to_be_gone() {
        let root = tempfile::tempdir().unwrap();
        let error = read_maps(root.path(), Pid(7)).unwrap_err();
        assert!(matches!(error, MapsError::Gone(Pid(7))), "{error}");
    }

    proptest! {
        #[test]
        fn any_text_yields_sorted_disjoint_ranges(
            lines in prop::collection::vec(
                prop_oneof![
                    any::<String>(),
                    (any::<u16>(), any::<u16>())
                        .prop_map(|(a, b)| format!("{a:x}-{b:x} rw-p 0 0:0 0 [heap]")),
                ],
                0..40,
            )
        ) {
            let vmas = parse_maps(&lines.join("\n"));
            for pair in vmas.windows(2) {
                prop_assert!(pair[0].range.end() <= pair[1].range.start());
            }
        }
    }
}
