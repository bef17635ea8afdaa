//! The agent under test, or the controller, as a separate process.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use demeter_guest::status::Status;
use demeter_host_api::view::HostView;
use demeter_outcome::Estimate;
use demeter_policy::{ByteCount, Pid};

use super::host_link::HostLink;
use super::testbed::Testbed;
use crate::fault::Fault;
use crate::link::{AGENT_RECORDING_PATH, HOST_CONFIG_PATH, HOST_SOCKET_PATH, VmMessage, to_hex};
use crate::vm::dies_with_this_thread;

/// Size of the log's tail that is sent to the host, bytes.
const LOG_TAIL_BYTES: u64 = 64 * 1024;

/// Bytes of a recording per line to the host.
const RECORDING_PART_BYTES: usize = 64 * 1024;

/// Time limit for the agent to exit after SIGTERM.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// Time limit of a request to the agent.
const STATUS_LIMIT: Duration = Duration::from_millis(500);

/// Time limit of the request for its estimate, which is made once, after the timed phase.
const ESTIMATE_LIMIT: Duration = Duration::from_secs(5);

/// Time limit of a request to the controller.
const ASK_LIMIT: Duration = Duration::from_secs(5);

/// Time limit until the agent first answers, and the polling interval.
const START_LIMIT: Duration = Duration::from_secs(20);
const START_LOOK: Duration = Duration::from_millis(20);

/// While figures do not change, one call in this many sends a request.
const QUIET_CALLS: u32 = 5;

/// A running agent. Dropping it stops it, by SIGKILL if it does not exit.
#[derive(Debug)]
pub struct AgentProcess {
    child: Child,
    socket: PathBuf,
    moved_bytes: Option<(u64, u64)>,
    /// Calls since the figures last changed.
    quiet: u32,
}

impl AgentProcess {
    /// Starts the agent for the process `target`. A configuration with targets of its own takes precedence. If the VM
    /// has the port, the agent also serves the host's requests.
    pub fn start(bed: &Testbed<'_>, target: Pid) -> Result<Self, Fault> {
        if bed.agent_has_targets {
            return Self::start_for_all(bed);
        }
        let config = bed.agent_config.to_string_lossy();
        let pid = target.to_string();
        Self::spawn(bed, &["guest", "-v", "--config", &config, "--pid", &pid])
    }

    /// Starts an agent that only serves the host's requests and manages nothing.
    pub fn start_relay(bed: &Testbed<'_>) -> Result<Self, Fault> {
        Self::spawn(bed, &["guest", "-v", "--relay-only"])
    }

    /// Starts an agent with configured targets, which also serves the host.
    pub fn start_for_all(bed: &Testbed<'_>) -> Result<Self, Fault> {
        let config = bed.agent_config.to_string_lossy();
        Self::spawn(bed, &["guest", "-v", "--config", &config])
    }

    /// Starts the controller, in a host with guests.
    pub fn start_controller(bed: &Testbed<'_>) -> Result<Self, Fault> {
        Self::spawn(bed, &["host", "-v", "--config", HOST_CONFIG_PATH])
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) {
        // Both fail only if it has exited already.
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
            // Ctrl-C must reach the measuring process only, which then stops the agent.
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

    /// Fails if it has exited.
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

    /// Bytes promoted and demoted, as the agent reports them and verified by node. If the agent does not answer,
    /// because it is starting or busy, the last figures are returned.
    ///
    /// While they do not change, requests are less frequent. Every request switches tasks, which empties the emulator's
    /// TLB and slows the workload under this system only.
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

    /// Its estimate of the slowdown by size of fast memory that programs can use. `None` until it has one.
    pub fn estimate(&self) -> Option<Estimate> {
        let status = ask_status(&self.socket, ESTIMATE_LIMIT)?;
        estimate(&serde_json::from_str(&status).ok()?)
    }

    /// Waits for its first answer, which ends its start. An emulator translates a program when it first runs. A start
    /// therefore takes some tenths of a second here, but only milliseconds on hardware.
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

    /// Sends SIGTERM and waits for its exit.
    pub fn stop(mut self) -> Result<(), Fault> {
        self.check()?;
        match self.end()? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(Fault::AgentDied(status)),
            None => Err(Fault::AgentStuck(STOP_LIMIT)),
        }
    }

    /// Sends SIGTERM; returns the exit status, if it exits in time. Must not be called after it was waited for.
    fn end(&mut self) -> Result<Option<ExitStatus>, Fault> {
        // SAFETY: a signal to our own child. It was not waited for, so its PID is not reused.
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
        // Only the agent can undo its changes in the kernel.
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.end();
        }
        self.kill();
    }
}

/// Sends a request to the controller of a host's guests.
pub fn ask_controller(question: &str, body: &str) -> Result<String, Fault> {
    let text = demeter_http::ask(Path::new(HOST_SOCKET_PATH), question, body, ASK_LIMIT);
    text.map_err(|error| Fault::Guest(format!("has no controller: {error}")))
}

/// The controller's view of its VMs.
pub fn controllers_view() -> Result<HostView, Fault> {
    let text = ask_controller("GET /v1/vms", "")?;
    serde_json::from_str(&text).map_err(|e| Fault::io("decode", "GET /v1/vms")(e.into()))
}

/// The tail of the agent's log; empty if there is none.
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

/// Sends the agent's recording, if there is one.
pub fn send_recording(link: &mut HostLink) -> Result<(), Fault> {
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

/// Requests `GET /v1/status` on the agent's socket.
fn ask_status(socket: &Path, limit: Duration) -> Option<String> {
    if !fs::exists(socket).ok()? {
        return None;
    }
    demeter_http::ask(socket, "GET /v1/status", "", limit).ok()
}

/// Bytes promoted and demoted, as the agent tells now.
fn ask_moved(socket: &Path) -> Option<(u64, u64)> {
    moved(&ask_status(socket, STATUS_LIMIT)?)
}

/// Bytes promoted and demoted, from an agent's status.
fn moved(status: &str) -> Option<(u64, u64)> {
    let status: serde_json::Value = serde_json::from_str(status).ok()?;
    Some((
        status["promoted_bytes"].as_u64()?,
        status["demoted_bytes"].as_u64()?,
    ))
}

/// An agent's estimate. The kernel's own fast memory counts neither in its points nor in the size that the VM has.
fn estimate(status: &Status) -> Option<Estimate> {
    let benefit = status.benefit.as_ref()?;
    let managed = status.targets.iter().map(|target| target.fast_bytes);
    let fast = managed.fold(status.fast_free_bytes, u64::saturating_add);
    Some(demeter_scenario::estimate(ByteCount(fast), benefit))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// A process that stands in for an agent.
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
        // Ends with the test's process: the number of requests depends on the machine's speed.
        std::thread::spawn(move || {
            let status = "{\"promoted_bytes\": 1, \"demoted_bytes\": 2}";
            let length = status.len();
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{status}");
            // Rejects the first request, like a busy agent.
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
    fn the_estimate_is_of_the_memory_that_programs_can_use() {
        let mut status = Status::default();
        assert_eq!(estimate(&status), None);
        status.benefit = serde_json::from_value(serde_json::json!({
            "points": [[0, 0], [100, 1000]], "fast_latency_ns": 100, "slow_latency_ns": 300,
            "running_ms": 1000, "waits_min_permille": 0, "waits_max_permille": 500,
        }))
        .unwrap();
        status.fast_free_bytes = 5;
        status.targets = vec![Default::default(), Default::default()];
        status.targets[0].fast_bytes = 20;
        status.targets[1].fast_bytes = 25;
        let estimate = estimate(&status).unwrap();
        assert_eq!(estimate.fast_bytes, 50);
        assert_eq!(estimate.slowdown(50), Some([1.0, 1.5]));
    }

    #[test]
    fn an_agent_without_a_socket_says_nothing() {
        assert_eq!(ask_moved(Path::new("/nonexistent/guest.sock")), None);
    }
}
