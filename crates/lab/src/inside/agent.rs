//! The agent under test, or the controller in its place, as its own process.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use demeter_host::view::HostView;
use demeter_policy::Pid;

use super::fault::Fault;
use super::init::Link;
use super::testbed::Testbed;
use crate::link::{AGENT_RECORDING_PATH, HOST_CONFIG_PATH, HOST_SOCKET_PATH, VmMessage, to_hex};
use crate::vm::dies_with_this_thread;

/// How much of the end of the log reaches the host, bytes.
const LOG_TAIL_BYTES: u64 = 64 * 1024;

/// Bytes of the recording in one line to the host.
const RECORDING_PART_BYTES: usize = 64 * 1024;

/// How long the agent may take to end once it is told to.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// How long a question to the agent may take.
const STATUS_LIMIT: Duration = Duration::from_millis(500);

/// How long a question to the controller may take.
const ASK_LIMIT: Duration = Duration::from_secs(5);

/// How long the agent may take until it answers, and between two looks whether it does.
const START_LIMIT: Duration = Duration::from_secs(20);
const START_LOOK: Duration = Duration::from_millis(20);

/// While nothing moves, one of so many calls really asks.
const QUIET_CALLS: u32 = 5;

/// A running agent; ended when dropped, and killed where it does not end.
#[derive(Debug)]
pub struct AgentProcess {
    child: Child,
    socket: PathBuf,
    moved_bytes: Option<(u64, u64)>,
    /// Calls since the figures were last seen to change.
    quiet: u32,
}

impl AgentProcess {
    /// Starts the agent with process `target` as its only target, where its configuration does not name others. Where
    /// the VM has a port for it, it serves the host's requests as well.
    pub fn start(bed: &Testbed<'_>, target: Pid) -> Result<Self, Fault> {
        if bed.agent_has_targets {
            return Self::start_for_all(bed);
        }
        let config = bed.agent_config.to_string_lossy();
        let pid = target.to_string();
        Self::spawn(bed, &["guest", "-v", "--config", &config, "--pid", &pid])
    }

    /// Starts an agent that manages nothing and only serves the host's requests.
    pub fn start_relay(bed: &Testbed<'_>) -> Result<Self, Fault> {
        Self::spawn(bed, &["guest", "-v", "--relay-only"])
    }

    /// Starts an agent whose configuration names its targets, and that serves the host's requests.
    pub fn start_for_all(bed: &Testbed<'_>) -> Result<Self, Fault> {
        let config = bed.agent_config.to_string_lossy();
        Self::spawn(bed, &["guest", "-v", "--config", &config])
    }

    /// Starts the controller, for a host's guest.
    pub fn start_controller(bed: &Testbed<'_>) -> Result<Self, Fault> {
        Self::spawn(bed, &["host", "-v", "--config", HOST_CONFIG_PATH])
    }

    /// Kills it without warning.
    pub fn kill(&mut self) {
        // Both fail only when it has ended already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn spawn(bed: &Testbed<'_>, args: &[&str]) -> Result<Self, Fault> {
        let path = &bed.agent_log;
        let log = File::options()
            .create(true)
            .append(true)
            .open(path)
            .map_err(Fault::io("create", path))?;
        let stderr = log.try_clone().map_err(Fault::io("duplicate", path))?;
        let program = bed.programs.join("demeter");
        let mut command = Command::new(&program);
        command
            .args(args)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(stderr)
            // Ctrl-C is for whoever measures, who then stops it.
            .process_group(0);
        dies_with_this_thread(&mut command);
        let child = command.spawn().map_err(Fault::io("start", &program))?;
        Ok(Self {
            child,
            socket: bed.agent_socket.clone(),
            moved_bytes: None,
            quiet: 0,
        })
    }

    /// Its process id.
    pub fn pid(&self) -> Pid {
        Pid(self.child.id())
    }

    /// Fails when it has ended.
    pub fn check(&mut self) -> Result<(), Fault> {
        match self
            .child
            .try_wait()
            .map_err(Fault::io("wait for", "the agent"))?
        {
            Some(status) => Err(Fault::AgentDied(status)),
            None => Ok(()),
        }
    }

    /// Bytes that it says it has promoted and demoted, verified by node. An agent that does not
    /// answer, because it is not up yet or busy, leaves the last known figures.
    ///
    /// While they do not change it is asked less often: every question switches tasks, which
    /// empties the emulator's TLB and slows the workload under this system alone.
    pub fn moved_bytes(&mut self) -> Option<(u64, u64)> {
        if !self.quiet.is_multiple_of(QUIET_CALLS) {
            self.quiet += 1;
            return self.moved_bytes;
        }
        match ask_moved(&self.socket) {
            moved if moved.is_some() && moved == self.moved_bytes => self.quiet += 1,
            Some(moved) => {
                self.moved_bytes = Some(moved);
                self.quiet = 0;
            }
            None => {}
        }
        self.moved_bytes
    }

    /// Waits until it answers, so that its start is over. An emulator translates a program as it runs for the first
    /// time: what a start takes here, a few tenths of a second, says nothing of a machine, where it is milliseconds.
    pub fn await_up(&mut self) -> Result<(), Fault> {
        let deadline = Instant::now() + START_LIMIT;
        while ask_moved(&self.socket).is_none() {
            self.check()?;
            if Instant::now() >= deadline {
                return Err(Fault::AgentSilent(START_LIMIT));
            }
            std::thread::sleep(START_LOOK);
        }
        Ok(())
    }

    /// Tells it to end, and waits for that.
    pub fn stop(mut self) -> Result<(), Fault> {
        self.check()?;
        match self.end()? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(Fault::AgentDied(status)),
            None => Err(Fault::AgentStuck(STOP_LIMIT)),
        }
    }

    /// Tells it to end; returns how it did, if it did in time. It must not have been waited for.
    fn end(&mut self) -> Result<Option<ExitStatus>, Fault> {
        // SAFETY: a signal to our own child, which has not been waited for, so that its number
        // is still its own.
        unsafe { libc::kill(self.child.id() as libc::pid_t, libc::SIGTERM) };
        let deadline = Instant::now() + STOP_LIMIT;
        while Instant::now() < deadline {
            let status = self.child.try_wait();
            if let Some(status) = status.map_err(Fault::io("wait for", "the agent"))? {
                return Ok(Some(status));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(None)
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        // What it has set up in the kernel is its own to take down.
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.end();
        }
        self.kill();
    }
}

/// Asks the controller of a host's guests.
pub fn ask_controller(question: &str, body: &str) -> Result<String, Fault> {
    let text = demeter_http::ask(Path::new(HOST_SOCKET_PATH), question, body, ASK_LIMIT);
    text.map_err(|error| Fault::Guest(format!("has no controller: {error}")))
}

/// What that controller knows.
pub fn controllers_view() -> Result<HostView, Fault> {
    let text = ask_controller("GET /v1/vms", "")?;
    serde_json::from_str(&text).map_err(|e| Fault::io("decode", "GET /v1/vms")(e.into()))
}

/// The end of the agent's log; empty when there is none.
pub fn log_tail(bed: &Testbed<'_>) -> String {
    let tail = || -> std::io::Result<Vec<u8>> {
        let mut log = File::open(&bed.agent_log)?;
        let length = log.metadata()?.len();
        log.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        log.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&tail().unwrap_or_default()).into_owned()
}

/// Sends what the agent has recorded, if it has.
pub fn send_recording(link: &mut Link) -> Result<(), Fault> {
    let Ok(mut recording) = File::open(AGENT_RECORDING_PATH) else {
        return Ok(());
    };
    let mut bytes = vec![0; RECORDING_PART_BYTES];
    loop {
        let read = recording.read(&mut bytes);
        let read = read.map_err(Fault::io("read", AGENT_RECORDING_PATH))?;
        if read == 0 {
            return Ok(());
        }
        let hex = to_hex(&bytes[..read]);
        link.send(&VmMessage::AgentRecording { hex })?;
    }
}

/// Asks `GET /v1/status` of the agent's socket.
fn ask_moved(socket: &Path) -> Option<(u64, u64)> {
    if !fs::exists(socket).ok()? {
        return None;
    }
    moved(&demeter_http::ask(socket, "GET /v1/status", "", STATUS_LIMIT).ok()?)
}

/// The bytes promoted and demoted, of an agent's status.
fn moved(status: &str) -> Option<(u64, u64)> {
    let status: serde_json::Value = serde_json::from_str(status).ok()?;
    Some((
        status["promoted_bytes"].as_u64()?,
        status["demoted_bytes"].as_u64()?,
    ))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// A process in an agent's place.
    fn agent(script: &str, socket: &Path) -> AgentProcess {
        AgentProcess {
            child: Command::new("sh").args(["-c", script]).spawn().unwrap(),
            socket: socket.into(),
            moved_bytes: None,
            quiet: 0,
        }
    }

    #[test]
    fn an_agent_is_up_when_it_answers() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("guest.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        // Ends with the test's process: how often it is asked is up to the machine's speed.
        std::thread::spawn(move || {
            let status = "{\"promoted_bytes\": 1, \"demoted_bytes\": 2}";
            let length = status.len();
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{status}");
            // Who comes first is sent away, as by an agent that is busy.
            for mut asked in listener.incoming().skip(1).flatten() {
                let _ = asked.read(&mut [0; 1024]);
                let _ = asked.write_all(answer.as_bytes());
            }
        });
        agent("exec sleep 60", &socket).await_up().unwrap();
    }

    #[test]
    fn an_agent_that_ends_is_not_waited_for() {
        let mut agent = agent("exit 3", Path::new("/nonexistent/guest.sock"));
        assert!(matches!(agent.await_up(), Err(Fault::AgentDied(_))));
    }

    #[test]
    fn figures_come_from_a_status_only() {
        let good = "{\"promoted_bytes\": 4096, \"demoted_bytes\": 8192, \"more\": []}";
        assert_eq!(moved(good), Some((4096, 8192)));
        assert_eq!(moved("{\"promoted_bytes\":-1,\"demoted_bytes\":1}"), None);
        assert_eq!(moved("garbage"), None);
    }

    #[test]
    fn an_agent_without_a_socket_says_nothing() {
        assert_eq!(ask_moved(Path::new("/nonexistent/guest.sock")), None);
    }
}
