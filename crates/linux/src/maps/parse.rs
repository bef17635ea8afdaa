//! Parses a maps file line by line.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use demeter_policy::{GuestVirtAddr, Pid, VirtRange};

use super::{Backing, MapsError, ObjectId, Vma, VmaKind};

/// Maximum number of bytes read from a maps file: about 400,000 mappings.
const MAPS_BYTES_MAX: u64 = 32 << 20;

/// Longest line: addresses and a path of PATH_MAX bytes.
pub(super) const LINE_BYTES_MAX: u64 = 8 << 10;

pub(super) fn for_each_of(root: &Path, pid: Pid, each: impl FnMut(Vma)) -> Result<(), MapsError> {
    let path = root.join(format!("proc/{pid}/maps"));
    let read = File::open(&path).and_then(|file| {
        let file = BufReader::with_capacity(64 << 10, file.take(MAPS_BYTES_MAX));
        for_each(file, each)
    });
    read.map_err(|source| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => MapsError::Gone(pid),
        _ => MapsError::Io { path, source },
    })
}

/// Calls `each` with the mappings in a maps file, in order, without overlap.
///
/// At most one line of text is in memory. Paths may contain any bytes; only their beginnings matter.
pub(super) fn for_each(mut maps: impl BufRead, mut each: impl FnMut(Vma)) -> io::Result<()> {
    let mut end = GuestVirtAddr(0);
    let mut line = vec![];
    loop {
        line.clear();
        let mut bounded = maps.by_ref().take(LINE_BYTES_MAX);
        if bounded.read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        let vma = parse_line(String::from_utf8_lossy(&line).trim_end());
        if let Some(vma) = vma.filter(|vma| end <= vma.range.start()) {
            end = vma.range.end();
            each(vma);
        }
    }
}

/// `START-END PERMS OFFSET DEV INODE [PATH]`
fn parse_line(line: &str) -> Option<Vma> {
    let mut rest = line;
    let (start, end) = next_field(&mut rest)?.split_once('-')?;
    let perms = next_field(&mut rest)?.as_bytes();
    let [offset, device, inode] = [(); 3].map(|()| next_field(&mut rest));
    let &[read, write, _, sharing] = perms else {
        return None;
    };
    let (path, is_shared, writable) = (rest.trim_start(), sharing == b's', write == b'w');
    let kind = kind_of(path, is_shared);
    let backing = backing(offset?, device?, inode?, path.starts_with("/SYSV"));
    // Pages of a private mapping become private when the process writes them.
    let is_common = matches!(kind, VmaKind::Shmem | VmaKind::File) && (is_shared || !writable);
    Some(Vma {
        range: VirtRange::new(address(start)?, address(end)?)?,
        readable: read == b'r',
        writable,
        kind,
        backing: backing.filter(|_| is_common),
    })
}

fn backing(offset: &str, device: &str, inode: &str, is_sysv: bool) -> Option<Backing> {
    let hex = |digits| u32::from_str_radix(digits, 16).ok();
    let (major, minor) = device.split_once(':')?;
    let inode = inode.parse().ok().filter(|&inode| inode > 0)?;
    Some(Backing {
        object: ObjectId {
            device: (hex(major)?, hex(minor)?),
            inode,
            is_sysv,
        },
        offset: u64::from_str_radix(offset, 16).ok()?,
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

/// Path prefixes without page cache: devices, registers of PCI devices, MAP_HUGETLB, and memory that the kernel itself
/// cannot read.
const NO_FILES: [&str; 5] = ["/dev/", "/sys/", "/proc/", "/anon_hugepage", "/secretmem"];

fn kind_of(path: &str, shared: bool) -> VmaKind {
    let is_shmem = path.starts_with("[anon_shmem:")
        || path.starts_with("/memfd:")
        || path.starts_with("/SYSV")
        || path.starts_with("/dev/shm/");
    match path {
        "" | "[heap]" => VmaKind::Anonymous,
        "[stack]" => VmaKind::Stack,
        _ if path.starts_with("[anon:") => VmaKind::Anonymous,
        // Shared anonymous memory appears as /dev/zero; a private mapping of it is anonymous.
        _ if path.starts_with("/dev/zero") && !shared => VmaKind::Anonymous,
        _ if path.starts_with("/dev/zero") || is_shmem => VmaKind::Shmem,
        _ if NO_FILES.iter().any(|start| path.starts_with(start)) => VmaKind::Special,
        // Such as "[vdso]" and "anon_inode:[perf_event]".
        _ if !path.starts_with('/') => VmaKind::Special,
        _ => VmaKind::File,
    }
}
