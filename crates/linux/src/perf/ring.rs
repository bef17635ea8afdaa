//! The ring of a perf event: shared memory and its records.
//!
//! The layouts are those of `struct perf_event_mmap_page` and `enum perf_event_type` in linux/perf_event.h. All values
//! are checked: an impossible head or size is an error, after which the ring is resynchronized.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use demeter_policy::{GuestVirtAddr, PAGE_SIZE, Pid};

use crate::mapping::{Mapping, unread};

/// Offset of the writer's position in the control page, which precedes the records.
pub const DATA_HEAD: usize = 1024;
/// Offset of the reader's position in the control page.
pub const DATA_TAIL: usize = 1032;
/// Size of the control page.
pub const CONTROL_BYTES: usize = PAGE_SIZE as usize;

/// Size of `struct perf_event_header`: type (u32), misc (u16), size (u16).
const HEADER_BYTES: usize = 8;

const PERF_RECORD_LOST: u32 = 2;
/// The type of a sample record.
pub const PERF_RECORD_SAMPLE: u32 = 9;
const PERF_RECORD_LOST_SAMPLES: u32 = 13;

/// The ring of an event.
#[derive(Debug)]
pub struct Ring {
    memory: Mapping,
    data_bytes: u64,
}

impl Ring {
    /// Maps an event's ring with `data_bytes` for records: a power of two of pages.
    pub fn map(event: &impl AsFd, data_bytes: usize) -> io::Result<Self> {
        let memory = Mapping::new(event, CONTROL_BYTES + data_bytes)?;
        Ok(Self {
            memory,
            data_bytes: data_bytes as u64,
        })
    }

    /// Replaces `bytes` with the records since the last call. The error names the invalid value.
    pub fn take(&self, bytes: &mut Vec<u8>) -> Result<(), String> {
        bytes.clear();
        let tail_word = self.memory.u64_at(DATA_TAIL);
        // Acquire: records up to this head were written before it. We are the tail's only writer.
        let head = self.memory.u64_at(DATA_HEAD).load(Ordering::Acquire);
        let tail = tail_word.load(Ordering::Relaxed);
        let aligned = head.is_multiple_of(8) && tail.is_multiple_of(8);
        let pieces = unread(head, tail, self.data_bytes).filter(|_| aligned);
        for piece in pieces.iter().flatten() {
            let place = |at: u64| CONTROL_BYTES + at as usize;
            self.memory
                .copy(place(piece.start)..place(piece.end), bytes);
        }
        // Release: the bytes are reused only after they were copied.
        tail_word.store(head & !7, Ordering::Release);
        match pieces {
            Some(_) => Ok(()),
            None => Err(format!(
                "head {head} is not within {} bytes of tail {tail}",
                self.data_bytes
            )),
        }
    }

    /// Discards the records since the last call.
    pub fn discard(&self) {
        // The data is not needed, and the ring is resynchronized even after an error.
        let _ = self.take(&mut Vec::new());
    }
}

/// One record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record<'a> {
    /// A sample; the event's `sample_type` defines its layout.
    Sample(&'a [u8]),
    /// Number of records that were lost for lack of space.
    Lost(u64),
    /// Throttling and all other records.
    Other,
}

/// Decodes process (thread group) and address of a TID|ADDR sample. The address is 0 if the hardware did not have it.
pub fn access(sample: &[u8]) -> Option<(Pid, GuestVirtAddr)> {
    Some((Pid(u32_at(sample, 0)?), GuestVirtAddr(u64_at(sample, 8)?)))
}

/// A load sampled by AMD's IBS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IbsLoad {
    /// The process.
    pub pid: Pid,
    /// Where it loaded from.
    pub addr: GuestVirtAddr,
    /// Latency after the load missed the first cache, core cycles; 0 for a hit.
    pub latency_cycles: u16,
}

/// Decodes a TID|RAW sample of the `ibs_op` PMU: `None` if the op is no load or has no valid address.
///
/// All kernels with that PMU write the unit's registers into a raw sample, behind a word of its capabilities. As
/// a sample's own address Linux 6.1 gives it, and 5.10 gives 0.
pub fn ibs_load(sample: &[u8]) -> Option<IbsLoad> {
    /// Bits of IbsOpData3: the op loaded, it missed the first cache, IbsDcLinAd is valid.
    const LOAD: u64 = 1 << 0;
    const MISS: u64 = 1 << 7;
    const LINEAR_VALID: u64 = 1 << 17;
    /// Where IbsDcMissLat begins in it.
    const LATENCY_SHIFT: u32 = 32;
    /// Bytes before the registers: pid and tid, the size of what is raw, the capabilities.
    const BEFORE: usize = 16;
    // IbsOpCtl, IbsOpRip, IbsOpData, IbsOpData2, IbsOpData3, IbsDcLinAd
    let register = |at: usize| u64_at(sample, BEFORE + at * 8);
    let size = u32_at(sample, 8)? as usize;
    sample.get(12..)?.get(..size)?;
    let data3 = register(4)?;
    let latency_cycles = match data3 & MISS {
        0 => 0,
        _ => (data3 >> LATENCY_SHIFT) as u16,
    };
    (data3 & LOAD != 0 && data3 & LINEAR_VALID != 0).then_some(IbsLoad {
        pid: Pid(u32_at(sample, 0)?),
        addr: GuestVirtAddr(register(5)?),
        latency_cycles,
    })
}

/// Decodes a TIME|RAW sample: its time in nanoseconds of the event's clock, and the tracepoint's bytes.
pub fn raw(sample: &[u8]) -> Option<(u64, &[u8])> {
    let time_ns = u64_at(sample, 0)?;
    let size = u32_at(sample, 8)? as usize;
    Some((time_ns, sample[12..].get(..size)?))
}

/// Iterates over the records in `bytes`, which span from tail to head.
///
/// An error is the last item: sizes chain the records, so no later record can be found.
pub fn records(bytes: &[u8]) -> impl Iterator<Item = Result<Record<'_>, String>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let at = bytes.len() - rest.len();
        let Some((record, tail)) = next_record(rest) else {
            rest = &[];
            return Some(Err(format!(
                "record at byte {at} of {} has an impossible size",
                bytes.len()
            )));
        };
        rest = tail;
        Some(Ok(record))
    })
}

fn next_record(bytes: &[u8]) -> Option<(Record<'_>, &[u8])> {
    let kind = u32_at(bytes, 0)?;
    let size = usize::from(u16::from_ne_bytes(bytes.get(6..8)?.try_into().ok()?));
    if size < HEADER_BYTES || !size.is_multiple_of(8) {
        return None;
    }
    let (record, rest) = bytes.split_at_checked(size)?;
    let body = &record[HEADER_BYTES..];
    let record = match kind {
        PERF_RECORD_SAMPLE => Record::Sample(body),
        PERF_RECORD_LOST => Record::Lost(u64_at(body, 8)?),
        PERF_RECORD_LOST_SAMPLES => Record::Lost(u64_at(body, 0)?),
        _ => Record::Other,
    };
    Some((record, rest))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(kind: u32, words: &[u64]) -> Vec<u8> {
        let size = (HEADER_BYTES + words.len() * 8) as u16;
        let mut bytes = kind.to_ne_bytes().to_vec();
        bytes.extend(2u16.to_ne_bytes());
        bytes.extend(size.to_ne_bytes());
        bytes.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
        bytes
    }

    fn sample(pid: u32, addr: u64) -> Vec<u8> {
        let pid_and_tid: [u8; 8] = [pid.to_ne_bytes(), (pid + 1).to_ne_bytes()]
            .concat()
            .try_into()
            .unwrap();
        record(PERF_RECORD_SAMPLE, &[u64::from_ne_bytes(pid_and_tid), addr])
    }

    #[test]
    fn every_kind_is_read_and_unknown_ones_are_skipped() {
        let bytes = [
            sample(7, 0x1234),
            record(5, &[1, 2, 3]),
            record(PERF_RECORD_LOST, &[99, 4]),
            record(999, &[]),
            record(PERF_RECORD_LOST_SAMPLES, &[5]),
            sample(8, 0),
        ]
        .concat();
        let found: Vec<_> = records(&bytes).map(Result::unwrap).collect();
        let (first, last) = (sample(7, 0x1234), sample(8, 0));
        assert_eq!(
            found,
            [
                Record::Sample(&first[8..]),
                Record::Other,
                Record::Lost(4),
                Record::Other,
                Record::Lost(5),
                Record::Sample(&last[8..]),
            ]
        );
    }

    #[test]
    fn an_impossible_size_ends_the_reading() {
        for size in [0u16, 4, 7, 9, 12, 4096] {
            let mut corrupt = sample(2, 2);
            corrupt[6..8].copy_from_slice(&size.to_ne_bytes());
            let bytes = [sample(1, 1), corrupt, sample(3, 3)].concat();
            let found: Vec<_> = records(&bytes).collect();
            assert_eq!(found.len(), 2, "size {size}");
            assert!(found[0].is_ok() && found[1].is_err(), "size {size}");
        }
    }

    #[test]
    fn a_sample_too_short_for_its_fields_yields_nothing() {
        assert_eq!(access(&[0; 15]), None);
        let timed = |rest: &[u8]| [&7u64.to_ne_bytes()[..], rest].concat();
        assert_eq!(raw(&timed(&[9, 0, 0, 0, 1, 2, 3, 4])), None);
        let three = timed(&[3, 0, 0, 0, 1, 2, 3, 4]);
        assert_eq!(raw(&three), Some((7, &[1, 2, 3][..])));
        assert_eq!(raw(&three[..11]), None);
        assert_eq!(raw(&[]), None);
    }

    /// A raw sample of IBS: process 7, the register IbsOpData3, the address 0x1234.
    fn ibs_sample(data3: u64) -> Vec<u8> {
        let mut bytes: Vec<u8> = [7u32, 8, 60, 0xdd]
            .iter()
            .flat_map(|it| it.to_ne_bytes())
            .collect();
        let registers = [1 << 18, 0x40_0000, 0, 0, data3, 0x1234, 0x5678];
        bytes.extend(registers.iter().flat_map(|it: &u64| it.to_ne_bytes()));
        bytes
    }

    #[test]
    fn an_op_is_a_load_only_with_a_valid_address() {
        let load = |data3| ibs_load(&ibs_sample(data3));
        let hit = IbsLoad {
            pid: Pid(7),
            addr: GuestVirtAddr(0x1234),
            latency_cycles: 0,
        };
        let miss = IbsLoad {
            latency_cycles: 500,
            ..hit
        };
        assert_eq!(load(1 << 17 | 1), Some(hit));
        assert_eq!(load(500 << 32 | 1 << 17 | 1 << 7 | 1), Some(miss));
        // A latency without a miss is left over from another op.
        assert_eq!(load(500 << 32 | 1 << 17 | 1), Some(hit));
        for (no_load, why) in [
            (0, "no access"),
            (1, "no address"),
            (1 << 17 | 2, "a store"),
        ] {
            assert_eq!(load(no_load), None, "{why}");
        }
        let whole = ibs_sample(1 << 17 | 1);
        assert!((0..whole.len()).all(|end| ibs_load(&whole[..end]).is_none()));
    }

    #[test]
    fn a_lying_head_is_an_error_once() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(3 * PAGE_SIZE).unwrap();
        let ring = Ring::map(&file, 2 * CONTROL_BYTES).unwrap();
        let kernel = Mapping::new(&file, 3 * CONTROL_BYTES).unwrap();
        let mut bytes = Vec::new();
        for head in [2 * PAGE_SIZE + 8, u64::MAX, 12] {
            kernel.u64_at(DATA_HEAD).store(head, Ordering::Release);
            assert!(ring.take(&mut bytes).is_err(), "head {head}");
            kernel
                .u64_at(DATA_HEAD)
                .store((head & !7).wrapping_add(16), Ordering::Release);
            assert_eq!(ring.take(&mut bytes), Ok(()));
            assert_eq!(bytes.len(), 16);
            kernel.u64_at(DATA_HEAD).store(0, Ordering::Release);
            kernel.u64_at(DATA_TAIL).store(0, Ordering::Release);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_in_bounded_steps(bytes in prop::collection::vec(any::<u8>(), 0..500)) {
            let found: Vec<_> = records(&bytes).collect();
            prop_assert!(found.len() <= bytes.len() / HEADER_BYTES + 1);
            let errors = found.iter().filter(|record| record.is_err()).count();
            prop_assert!(errors <= 1 && found.iter().rev().skip(1).all(Result::is_ok));
        }

        #[test]
        fn what_was_written_is_read(
            samples in prop::collection::vec((0u32..u32::MAX, any::<u64>()), 0..50),
        ) {
            let bytes: Vec<u8> =
                samples.iter().flat_map(|&(pid, addr)| sample(pid, addr)).collect();
            let found: Vec<_> = records(&bytes)
                .map(|record| match record {
                    Ok(Record::Sample(sample)) => access(sample).unwrap(),
                    other => panic!("{other:?}"),
                })
                .collect();
            let expected: Vec<_> =
                samples.iter().map(|&(pid, addr)| (Pid(pid), GuestVirtAddr(addr))).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
