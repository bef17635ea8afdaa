//! ChampSim traces: one uncompressed record of 64 bytes per instruction.
//!
//! Instruction pointer (8 bytes), is-branch, branch-taken, two destination and four source
//! registers (1 byte each), then the addresses of two destinations and four sources in memory
//! (8 bytes each, little-endian, 0 for none). One thread.

use std::io::{self, Read};
use std::path::Path;

use demeter_policy::GuestVirtAddr;

use super::{Error, Fault, TraceEvent};
use crate::Access;

const RECORD_BYTES: usize = 64;
const STORES_AT: usize = 16;
const LOADS_AT: usize = 32;
const RECORDS_AT_ONCE: usize = 1024;

/// Reads a ChampSim trace to its end. `found` receives events in order: an instruction, its loads, its stores.
///
/// # Errors
/// When `source` or `found` fails, or the trace ends within a record.
pub fn champsim(
    mut source: impl Read,
    path: &Path,
    mut found: impl FnMut(&[TraceEvent]) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut bytes = [0; RECORD_BYTES * RECORDS_AT_ONCE];
    let mut events = Vec::new();
    let (mut held, mut offset) = (0, 0u64);
    loop {
        let read = match source.read(&mut bytes[held..]) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Error::io("read", path)(error)),
        };
        held += read;
        if read == 0 {
            return match held {
                0 => Ok(()),
                _ => Err(Error::content(path, offset, Fault::Truncated)),
            };
        }
        let whole = held / RECORD_BYTES * RECORD_BYTES;
        events.clear();
        for record in bytes[..whole].chunks_exact(RECORD_BYTES) {
            events.push(TraceEvent::Instructions(1));
            events.extend(
                addresses(&record[LOADS_AT..]).map(|gva| TraceEvent::Access(Access::load(gva))),
            );
            let stores = addresses(&record[STORES_AT..LOADS_AT]);
            events.extend(stores.map(|gva| TraceEvent::Access(Access::store(gva))));
        }
        found(&events)?;
        bytes.copy_within(whole..held, 0);
        held -= whole;
        offset += whole as u64;
    }
}

/// The addresses that are present.
fn addresses(bytes: &[u8]) -> impl Iterator<Item = GuestVirtAddr> {
    let addresses = bytes.chunks_exact(8).map(|word| {
        let word = word.iter().rev();
        word.fold(0u64, |address, &byte| address << 8 | u64::from(byte))
    });
    addresses.filter(|&address| address != 0).map(GuestVirtAddr)
}
