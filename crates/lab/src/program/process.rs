//! One running program: its start, output and exit.

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use demeter_policy::Pid;

use super::cgroup::{self, OwnCgroup};
use super::family;
use super::output::OutputParser;
use crate::fault::Fault;
use crate::launch::Launch;
use crate::vm::dies_with_this_thread;

/// An event from a program's threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    /// It reported that it is ready.
    Ready,
    /// The process has ended.
    Ended(Pid),
}

/// Time limit to read the rest of the output after the program has exited, as a descendant may keep writing.
const OUTPUT_END_MAX: Duration = Duration::from_secs(1);

/// A running program, leader of its own session and process group.
#[derive(Debug)]
pub struct Process {
    child: Child,
    /// Disconnected after all output was read; removed after that was awaited.
    listening: Option<Receiver<()>>,
}

impl Process {
    /// Starts the program, in `cgroup` if there is one. Its output goes to `heard`. `tell` receives its readiness and
    /// its exit.
    pub fn start(
        launch: &Launch,
        cgroup: Option<&OwnCgroup>,
        heard: &Arc<Mutex<OutputParser>>,
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
        // `command` still holds the other end of the pipe.
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
                    // The receiver is gone after the run.
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

    /// Its exit status, if it has exited. All output before that has then been parsed.
    pub fn status(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().ok().flatten()?;
        if let Some(listening) = self.listening.take() {
            // No message is ever sent: the wait ends with the reader, or by its time limit.
            let _ = listening.recv_timeout(OUTPUT_END_MAX);
        }
        Some(status)
    }

    /// Sends SIGTERM to its process group.
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
            // It fails only if it was waited for already.
            let _ = self.child.wait();
        }
    }
}

/// Locks the parser of a program's output.
pub fn lock(heard: &Mutex<OutputParser>) -> MutexGuard<'_, OutputParser> {
    heard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Between fork and exec: creates a session, and makes the process the OOM killer's first choice.
fn lead_a_session_that_goes_first() -> io::Result<()> {
    // SAFETY: plain system calls on zero-terminated constants and a number.
    unsafe {
        if libc::setsid() < 0 {
            return Err(io::Error::last_os_error());
        }
        let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY);
        if file >= 0 {
            // If refused, the kernel chooses by size, which selects the program as well.
            libc::write(file, c"1000".as_ptr().cast(), 4);
            libc::close(file);
        }
    }
    Ok(())
}

/// Returns when a child has exited. It must still be waited for, so its PID is not reused.
fn wait_for_end(pid: Pid) {
    loop {
        // SAFETY: the kernel fills the structure that it gets; no child is reaped.
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
        Some(libc::ENOENT) => ": the file, its loader or its working folder is missing".into(),
        Some(libc::ENOEXEC) => ": it is not a program for this machine".into(),
        Some(libc::EACCES) => ": it is not executable".into(),
        _ => format!(": {source}"),
    };
    Fault::Program {
        name: launch.name.clone(),
        what: format!("cannot be started from {}{why}", launch.file.display()),
    }
}
