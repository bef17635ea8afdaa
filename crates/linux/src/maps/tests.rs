use std::time::Duration;

use demeter_policy::{BLOCK_SIZE, GuestVirtAddr};
use proptest::prelude::*;

use super::parse::LINE_BYTES_MAX;
use super::*;
use crate::cpu::of_this_thread;
use crate::policies::read_policies;

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

/// CPU time to read the mappings of a process, none of which touch, and a policy for each.
fn reading_time(mappings: u64) -> Duration {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("proc/7");
    std::fs::create_dir_all(&dir).unwrap();
    let at = |i: u64| (1 << 40) + (i << 24);
    let map = |i| {
        format!(
            "{:x}-{:x} rw-p 0 00:00 0\n",
            at(i),
            at(i) + (4096 << (i % 9))
        )
    };
    let policy = |i| format!("{:x} default N0=1 kernelpagesize_kB=4\n", at(i));
    std::fs::write(dir.join("maps"), (0..mappings).map(map).collect::<String>()).unwrap();
    let policies = (0..mappings).map(policy).collect::<String>();
    std::fs::write(dir.join("numa_maps"), policies).unwrap();
    let read = |_| {
        let began = of_this_thread();
        let found = read_movable(root.path(), Pid(7), |_| true).unwrap();
        assert_eq!(found.pieces.len() as u64 + found.left_out, mappings);
        let mut policies = 0;
        let patience = Duration::from_secs(600);
        read_policies(root.path(), Pid(7), patience, |_| policies += 1).unwrap();
        assert_eq!(policies, mappings);
        of_this_thread() - began
    };
    (0..3).map(read).min().unwrap()
}

#[test]
fn ten_times_the_mappings_take_ten_times_as_long() {
    let (few, many) = (reading_time(6500), reading_time(65_000));
    // Quadratic work would take a hundred times as long.
    assert!(many < 30 * few, "{few:?} and {many:?}");
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
