//! Round trips, and errors with an offset for any other bytes.

use std::io::Cursor;
use std::path::{Path, PathBuf};

use demeter_policy::GuestVirtAddr;
use demeter_scenario::{Trace, Workload as Kind};
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::workload::Workload;
use crate::{Access, Batch, Program};

/// Accesses of several threads, with near and far differences.
fn accesses() -> impl Strategy<Value = Vec<(u32, Access)>> {
    let addr = prop_oneof![
        4 => 0x7000_0000u64..0x7001_0000,
        2 => 0u64..1 << 34,
        1 => 0u64..1 << 57,
    ];
    let access = (addr, any::<bool>()).prop_map(|(addr, is_store)| {
        let gva = GuestVirtAddr(addr & !7);
        if is_store {
            Access::store(gva)
        } else {
            Access::load(gva)
        }
    });
    proptest::collection::vec((0u32..4, access), 1..400)
}

fn write(path: &Path, accesses: &[(u32, Access)]) -> Written {
    let mut writer = Writer::create(path).unwrap();
    for (thread, access) in accesses {
        let events = [TraceEvent::Instructions(1), TraceEvent::Access(*access)];
        writer.push(*thread, events).unwrap();
    }
    writer.finish().unwrap()
}

fn file(accesses: &[(u32, Access)]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.trace");
    write(&path, accesses);
    (dir, path)
}

/// Reads all frames or returns the error.
fn read(bytes: &[u8]) -> Result<Vec<Frame>, Error> {
    let mut reader = Reader::new(bytes, Path::new("t"))?;
    let mut frames = Vec::new();
    let mut frame = Frame::default();
    while reader.next_frame(&mut frame)?.is_some() {
        frames.push(frame.clone());
    }
    Ok(frames)
}

proptest! {
    #[test]
    fn what_is_written_is_read(accesses in accesses()) {
        let (dir, path) = file(&accesses);
        let bytes = std::fs::read(&path).unwrap();
        let frames = read(&bytes).unwrap();
        for frame in &frames {
            // The frame equals the accesses of one thread.
            let own = (0..4).any(|thread| {
                let of = accesses.iter().filter(|(t, _)| *t == thread);
                of.map(|(_, access)| *access).collect::<Vec<_>>() == frame.accesses
            });
            prop_assert!(own);
            prop_assert_eq!(frame.instructions, frame.accesses.len() as u64);
        }
        let count: usize = frames.iter().map(|frame| frame.accesses.len()).sum();
        prop_assert_eq!(count, accesses.len());
        // The trace, without temporary files.
        prop_assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_changed_byte_is_found_out(accesses in accesses(), at: prop::sample::Index, by in 1u8..) {
        let (_dir, path) = file(&accesses);
        let mut bytes = std::fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= by;
        let Err(Error::Content { offset, .. }) = read(&bytes) else {
            return Err(TestCaseError::fail("no error, or one without an offset"));
        };
        prop_assert!(offset <= bytes.len() as u64);
    }

    #[test]
    fn a_cut_file_is_found_out(accesses in accesses(), at: prop::sample::Index) {
        let (_dir, path) = file(&accesses);
        let bytes = std::fs::read(&path).unwrap();
        let cut = at.index(bytes.len());
        let error = read(&bytes[..cut]).unwrap_err();
        let Error::Content { offset, fault: Fault::Truncated, .. } = error else {
            return Err(TestCaseError::fail(error.to_string()));
        };
        prop_assert_eq!(offset, cut as u64);
    }

    #[test]
    fn replaying_moves_every_access_with_its_region(accesses in accesses()) {
        let (_dir, path) = file(&accesses);
        let kind = Kind::Trace(Trace { file: path });
        let mut program = Workload::new(&kind, 1, 0).unwrap();
        // Regions are spaced by their size.
        let mut base = 1u64 << 20;
        let bases: Vec<GuestVirtAddr> = program.regions().iter().map(|region| {
            let at = base;
            base += region.bytes.0 + (1 << 20);
            GuestVirtAddr(at)
        }).collect();
        program.place(&bases);
        for thread in 0..program.threads() {
            let mut replayed = Vec::new();
            while replayed.len() < 2 * accesses.len() {
                let mut batch = Batch::default();
                program.next(thread, 0, &mut batch);
                replayed.extend_from_slice(batch.accesses());
            }
            // Kinds and page offsets repeat the recording, twice.
            let own = (0..4).any(|number| {
                let of: Vec<Access> =
                    accesses.iter().filter(|(t, _)| *t == number).map(|(_, a)| *a).collect();
                !of.is_empty() && replayed.iter().zip(of.iter().cycle()).all(|(new, old)| {
                    new.is_store() == old.is_store()
                        && new.gva().0 % 4096 == old.gva().0 % 4096
                })
            });
            prop_assert!(own);
        }
        prop_assert_eq!(program.fault(), None);
    }
}

#[test]
fn streams_cost_a_byte_and_jumps_few() {
    let stream = |i: u64| (0, Access::load(GuestVirtAddr((1 << 40) + i * 8)));
    let update = |i: u64| {
        let gva = GuestVirtAddr((i / 2).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 30 & !7);
        (
            0,
            if i & 1 == 0 {
                Access::load(gva)
            } else {
                Access::store(gva)
            },
        )
    };
    let dir = tempfile::tempdir().unwrap();
    let bytes_each = |accesses: Vec<(u32, Access)>| {
        let written = write(&dir.path().join("t"), &accesses);
        written.file_bytes as f64 / accesses.len() as f64
    };
    assert!(bytes_each((0..100_000).map(stream).collect()) < 1.02);
    // Random updates in 16 GiB: each store follows its load.
    let random = bytes_each((0..100_000).map(update).collect());
    assert!(random < 3.3, "{random}");
}

#[test]
fn a_frame_is_read_again_where_it_was() {
    let accesses: Vec<(u32, Access)> = (0..50_000)
        .map(|i| (i % 2, Access::load(GuestVirtAddr(u64::from(i) * 64))))
        .collect();
    let (_dir, path) = file(&accesses);
    let mut reader = Reader::open(&path).unwrap();
    let mut frames = Vec::new();
    let mut frame = Frame::default();
    while let Some(place) = reader.next_frame(&mut frame).unwrap() {
        frames.push((place, frame.clone()));
    }
    assert_eq!(frames.len(), 8);
    for (place, expected) in frames.iter().rev() {
        reader.frame_at(*place, &mut frame).unwrap();
        assert_eq!(&frame, expected);
    }
}

#[test]
fn a_trace_without_access_is_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let mut writer = Writer::create(&path).unwrap();
    writer.push(0, [TraceEvent::Instructions(1)]).unwrap();
    assert!(matches!(writer.finish(), Err(Error::Empty { .. })));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_trace_that_changes_under_the_replay_is_told_at_the_end() {
    let accesses: Vec<(u32, Access)> = (0..20_000)
        .map(|i| (0, Access::load(GuestVirtAddr(i * 64))))
        .collect();
    let (_dir, path) = file(&accesses);
    let mut program = Workload::new(&Kind::Trace(Trace { file: path.clone() }), 1, 0).unwrap();
    program.place(&vec![GuestVirtAddr(0); program.regions().len()]);
    let cut = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    cut.set_len(100).unwrap();
    for _ in 0..40 {
        let mut batch = Batch::default();
        program.next(0, 0, &mut batch);
        assert!(!batch.accesses().is_empty());
    }
    let fault = program.fault().unwrap();
    assert!(fault.contains("byte 100"), "{fault}");
}

fn gather(
    read: impl FnOnce(&mut dyn FnMut(&[TraceEvent]) -> Result<(), Error>) -> Result<(), Error>,
) -> Result<Vec<TraceEvent>, Error> {
    let mut all = Vec::new();
    read(&mut |events| {
        all.extend_from_slice(events);
        Ok(())
    })?;
    Ok(all)
}

#[test]
fn lackeys_lines() {
    let text = "==12== Lackey\n\nI  04016b80,3\n L 1ffeffe7e8,8\n S 04222cac,4\n M 0421c7cc,4\n";
    let read = |text: &str| {
        let source = Cursor::new(text.as_bytes().to_vec());
        gather(|found| lackey(source, Path::new("l"), found))
    };
    let (load, store) = (
        |gva| TraceEvent::Access(Access::load(GuestVirtAddr(gva))),
        |gva| TraceEvent::Access(Access::store(GuestVirtAddr(gva))),
    );
    assert_eq!(
        read(text).unwrap(),
        [
            TraceEvent::Instructions(1),
            load(0x1f_feff_e7e8),
            store(0x0422_2cac),
            load(0x0421_c7cc),
            store(0x0421_c7cc),
        ]
    );
    for bad in [
        "hello\n",
        " L 12\n",
        " L xyz,8\n",
        " X 12,8\n",
        " L 12,99999999\n",
    ] {
        let error = read(&format!("==1== x\n{bad}")).unwrap_err().to_string();
        assert!(
            error.contains("byte 8") && error.contains("lackey"),
            "{error}"
        );
    }
}

#[test]
fn champsims_records() {
    let mut record = [0u8; 64];
    record[16..24].copy_from_slice(&0x1000u64.to_le_bytes());
    record[32..40].copy_from_slice(&0x2000u64.to_le_bytes());
    record[56..64].copy_from_slice(&0x3000u64.to_le_bytes());
    let bytes = [record, [0; 64]].concat();
    let read = |bytes: &[u8]| gather(|found| champsim(bytes, Path::new("c"), found));
    assert_eq!(
        read(&bytes).unwrap(),
        [
            TraceEvent::Instructions(1),
            TraceEvent::Access(Access::load(GuestVirtAddr(0x2000))),
            TraceEvent::Access(Access::load(GuestVirtAddr(0x3000))),
            TraceEvent::Access(Access::store(GuestVirtAddr(0x1000))),
            TraceEvent::Instructions(1),
        ]
    );
    let error = read(&bytes[..100]).unwrap_err().to_string();
    assert!(
        error.contains("byte 64") && error.contains("cut off"),
        "{error}"
    );
}

proptest! {
    #[test]
    fn foreign_readers_take_any_bytes(accesses in accesses(), bytes: Vec<u8>) {
        let line = |(_, access): &(u32, Access)| {
            let kind = if access.is_store() { 'S' } else { 'L' };
            format!(" {kind} {:x},8\n", access.gva().0)
        };
        let lines: String = accesses.iter().map(line).collect();
        let read = |bytes: &[u8]| gather(|found| lackey(bytes, Path::new("l"), found));
        let found: Vec<TraceEvent> = accesses.iter().map(|(_, access)| TraceEvent::Access(*access)).collect();
        prop_assert_eq!(&read(lines.as_bytes()).unwrap(), &found);
        match read(&[lines.as_bytes(), &bytes].concat()) {
            Ok(more) => prop_assert!(more.starts_with(&found)),
            Err(error) => {
                let Error::Content { offset, .. } = error else {
                    return Err(TestCaseError::fail(error.to_string()));
                };
                prop_assert!(offset >= lines.len() as u64);
            }
        }
        let read = gather(|found| champsim(&bytes[..], Path::new("c"), found));
        prop_assert_eq!(read.is_ok(), bytes.len() % 64 == 0);
    }
}
