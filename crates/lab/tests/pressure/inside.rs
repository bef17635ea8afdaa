//! The part of the test in the VM.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::panic::catch_unwind;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use demeter_guest::nodes::{NodeMemory, Topology};
use demeter_guest::status::StatusCell;
use demeter_policy::{BLOCK_SIZE, MIB, PAGE_SIZE, Pid};

use super::in_vm::{HotMemory, agent, map, mount_all, prefer, touch};

/// The module of a block device in memory, and its device.
pub const DISK: &str = "/brd.ko";
const SWAP: &str = "/dev/ram0";
const SWAP_MIB: u64 = 64;

/// Another one, larger than the VM's memory and never written: what is read of it is cached as a file's pages are.
const FILES: &str = "/dev/ram1";
const FILES_MIB: u64 = 1024;

/// Time between two reads of a MiB of files.
const PAUSE: Duration = Duration::from_millis(20);

/// First arguments of children: a program that uses memory, and the agent. The agent is not the program's parent, since it
/// leaves parents alone.
const USE: &str = "use-memory";
const AGENT: &str = "be-the-agent";

/// An agent's task: to rest, to look at hot memory, or to move most of it.
const REST_ALL: &str = "rest";
const LOOK: &str = "look";
const MOVE: &str = "move";

/// Whether khugepaged reclaims memory for huge pages.
const KHUGEPAGED_RECLAIMS: &str = "/sys/kernel/mm/transparent_hugepage/khugepaged/defrag";

const CGROUP: &str = "/sys/fs/cgroup/pressed";

/// Hot memory, at the end of the program's memory.
const HOT: u64 = 48 * MIB;

/// Distance of a program from its limits.
const MARGIN: u64 = 6 * MIB;

/// Memory above the watermarks that a program leaves free. The agent's process needs a part. The fast node gets none of the
/// rest while it is below what moves keep, which is 4 MiB more than its high watermark.
const LEFT: u64 = 48 * MIB;

/// Memory beyond the watermarks that the kernel must reclaim.
const EXCESS: u64 = 32 * MIB;

/// Epochs of the agent that are judged.
const EPOCHS: u32 = 40;
const EPOCH: Duration = Duration::from_millis(500);

/// The kernel is at rest if it reclaims nothing for this long. It has this many such times to get there.
const REST: Duration = Duration::from_secs(3);
const RESTS_MAX: usize = 40;

/// Counters of the kernel that say that memory was short. Stalls are left out: an allocation counts as one, too, if the kernel
/// finds that it need not reclaim for it, which nothing but a scan tells.
const SHORTAGE: [&str; 6] = [
    "pswpout",
    "pgscan_kswapd",
    "pgscan_direct",
    "pgsteal_kswapd",
    "pgsteal_direct",
    "oom_kill",
];

/// A kind of pressure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Case {
    /// The program is just below `memory.high` and `memory.max` of its cgroup, and there is fast memory free.
    NearLimits,
    /// The program has filled both nodes down to their watermarks.
    NearWatermarks,
    /// The program has more memory than both nodes have above their watermarks: the kernel has swapped some of it out.
    BelowWatermarks,
    /// Cached files fill the memory that the program leaves free. Its hot memory is slow.
    FullOfFiles,
}

/// An agent that runs beside the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// An agent without samples: a process of the same size that moves nothing.
    AgentAtRest,
    /// An agent that finds the program's hot memory.
    Agent,
}

impl Case {
    /// Whether a counter must stay as it is without an agent. Files that are cached may be dropped for moves.
    fn judges(self, counter: &str) -> bool {
        self != Self::FullOfFiles
            || !(counter.starts_with("pgscan") || counter.starts_with("pgsteal"))
    }

    /// Whether the program's hot memory begins in slow memory.
    fn is_slow(self) -> bool {
        matches!(self, Self::NearLimits | Self::FullOfFiles)
    }
}

/// Runs all cases, prints the verdict on the console and powers the VM off.
pub fn first_process() -> ! {
    let verdict = catch_unwind(|| {
        mount_all(&[("cgroup2", "/sys/fs/cgroup")]).unwrap();
        swap_on();
        // It would reclaim memory for huge pages, at times of its own.
        fs::write(KHUGEPAGED_RECLAIMS, "0").unwrap();
        let mut worse = vec![];
        for case in [
            Case::NearLimits,
            Case::NearWatermarks,
            Case::BelowWatermarks,
            Case::FullOfFiles,
        ] {
            let at_rest = run(case, Beside::AgentAtRest);
            for (counter, count) in run(case, Beside::Agent) {
                let most = at_rest[&counter];
                if case.judges(&counter) && count > most {
                    worse.push(format!(
                        "{case:?}: {counter} {count}, with an agent at rest {most}"
                    ));
                }
            }
        }
        assert!(worse.is_empty(), "{worse:#?}");
    });
    if verdict.is_ok() {
        println!("{}", super::VERDICT);
    }
    // SAFETY: the first process of a VM owns the whole machine.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
    unreachable!("the machine is off");
}

/// Does the task of a child, if this process is one.
pub fn be_a_child() {
    let args: Vec<String> = std::env::args().collect();
    match &args[..] {
        [_, what, bytes] if what == USE => use_memory(bytes.parse().unwrap()),
        [_, what, pid, start, bytes] if what == AGENT => {
            let start: u64 = start.parse().unwrap();
            let end = start + bytes.parse::<u64>().unwrap();
            manage(Pid(pid.parse().unwrap()), end - HOT..end);
            std::process::exit(0);
        }
        _ => {}
    }
}

/// Counts shortages of memory while a program runs beside an agent.
fn run(case: Case, beside: Beside) -> BTreeMap<String, u64> {
    fs::create_dir(CGROUP).unwrap();
    let usable = usable();
    let bytes = match case {
        Case::NearLimits | Case::FullOfFiles => 160 * MIB,
        Case::NearWatermarks => usable - LEFT,
        Case::BelowWatermarks => usable + EXCESS,
    };
    let bytes = bytes / BLOCK_SIZE * BLOCK_SIZE;
    let (start, mut child) = start(bytes, case);
    if case == Case::NearLimits {
        let used: u64 = read(&format!("{CGROUP}/memory.current"))
            .trim()
            .parse()
            .unwrap();
        fs::write(format!("{CGROUP}/memory.high"), (used + MARGIN).to_string()).unwrap();
        fs::write(
            format!("{CGROUP}/memory.max"),
            (used + 2 * MARGIN).to_string(),
        )
        .unwrap();
    }
    let mut agent = Command::new("/proc/self/exe")
        .args([AGENT, &child.id().to_string()])
        .args([start, bytes].map(|number| number.to_string()))
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let files = (case == Case::FullOfFiles).then(read_files);
    let before = counts_at_rest();
    let (stop, stopped) = mpsc::channel();
    let reader = files.map(|files| std::thread::spawn(move || read_on(files, &stopped)));
    let task = match (beside, case) {
        (Beside::AgentAtRest, _) => REST_ALL,
        // Where the kernel swaps there is no room to move.
        (Beside::Agent, Case::BelowWatermarks) => LOOK,
        (Beside::Agent, _) => MOVE,
    };
    writeln!(agent.stdin.take().unwrap(), "{task}").unwrap();
    assert!(
        agent.wait().unwrap().success(),
        "the agent moved what is hot"
    );
    let after = counts();
    child.kill().unwrap();
    child.wait().unwrap();
    fs::remove_dir(CGROUP).unwrap();
    drop(stop);
    if let Some(reader) = reader {
        reader.join().unwrap();
    }
    // Lists of free pages by CPU, and caches, keep some of it.
    await_usable(usable / 2);
    let since: BTreeMap<String, u64> = after
        .into_iter()
        .map(|(counter, count)| (counter.clone(), count - before[&counter]))
        .collect();
    println!("{case:?}, {beside:?}: {since:?}");
    since
}

/// Waits until the kernel has freed a program's memory: it may do so after the program's end.
fn await_usable(least: u64) {
    let is_free = || {
        let is_free = usable() >= least;
        std::thread::sleep(if is_free { Duration::ZERO } else { REST });
        is_free
    };
    assert!(
        (0..RESTS_MAX).any(|_| is_free()),
        "{} bytes are usable",
        usable()
    );
}

/// Fills free memory with cached files. They go when nobody has the result any more.
fn read_files() -> File {
    // Files are dropped before anything is swapped.
    fs::write("/proc/sys/vm/swappiness", "0").unwrap();
    let mut files = File::open(FILES).unwrap();
    io::copy(&mut files, &mut io::sink()).unwrap();
    let usable = usable();
    assert!(usable < HOT / 2, "{usable} bytes are still free");
    files
}

/// Reads more of the files, slowly, until the sender is dropped.
fn read_on(mut files: File, stopped: &mpsc::Receiver<()>) {
    let mut part = vec![0; MIB as usize];
    while stopped.recv_timeout(PAUSE) == Err(mpsc::RecvTimeoutError::Timeout) {
        if files.read(&mut part).unwrap() == 0 {
            files.rewind().unwrap();
        }
    }
}

/// Starts the program in its cgroup, and waits until it has touched its memory, as small pages.
fn start(bytes: u64, case: Case) -> (u64, Child) {
    let thp = "/sys/kernel/mm/transparent_hugepage/enabled";
    fs::write(thp, "never").unwrap();
    let mut child = Command::new("/proc/self/exe")
        .args([USE, &bytes.to_string()])
        .env("SLOW_END", if case.is_slow() { "1" } else { "" })
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    fs::write(format!("{CGROUP}/cgroup.procs"), child.id().to_string()).unwrap();
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let mut line = String::new();
    let said = child.stdout.take().unwrap();
    BufReader::new(said).read_line(&mut line).unwrap();
    // Small pages may become huge ones from now on.
    fs::write(thp, "always").unwrap();
    (line.trim().parse().unwrap(), child)
}

/// The counters of memory shortage once the kernel reclaims nothing more.
fn counts_at_rest() -> BTreeMap<String, u64> {
    let mut before = counts();
    for _ in 0..RESTS_MAX {
        std::thread::sleep(REST);
        let now = counts();
        if now == before {
            return now;
        }
        before = now;
    }
    panic!("the kernel does not come to rest: {before:?}");
}

/// The counters of memory shortage, of the machine and of the cgroup.
fn counts() -> BTreeMap<String, u64> {
    let vmstat = read("/proc/vmstat");
    let events = read(&format!("{CGROUP}/memory.events"));
    let pairs = |text: &str| -> Vec<(String, u64)> {
        let words = |line: &str| {
            let (name, count) = line.split_once(' ')?;
            Some((name.to_owned(), count.parse().ok()?))
        };
        text.lines().filter_map(words).collect()
    };
    let machine = pairs(&vmstat).into_iter();
    let machine = machine.filter(|(name, _)| SHORTAGE.contains(&&name[..]));
    let cgroup = pairs(&events).into_iter();
    machine
        .chain(cgroup.map(|(name, count)| (format!("memory.events {name}"), count)))
        .collect()
}

/// Manages a program's memory: at rest until its task arrives, and for a while from then on. Fails if the task is to move and
/// most of the hot memory did not become fast.
fn manage(pid: Pid, hot: Range<u64>) {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || tell.send(io::read_to_string(io::stdin()).unwrap()));
    let status = StatusCell::default();
    let tracker = HotMemory::of(vec![]);
    let found = tracker.0.clone();
    let mut agent = agent(&[pid], tracker, 0..2, |node| node == 1, &status);
    let task = loop {
        agent.step().unwrap();
        if let Ok(task) = told.recv_timeout(EPOCH) {
            break task;
        }
    };
    let task = task.trim();
    if task != REST_ALL {
        found.lock().unwrap().push((pid, hot));
    }
    for _ in 0..EPOCHS {
        std::thread::sleep(EPOCH);
        agent.step().unwrap();
    }
    let told = status.get();
    println!(
        "promoted {} MiB, demoted {} MiB, failed {:?}",
        told.promoted_bytes / MIB,
        told.demoted_bytes / MIB,
        told.failed_bytes
    );
    assert!(task != MOVE || told.promoted_bytes >= HOT / 2, "{told:?}");
}

/// Free memory of both nodes above their watermarks.
fn usable() -> u64 {
    free().iter().map(|node| node.usable().0).sum()
}

/// Free memory of both nodes.
fn free() -> Vec<NodeMemory> {
    let topology = Topology::read(Path::new("/")).unwrap();
    let nodes = topology.nodes.iter().map(|node| node.id);
    NodeMemory::read_all(Path::new("/"), nodes).unwrap()
}

/// Takes memory, says where it is, and uses its end for ever.
fn use_memory(bytes: u64) -> ! {
    // The memory is its cgroup's.
    let mut go = String::new();
    io::stdin().read_line(&mut go).unwrap();
    let start = map(bytes, libc::MAP_PRIVATE);
    let hot = start + bytes - HOT;
    touch(start, bytes - HOT);
    let is_slow = std::env::var("SLOW_END").is_ok_and(|it| !it.is_empty());
    if is_slow {
        prefer(Some(1));
    }
    touch(hot, HOT);
    prefer(None);
    println!("{start}");
    io::stdout().flush().unwrap();
    loop {
        touch(hot, HOT);
        // The agent has the machine's other CPU, and the kernel's threads some time on this one.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Makes block devices in memory, and swaps to the first.
fn swap_on() {
    let module = File::open(DISK).unwrap();
    let options = CString::new(format!("rd_nr=2 rd_size={}", FILES_MIB << 10)).unwrap();
    // SAFETY: an open file and a C string that outlives the call.
    let loaded = unsafe {
        libc::syscall(
            libc::SYS_finit_module,
            module.as_raw_fd(),
            options.as_ptr(),
            0,
        )
    };
    assert_eq!(loaded, 0, "{}", io::Error::last_os_error());
    // The first page of swap space (union swap_header): version 1 and the last page at 1024, and the signature at its end.
    let mut header = vec![0u8; PAGE_SIZE as usize];
    let last_page = (SWAP_MIB * MIB / PAGE_SIZE - 1) as u32;
    header[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    header[1028..1032].copy_from_slice(&last_page.to_ne_bytes());
    header[PAGE_SIZE as usize - 10..].copy_from_slice(b"SWAPSPACE2");
    let mut disk = File::options().write(true).open(SWAP).unwrap();
    disk.write_all(&header).unwrap();
    disk.sync_all().unwrap();
    let path = CString::new(SWAP).unwrap();
    // SAFETY: a C string that outlives the call.
    let failed = unsafe { libc::swapon(path.as_ptr(), 0) };
    assert_eq!(failed, 0, "{}", io::Error::last_os_error());
    fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory").unwrap();
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap()
}
