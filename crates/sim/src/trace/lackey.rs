//! Output of `valgrind --tool=lackey --trace-mem=yes`: a line per instruction and access.
//!
//! `I  04016b80,3` is an instruction, ` L 1ffeffe7e,8` a load, ` S ...` a store, ` M ...` a load and a store. Each line
//! has a hexadecimal address and a size. Lines that begin with `==` come from valgrind. Lackey does not print threads,
//! so all events belong to one.

use std::io::{self, BufRead};
use std::path::Path;

use demeter_policy::GuestVirtAddr;

use super::{Error, Fault, TraceEvent};
use crate::Access;

/// Maximum length of a lackey line, bytes.
const LINE_MAX: u64 = 4096;

/// Reads lackey's output to its end. `found` receives events in order.
///
/// # Errors
/// When `source` or `found` fails, or a line is invalid; the error has its offset.
pub fn lackey(
    mut source: impl BufRead,
    path: &Path,
    mut found: impl FnMut(&[TraceEvent]) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut line = Vec::new();
    let mut offset = 0;
    loop {
        line.clear();
        let mut bounded = io::Read::take(&mut source, LINE_MAX);
        let read = bounded
            .read_until(b'\n', &mut line)
            .map_err(Error::io("read", path))?;
        if read == 0 {
            return Ok(());
        }
        let text = line.trim_ascii();
        if !text.is_empty() && !text.starts_with(b"==") {
            let events = parse(text).ok_or_else(|| Error::content(path, offset, Fault::Line))?;
            found(&events)?;
        }
        offset += read as u64;
    }
}

/// The events of a line: at most two.
fn parse(line: &[u8]) -> Option<Events> {
    let (kind, rest) = line.split_first()?;
    let rest = std::str::from_utf8(rest).ok()?.trim_start();
    let (address, size) = rest.split_once(',')?;
    size.parse::<u16>().ok()?;
    let gva = GuestVirtAddr(u64::from_str_radix(address, 16).ok()?);
    let (load, store) = (Access::load(gva), Access::store(gva));
    Some(match kind {
        b'I' => Events::one(TraceEvent::Instructions(1)),
        b'L' => Events::one(TraceEvent::Access(load)),
        b'S' => Events::one(TraceEvent::Access(store)),
        b'M' => Events {
            events: [TraceEvent::Access(load), TraceEvent::Access(store)],
            count: 2,
        },
        _ => return None,
    })
}

struct Events {
    events: [TraceEvent; 2],
    count: usize,
}

impl Events {
    fn one(event: TraceEvent) -> Self {
        Self {
            events: [event; 2],
            count: 1,
        }
    }
}

impl std::ops::Deref for Events {
    type Target = [TraceEvent];

    fn deref(&self) -> &[TraceEvent] {
        &self.events[..self.count]
    }
}
