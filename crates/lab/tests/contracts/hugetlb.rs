//! Huge pages from a pool, mapped in every way: the agent leaves them alone, and the pools of all nodes as they were.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::os::fd::RawFd;
use std::{io, ptr};

use demeter_guest::status::StatusCell;
use demeter_policy::{BLOCK_SIZE, MIB, Pid};

use super::in_vm::{HotMemory, agent};
use super::inside::{end, fill_fast, hear, map_on, run, say, touch_on};
use super::places::lies;

/// Where the file system of huge pages is mounted.
pub const FOLDER: &str = "/huge";

/// Huge pages of each way to map them: idle ones in fast memory, then hot ones in slow memory.
const IDLE: u64 = 2 * BLOCK_SIZE;
const HOT: u64 = 4 * BLOCK_SIZE;

/// Huge pages in the pools of both nodes: some are left over.
const POOLS: [u64; 2] = [12, 20];

/// Hot memory of the same program that may move, in slow memory.
const PLAIN: u64 = 48 * MIB;

/// Free fast memory: too little for what is hot.
const FREE: u64 = 16 * MIB;

/// Epochs of the agent.
const EPOCHS: usize = 40;

/// A way to map huge pages of a pool.
#[derive(Debug, Clone, Copy)]
enum Way {
    Anonymous,
    Memfd,
    SharedMemory,
    MountedFile,
}

const WAYS: [Way; 4] = [
    Way::Anonymous,
    Way::Memfd,
    Way::SharedMemory,
    Way::MountedFile,
];

/// Checks the pools before the program, behind the agent, and behind the program's end.
pub fn watch() {
    for (node, pages) in POOLS.iter().enumerate() {
        fs::write(file(node, "nr"), pages.to_string()).unwrap();
    }
    let before = pools();
    let program = run("");
    let meanwhile = pools();
    end(program);
    let after = pools();
    println!("pools: {before:?}, behind the agent {meanwhile:?}, at the end {after:?}");
    let used = |node: usize, bytes: u64| {
        let mut pool = before[&node];
        pool[1] -= WAYS.len() as u64 * bytes / BLOCK_SIZE;
        pool
    };
    let expected = BTreeMap::from([(0, used(0, IDLE)), (1, used(1, HOT))]);
    assert_eq!(meanwhile, expected);
    assert_eq!(after, before);
}

/// Pages in each node's pool: all, free ones, and those beyond its size.
fn pools() -> BTreeMap<usize, [u64; 3]> {
    let read = |node, what| {
        let text = fs::read_to_string(file(node, what)).unwrap();
        text.trim().parse().unwrap()
    };
    let pool = |node| (node, ["nr", "free", "surplus"].map(|what| read(node, what)));
    [0, 1].map(pool).into()
}

fn file(node: usize, what: &str) -> String {
    format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/{what}_hugepages")
}

/// The program: maps huge pages in every way, and plain memory.
pub fn use_memory() -> ! {
    let mut starts = WAYS.map(map_huge).to_vec();
    for &start in &starts {
        touch_on(0, start, IDLE);
        touch_on(1, start + IDLE, HOT);
    }
    starts.push(map_on(1, PLAIN));
    fill_fast(FREE);
    let starts: Vec<String> = starts.iter().map(u64::to_string).collect();
    say(&format!("{} {}", std::process::id(), starts.join(" ")));
    loop {
        std::thread::park();
    }
}

fn map_huge(way: Way) -> u64 {
    let len = (IDLE + HOT) as usize;
    // SAFETY: new mappings at addresses that the kernel chooses, and strings that outlive the calls.
    let start = unsafe {
        match way {
            Way::Anonymous => {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
                map(len, flags, -1)
            }
            Way::Memfd => {
                let file = libc::memfd_create(c"huge".as_ptr(), libc::MFD_HUGETLB);
                map(len, libc::MAP_SHARED, file)
            }
            Way::SharedMemory => {
                let mode = libc::IPC_CREAT | libc::SHM_HUGETLB | 0o600;
                let id = libc::shmget(libc::IPC_PRIVATE, len, mode);
                assert_ne!(id, -1, "{}", io::Error::last_os_error());
                let start = libc::shmat(id, ptr::null(), 0);
                // It ends with the program.
                libc::shmctl(id, libc::IPC_RMID, ptr::null_mut());
                start
            }
            Way::MountedFile => {
                let path = CString::new(format!("{FOLDER}/file")).unwrap();
                let file = libc::open(path.as_ptr(), libc::O_CREAT | libc::O_RDWR, 0o600);
                // It ends with the program, too.
                libc::unlink(path.as_ptr());
                map(len, libc::MAP_SHARED, file)
            }
        }
    };
    let why = io::Error::last_os_error();
    assert_ne!(start, libc::MAP_FAILED, "{way:?}: {why}");
    start as u64
}

/// Maps a file of this length, or anonymous memory without one.
///
/// # Safety
/// The flags name no address.
unsafe fn map(len: usize, flags: i32, file: RawFd) -> *mut libc::c_void {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: plain calls; the kernel chooses the address.
    unsafe {
        if file != -1 {
            libc::ftruncate(file, len as i64);
        }
        libc::mmap(ptr::null_mut(), len, protection, flags, file, 0)
    }
}

/// The agent: all of the program's memory in slow memory is hot.
pub fn manage() {
    let said = hear();
    let [pid, huge @ .., plain] = &said[..] else {
        panic!("{said:?}")
    };
    let pid = Pid(*pid as u32);
    let slow = huge.iter().map(|start| start + IDLE..start + IDLE + HOT);
    let plain = *plain..plain + PLAIN;
    let hot = slow.clone().chain([plain.clone()]);
    let tracker = HotMemory::of(hot.map(|range| (pid, range)).collect());
    let status = StatusCell::default();
    let mut agent = agent(&[pid], tracker, 0..2, |node| node == 1, &status);
    for _ in 0..EPOCHS {
        agent.step().unwrap();
    }
    let told = status.get();
    eprintln!(
        "promoted {} MiB, demoted {} MiB, {:?}",
        told.promoted_bytes / MIB,
        told.demoted_bytes / MIB,
        told.targets
    );
    let on = |range, node| lies(pid, range).get(&node).copied().unwrap_or(0) * 4096;
    assert!(on(plain, 0) >= PLAIN / 10 * 9, "plain memory moves");
    assert!(told.demoted_bytes >= PLAIN / 2, "idle memory makes way");
    for &start in huge {
        assert_eq!(on(start..start + IDLE, 0), IDLE);
        assert_eq!(on(start + IDLE..start + IDLE + HOT, 1), HOT);
    }
    let left = &told.targets[0].left_alone;
    // Anonymous ones are known by their path, and have no policy to be judged by.
    let judged = (WAYS.len() as u64 - 1) * (IDLE + HOT);
    assert!(
        (left.iter()).any(|it| it.why == "of reserved huge pages" && it.bytes == Some(judged)),
        "{left:?}"
    );
}
