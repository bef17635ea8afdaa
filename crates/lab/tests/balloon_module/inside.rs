//! The part of the test in the VM.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::panic::catch_unwind;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use demeter_guest::balloon::GpaRange;
use demeter_guest::balloon::conformance::{self, conforms};
use demeter_guest::balloon::{Balloon, LiveBalloon, Stop};
use demeter_policy::{BLOCK_SIZE, ByteCount, GuestPhysAddr, MIB, NodeId, PAGE_SIZE};

/// Path of the module in the VM.
pub const MODULE: &str = "/demeter_balloon.ko";

/// The argument of a child that takes all available memory.
pub const EAT: &str = "eat-all-memory";

const ROUNDS: u64 = 100;

const NODES: [NodeId; 2] = [NodeId(0), NodeId(1)];

/// Allowed loss over a hundred rounds: slabs that grew, and this program's heap.
const LOST_MAX: u64 = 4 * MIB;

/// Words in the kernel's log that indicate a bug.
const SPLATS: [&str; 5] = ["BUG:", "WARNING:", "Oops", "general protection", "Bad page"];

/// Runs all tests, prints the verdict on the console and powers the VM off.
pub fn first_process() -> ! {
    let verdict = catch_unwind(|| {
        mount_all().unwrap();
        everything();
    });
    if verdict.is_ok() {
        println!("{}", super::VERDICT);
    }
    // SAFETY: the first process of a VM owns the whole machine.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
    unreachable!("the machine is off");
}

fn everything() {
    hundred_rounds();
    load();
    let mut balloon = open();
    for node in NODES {
        conforms(&mut balloon, node);
    }
    held_pages_are_left_out_of_dumps(&mut balloon);
    given_ranges_are_given_back(&mut balloon);
    memory_that_is_held_stays_online(&mut balloon);
    rates(&mut balloon);
    bad_calls_are_refused();
    no_splat();
    what_is_allowed_goes_when_memory_runs_out(balloon);
    unload().unwrap();
    no_splat();
}

/// Loads the module, holds memory, returns some or none, and unloads it.
fn hundred_rounds() {
    let before = free();
    for round in 0..ROUNDS {
        load();
        let mut balloon = open();
        let mut held = vec![];
        for (node, mib) in NODES
            .into_iter()
            .zip([1 + round * 37 % 300, 1 + round * 53 % 400])
        {
            let bytes = mib * MIB + round % 7 * PAGE_SIZE;
            let (ranges, stop) = conformance::inflate(&mut balloon, node, bytes);
            assert_eq!((conformance::sum(&ranges), stop), (bytes, Stop::Done));
            assert_lies_in(node, &ranges);
            if round % 3 == 0 {
                let (moved, _) =
                    conformance::deflate(&mut balloon, node, bytes / 3 / PAGE_SIZE * PAGE_SIZE);
                assert!(moved > 0);
            }
            held.extend(ranges);
        }
        assert_disjoint(held);
        if round == 0 {
            let error = unload().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "it is open");
        }
        // Held memory outlives the process that requested it.
        let listed = conformance::list(&mut balloon, NODES[0]);
        drop(balloon);
        assert_eq!(conformance::list(&mut open(), NODES[0]), listed);
        unload().unwrap();
    }
    for (node, (before, after)) in NODES.iter().zip(before.iter().zip(free())) {
        println!(
            "node {node}: {} MiB free before, {} MiB after",
            before / MIB,
            after / MIB
        );
        assert!(after + LOST_MAX > *before, "memory was lost");
    }
    no_splat();
}

fn held_pages_are_left_out_of_dumps(balloon: &mut LiveBalloon) {
    let (held, _) = conformance::inflate(balloon, NODES[1], 5 * BLOCK_SIZE + PAGE_SIZE);
    assert!(
        pages(&held).all(is_offline),
        "all of what is held is marked"
    );
    conformance::deflate(balloon, NODES[1], 1 << 40);
    assert!(!pages(&held).any(is_offline), "nothing else is");
}

fn given_ranges_are_given_back(balloon: &mut LiveBalloon) {
    let node = NODES[1];
    let (held, _) = conformance::inflate(balloon, node, 6 * BLOCK_SIZE);
    let first = held[0].start.0;
    // From the middle of one block to the middle of another.
    let part = (first + BLOCK_SIZE / 2, first + BLOCK_SIZE + PAGE_SIZE);
    let within = |balloon: &mut LiveBalloon, (start, end)| {
        let range = (GuestPhysAddr(start), GuestPhysAddr(end));
        balloon
            .deflate_within(node, ByteCount(1 << 40), range)
            .unwrap()
    };
    let expected: u64 = pages(&held)
        .filter(|page| (part.0..part.1).contains(&(page * PAGE_SIZE)))
        .count() as u64;
    let given = within(balloon, part);
    assert_eq!(
        (given.moved.0, given.stop),
        (expected * PAGE_SIZE, Stop::Empty)
    );
    let left = conformance::list(balloon, node);
    assert!(
        left.iter()
            .all(|r| r.start.0 >= part.1 || r.start.0 + r.bytes.0 <= part.0)
    );
    assert_eq!(within(balloon, part).moved.0, 0, "it went once");
    conformance::deflate(balloon, node, 1 << 40);
}

/// The host identifies held pages by address, so their memory cannot be taken offline.
fn memory_that_is_held_stays_online(balloon: &mut LiveBalloon) {
    let node = NODES[1];
    // Reaches below the last block, which has a hole and is never removed.
    let (held, _) = conformance::inflate(balloon, node, 3 * memory_block_bytes());
    let block = held[0].start.0 / memory_block_bytes();
    let state = format!("/sys/devices/system/memory/memory{block}/state");
    let error = fs::write(&state, "offline").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ResourceBusy, "{error}");
    assert_eq!(conformance::list(balloon, node), held);
    conformance::deflate(balloon, node, 1 << 40);
}

/// Prints the speed; the reader judges whether it is fast enough.
fn rates(balloon: &mut LiveBalloon) {
    let bytes = 384 * MIB;
    let gib_per_s =
        |start: Instant| bytes as f64 / (1u64 << 30) as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    let (held, stop) = conformance::inflate(balloon, NODES[1], bytes);
    println!(
        "inflated {} MiB at {:.2} GiB/s, {} ranges",
        bytes / MIB,
        gib_per_s(start),
        held.len()
    );
    assert_eq!(stop, Stop::Done);
    let start = Instant::now();
    conformance::deflate(balloon, NODES[1], 1 << 40);
    println!("deflated it at {:.2} GiB/s", gib_per_s(start));
}

#[expect(clippy::too_many_lines, reason = "a table of calls")]
fn bad_calls_are_refused() {
    let device = File::options()
        .read(true)
        .write(true)
        .open("/dev/demeter_balloon")
        .unwrap();
    let call = |request: u64, argument: &mut [u64]| {
        // SAFETY: requests of the driver use at most the 64 bytes that exist.
        let failed = unsafe { libc::ioctl(device.as_raw_fd(), request, argument.as_mut_ptr()) } < 0;
        failed.then(|| io::Error::last_os_error().raw_os_error().unwrap())
    };
    let ioc =
        |direction: u64, size: u64, number: u64| direction << 30 | size << 16 | 0xde << 8 | number;
    let (inflate, deflate, list) = (ioc(3, 48, 1), ioc(3, 48, 2), ioc(3, 32, 3));
    let mut buffer = [0u64; 64];
    let ranges = buffer.as_mut_ptr() as u64;
    let word = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    for (request, mut argument, errno) in [
        // Unknown flags, half a page, no capacity for ranges, too large a capacity, a missing node.
        (
            inflate,
            [word(0, 6), 4096, ranges, word(1, 0), 0, 0, 0, 0],
            libc::EINVAL,
        ),
        (
            inflate,
            [word(0, 0), 4097, ranges, word(1, 0), 0, 0, 0, 0],
            libc::EINVAL,
        ),
        (
            inflate,
            [word(0, 0), 4096, ranges, word(0, 0), 0, 0, 0, 0],
            libc::EINVAL,
        ),
        (
            inflate,
            [word(0, 0), 4096, ranges, word(4097, 0), 0, 0, 0, 0],
            libc::EINVAL,
        ),
        (
            inflate,
            [word(1023, 0), 4096, ranges, word(1, 0), 0, 0, 0, 0],
            libc::ENODEV,
        ),
        (
            inflate,
            [word(u32::MAX, 0), 4096, ranges, word(1, 0), 0, 0, 0, 0],
            libc::ENODEV,
        ),
        (
            inflate,
            [word(0, 0), 4096, ranges, word(1, 0), 0, word(0, 1), 0, 0],
            libc::EINVAL,
        ),
        // A reversed range, and one that starts within a page.
        (
            deflate,
            [word(0, 0), 4096, 8192, 4096, 0, 0, 0, 0],
            libc::EINVAL,
        ),
        (
            deflate,
            [word(0, 0), 4096, 1, 8192, 0, 0, 0, 0],
            libc::EINVAL,
        ),
        (list, [word(0, 0), ranges, 0, 0, 0, 0, 0, 0], libc::EINVAL),
        (list, [word(9, 64), ranges, 0, 0, 0, 0, 0, 0], libc::ENODEV),
        (ioc(3, 8, 77), [0; 8], libc::ENOTTY),
        // Memory of another owner.
        (
            inflate,
            [word(0, 0), 4096, u64::MAX << 47, word(1, 0), 0, 0, 0, 0],
            libc::EFAULT,
        ),
    ] {
        assert_eq!(
            call(request, &mut argument),
            Some(errno),
            "{request:#x} {argument:x?}"
        );
    }
    // The last range has a page that could not be reported; a list reports it.
    let mut balloon = open();
    assert_eq!(
        conformance::sum(&conformance::list(&mut balloon, NODES[0])),
        PAGE_SIZE
    );
    conformance::deflate(&mut balloon, NODES[0], PAGE_SIZE);
    let mut found = [word(0, 1), ranges, u64::MAX, 0, 0, 0, 0, 0];
    assert_eq!(call(list, &mut found), None, "no cursor is too large");
}

fn what_is_allowed_goes_when_memory_runs_out(mut balloon: LiveBalloon) {
    let node = NODES[1];
    conformance::inflate(&mut balloon, node, 256 * MIB);
    let allowed = ByteCount(48 * MIB);
    balloon.allow_oom(node, allowed).unwrap();
    assert!(!is_readable(balloon.event_fd().unwrap()));
    let eaten = Command::new("/proc/self/exe").arg(EAT).status().unwrap();
    assert!(!eaten.success(), "it was killed");
    assert!(is_readable(balloon.event_fd().unwrap()));
    assert!(balloon.take_event().unwrap());
    assert!(!balloon.take_event().unwrap(), "it is told once");
    let stats = balloon.stats(node).unwrap();
    println!(
        "given back when memory ran out: {} MiB",
        stats.oom_returned.0 / MIB
    );
    assert_eq!(stats.oom_returned, allowed, "all of it, and no more");
    assert_eq!(stats.held.0, 256 * MIB - allowed.0);
    assert_eq!(
        conformance::sum(&conformance::list(&mut balloon, node)),
        stats.held.0
    );
}

/// Allocates memory until the kernel kills this process.
pub fn eat() -> ! {
    fs::write("/proc/self/oom_score_adj", "1000").unwrap();
    let mut eaten: Vec<Vec<u8>> = vec![];
    loop {
        eaten.push(vec![1; BLOCK_SIZE as usize]);
    }
}

fn mount_all() -> io::Result<()> {
    for (kind, target) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        let (kind, target) = (CString::new(kind)?, CString::new(target)?);
        let (kind, target) = (kind.as_ptr(), target.as_ptr());
        // SAFETY: C strings that outlive the call; no data is passed.
        if unsafe { libc::mount(kind, target, kind, 0, std::ptr::null()) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn load() {
    let module = File::open(MODULE).unwrap();
    // SAFETY: a descriptor, no parameters, no flags.
    let result =
        unsafe { libc::syscall(libc::SYS_finit_module, module.as_raw_fd(), c"".as_ptr(), 0) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

fn unload() -> io::Result<()> {
    let name = c"demeter_balloon".as_ptr();
    // SAFETY: a C string and flags.
    match unsafe { libc::syscall(libc::SYS_delete_module, name, libc::O_NONBLOCK) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn open() -> LiveBalloon {
    LiveBalloon::open(Path::new("/")).unwrap()
}

/// Free bytes of the nodes, including the per-CPU lists (tens of MiB, because these hold blocks as well).
fn free() -> [u64; 2] {
    let text = fs::read_to_string("/proc/zoneinfo").unwrap();
    let mut pages = [0; 2];
    let mut node = 0;
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["Node", number, "zone", _] => node = number.trim_end_matches(',').parse().unwrap(),
            ["pages", "free", count] | ["count:", count] => {
                pages[node] += count.parse::<u64>().unwrap();
            }
            _ => {}
        }
    }
    pages.map(|pages| pages * PAGE_SIZE)
}

fn pages(ranges: &[GpaRange]) -> impl Iterator<Item = u64> {
    ranges
        .iter()
        .flat_map(|r| r.start.0 / PAGE_SIZE..(r.start.0 + r.bytes.0) / PAGE_SIZE)
}

/// Whether the kernel marks a page as having no content (KPF_OFFLINE in linux/kernel-page-flags.h).
fn is_offline(page: u64) -> bool {
    const KPF_OFFLINE: u64 = 1 << 23;
    let mut flags = [0; 8];
    let mut file = File::open("/proc/kpageflags").unwrap();
    file.seek(SeekFrom::Start(page * 8)).unwrap();
    file.read_exact(&mut flags).unwrap();
    u64::from_ne_bytes(flags) & KPF_OFFLINE != 0
}

/// Checks every range against the kernel's memory blocks.
fn assert_lies_in(node: NodeId, ranges: &[GpaRange]) {
    let size = memory_block_bytes();
    for range in ranges {
        let last = range.start.0 + range.bytes.0 - 1;
        for block in range.start.0 / size..=last / size {
            let link = format!("/sys/devices/system/node/node{node}/memory{block}");
            assert!(Path::new(&link).exists(), "{range:?} is not of node {node}");
        }
    }
}

fn memory_block_bytes() -> u64 {
    let size = fs::read_to_string("/sys/devices/system/memory/block_size_bytes").unwrap();
    u64::from_str_radix(size.trim(), 16).unwrap()
}

fn assert_disjoint(mut ranges: Vec<GpaRange>) {
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        assert!(
            pair[0].start.0 + pair[0].bytes.0 <= pair[1].start.0,
            "{pair:?} overlap"
        );
    }
}

fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let mut poll = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry, ours.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}

/// Checks that the kernel's log has no complaint so far.
fn no_splat() {
    const SYSLOG_ACTION_READ_ALL: libc::c_int = 3;
    let mut log = vec![0u8; 1 << 20];
    // SAFETY: we own the buffer, and its length is correct.
    let length = unsafe {
        libc::klogctl(
            SYSLOG_ACTION_READ_ALL,
            log.as_mut_ptr().cast(),
            log.len() as i32,
        )
    };
    let length = usize::try_from(length).expect("the kernel shows its log");
    let log = String::from_utf8_lossy(&log[..length]);
    let bad = log
        .lines()
        .find(|line| SPLATS.iter().any(|splat| line.contains(splat)));
    assert_eq!(bad, None);
}
