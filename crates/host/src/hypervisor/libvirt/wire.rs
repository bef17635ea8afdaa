//! QMP through libvirt: commands as `virDomainQemuMonitorCommand`, and libvirt's monitor events.

use std::collections::VecDeque;

use serde_json::{Value, json};

use super::client::{Domain, Life, life};
use super::message::{Decoder, EVENT, Message as Carrier, OK, Procedure, REPLY};
use super::xdr::{Malformed, Reader, Writer};
use crate::hypervisor::qemu::Wire;
use crate::hypervisor::qemu::decode::{LINE_BYTES_MAX, Message, Notice, answer_to, event};

/// A connection to libvirt that carries one domain's monitor.
#[derive(Debug)]
pub(super) struct Monitor {
    pub domain: Domain,
    pub decoder: Decoder,
    /// Messages that arrived before.
    pub earlier: VecDeque<Carrier>,
}

impl Wire for Monitor {
    fn push(&mut self, bytes: &[u8]) {
        self.decoder.push(bytes);
    }

    fn next_message(&mut self) -> Result<Option<Message>, String> {
        let message = match self.earlier.pop_front() {
            Some(earlier) => Some(earlier),
            None => self
                .decoder
                .next_message()
                .map_err(|error| error.to_string())?,
        };
        message.map(|message| self.carried(&message)).transpose()
    }

    fn command(&self, id: u64, name: &str, arguments: Value) -> Result<Vec<u8>, String> {
        let serial = u32::try_from(id).map_err(|_| "the command numbers are exhausted")?;
        let command = json!({"execute": name, "arguments": arguments}).to_string();
        let body = self.domain.write(Writer::default()).text(&command).u32(0);
        Ok(Carrier::call(Procedure::MONITOR_COMMAND, serial, body))
    }
}

impl Monitor {
    fn carried(&self, message: &Carrier) -> Result<Message, String> {
        let malformed = |Malformed| "a message does not match its type".to_owned();
        match (message.kind, message.procedure) {
            (REPLY, Procedure::MONITOR_COMMAND) => {
                let id = message.serial.into();
                if message.status != OK {
                    let desc = message.error();
                    return Ok(Message::Error { id, desc });
                }
                let text = Reader(&message.body).text().map_err(malformed)?;
                if text.len() > LINE_BYTES_MAX {
                    return Err(format!("an answer is longer than {LINE_BYTES_MAX} bytes"));
                }
                answer_to(id, text).map_err(|error| error.to_string())
            }
            (EVENT, Procedure::MONITOR_EVENT) => {
                let mut body = Reader(&message.body);
                let read = |body: &mut Reader| {
                    body.i32()?;
                    Ok((Domain::read(body)?, event(Some(body.text()?))))
                };
                let (domain, notice) = read(&mut body).map_err(malformed)?;
                let ours = domain.is(&self.domain);
                Ok(Message::Event(if ours { notice } else { Notice::Other }))
            }
            (EVENT, Procedure::LIFECYCLE) => {
                let (domain, life) = life(&message.body).map_err(malformed)?;
                match life {
                    Life::Stopped if domain.is(&self.domain) => {
                        Err("the domain has stopped".into())
                    }
                    _ => Ok(Message::Event(Notice::Other)),
                }
            }
            (EVENT, _) => Ok(Message::Event(Notice::Other)),
            _ => Err("it answers what was not asked".into()),
        }
    }
}
