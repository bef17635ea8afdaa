//! One program that runs: its start, its output, its end.

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use demeter_policy::Pid;

use super::cgroup::{self, OwnCgroup};
use super::family;
use super::heard::Heard;
use super::launch::Launch;
use crate::inside::Fault;
use crate::vm::dies_with_this_thread;

/// What a program's threads tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    /// It printed that it is ready.
    Ready,
    /// The process has ended.
    Ended(Pid),
}

/// How long the end of a program's output is waited for once it has ended: a descendant may go on
/// with it.
const OUTPUT_END_MAX: Duration = Duration::from_secs(1);

/// A program that was started. It leads a session and a process group of its own.
#[derive(Debug)]
pub struct Process {
    child: Child,
    /// Disconnected once all its output was heard; gone once that was waited for.
    listening: Option<Receiver<()>>,
}

impl Process {
    /// Starts it, in `cgroup` if there is one. What it prints goes to `heard`; `tell` hears when it is ready and when
    /// it ends.
    pub fn start(
        launch: &Launch,
        cgroup: Option<&OwnCgroup>,
        heard: &Arc<Mutex<Heard>>,
        clock: Instant,
        tell: &Sender<Said>,
    ) -> Result<Self, Fault> {
        let fault = |source| start_fault(launch, source);
        let (mut output, theirs) = io::pipe().map_err(fault)?;
        let mut command = Command::new(&launch.file);
        command
            .args(&launch.args)
            .env_clear()
            .envs(&launch.env)
            .current_dir(&launch.folder)
            .stdin(Stdio::null())
            .stdout(theirs.try_clone().map_err(fault)?)
            .stderr(theirs);
        dies_with_this_thread(&mut command);
        let joins = cgroup.map(OwnCgroup::open).transpose()?;
        let prepare = move || {
            lead_a_session_that_goes_first()?;
            joins.as_ref().map_or(Ok(()), cgroup::join)
        };
        // SAFETY: between fork and exec only async-signal-safe calls are made.
        unsafe { command.pre_exec(prepare) };
        let child = command.spawn().map_err(fault)?;
        // `command` still holds the pipe's other end.
        drop(command);
        let (heard, tell_ready) = (Arc::clone(heard), tell.clone());
        let (listens, listening) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            let _dropped_at_the_end = listens;
            let mut bytes = [0; 4096];
            loop {
                let read = match output.read(&mut bytes) {
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                    Ok(0) | Err(_) => return,
                    Ok(read) => read,
                };
                let t_s = clock.elapsed().as_secs_f64();
                if lock(&heard).take(&bytes[..read], t_s) {
                    // Nobody listens any more once the run is over.
                    let _ = tell_ready.send(Said::Ready);
                }
            }
        });
        let (pid, tell) = (Pid(child.id()), tell.clone());
        std::thread::spawn(move || {
            wait_for_end(pid);
            let _ = tell.send(Said::Ended(pid));
        });
        Ok(Self {
            child,
            listening: Some(listening),
        })
    }

    /// Its process id.
    pub fn pid(&self) -> Pid {
        Pid(self.child.id())
    }

    /// How it ended, if it has. What it printed before that has been heard then.
    pub fn status(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().ok().flatten()?;
        if let Some(listening) = self.listening.take() {
            // Nothing is ever sent: it ends with the listener, or in time.
            let _ = listening.recv_timeout(OUTPUT_END_MAX);
        }
        Some(status)
    }

    /// Asks its group to end.
    pub fn ask_to_end(&mut self) {
        if self.status().is_none() {
            family::signal_group(self.pid(), libc::SIGTERM);
        }
    }

    /// Kills it with all its descendants.
    pub fn kill(&mut self) {
        if self.status().is_none() {
            family::with_descendants(self.pid())
                .into_iter()
                .for_each(family::kill);
            // It fails only when it has been waited for, which is as well.
            let _ = self.child.wait();
        }
    }
}

/// What a program has said so far.
pub fn lock(heard: &Mutex<Heard>) -> MutexGuard<'_, Heard> {
    heard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Between fork and exec: a session of its own, and the first to be killed where memory runs out.
fn lead_a_session_that_goes_first() -> io::Result<()> {
    // SAFETY: plain system calls on constants that end with a zero, and on a number.
    unsafe {
        if libc::setsid() < 0 {
            return Err(io::Error::last_os_error());
        }
        let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY);
        if file >= 0 {
            // Where it is refused the kernel chooses by size, which finds it as well.
            libc::write(file, c"1000".as_ptr().cast(), 4);
            libc::close(file);
        }
    }
    Ok(())
}

/// Returns once a child has ended; it still has to be waited for, so its number stays its own.
fn wait_for_end(pid: Pid) {
    loop {
        // SAFETY: the kernel fills the structure that it is given; no child is reaped.
        let failed = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            libc::waitid(
                libc::P_PID,
                pid.0,
                &raw mut info,
                libc::WEXITED | libc::WNOWAIT,
            )
        };
        if failed == 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return;
        }
    }
}

fn start_fault(launch: &Launch, source: io::Error) -> Fault {
    let why = match source.raw_os_error() {
        Some(libc::ENOENT) => ": it, its loader or its working folder is not there".into(),
        Some(libc::ENOEXEC) => ": it is no program for this machine".into(),
        Some(libc::EACCES) => ": it may not be executed".into(),
        _ => format!(": {source}"),
    };
    Fault::Program {
        name: launch.name.clone(),
        what: format!("cannot be started from {}{why}", launch.file.display()),
    }
}
