//! A test double of QEMU's QMP socket.

use std::sync::{Arc, Mutex};

use demeter_policy::Tier;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::broadcast;

use super::Told;
use super::vm::{State, device_at};
use crate::hypervisor::{Event, Mapping, MemoryBackend, MemoryDevice};

/// Carries out a command like QEMU, or returns the reason for refusing.
pub(super) fn execute(vm: &mut State, command: &str, arguments: &Value) -> Result<Value, String> {
    let size = || arguments["value"].as_u64().ok_or("not a size");
    match command {
        "qmp_capabilities" => Ok(json!({})),
        "query-memdev" => {
            let memdev = |of: MemoryBackend| {
                json!({
                    "id": of.id, "size": of.size.0, "share": of.shared, "policy": "default"
                })
            };
            Ok(vm.backends().into_iter().map(memdev).collect())
        }
        "query-cpus-fast" => Ok(json!([{"cpu-index": 0, "thread-id": std::process::id()}])),
        "query-memory-devices" => {
            let device = |of: MemoryDevice| {
                let tier = if of.node.0 == 0 {
                    Tier::Fast
                } else {
                    Tier::Slow
                };
                json!({"type": "virtio-mem", "data": {
                    "id": of.id, "node": of.node.0, "size": of.size.0,
                    "requested-size": of.requested.0, "max-size": of.max.0,
                    "block-size": of.block.0, "memaddr": device_at(tier).0, "memdev": "/objects/x",
                }})
            };
            let devices = vm.memory_devices().into_iter().map(device);
            let dimm = vm.dimm.map(|range| {
                json!({"type": "dimm", "data": {
                    "id": "d0", "addr": range.start().0, "size": range.len().0, "slot": 0,
                    "node": 0, "memdev": "/objects/d", "hotplugged": true, "hotpluggable": true,
                }})
            });
            Ok(devices.chain(dimm).collect())
        }
        "qom-set" => {
            let path = arguments["path"].as_str().unwrap_or("");
            let device = path.trim_start_matches("/machine/peripheral/");
            vm.request_size(device, size()?).map(|()| json!({}))
        }
        "balloon" => {
            vm.request_balloon_size(size()?);
            Ok(json!({}))
        }
        "query-status" => Ok(json!({"status": "running", "running": true})),
        "query-balloon" => Ok(json!({"actual": vm.balloon_size()})),
        "qom-list" => Ok(match (vm.pinned, arguments["path"].as_str()) {
            (true, Some("/machine/peripheral")) => {
                json!([{"name": "gpu0", "type": "child<vfio-pci>"}])
            }
            _ => json!([{"name": "type", "type": "string"}]),
        }),
        "human-monitor-command" => monitor(vm, arguments["command-line"].as_str().unwrap_or("")),
        _ => Err(format!("The command {command} has not been found")),
    }
}

fn monitor(vm: &State, line: &str) -> Result<Value, String> {
    let layout = vm.layout();
    if let Some(address) = line.strip_prefix("gpa2hva 0x") {
        let address = u64::from_str_radix(address, 16).map_err(|_| "not a number")?;
        let plugged = vm.plugged();
        let device = plugged.iter().find(|of| of.guest.start().0 == address);
        if let Some(Mapping { host, .. }) = device {
            let text = format!(
                "Host virtual address for {address:#x} (d) is {:#x}\r\n",
                host.0
            );
            return Ok(json!(text));
        }
        let lies = layout.iter().find(|(_, mapping, _)| {
            (mapping.guest.start().0..mapping.guest.end().0).contains(&address)
        });
        return Ok(json!(lies.map_or(
            "No memory is mapped at address".to_owned(),
            |(node, mapping, _)| format!(
                "Host virtual address for {address:#x} (node{node}) is {:#x}\r\n",
                mapping.host.0 + address - mapping.guest.start().0
            )
        )));
    }
    let ranges: String = layout
        .iter()
        .map(|(node, mapping, offset)| {
            let (start, last) = (mapping.guest.start().0, mapping.guest.end().0 - 1);
            let offset = match offset.0 {
                0 => String::new(),
                offset => format!(" @{offset:016x}"),
            };
            format!("  {start:016x}-{last:016x} (prio 0, ram): node{node}{offset}\r\n")
        })
        .collect();
    Ok(json!(format!(
        "FlatView #0\r\n AS \"I/O\", root: io\r\n Root memory region: io\r\n  \
         0000000000000000-0000000000000007 (prio 0, i/o): dma-chan\r\n\r\nFlatView #1\r\n \
         AS \"memory\", root: system\r\n Root memory region: system\r\n{ranges}\r\n"
    )))
}

/// QEMU's name of an event.
pub(super) fn name(told: Told) -> &'static str {
    match told {
        Told::Event(Event::Reset) => "RESET",
        Told::Event(Event::Changed) => "RESUME",
        Told::SizeChange => "BALLOON_CHANGE",
    }
}

fn event_of(told: Told) -> Value {
    json!({"event": name(told), "data": {}})
}

/// Serves one client at a time.
pub(super) async fn serve(
    listener: UnixListener,
    state: Arc<Mutex<State>>,
    events: broadcast::Sender<Told>,
) {
    while let Ok((stream, _)) = listener.accept().await {
        // The client may go at any time.
        let _ = speak(stream, &state, events.subscribe()).await;
    }
}

async fn speak(
    stream: UnixStream,
    state: &Mutex<State>,
    mut events: broadcast::Receiver<Told>,
) -> std::io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut lines = BufReader::new(reader).lines();
    writer
        .write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n")
        .await?;
    loop {
        let said: Vec<Value> = tokio::select! {
            // Report all events before the next answer.
            biased;
            event = events.recv() => {
                let Ok(told) = event else { return Ok(()) };
                vec![event_of(told)]
            }
            line = lines.next_line() => {
                let Some(line) = line? else { return Ok(()) };
                let command: Value = serde_json::from_str(&line)?;
                let mut state = state.lock().unwrap();
                if state.silent {
                    continue;
                }
                let name = command["execute"].as_str().unwrap_or("");
                let happens = state.upon_status.take_if(|_| name == "query-status");
                let event = happens.map(|happens| event_of(Told::Event(happens(&mut state))));
                let answer = match execute(&mut state, name, &command["arguments"]) {
                    Ok(value) => json!({"return": value, "id": command["id"]}),
                    Err(desc) => json!({
                        "error": {"class": "GenericError", "desc": desc}, "id": command["id"],
                    }),
                };
                event.into_iter().chain([answer]).collect()
            }
        };
        for said in said {
            writer.write_all(format!("{said}\r\n").as_bytes()).await?;
        }
    }
}
