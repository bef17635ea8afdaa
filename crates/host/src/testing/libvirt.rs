//! A test double of libvirtd with one domain "db", whose QEMU is a [`State`](super::vm::State).

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use demeter_policy::Tier;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::broadcast;

use super::vm::State;
use super::{Told, qmp};
use crate::hypervisor::libvirt::{
    Decoder, Domain, EVENT, Malformed, Message, OK, Procedure, REPLY, Reader, Writer,
};

/// The double's state.
#[derive(Clone)]
pub(super) struct Has {
    pub state: Arc<Mutex<State>>,
    /// Whether the domain runs.
    pub runs: bool,
    /// The socket of its guest's agent.
    pub agent: PathBuf,
}

impl Has {
    /// A domain that lacks nothing.
    fn xml(&self) -> String {
        let state = self.state.lock().unwrap();
        let cell = |node, tier| {
            let size = state.boot.get(tier).file.metadata().unwrap().len() >> 10;
            format!("<cell id='{node}' memory='{size}' memAccess='shared'/>")
        };
        let (fast, slow) = (cell(0, Tier::Fast), cell(1, Tier::Slow));
        let agent = self.agent.display();
        let (own, tune) = (&state.metadata, &state.numatune);
        format!(
            "<domain type='qemu' id='1'><name>db</name><metadata>{own}</metadata><numatune>{tune}</numatune><cpu><numa>{fast}{slow}</numa></cpu><devices>\
             <channel type='unix'><source path='{agent}'/><target name='org.demeter.0'/></channel>\
             </devices></domain>"
        )
    }
}

/// Serves any number of clients.
pub(super) async fn serve(listener: UnixListener, has: Has, told: broadcast::Sender<Told>) {
    let mut clients = tokio::task::JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let (has, told) = (has.clone(), told.subscribe());
        // A client may go at any time.
        clients.spawn(async move { drop(speak(stream, &has, told).await) });
    }
}

fn domain() -> Domain {
    Domain::new("db", 1)
}

async fn speak(
    mut stream: UnixStream,
    has: &Has,
    mut told: broadcast::Receiver<Told>,
) -> std::io::Result<()> {
    let mut decoder = Decoder::default();
    let mut bytes = [0; 4096];
    loop {
        tokio::select! {
            biased;
            told = told.recv() => {
                let Ok(told) = told else { return Ok(()) };
                let name = qmp::name(told);
                let body = domain().write(Writer::default().i32(1)).text(name).u32(0).u32(0).u32(0);
                let event = message(Procedure::MONITOR_EVENT, EVENT, 0, Ok(body.u32(0)));
                stream.write_all(&event.bytes()).await?;
            }
            count = stream.read(&mut bytes) => {
                let count = count?;
                if count == 0 {
                    return Ok(());
                }
                decoder.push(&bytes[..count]);
                while let Some(call) = decoder.next_message().unwrap() {
                    let Some(body) = answer(&call, has) else {
                        continue;
                    };
                    let reply = message(call.procedure, REPLY, call.serial, body);
                    stream.write_all(&reply.bytes()).await?;
                }
            }
        }
    }
}

fn message(procedure: Procedure, kind: u32, serial: u32, body: Result<Writer, String>) -> Message {
    let failed = body.is_err();
    let error = |words: String| Writer::default().i32(1).i32(0).u32(1).text(&words);
    Message {
        procedure,
        kind,
        serial,
        status: if failed { OK + 1 } else { OK },
        body: body.unwrap_or_else(error).0,
    }
}

fn answer(call: &Message, has: &Has) -> Option<Result<Writer, String>> {
    let mut body = Reader(&call.body);
    let nothing = Writer::default();
    Some(Ok(match call.procedure {
        Procedure::AUTH_LIST => nothing.u32(1).u32(0),
        Procedure::OPEN => nothing,
        Procedure::WATCH_DOMAINS | Procedure::WATCH_MONITOR => nothing.i32(1),
        Procedure::LOOKUP_BY_NAME => match body.text().unwrap() {
            "db" => domain().write(nothing),
            other => return Some(Err(format!("Domain not found: {other}"))),
        },
        Procedure::LIST_DOMAINS if has.runs => domain().write(nothing.u32(1)).u32(1),
        Procedure::LIST_DOMAINS => nothing.u32(0).u32(0),
        Procedure::XML => nothing.text(&has.xml()),
        Procedure::MONITOR_COMMAND => {
            let text = || -> Result<&str, Malformed> {
                assert_eq!(Domain::read(&mut body)?, domain());
                body.text()
            }();
            let command: Value = serde_json::from_str(text.unwrap()).unwrap();
            let mut state = has.state.lock().unwrap();
            if state.silent {
                return None;
            }
            let name = command["execute"].as_str().unwrap();
            let answer = match qmp::execute(&mut state, name, &command["arguments"]) {
                Ok(value) => json!({"return": value, "id": "libvirt-7"}),
                Err(desc) => json!({
                    "error": {"class": "GenericError", "desc": desc}, "id": "libvirt-7",
                }),
            };
            nothing.text(&answer.to_string())
        }
        Procedure(program, number) => {
            return Some(Err(format!("unknown procedure: {number} of {program:#x}")));
        }
    }))
}
