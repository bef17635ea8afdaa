//! Descendants of this process: search and termination.
//!
//! A program may leave orphaned processes behind. This process adopts them, so that they can be found: they are its
//! children, but not in its session.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use demeter_policy::Pid;

/// Maximum number of processes of one workload.
const PROCESSES_MAX: usize = 4096;

/// Time for which a process may outlive its parent.
const LATE_LIMIT: Duration = Duration::from_millis(300);

/// Time limit for killed processes to exit.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// Interval between checks of exiting processes.
const TICK: Duration = Duration::from_millis(10);

/// Makes this process adopt all orphaned descendants.
pub fn adopt() -> io::Result<()> {
    // SAFETY: it has a number as argument and changes an attribute of this process only.
    match unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Orphaned processes: children of this process that it did not start, since they are in another session and not in
/// `known`. Reaps those that have exited.
fn strays(known: &[Pid]) -> Vec<Pid> {
    // SAFETY: it has no arguments and cannot fail.
    let own = unsafe { libc::getsid(0) };
    let children = children(Pid(std::process::id())).into_iter();
    let mut strays: Vec<Pid> = children
        .filter(|pid| !known.contains(pid) && session(*pid).is_some_and(|sid| sid != own))
        .collect();
    strays.retain(|&pid| !collect(pid));
    strays
}

/// Whether any process was left behind for good. The last process of a pipeline may exit slightly later than its
/// parent.
pub fn leaves_strays(known: &[Pid]) -> bool {
    let deadline = Instant::now() + LATE_LIMIT;
    while !strays(known).is_empty() {
        if Instant::now() > deadline {
            return true;
        }
        std::thread::sleep(TICK);
    }
    false
}

/// A process and all its descendants, as far as readable.
pub fn with_descendants(pid: Pid) -> Vec<Pid> {
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(&pid) = found.get(next).filter(|_| found.len() < PROCESSES_MAX) {
        found.extend(children(pid));
        next += 1;
    }
    found
}

/// Signals the process group of `leader`. `leader` must not have been waited for.
pub fn signal_group(leader: Pid, signal: i32) {
    // SAFETY: a signal to a group; it fails only if the group is empty.
    unsafe { libc::kill(-(leader.0 as i32), signal) };
}

/// Kills orphaned processes, and any that they leave behind, until none is left.
pub fn kill_strays(known: &[Pid]) {
    let deadline = Instant::now() + KILL_LIMIT;
    loop {
        let strays = strays(known);
        if strays.is_empty() || Instant::now() > deadline {
            return;
        }
        strays.into_iter().flat_map(with_descendants).for_each(kill);
        std::thread::sleep(TICK);
    }
}

/// Kills one descendant, which must not have been waited for.
pub fn kill(pid: Pid) {
    // SAFETY: a signal to a process; it fails only if the process is gone.
    unsafe { libc::kill(pid.0 as i32, libc::SIGKILL) };
}

/// Reaps an exited child; returns false if it still runs.
fn collect(pid: Pid) -> bool {
    // SAFETY: no status is requested, and the call does not block.
    unsafe { libc::waitpid(pid.0 as i32, std::ptr::null_mut(), libc::WNOHANG) != 0 }
}

/// Its children, from /proc/PID/task/TID/children (CONFIG_PROC_CHILDREN).
fn children(pid: Pid) -> Vec<Pid> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let tasks = tasks.into_iter().flatten().flatten().take(PROCESSES_MAX);
    let texts = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let pids = |text: String| -> Vec<Pid> {
        let words = text.split_ascii_whitespace();
        words
            .filter_map(|word| word.parse().ok())
            .map(Pid)
            .collect()
    };
    texts.flat_map(pids).collect()
}

/// Its session: field 6 of /proc/PID/stat (proc(5)), counted after the name.
fn session(pid: Pid) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let behind_name = stat.rsplit(") ").next()?;
    behind_name.split_ascii_whitespace().nth(3)?.parse().ok()
}
