//! The host controller under test, as a separate process: configuration, requests, kill and restart.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use demeter_host_api::body::{PolicyChoice, Tiers};
use demeter_host_api::view::{HostView, TierView};
use demeter_policy::provision::Policy;
use serde::Serialize;

use crate::error::Error;
use crate::vm::{CONFIG, ControllerSetup, NodeSizes, dies_with_this_thread, socket};

/// Time limit until the controller first answers.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Interval between checks of its socket.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Time limit of a request.
const ASK_LIMIT: Duration = Duration::from_secs(5);

/// A running controller. Dropping it kills it; so does the end of the thread that started it.
#[derive(Debug)]
pub struct Controller {
    program: PathBuf,
    folder: PathBuf,
    child: Child,
}

impl From<NodeSizes> for TierView {
    fn from(sizes: NodeSizes) -> Self {
        Self {
            fast_bytes: sizes.fast_mib << 20,
            slow_bytes: sizes.slow_mib << 20,
        }
    }
}

impl Controller {
    /// Starts `program` (the demeter command) in `folder` and waits until it answers.
    pub fn start(program: &Path, folder: &Path, setup: &ControllerSetup) -> Result<Self, Error> {
        setup.write(folder)?;
        let mut controller = Self {
            child: spawn(program, folder)?,
            program: program.into(),
            folder: folder.into(),
        };
        controller.wait()?;
        Ok(controller)
    }

    /// Kills it with SIGKILL and restarts it; returns once it answers.
    pub fn kill_and_restart(&mut self) -> Result<(), Error> {
        self.kill();
        self.child = spawn(&self.program, &self.folder)?;
        self.wait()
    }

    /// PID of the controller.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Log of its output.
    fn log(folder: &Path) -> PathBuf {
        folder.join("host.log")
    }

    /// Its view of the VMs.
    pub fn view(&self) -> Result<HostView, Error> {
        let text = self.ask("GET /v1/vms", "")?;
        serde_json::from_str(&text).map_err(|e| Error::io("decode", "GET /v1/vms")(e.into()))
    }

    /// Requests a size for a VM.
    pub fn set(&self, vm: &str, tiers: TierView) -> Result<(), Error> {
        let body = Tiers {
            fast_mib: Some(tiers.fast_bytes >> 20),
            slow_mib: Some(tiers.slow_bytes >> 20),
        };
        self.put(&format!("/v1/vms/{vm}/tiers"), &body)
    }

    /// Requests a policy.
    pub fn set_policy(&self, policy: Policy) -> Result<(), Error> {
        self.put("/v1/policy", &PolicyChoice { policy })
    }

    fn put(&self, path: &str, body: &impl Serialize) -> Result<(), Error> {
        let question = format!("PUT {path}");
        let body =
            serde_json::to_string(body).map_err(|e| Error::io("encode", &question)(e.into()))?;
        self.ask(&question, &body)?;
        Ok(())
    }

    /// Its latest events, as JSON.
    fn events(&self) -> Result<String, Error> {
        self.ask("GET /v1/events", "")
    }

    /// Copies its log and events to the folder `kept`, named after `run`. A failed controller need not answer.
    pub fn keep_logs(&self, kept: &Path, run: &str, failed: bool) -> Result<(), Error> {
        std::fs::create_dir_all(kept).map_err(Error::io("create", kept))?;
        let name = |what: &str| kept.join(format!("{}-host-{what}", run.replace(' ', "-")));
        let log = name("log");
        std::fs::copy(Self::log(&self.folder), &log).map_err(Error::io("create", &log))?;
        match self.events() {
            Ok(events) => {
                let path = name("events.json");
                std::fs::write(&path, events).map_err(Error::io("create", &path))
            }
            Err(_) if failed => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn ask(&self, question: &str, body: &str) -> Result<String, Error> {
        let socket = socket(&self.folder);
        demeter_http::ask(&socket, question, body, ASK_LIMIT)
            .map_err(io::Error::other)
            .map_err(Error::io("ask the host controller on", &socket))
    }

    fn wait(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let failure = match self.view() {
                Ok(_) => return Ok(()),
                Err(failure) => failure,
            };
            let ended = self.child.try_wait();
            if let Some(status) = ended.map_err(Error::io("wait for", "the host controller"))? {
                return Err(Error::Tool {
                    program: "demeter host".into(),
                    said: last_line(&Self::log(&self.folder)).unwrap_or(status.to_string()),
                    hint: "its log says more".into(),
                });
            }
            if Instant::now() >= deadline {
                return Err(failure);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn kill(&mut self) {
        // Both fail only if it has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.kill();
    }
}

fn last_line(log: &Path) -> Option<String> {
    let text = std::fs::read_to_string(log).ok()?;
    text.lines().last().map(str::to_owned)
}

fn spawn(program: &Path, folder: &Path) -> Result<Child, Error> {
    let log = Controller::log(folder);
    let open = || -> io::Result<(File, File)> {
        let file = File::options().create(true).append(true).open(&log)?;
        Ok((file.try_clone()?, file))
    };
    let (output, errors) = open().map_err(Error::io("create", &log))?;
    let mut command = Command::new(program);
    command
        .args(["host", "-v", "--config"])
        .arg(folder.join(CONFIG))
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(errors)
        // In its own process group, so that Ctrl-C reaches us only, and we end it.
        .process_group(0);
    dies_with_this_thread(&mut command);
    command.spawn().map_err(Error::io("start", program))
}
