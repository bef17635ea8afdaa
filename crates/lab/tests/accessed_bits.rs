//! Accessed bits under our own emulator follow a TLB as hardware has it. This program boots a VM in which it is itself the
//! first process, and reads there which of its pages the kernel finds accessed. Without that emulator the test is skipped.

#[path = "console/mod.rs"]
mod console;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;
use std::{fs, io, ptr};

use demeter_lab::Lab;

/// How long the VM may take on a slow machine.
const LIMIT: Duration = Duration::from_secs(300);

/// The VM's memory, MiB. With less than 512 Linux makes no huge pages.
const MIB: u64 = 1024;

/// TLBs of Ice Lake: the second level has 2,048 entries.
const TLB: &str = "tlb=16:4:8:4:2:4:128:16:4:4:0";

const SMALL: u64 = 4096;
const HUGE: u64 = 2 << 20;
/// Four times as many small pages as the TLB holds, and fewer huge ones.
const SMALL_PAGES: u64 = 8192;
const HUGE_PAGES: u64 = 64;
/// Accesses to each huge page, all to other parts of it.
const PARTS: u64 = 128;

/// The line of smaps with memory whose accessed bits are set.
const ACCESSED: &str = "Referenced:";

/// The counts that the console shows, by name.
const HUGE_HELD: &str = "huge pages that are accessed and stay in the TLB";
const HUGE_MISSED: &str = "huge pages that are accessed after a flush, half of all";
const SMALL_HOT: &str = "small pages that are accessed and do not stay in the TLB";
const SMALL_IDLE: &str = "small pages that are not accessed";

fn main() -> ExitCode {
    if std::process::id() == 1 {
        first_process();
    }
    // cargo's runner asks what there is.
    if std::env::args().any(|arg| arg == "--list") {
        println!("accessed_bits: test");
        return ExitCode::SUCCESS;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let lab = match Lab::of_tree(&root).and_then(Lab::exact) {
        Ok(lab) => lab,
        Err(why) => {
            eprintln!("skipped: {why}");
            return ExitCode::SUCCESS;
        }
    };
    let modelled = boot(&lab, TLB);
    println!("modelled TLB: {modelled:#?}");
    // The emulator's own TLB grows to any size, and holds huge pages in pieces.
    println!("the emulator's own: {:#?}", boot(&lab, ""));
    let expected = [
        (HUGE_HELD, 0..=HUGE_PAGES / 20),
        (HUGE_MISSED, HUGE_PAGES / 2..=HUGE_PAGES / 2),
        (SMALL_HOT, SMALL_PAGES * 19 / 20..=SMALL_PAGES),
        (SMALL_IDLE, 0..=0),
    ];
    let wrong: Vec<_> = expected
        .into_iter()
        .filter(|(what, count)| !modelled.get(*what).is_some_and(|it| count.contains(it)))
        .collect();
    match wrong[..] {
        [] => {
            println!("test accessed_bits ... ok");
            ExitCode::SUCCESS
        }
        _ => {
            println!("expected: {wrong:#?}\ntest accessed_bits ... FAILED");
            ExitCode::FAILURE
        }
    }
}

/// Boots a VM whose plugin has this argument more; returns what its console counts.
fn boot(lab: &Lab, tlb: &str) -> BTreeMap<String, u64> {
    let folder = tempfile::tempdir().unwrap();
    let plugin = folder.path().join("plugin.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("plugin/demeter_lab.c");
    let mut compile = Command::new("cc");
    compile.args(["-O2", "-shared", "-fPIC", "-DQEMU_PLUGIN_API=1", "-o"]);
    compile.arg(&plugin).arg(source);
    assert!(compile.status().expect("apt-get install gcc").success());
    let shared = folder.path().join("shared");
    let (plugin, shared) = (plugin.display(), shared.display());
    let options = [
        "-m".into(),
        format!("{MIB}M"),
        "-plugin".into(),
        format!("file={plugin},shm={shared},node={MIB}:0:80:100,dilation=1,{tlb}"),
    ];
    let console = console::boot(lab, &options, &[], "pti=off", LIMIT);
    let counts: BTreeMap<_, _> = console.lines().filter_map(count).collect();
    assert_eq!(counts.len(), 4, "{console}");
    counts
}

/// A count and its name: `name: 17`.
fn count(line: &str) -> Option<(String, u64)> {
    let (what, count) = line.trim().rsplit_once(": ")?;
    let is_ours = [HUGE_HELD, HUGE_MISSED, SMALL_HOT, SMALL_IDLE].contains(&what);
    Some((what.into(), count.parse().ok().filter(|_| is_ours)?))
}

/// Runs in the VM, and ends it.
fn first_process() -> ! {
    if let Err(error) = accesses() {
        println!("failed: {error}");
    }
    // SAFETY: no memory is passed. `panic=-1` and `-no-reboot` end the VM if this fails.
    unsafe { libc::reboot(libc::RB_AUTOBOOT) };
    panic!("the VM does not end")
}

fn accesses() -> io::Result<()> {
    // SAFETY: C strings; no data is passed.
    let failed = unsafe {
        libc::mkdir(c"/proc".as_ptr(), 0o755);
        let proc = c"proc".as_ptr();
        libc::mount(proc, c"/proc".as_ptr(), proc, 0, ptr::null())
    };
    if failed != 0 {
        return Err(io::Error::last_os_error());
    }
    let huge = map(HUGE_PAGES * HUGE, libc::MADV_HUGEPAGE)?;
    let small = map(SMALL_PAGES * SMALL, libc::MADV_NOHUGEPAGE)?;
    if bytes_of(huge.start, "AnonHugePages:")? != HUGE_PAGES * HUGE {
        return Err(io::Error::other("the kernel has made no huge pages"));
    }
    let huge_pages = || huge.clone().step_by(HUGE as usize);
    // The emulator's own TLB adapts to what was accessed between flushes.
    for _ in 0..20 {
        small.clone().step_by(SMALL as usize).for_each(load);
        flush()?;
    }

    huge_pages().for_each(load);
    clear_accessed()?;
    for part in 1..=PARTS {
        huge_pages().for_each(|page| load(page + part * 3 * SMALL));
    }
    println!("{HUGE_HELD}: {}", bytes_of(huge.start, ACCESSED)? / HUGE);
    clear_accessed()?;
    flush()?;
    huge_pages().step_by(2).for_each(load);
    println!("{HUGE_MISSED}: {}", bytes_of(huge.start, ACCESSED)? / HUGE);
    println!("{SMALL_IDLE}: {}", bytes_of(small.start, ACCESSED)? / SMALL);

    small.clone().step_by(SMALL as usize).for_each(load);
    clear_accessed()?;
    small.clone().step_by(SMALL as usize).for_each(load);
    println!("{SMALL_HOT}: {}", bytes_of(small.start, ACCESSED)? / SMALL);
    Ok(())
}

/// Memory whose pages are all there, at a multiple of a huge page's size.
fn map(bytes: u64, advice: i32) -> io::Result<Range<u64>> {
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let at = unsafe {
        libc::mmap(
            ptr::null_mut(),
            (bytes + HUGE) as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = (at as u64).next_multiple_of(HUGE);
    // The rest goes, so that the mapping has this start.
    let (before, behind) = (start - at as u64, at as u64 + HUGE - start);
    // SAFETY: parts of the new mapping, which nobody else has.
    unsafe {
        libc::munmap(at, before as usize);
        libc::munmap((start + bytes) as *mut _, behind as usize);
        if libc::madvise(start as *mut _, bytes as usize, advice) != 0 {
            return Err(io::Error::last_os_error());
        }
        for page in (start..start + bytes).step_by(SMALL as usize) {
            (page as *mut u8).write_volatile(1);
        }
    }
    Ok(start..start + bytes)
}

fn load(at: u64) {
    // SAFETY: within a mapping of `map`, which stays.
    unsafe { (at as *const u8).read_volatile() };
}

/// Has the kernel flush the TLB: it does for a mapping of many pages that goes.
fn flush() -> io::Result<()> {
    let gone = map(HUGE, libc::MADV_NOHUGEPAGE)?;
    // SAFETY: a mapping that nobody else has.
    match unsafe { libc::munmap(gone.start as *mut _, HUGE as usize) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Clears accessed bits, as DAMON does without a flush.
fn clear_accessed() -> io::Result<()> {
    fs::write("/proc/self/clear_refs", "1")
}

/// Memory of the mapping at `start` by a line of smaps.
fn bytes_of(start: u64, name: &str) -> io::Result<u64> {
    let smaps = fs::read_to_string("/proc/self/smaps")?;
    let mut lines = smaps.lines();
    lines.find(|line| line.starts_with(&format!("{start:x}-")));
    let line = lines.find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| kib * 1024)
        .ok_or_else(|| io::Error::other(format!("no {name} at {start:x}: {smaps}")))
}
