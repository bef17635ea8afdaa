//! The lab's own QMP connection to a VM's emulator. It has its own socket, because a QMP socket serves one client at a
//! time and the host controller has the other.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Take, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::Error;

/// Time limit of an answer. While the emulator writes or reads a snapshot, it is silent.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

/// Time limit of an emulator job.
const JOB_LIMIT: Duration = Duration::from_secs(120);

/// Interval between checks of a job or a migration.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Maximum bytes read per connection.
const BYTES_MAX: u64 = 1 << 20;

/// DIMM slots of a VM with hotplug events.
pub const DIMM_SLOTS: usize = 16;

/// Size of a DIMM, MiB: the block size of the guest's kernel.
pub const DIMM_MIB: u64 = 128;

/// The snapshot, its nodes among the emulator's block devices, and its file.
const SNAPSHOT: &str = "demeter-snapshot";
const SNAPSHOT_FILE: &str = "demeter-snapshot-file";

/// The lab's QMP socket of the VM in `folder`.
pub fn own_qmp_socket(folder: &Path) -> PathBuf {
    folder.join("lab-qmp.sock")
}

/// A connection to one VM's emulator.
#[derive(Debug)]
pub struct Monitor {
    socket: PathBuf,
    folder: PathBuf,
    stream: BufReader<Take<UnixStream>>,
}

impl Monitor {
    /// Connects to the emulator of the VM in `folder`.
    pub fn connect(folder: &Path) -> Result<Self, Error> {
        let socket = own_qmp_socket(folder);
        let connected = UnixStream::connect(&socket).and_then(|stream| {
            stream.set_read_timeout(Some(ANSWER_LIMIT))?;
            stream.set_write_timeout(Some(ANSWER_LIMIT))?;
            Ok(stream)
        });
        let stream = connected.map_err(Error::io("connect to", &socket))?;
        let mut monitor = Self {
            socket,
            folder: folder.into(),
            stream: BufReader::new(stream.take(BYTES_MAX)),
        };
        monitor.ask("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    /// Resets the VM, like its reset button.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.ask("system_reset", json!({})).map(drop)
    }

    /// Stops all of its CPUs.
    pub fn stop(&mut self) -> Result<(), Error> {
        self.ask("stop", json!({})).map(drop)
    }

    /// Resumes its CPUs.
    pub fn go_on(&mut self) -> Result<(), Error> {
        self.ask("cont", json!({})).map(drop)
    }

    /// Starts a migration that is discarded: all of its memory is read, as for another host.
    pub fn migrate(&mut self) -> Result<(), Error> {
        let to = json!({"uri": "exec:cat > /dev/null"});
        self.ask("migrate", to).map(drop)
    }

    /// Cancels a migration, and resumes the VM if it has completed already.
    pub fn end_migration(&mut self) -> Result<(), Error> {
        self.ask("migrate_cancel", json!({}))?;
        let deadline = Instant::now() + JOB_LIMIT;
        loop {
            let answer = self.ask("query-migrate", json!({}))?;
            match answer["status"].as_str() {
                Some("cancelled") => return Ok(()),
                Some("completed") => return self.go_on(),
                Some("failed") => return Err(self.error("migrate", &answer)),
                _ => self.wait("migrate", deadline)?,
            }
        }
    }

    /// Writes the VM's state and memory to a file in its folder.
    pub fn save_snapshot(&mut self) -> Result<(), Error> {
        let path = self.snapshot_path();
        fs::write(&path, "").map_err(Error::io("create", &path))?;
        let file = json!({"driver": "file", "node-name": SNAPSHOT_FILE, "filename": path});
        self.ask("blockdev-add", file)?;
        // The image grows with its content.
        let empty = json!({"driver": "qcow2", "file": SNAPSHOT_FILE, "size": 1 << 20});
        self.job("blockdev-create", json!({"options": empty}))?;
        let image = json!({"driver": "qcow2", "node-name": SNAPSHOT, "file": SNAPSHOT_FILE});
        self.ask("blockdev-add", image)?;
        self.job("snapshot-save", snapshot())
    }

    /// Restores the VM from its snapshot, and removes the snapshot.
    pub fn load_snapshot(&mut self) -> Result<(), Error> {
        self.job("snapshot-load", snapshot())?;
        for node in [SNAPSHOT, SNAPSHOT_FILE] {
            self.ask("blockdev-del", json!({"node-name": node}))?;
        }
        let path = self.snapshot_path();
        fs::remove_file(&path).map_err(Error::io("remove", &path))
    }

    /// IDs of the plugged DIMMs.
    pub fn dimms(&mut self) -> Result<Vec<String>, Error> {
        let devices = self.ask("query-memory-devices", json!({}))?;
        let id = |device: &Value| Some(device["data"]["id"].as_str()?.to_owned());
        Ok(devices
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(id)
            .collect())
    }

    /// Plugs a DIMM into a node.
    pub fn plug_dimm(&mut self, node: u64) -> Result<(), Error> {
        let there = self.dimms()?;
        let mut ids = (0..DIMM_SLOTS).map(|slot| format!("dimm{slot}"));
        let Some(id) = ids.find(|id| !there.contains(id)) else {
            return Err(self.error("plug a DIMM", &json!("no slot is free")));
        };
        let memory = format!("{id}-memory");
        // The backend of an earlier DIMM in this slot may still exist.
        let _ = self.ask("object-del", json!({"id": memory}));
        let size = DIMM_MIB << 20;
        let backend = json!({
            "qom-type": "memory-backend-memfd", "id": memory, "size": size, "share": true,
        });
        self.ask("object-add", backend)?;
        let device = json!({"driver": "pc-dimm", "id": id, "memdev": memory, "node": node});
        self.ask("device_add", device).map(drop)
    }

    /// Asks the guest to release a DIMM, which it may refuse.
    pub fn unplug_dimm(&mut self, id: &str) -> Result<(), Error> {
        self.ask("device_del", json!({"id": id})).map(drop)
    }

    fn snapshot_path(&self) -> PathBuf {
        self.folder.join("snapshot.qcow2")
    }

    /// Runs a command as an emulator job, and waits for its end.
    fn job(&mut self, command: &str, mut arguments: Value) -> Result<(), Error> {
        arguments["job-id"] = json!(command);
        self.ask(command, arguments)?;
        let deadline = Instant::now() + JOB_LIMIT;
        loop {
            let jobs = self.ask("query-jobs", json!({}))?;
            let mut jobs = jobs.as_array().into_iter().flatten();
            match jobs.find(|job| job["id"] == command) {
                Some(job) if job["status"] == "concluded" && job.get("error").is_none() => break,
                Some(job) if job["status"] != "concluded" => {}
                job => return Err(self.error(command, job.unwrap_or(&Value::Null))),
            }
            self.wait(command, deadline)?;
        }
        self.ask("job-dismiss", json!({"id": command})).map(drop)
    }

    fn wait(&self, what: &str, deadline: Instant) -> Result<(), Error> {
        if Instant::now() >= deadline {
            return Err(self.error(what, &json!("did not finish in time")));
        }
        std::thread::sleep(LOOK_EVERY);
        Ok(())
    }

    /// Runs a command and returns its result.
    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, Error> {
        let question = json!({"execute": command, "arguments": arguments, "id": command});
        let mut answer = || -> io::Result<Value> {
            let stream = self.stream.get_mut().get_mut();
            stream.write_all(format!("{question}\n").as_bytes())?;
            loop {
                let mut line = String::new();
                if self.stream.read_line(&mut line)? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                // The greeting and events have no ID.
                let mut answer: Value = serde_json::from_str(&line)?;
                if answer["id"] == command {
                    return Ok(answer.take());
                }
            }
        };
        let answer = answer().map_err(Error::io("talk to the emulator at", &self.socket))?;
        match answer.get("return") {
            Some(value) => Ok(value.clone()),
            None => Err(self.error(command, &answer["error"])),
        }
    }

    fn error(&self, what: &str, said: &Value) -> Error {
        let error = io::Error::other(format!("{what}: {said}"));
        Error::io("control the emulator at", &self.socket)(error)
    }
}

fn snapshot() -> Value {
    json!({"tag": SNAPSHOT, "vmstate": SNAPSHOT, "devices": [SNAPSHOT]})
}
