//! A process's address space, as `/proc/PID/maps` tells it (proc(5)).

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use demeter_policy::{BLOCK_SIZE, GuestVirtAddr, Pid, VirtRange};

/// Most ranges that are kept of one process: the largest. A program may have 65,530 mappings
/// (`vm.max_map_count`), and 64 such programs must not make the agent grow.
pub const RANGES_MAX: usize = 4096;

/// Most bytes that are read of one maps file: about 400,000 mappings.
const MAPS_BYTES_MAX: u64 = 32 << 20;

/// Longest line that is kept: addresses and a path of PATH_MAX bytes.
const LINE_BYTES_MAX: u64 = 8 << 10;

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
    /// A file, private or shared: the page cache, and what a process wrote of its own. Shared memory of a tmpfs
    /// other than /dev/shm passes for one.
    File,
    /// The main thread's stack.
    Stack,
    /// What no page can be moved of: the kernel's own (vdso, vvar, vsyscall, uprobes), devices, huge pages that
    /// were reserved.
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

/// Memory of a process that may be moved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Movable {
    /// Anonymous and shared memory, and files of which at least a block is mapped: sorted, disjoint, touching
    /// mappings joined, at most [`RANGES_MAX`].
    pub ranges: Vec<VirtRange>,
    /// Smaller ranges that are left out.
    pub left_out: u64,
}

/// The mappings of a process: sorted, disjoint, of more than [`RANGES_MAX`] the largest.
///
/// Lines that are malformed or overlap an earlier one are passed over: the kernel writes the
/// file page by page while the process goes on mapping.
pub fn read_maps(root: &Path, pid: Pid) -> Result<Vec<Vma>, MapsError> {
    let mut found = Largest::new(|vma: &Vma| vma.range.len().0);
    for_each_of(root, pid, |vma| found.push(vma))?;
    Ok(found.finish().0)
}

/// The memory of a process that may be moved.
pub fn read_movable(root: &Path, pid: Pid) -> Result<Movable, MapsError> {
    let mut found = Largest::new(|range: &VirtRange| range.len().0);
    for_each_of(root, pid, |vma| add_movable(&mut found, vma))?;
    let (ranges, left_out) = found.finish();
    Ok(Movable { ranges, left_out })
}

/// The mappings in the text of a maps file, as [`read_maps`] has them.
pub fn parse_maps(text: &str) -> Vec<Vma> {
    let mut found = Largest::new(|vma: &Vma| vma.range.len().0);
    // Reading from memory does not fail.
    let _ = for_each(text.as_bytes(), |vma| found.push(vma));
    found.finish().0
}

fn add_movable(found: &mut Largest<VirtRange>, vma: Vma) {
    let is_movable = match vma.kind {
        VmaKind::Anonymous | VmaKind::Shmem => true,
        // A program maps dozens of small libraries, which many share.
        VmaKind::File => vma.range.len().0 >= BLOCK_SIZE,
        VmaKind::Stack | VmaKind::Special => false,
    };
    if !is_movable || !(vma.readable || vma.writable) {
        return;
    }
    let touched = found
        .last_mut()
        .filter(|last| last.end() == vma.range.start());
    match touched.and_then(|last| Some((VirtRange::new(last.start(), vma.range.end())?, last))) {
        Some((joined, last)) => *last = joined,
        None => found.push(vma.range),
    }
}

fn for_each_of(root: &Path, pid: Pid, each: impl FnMut(Vma)) -> Result<(), MapsError> {
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

/// Calls `each` with the mappings in a maps file, in order, without overlap. No more of the text
/// than a line is in memory; of paths, which may be any bytes, it matters only how they begin.
fn for_each(mut maps: impl BufRead, mut each: impl FnMut(Vma)) -> io::Result<()> {
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

/// The largest [`RANGES_MAX`] of what is pushed, in the order in which it was; no more than twice as
/// many are in memory.
struct Largest<T> {
    kept: Vec<T>,
    len: fn(&T) -> u64,
    left_out: u64,
}

impl<T> Largest<T> {
    fn new(len: fn(&T) -> u64) -> Self {
        Self {
            kept: vec![],
            len,
            left_out: 0,
        }
    }

    fn last_mut(&mut self) -> Option<&mut T> {
        self.kept.last_mut()
    }

    fn push(&mut self, item: T) {
        if self.kept.len() == 2 * RANGES_MAX {
            self.cut();
        }
        self.kept.push(item);
    }

    fn cut(&mut self) {
        let Some(surplus) = self.kept.len().checked_sub(RANGES_MAX).filter(|&n| n > 0) else {
            return;
        };
        let mut lengths: Vec<u64> = self.kept.iter().map(self.len).collect();
        let (_, &mut longest, _) = lengths.select_nth_unstable(surplus - 1);
        // Of those as long as the longest that must go, the first go.
        let shorter = lengths.iter().filter(|&&len| len < longest).count();
        let mut as_long = surplus - shorter;
        let len = self.len;
        self.kept.retain(|item| {
            let goes = len(item) < longest || (len(item) == longest && as_long > 0);
            as_long -= usize::from(goes && len(item) == longest);
            !goes
        });
        self.left_out += surplus as u64;
    }

    fn finish(mut self) -> (Vec<T>, u64) {
        self.cut();
        (self.kept, self.left_out)
    }
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

/// How names begin behind which there is no page cache: devices, registers of PCI devices, and MAP_HUGETLB.
const NO_FILES: [&str; 4] = ["/dev/", "/sys/", "/proc/", "/anon_hugepage"];

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
        _ if NO_FILES.iter().any(|start| path.starts_with(start)) => VmaKind::Special,
        // As "[vdso]" and "anon_inode:[perf_event]".
        _ if !path.starts_with('/') => VmaKind::Special,
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
    fn a_mapping_bomb_leaves_the_largest_and_their_number() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("proc/7")).unwrap();
        // No two touch, or they would be joined; each tenth has a megabyte.
        let count = 4 * RANGES_MAX as u64 + 3;
        let line = |i: u64| {
            let (start, pages) = (i << 24, if i % 10 == 9 { 256 } else { 1 });
            format!("{start:x}-{:x} rw-p 0 00:00 0\n", start + pages * 4096)
        };
        let text: String = (1..=count).map(line).collect();
        std::fs::write(root.path().join("proc/7/maps"), text).unwrap();
        let found = read_movable(root.path(), Pid(7)).unwrap();
        assert_eq!(found.ranges.len(), RANGES_MAX);
        assert_eq!(found.left_out, count - RANGES_MAX as u64);
        let large = found.ranges.iter().filter(|range| range.len().0 == 1 << 20);
        assert_eq!(large.count() as u64, (count + 1) / 10);
        assert!(found.ranges.is_sorted_by_key(|range| range.start()));
        assert_eq!(read_maps(root.path(), Pid(7)).unwrap().len(), RANGES_MAX);
    }

    #[test]
    fn movable_memory_is_joined_where_it_touches() {
        let mut found = Largest::new(|range: &VirtRange| range.len().0);
        for vma in parse_maps(SAMPLE) {
            add_movable(&mut found, vma);
        }
        let (ranges, left_out) = found.finish();
        let text: Vec<_> = ranges.iter().map(|r| (r.start().0, r.len().0)).collect();
        assert_eq!(
            text,
            [(0x55d0c9000000, 0x21000), (0x7f0000000000, 0x61000000)]
        );
        assert_eq!(left_out, 0);
    }

    #[test]
    fn files_of_a_block_may_be_moved_and_what_has_no_page_cache_may_not() {
        let movable = |len: u64, path: &str| {
            let end = 0x7f00_0000_0000 + len;
            let mut found = Largest::new(|range: &VirtRange| range.len().0);
            for vma in parse_maps(&format!("7f0000000000-{end:x} r--s 0 08:01 9 {path}\n")) {
                add_movable(&mut found, vma);
            }
            !found.finish().0.is_empty()
        };
        for path in ["/var/lib/db/data.mdb", "/tmp/a b (deleted)", "/devices"] {
            assert!(movable(BLOCK_SIZE, path), "{path}");
            assert!(!movable(BLOCK_SIZE - 4096, path), "{path}");
        }
        for path in [
            "/dev/dri/card0",
            "/dev/hugepages/guest",
            "/sys/devices/pci0000:00/0000:00:02.0/resource2",
            "/anon_hugepage (deleted)",
            "anon_inode:[perf_event]",
            "[vvar]",
        ] {
            assert!(!movable(1 << 30, path), "{path}");
        }
        assert!(movable(4096, "/dev/shm/small"));
    }

    #[test]
    fn names_that_are_no_text_and_lines_without_end_are_survived() {
        let mut bytes = b"1000-2000 rw-p 0 00:00 0 /tmp/\xff\xfe\n".to_vec();
        bytes.extend(b"3000-4000 rw-p 0 00:00 0 /");
        bytes.extend(vec![b'x'; 3 * LINE_BYTES_MAX as usize]);
        bytes.extend(b"\n5000-6000 rw-p 0 00:00 0\n");
        let mut starts = vec![];
        for_each(&bytes[..], |vma| starts.push(vma.range.start().0)).unwrap();
        assert_eq!(starts, [0x1000, 0x3000, 0x5000]);
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
