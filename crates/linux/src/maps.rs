//! Reads a process's address space from `/proc/PID/maps` (proc(5)).

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use demeter_policy::{BLOCK_SIZE, Block, GuestVirtAddr, Pid, VirtRange};

/// Maximum number of ranges kept per process: the largest. A program may have 65,530 mappings (`vm.max_map_count`), and
/// 64 such programs must not make the agent grow.
pub const RANGES_MAX: usize = 4096;

/// Maximum number of bytes read from a maps file: about 400,000 mappings.
const MAPS_BYTES_MAX: u64 = 32 << 20;

/// Longest line: addresses and a path of PATH_MAX bytes.
const LINE_BYTES_MAX: u64 = 8 << 10;

/// One mapping (virtual memory area) of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vma {
    /// Its addresses.
    pub range: VirtRange,
    /// The process may read it.
    pub readable: bool,
    /// The process may write it.
    pub writable: bool,
    /// The kind of its memory.
    pub kind: VmaKind,
    /// The mapped part of an object that other processes may map, too.
    pub backing: Option<Backing>,
}

/// The identity of a file or shared memory, equal for all who map it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId {
    /// The file system's device: major and minor number.
    device: (u32, u32),
    inode: u64,
    /// System V shared memory has its own numbers, on the device of all shared memory.
    is_sysv: bool,
}

/// The part of an object that is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backing {
    /// Which object.
    pub object: ObjectId,
    /// Offset of the mapping's first byte.
    pub offset: u64,
}

/// The kind of a mapping's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmaKind {
    /// Private anonymous memory, including the heap.
    Anonymous,
    /// Shared memory: shared anonymous, memfd, System V, /dev/shm.
    Shmem,
    /// A file, private or shared: its page cache, and the process's private copies. Includes shared memory on a tmpfs
    /// other than /dev/shm.
    File,
    /// The main thread's stack.
    Stack,
    /// Memory whose pages cannot be moved: the kernel's own (vdso, vvar, vsyscall, uprobes), devices, hugetlb pages.
    Special,
}

/// An error in reading a process's mappings.
#[derive(Debug, thiserror::Error)]
pub enum MapsError {
    /// The process has ended.
    #[error("process {0} has gone")]
    Gone(Pid),
    /// The file exists but cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The maps file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Movable memory of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Movable {
    /// Anonymous and shared memory, and files of which at least a block is mapped: sorted, disjoint, at most
    /// [`RANGES_MAX`].
    pub pieces: Vec<Piece>,
    /// Number of smaller pieces beyond the limit.
    pub left_out: u64,
    /// Blocks with memory that must not move, since memory moves by the block: sorted, disjoint.
    pub forbidden: Vec<VirtRange>,
}

/// A piece of movable memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Its addresses. Adjacent private memory is one piece.
    pub range: VirtRange,
    /// The mapped part of an object, if others may map it, too.
    pub backing: Option<Backing>,
}

impl Movable {
    /// The parts of sorted, disjoint ranges outside of forbidden blocks. Adjacent parts are joined.
    pub fn without_forbidden(&self, ranges: impl IntoIterator<Item = VirtRange>) -> Vec<VirtRange> {
        let mut left: Vec<VirtRange> = vec![];
        for range in ranges {
            let mut start = range.start();
            let next = self.forbidden.partition_point(|f| f.end() <= start);
            for forbidden in &self.forbidden[next..] {
                if forbidden.start() >= range.end() {
                    break;
                }
                join(&mut left, VirtRange::new(start, forbidden.start()));
                start = forbidden.end();
            }
            join(&mut left, VirtRange::new(start, range.end()));
        }
        left
    }
}

/// Appends a range that starts after the last one's start; adjacent or overlapping ranges are joined.
fn join(ranges: &mut Vec<VirtRange>, range: Option<VirtRange>) {
    let Some(range) = range else { return };
    match ranges.last_mut().filter(|last| last.end() >= range.start()) {
        Some(last) => {
            let end = last.end().max(range.end());
            *last = VirtRange::new(last.start(), end).unwrap_or(range);
        }
        None => ranges.push(range),
    }
}

/// Reads the mappings of a process: sorted, disjoint, the largest [`RANGES_MAX`].
///
/// Malformed lines and lines that overlap an earlier one are skipped: the kernel writes the file page by page while the
/// process goes on mapping.
pub fn read_maps(root: &Path, pid: Pid) -> Result<Vec<Vma>, MapsError> {
    let mut found = Largest::new(|vma: &Vma| vma.range.len().0);
    for_each_of(root, pid, |vma| found.push(vma))?;
    Ok(found.finish().0)
}

/// Reads the movable memory of a process. `may_move` is asked about each mapping with movable pages.
pub fn read_movable(
    root: &Path,
    pid: Pid,
    mut may_move: impl FnMut(&Vma) -> bool,
) -> Result<Movable, MapsError> {
    let mut found = Sorting::new();
    for_each_of(root, pid, |vma| found.add(&vma, &mut may_move))?;
    Ok(found.finish())
}

/// Parses a maps file as [`read_maps`] does.
pub fn parse_maps(text: &str) -> Vec<Vma> {
    let mut found = Largest::new(|vma: &Vma| vma.range.len().0);
    // Reading from memory does not fail.
    let _ = for_each(text.as_bytes(), |vma| found.push(vma));
    found.finish().0
}

/// Divides mappings into movable and forbidden memory.
struct Sorting {
    pieces: Largest<Piece>,
    forbidden: Vec<VirtRange>,
}

impl Sorting {
    fn new() -> Self {
        Self {
            pieces: Largest::new(|piece: &Piece| piece.range.len().0),
            forbidden: vec![],
        }
    }

    fn add(&mut self, vma: &Vma, may_move: &mut impl FnMut(&Vma) -> bool) {
        if vma.kind == VmaKind::Special {
            return;
        }
        if !may_move(vma) {
            let blocks = Block::numbers_of(&vma.range);
            let (start, end) = (Block(blocks.start).start(), Block(blocks.end).start());
            return join(&mut self.forbidden, VirtRange::new(start, end));
        }
        let is_movable = match vma.kind {
            VmaKind::Anonymous | VmaKind::Shmem => true,
            // A program maps dozens of small libraries, which many programs share.
            VmaKind::File => vma.range.len().0 >= BLOCK_SIZE,
            VmaKind::Stack | VmaKind::Special => false,
        };
        if !is_movable || !(vma.readable || vma.writable) {
            return;
        }
        let touched = self.pieces.last_mut().filter(|last| {
            last.range.end() == vma.range.start() && last.backing.is_none() && vma.backing.is_none()
        });
        let joined = touched.and_then(|last| {
            let joined = VirtRange::new(last.range.start(), vma.range.end())?;
            Some((last, joined))
        });
        match joined {
            Some((last, joined)) => last.range = joined,
            None => self.pieces.push(Piece {
                range: vma.range,
                backing: vma.backing,
            }),
        }
    }

    fn finish(self) -> Movable {
        let (pieces, left_out) = self.pieces.finish();
        Movable {
            pieces,
            left_out,
            forbidden: self.forbidden,
        }
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

/// Calls `each` with the mappings in a maps file, in order, without overlap.
///
/// At most one line of text is in memory. Paths may contain any bytes; only their beginnings matter.
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

/// The largest [`RANGES_MAX`] of the pushed elements, in their order. At most twice as many are in memory.
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
        // If several have the same length at the limit, the first are dropped.
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
        // No two ranges are adjacent, or they would be joined; every tenth is 1 MiB long.
        let count = 4 * RANGES_MAX as u64 + 3;
        let line = |i: u64| {
            let (start, pages) = (i << 24, if i % 10 == 9 { 256 } else { 1 });
            format!("{start:x}-{:x} rw-p 0 00:00 0\n", start + pages * 4096)
        };
        let text: String = (1..=count).map(line).collect();
        std::fs::write(root.path().join("proc/7/maps"), text).unwrap();
        let found = read_movable(root.path(), Pid(7), |_| true).unwrap();
        assert_eq!(found.pieces.len(), RANGES_MAX);
        assert_eq!(found.left_out, count - RANGES_MAX as u64);
        let large = found
            .pieces
            .iter()
            .filter(|piece| piece.range.len().0 == 1 << 20);
        assert_eq!(large.count() as u64, (count + 1) / 10);
        assert!(found.pieces.is_sorted_by_key(|piece| piece.range.start()));
        assert_eq!(read_maps(root.path(), Pid(7)).unwrap().len(), RANGES_MAX);
    }

    #[test]
    fn movable_memory_is_joined_where_it_touches() {
        let found = movable(SAMPLE, |_| true);
        let ranges = found.pieces.iter().map(|piece| piece.range);
        let text: Vec<_> = ranges.clone().map(|r| (r.start().0, r.len().0)).collect();
        assert_eq!(
            text,
            [
                (0x55d0c9000000, 0x21000),
                (0x7f0000000000, 0x40000000),
                (0x7f0040000000, 0x10000000),
                (0x7f0050000000, 0x10000000),
                (0x7f0060000000, 0x1000000)
            ],
            "what others may map, too, is a piece of its own"
        );
        assert_eq!(found.left_out, 0);
        let joined: Vec<_> = found.without_forbidden(ranges);
        assert_eq!(joined.len(), 2, "{joined:?}");
    }

    fn movable(text: &str, mut may_move: impl FnMut(&Vma) -> bool) -> Movable {
        let mut found = Sorting::new();
        for vma in parse_maps(text) {
            found.add(&vma, &mut may_move);
        }
        found.finish()
    }

    #[test]
    fn an_object_is_the_same_for_all_who_map_it() {
        let backings = |text: &str| -> Vec<_> {
            let vmas = parse_maps(text);
            vmas.iter().map(|vma| vma.backing).collect()
        };
        let one = backings(
            "1000-2000 rw-s 00003000 00:01 7 /memfd:x\n2000-3000 rw-s 00003000 00:01 7 /SYSV00000000\n\
             3000-4000 rw-p 0 08:01 7 /data\n4000-5000 r--p 0 08:01 7 /data\n5000-6000 rw-p 0 00:00 0",
        );
        let other = backings("9000-a000 r--s 00003000 00:01 7 /memfd:x (deleted)");
        assert_eq!(one[0], other[0]);
        assert_eq!(one[0].unwrap().offset, 0x3000);
        assert_ne!(one[0], one[1], "System V numbers its own");
        assert_eq!((one[2], one[4]), (None, None), "what is written is its own");
        assert!(one[3].is_some());
    }

    #[test]
    fn a_block_with_memory_that_must_stay_is_forbidden_whole() {
        const B: u64 = BLOCK_SIZE;
        let vma = |start: u64, end: u64| format!("{start:x}-{end:x} rw-p 0 00:00 0\n");
        let page = 4096;
        let text = vma(B, 3 * B)
            + &vma(3 * B + page, 3 * B + 2 * page)
            + &vma(4 * B, 9 * B)
            + &vma(9 * B, 9 * B + page)
            + &vma(9 * B + page, 12 * B);
        let small = movable(&text, |vma| vma.range.len().0 > page);
        let ranges = small.pieces.iter().map(|piece| piece.range);
        let left = small.without_forbidden(ranges);
        let left: Vec<_> = left
            .iter()
            .map(|r| (r.start().0 / B, r.end().0 / B))
            .collect();
        assert_eq!(left, [(1, 3), (4, 9), (10, 12)]);
    }

    #[test]
    fn files_of_a_block_may_be_moved_and_what_has_no_page_cache_may_not() {
        let movable = |len: u64, path: &str| {
            let end = 0x7f00_0000_0000 + len;
            let text = format!("7f0000000000-{end:x} r--s 0 08:01 9 {path}\n");
            !movable(&text, |_| true).pieces.is_empty()
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
            "/secretmem (deleted)",
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
        fn what_is_left_of_ranges_is_what_no_forbidden_block_has(
            ranges in prop::collection::vec((1u64..6, 1u64..2000), 0..8),
            forbidden in prop::collection::vec((1u64..4, 1u64..3), 0..5),
        ) {
            let of = |lens: &[(u64, u64)], unit: u64| -> Vec<VirtRange> {
                let mut end = 0;
                lens.iter().map(|&(gap, len)| {
                    let start = end + gap * unit;
                    end = start + len * unit;
                    VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(end)).unwrap()
                }).collect()
            };
            let ranges = of(&ranges, 4096);
            let space = Movable { forbidden: of(&forbidden, BLOCK_SIZE), ..Movable::default() };
            let left = space.without_forbidden(ranges.clone());
            prop_assert!(left.windows(2).all(|w| w[0].end() < w[1].start()));
            let has = |ranges: &[VirtRange], addr| ranges.iter().any(|r| r.contains(addr));
            for page in (0..12_000).map(|page| GuestVirtAddr(page * 4096)) {
                let want = has(&ranges, page) && !has(&space.forbidden, page);
                prop_assert_eq!(has(&left, page), want);
            }
        }

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
