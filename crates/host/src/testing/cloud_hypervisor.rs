//! A test double of Cloud Hypervisor, made from its API's published description
//! (vmm/src/api/openapi/cloud-hypervisor.yaml in its tree).
//!
//! It answers like its HTTP server: the connection stays open, and an answer without a body has no
//! length. Its memory follows its source: a memfd `ch_ram` for each zone, and new ones after a
//! reset.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use demeter_policy::Tier;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::broadcast;
use tokio::task::JoinSet;

use super::Told;
use super::vm::State;
use crate::hypervisor::Event;

/// The double's state.
#[derive(Clone)]
pub(super) struct Has {
    pub state: Arc<Mutex<State>>,
    /// Folder of its sockets, and parent of /proc.
    pub folder: PathBuf,
    /// Pending events, handled before the next answer.
    pub told: Arc<Mutex<broadcast::Receiver<Told>>>,
    /// Connections to the guest's vsock ports.
    pub calls: Arc<Mutex<JoinSet<()>>>,
}

impl Has {
    /// Creates the process's files in /proc: its maps, and a thread that runs a virtual CPU.
    pub(super) fn show_process(&self) {
        let process = self.folder.join(format!("proc/{}", std::process::id()));
        let thread = process.join(format!("task/{}", std::process::id()));
        std::fs::create_dir_all(&thread).unwrap();
        std::fs::write(thread.join("comm"), "vcpu0\n").unwrap();
        let other = process.join("task/1");
        std::fs::create_dir_all(&other).unwrap();
        std::fs::write(other.join("comm"), "vcpu_none\n").unwrap();
        for folder in ["fd", "fdinfo"] {
            let own = format!("/proc/{}/{folder}", std::process::id());
            // The link exists already after the first call.
            let _ = std::os::unix::fs::symlink(own, process.join(folder));
        }
        let maps = self.state.lock().unwrap().maps();
        std::fs::write(process.join("maps"), maps).unwrap();
    }

    fn happen(&self) {
        while let Ok(told) = self.told.lock().unwrap().try_recv() {
            match told {
                Told::Event(Event::Reset) => {
                    self.calls.lock().unwrap().abort_all();
                    self.state.lock().unwrap().renew();
                    self.show_process();
                }
                Told::Event(Event::Changed) => self.state.lock().unwrap().plugged_devices += 1,
                Told::SizeChange => {}
            }
        }
    }

    fn answer(&self, question: &str, body: &Value) -> (u16, Option<Value>) {
        self.happen();
        let mut vm = self.state.lock().unwrap();
        match question {
            "GET /api/v1/vmm.ping" => {
                let ping =
                    json!({"version": "v48.0", "pid": std::process::id(), "features": ["kvm"]});
                (200, Some(ping))
            }
            "GET /api/v1/vm.info" => (200, Some(info(&mut vm, &self.folder))),
            "PUT /api/v1/vm.resize" => {
                let boot = vm.boot.fast.bytes() + vm.boot.slow.bytes();
                let held = body["desired_balloon"].as_u64().unwrap();
                vm.request_balloon_size(boot - held);
                (204, None)
            }
            _ => (404, None),
        }
    }
}

fn info(vm: &mut State, folder: &Path) -> Value {
    let zone = |tier: Tier| {
        let memory = vm.boot.get(tier);
        json!({
            "id": if tier == Tier::Fast { "node0" } else { "node1" },
            "size": vm.claims.map_or(memory.bytes(), |size| size.0), "shared": !vm.private,
            "hugepages": false, "mergeable": false, "prefault": false,
        })
    };
    let zones = Tier::ALL.map(zone);
    let devices = vm
        .pinned
        .then(|| json!([{"id": "gpu0", "path": "/sys/bus/pci/devices/x"}]));
    let tree = (0..vm.plugged_devices + 1).map(|number| {
        let id = format!("_disk{number}");
        (
            id.clone(),
            json!({"id": id, "resources": [], "children": [], "pci_bdf": "0000:00:01.0"}),
        )
    });
    json!({
        "config": {
            "cpus": {"boot_vcpus": 1, "max_vcpus": 1},
            "memory": {"size": 0, "hotplug_method": "Acpi", "zones": zones, "thp": true},
            "numa": [
                {"guest_numa_id": 0, "memory_zones": ["node0"]},
                {"guest_numa_id": 1, "memory_zones": ["node1"]},
            ],
            "devices": devices,
            "vsock": {"cid": 3, "socket": folder.join("vsock")},
        },
        "state": "Running",
        "memory_actual_size": vm.balloon_size(),
        "device_tree": Value::Object(tree.collect()),
    })
}

/// Serves any number of clients, and connections to the guest's vsock ports.
pub(super) async fn serve(listener: UnixListener, vsock: UnixListener, has: Has) {
    let mut clients = JoinSet::new();
    loop {
        tokio::select! {
            accepted = vsock.accept() => {
                let Ok((stream, _)) = accepted else { return };
                let agent = has.folder.join("agent");
                let call = async move { drop(connect(stream, &agent).await) };
                has.calls.lock().unwrap().spawn(call);
            }
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { return };
                let has = has.clone();
                // A client may go at any time.
                clients.spawn(async move { drop(speak(stream, &has).await) });
            }
        }
    }
}

/// Forwards one connection to the guest's agent, if it names the agent's port.
async fn connect(mut stream: UnixStream, agent: &Path) -> std::io::Result<()> {
    let mut called = vec![];
    while called.last() != Some(&b'\n') {
        called.push(stream.read_u8().await?);
    }
    assert_eq!(called, b"CONNECT 1017\n");
    let mut guest = UnixStream::connect(agent).await?;
    // The host port's number. The guest's first message may follow in the same read.
    stream.write_all(b"OK 1073741824\n").await?;
    tokio::io::copy_bidirectional(&mut stream, &mut guest).await?;
    Ok(())
}

async fn speak(stream: UnixStream, has: &Has) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut question = String::new();
    stream.read_line(&mut question).await?;
    let mut bytes = 0;
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await?;
        if let Some(length) = line.strip_prefix("Content-Length: ") {
            bytes = length.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; bytes];
    stream.read_exact(&mut body).await?;
    if has.state.lock().unwrap().silent {
        return std::future::pending().await;
    }
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let (status, value) = has.answer(question.trim().trim_end_matches(" HTTP/1.0"), &body);
    let head =
        format!("HTTP/1.1 {status} \r\nServer: Cloud Hypervisor API\r\nConnection: keep-alive\r\n");
    let text = value.map(|value| value.to_string());
    let rest = match text {
        Some(text) => format!(
            "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{text}",
            text.len()
        ),
        None => "\r\n".into(),
    };
    stream.write_all((head + &rest).as_bytes()).await?;
    // The connection stays open until the client closes it.
    stream.read_to_end(&mut vec![]).await?;
    Ok(())
}
