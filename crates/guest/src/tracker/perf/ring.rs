//! Records of a perf ring as bytes, for events that sample exactly TID and ADDR.
//!
//! The layout is that of `enum perf_event_type` in linux/perf_event.h. Nothing is taken on
//! trust: a size that cannot be ends the reading.

use demeter_policy::{GuestVirtAddr, Pid};

/// Bytes of `struct perf_event_header`: type (u32), misc (u16), size (u16).
const HEADER_BYTES: usize = 8;

const PERF_RECORD_LOST: u32 = 2;
const PERF_RECORD_SAMPLE: u32 = 9;
const PERF_RECORD_LOST_SAMPLES: u32 = 13;

/// One record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// An access.
    Sample {
        /// The process (thread group) that made it.
        pid: Pid,
        /// Its address; 0 where the hardware knew none.
        addr: GuestVirtAddr,
    },
    /// So many records found no room.
    Lost(u64),
    /// Throttling and whatever else the kernel may say.
    Other,
}

/// The records in `bytes`, which begin at the tail and end at the head. An error says what is
/// corrupt and is the last item: sizes chain the records, so nothing after it can be believed.
pub fn records(bytes: &[u8]) -> impl Iterator<Item = Result<Record, String>> {
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

fn next_record(bytes: &[u8]) -> Option<(Record, &[u8])> {
    let kind = u32_at(bytes, 0)?;
    let size = usize::from(u16::from_ne_bytes(bytes.get(6..8)?.try_into().ok()?));
    if size < HEADER_BYTES || !size.is_multiple_of(8) {
        return None;
    }
    let (record, rest) = bytes.split_at_checked(size)?;
    let body = &record[HEADER_BYTES..];
    let record = match kind {
        PERF_RECORD_SAMPLE => Record::Sample {
            pid: Pid(u32_at(body, 0)?),
            addr: GuestVirtAddr(u64_at(body, 8)?),
        },
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
        let sample = |pid, addr| Record::Sample {
            pid: Pid(pid),
            addr: GuestVirtAddr(addr),
        };
        assert_eq!(
            found,
            [
                sample(7, 0x1234),
                Record::Other,
                Record::Lost(4),
                Record::Other,
                Record::Lost(5),
                sample(8, 0)
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
    fn a_sample_too_short_for_its_fields_is_corrupt() {
        let found: Vec<_> = records(&record(PERF_RECORD_SAMPLE, &[1])).collect();
        assert!(matches!(found[..], [Err(_)]));
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
            let found: Vec<_> = records(&bytes).map(Result::unwrap).collect();
            let expected: Vec<_> = samples
                .iter()
                .map(|&(pid, addr)| Record::Sample { pid: Pid(pid), addr: GuestVirtAddr(addr) })
                .collect();
            prop_assert_eq!(found, expected);
        }
    }
}
