//! Runs a command every second and reads the number that it prints.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::FromRawFd;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use regex_lite::Regex;

use super::output::{OutputParser, number};
use super::process::lock;
use crate::launch::Launch;
use crate::vm::dies_with_this_thread;

/// Interval between two runs.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time limit of a run.
const LIMIT: Duration = Duration::from_secs(5);
/// Interval between checks for its end.
const TICK: Duration = Duration::from_millis(20);
/// Maximum size of its output.
const OUTPUT_BYTES_MAX: u64 = 256 * 1024;

/// Runs a command until this is dropped.
#[derive(Debug)]
pub struct Asker {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Asker {
    /// Runs `command` in the program's environment every second; the numbers go to its meter.
    pub fn start(
        launch: &Launch,
        command: &[String],
        regex: Regex,
        heard: &Arc<Mutex<OutputParser>>,
        clock: Instant,
    ) -> Self {
        let (stop, stopped) = mpsc::channel();
        let (launch, command, heard) = (launch.clone(), command.to_vec(), Arc::clone(heard));
        let thread = std::thread::spawn(move || {
            loop {
                let said = run(&launch, &command);
                let mut heard = lock(&heard);
                match said.as_ref().map(|said| number(&regex, said)) {
                    Ok(Some(value)) => heard.meter.add(clock.elapsed().as_secs_f64(), value),
                    // Among its program's lines, where the user looks for the reason of a missing figure.
                    Ok(None) => {
                        let said = said.unwrap_or_default();
                        let said: String = said.lines().take(1).collect();
                        heard.take(format!("{}: {said}\n", command[0]).as_bytes(), 0.0);
                    }
                    Err(error) => {
                        heard.take(format!("{}: {error}\n", command[0]).as_bytes(), 0.0);
                    }
                }
                drop(heard);
                if stopped.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        });
        Self {
            stop: Some(stop),
            thread: Some(thread),
        }
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            // It cannot panic, and LIMIT bounds its run time.
            let _ = thread.join();
        }
    }
}

/// The output of one run.
fn run(launch: &Launch, command: &[String]) -> io::Result<String> {
    // Output goes to memory, so that a command with much output never waits for a reader.
    //
    // SAFETY: the name is zero-terminated; the descriptor is checked and then owned.
    let mut output = unsafe {
        let fd = libc::memfd_create(c"figure".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        File::from_raw_fd(fd)
    };
    let mut asked = Command::new(&command[0]);
    asked
        .args(&command[1..])
        .env_clear()
        .envs(&launch.env)
        .current_dir(&launch.folder)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output.try_clone()?);
    dies_with_this_thread(&mut asked);
    let mut child = asked.spawn()?;
    let deadline = Instant::now() + LIMIT;
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::other(format!("took longer than {LIMIT:?}")));
        }
        std::thread::sleep(TICK);
    }
    output.rewind()?;
    let mut bytes = vec![];
    output.take(OUTPUT_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
