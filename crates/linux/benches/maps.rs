//! Measures the CPU time to read a process's mappings and their policies, for up to 65,000 mappings.
//!
//! The files of a synthetic root show the time of the agent alone; this process's own files show the kernel's, too.
//!
//! `cargo bench -p demeter-linux --bench maps`

use std::fs;
use std::path::Path;
use std::time::Duration;

use demeter_linux::cpu;
use demeter_linux::maps::{read_maps, read_movable};
use demeter_linux::policies::read_policies;
use demeter_policy::Pid;

const PID: Pid = Pid(7);

/// Largest number of mappings: Linux allows 65,530.
const MOST: u64 = 65_000;

/// More than any reading takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// The least CPU time of five readings, milliseconds, and their result.
fn least<T>(mut read: impl FnMut() -> T) -> (f64, Option<T>) {
    let (mut least, mut last) = (Duration::MAX, None);
    for _ in 0..5 {
        let start = cpu::of_this_thread();
        last = Some(read());
        least = least.min(cpu::of_this_thread() - start);
    }
    (least.as_secs_f64() * 1e3, last)
}

fn measure(name: &str, root: &Path, pid: Pid) {
    let (maps_ms, maps) = least(|| read_maps(root, pid).expect("the file exists"));
    let (movable_ms, movable) =
        least(|| read_movable(root, pid, |_| true).expect("the file exists"));
    let mut mappings = 0;
    let (policies_ms, _) = least(|| {
        mappings = 0;
        read_policies(root, pid, PATIENCE, |_| mappings += 1)
    });
    let maps = maps.map_or(0, |maps| maps.len());
    let (pieces, left_out) = movable.map_or((0, 0), |it| (it.pieces.len(), it.left_out));
    println!(
        "{name:<22} {maps_ms:>9.2} {movable_ms:>9.2} {policies_ms:>9.2}   {maps} ranges kept, \
         {pieces} pieces and {left_out} left out, {mappings} policies"
    );
}

/// Writes the files of a process with separate mappings.
fn write(root: &Path, mappings: u64) -> std::io::Result<()> {
    let dir = root.join(format!("proc/{PID}"));
    fs::create_dir_all(&dir)?;
    let at = |i: u64| (1 << 40) + (i << 24);
    let map = |i: u64| {
        format!(
            "{:x}-{:x} rw-p 00000000 00:00 0 \n",
            at(i),
            at(i) + (4096 << (i % 9))
        )
    };
    let policy = |i: u64| {
        format!(
            "{:x} default anon=1 dirty=1 N0=1 kernelpagesize_kB=4\n",
            at(i)
        )
    };
    fs::write(dir.join("maps"), (0..mappings).map(map).collect::<String>())?;
    fs::write(
        dir.join("numa_maps"),
        (0..mappings).map(policy).collect::<String>(),
    )
}

/// Adds mappings to this process.
fn map(mappings: u64) {
    for i in 0..mappings {
        // Neighbours of equal protection would be one mapping.
        let protection = match i % 2 {
            0 => libc::PROT_READ,
            _ => libc::PROT_READ | libc::PROT_WRITE,
        };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the kernel chooses the address, and nobody uses the memory.
        unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
    }
}

fn main() -> std::io::Result<()> {
    println!("CPU time, ms                maps   movable  policies");
    for mappings in [MOST / 100, MOST / 10, MOST] {
        let root = tempfile::tempdir()?;
        write(root.path(), mappings)?;
        measure(&format!("{mappings} mappings"), root.path(), PID);
    }
    map(MOST);
    let own = Pid(std::process::id());
    measure("this process", Path::new("/"), own);
    Ok(())
}
