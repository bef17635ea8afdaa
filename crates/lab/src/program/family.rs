//! Who descends from whom among this process's children, and how all of them go.
//!
//! A program may leave processes behind that belong to nobody any more. This process adopts them,
//! so that they can be found: they are its children, but not in its session.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use demeter_policy::Pid;

/// Most processes of one workload.
const PROCESSES_MAX: usize = 4096;

/// How long a process may outlive the one that started it.
const LATE_LIMIT: Duration = Duration::from_millis(300);

/// How long killed processes may take to go.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// Between two looks at processes that go.
const TICK: Duration = Duration::from_millis(10);

/// Has this process adopt all descendants whose own parents end.
pub fn adopt() -> io::Result<()> {
    // SAFETY: takes a number and changes an attribute of this process only.
    match unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Processes that were left behind: children of this process that were not started by it, as they
/// are in another session and none of `known`. Those that have ended are forgotten.
fn strays(known: &[Pid]) -> Vec<Pid> {
    // SAFETY: takes nothing and cannot fail.
    let own = unsafe { libc::getsid(0) };
    let children = children(Pid(std::process::id())).into_iter();
    let mut strays: Vec<Pid> = children
        .filter(|pid| !known.contains(pid) && session(*pid).is_some_and(|sid| sid != own))
        .collect();
    strays.retain(|&pid| !collect(pid));
    strays
}

/// Whether somebody was left behind for good: the last of a pipeline may end a moment later than
/// who started it.
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

/// A process and all its descendants, as far as they can be read.
pub fn with_descendants(pid: Pid) -> Vec<Pid> {
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(&pid) = found.get(next).filter(|_| found.len() < PROCESSES_MAX) {
        found.extend(children(pid));
        next += 1;
    }
    found
}

/// Signals the process group that `leader` leads. It must not have been waited for.
pub fn signal_group(leader: Pid, signal: i32) {
    // SAFETY: a signal to a group; it fails only when nobody is in it.
    unsafe { libc::kill(-(leader.0 as i32), signal) };
}

/// Kills what was left behind, and what that leaves behind, until nobody is there.
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

/// Kills one process, which must be a descendant that has not been waited for.
pub fn kill(pid: Pid) {
    // SAFETY: a signal to a process; it fails only when it has gone.
    unsafe { libc::kill(pid.0 as i32, libc::SIGKILL) };
}

/// Waits for a child that has ended; false if it still runs.
fn collect(pid: Pid) -> bool {
    // SAFETY: no status is asked for, and the call does not block.
    unsafe { libc::waitpid(pid.0 as i32, std::ptr::null_mut(), libc::WNOHANG) != 0 }
}

/// Its children, by /proc/PID/task/TID/children (CONFIG_PROC_CHILDREN).
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

/// Its session: field 6 of /proc/PID/stat (proc(5)), counted behind the name.
fn session(pid: Pid) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let behind_name = stat.rsplit(") ").next()?;
    behind_name.split_ascii_whitespace().nth(3)?.parse().ok()
}
