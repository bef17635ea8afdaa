//! Tests of the properties in the module's text.

use std::fs;
use std::path::Path;

use demeter_policy::engine::conformance::{Rig, Script, hot_set};
use demeter_policy::engine::{Direction, Input, NodeFacts, Request};
use demeter_policy::{
    BLOCK_SIZE, Block, ByLevel, ByteCount, GuestVirtAddr, LEVELS, Level, Observation, Pid,
    Relocation, Sample, Share, Socket, Spread, VirtRange,
};
use proptest::prelude::*;

use super::events::{Decoder, Encoder};
use super::format::{Bytes, VERSION};
use super::*;
use crate::agent::conformance::AgentRig;

/// A recording of an agent under a script.
fn recorded(script: &Script) -> AgentRig {
    let mut rig = AgentRig::new(script);
    for epoch in &script.epochs {
        rig.run_epoch(epoch);
    }
    rig.finish();
    rig
}

fn bytes_of(script: &Script) -> Vec<u8> {
    fs::read(recorded(script).recording()).unwrap()
}

fn replay_bytes(bytes: &[u8]) -> Result<Replayed, RecordingError> {
    let mut reader = Reader::new(bytes, Path::new("x.rec"))?;
    replay(&mut reader, &mut |_| ())
}

#[test]
fn a_replay_decides_what_the_agent_decided() {
    let script = hot_set(20, 60, 60..75, 30);
    let rig = recorded(&script);
    let mut reader = Reader::open(&rig.recording()).unwrap();
    assert_eq!(reader.header().agent, env!("CARGO_PKG_VERSION"));
    assert_eq!(reader.header().tuning, script.tuning());
    let mut promoted = 0;
    let replayed = replay(&mut reader, &mut |decision| {
        if let Request::Move {
            direction: Direction::Promotion,
            blocks,
            ..
        } = decision.request
        {
            promoted += blocks.len();
        }
    })
    .unwrap();
    assert_eq!(replayed.divergence, None);
    assert!(replayed.is_ended);
    assert_eq!((replayed.first_epoch, replayed.last_epoch), (0, 30));
    assert!(promoted >= 15, "{promoted}");
    assert!(replayed.figures.promoted.0 >= 15 * BLOCK_SIZE);
}

#[test]
fn a_replay_with_another_tuning_differs_and_says_where() {
    let bytes = bytes_of(&hot_set(20, 60, 60..75, 10));
    let mut reader = Reader::new(&bytes[..], Path::new("x.rec")).unwrap();
    reader.header_mut().tuning.rate_limit_mib_s = 4;
    let divergence = replay(&mut reader, &mut |_| ())
        .unwrap()
        .divergence
        .unwrap();
    assert_ne!(divergence.recorded, divergence.replayed);
    assert!(divergence.epoch > 0 && divergence.offset < bytes.len() as u64);
}

#[test]
fn a_full_file_moves_aside_and_both_can_be_replayed() {
    let mut script = hot_set(20, 60, 60..75, 1);
    // Distant samples take the most bytes.
    script.epochs[0].samples = (0..40_000).map(|i| i * 31 % 80).collect();
    let rig_at = |limit_mib: u64, epochs: usize| {
        let mut rig = AgentRig::with_limit(&script, limit_mib);
        for _ in 0..epochs {
            rig.run_epoch(&script.epochs[0]);
        }
        rig.finish();
        rig
    };
    let rig = rig_at(4, 30);
    let (new, old) = (rig.recording(), rig.recording().with_extension("rec.1"));
    let size = |path: &Path| fs::metadata(path).unwrap().len();
    assert!(size(&new) + size(&old) <= 4 << 20);
    let replayed = [&old, &new].map(|path| {
        let mut reader = Reader::open(path).unwrap();
        replay(&mut reader, &mut |_| ()).unwrap()
    });
    for r in &replayed {
        assert_eq!(r.divergence, None);
        assert!(r.is_ended);
    }
    assert_eq!(replayed[0].last_epoch, replayed[1].first_epoch);
    assert_eq!(replayed[1].last_epoch, 30);
}

#[test]
fn bad_files_are_named_with_offset_and_reason() {
    let bytes = bytes_of(&hot_set(4, 8, 8..10, 3));
    let said = |bytes: &[u8]| replay_bytes(bytes).unwrap_err().to_string();
    assert_eq!(
        said(b"hello, world"),
        "x.rec, byte 0: this is no recording of an agent"
    );
    let mut other = bytes.clone();
    for version in [1, VERSION + 1] {
        other[8..10].copy_from_slice(&version.to_le_bytes());
        let want = format!("x.rec, byte 8: the recording has format {version}");
        assert!(said(&other).starts_with(&want));
    }
    let cut = &bytes[..bytes.len() - 20];
    assert_eq!(
        said(cut),
        format!("x.rec, byte {}: the recording is cut off here", cut.len())
    );
    let mut altered = bytes.clone();
    let at = bytes.len() - 30;
    altered[at] ^= 4;
    assert!(
        said(&altered).contains("the recording was altered here"),
        "{}",
        said(&altered)
    );
    let mut long = bytes.clone();
    long.push(0);
    assert!(said(&long).ends_with("something follows the end"));
    // A file that is still being written holds whole frames.
    let open = &bytes[..bytes.len() - 9];
    assert!(!replay_bytes(open).unwrap().is_ended);
}

#[test]
fn another_file_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notes.txt");
    fs::write(&path, "do not lose this").unwrap();
    let rig = AgentRig::new(&hot_set(4, 8, 8..10, 1));
    let header = Reader::open(&rig.recording()).unwrap().header().clone();
    let engine = demeter_policy::engine::Engine::new(
        demeter_policy::engine::ByHeat::new(header.gain()),
        demeter_policy::engine::Config::new(&header.tuning, ByteCount(0)),
    );
    let error = Recorder::start(&path, 4, header, &engine).unwrap_err();
    assert!(
        error.to_string().contains("exists and is no recording"),
        "{error}"
    );
    assert_eq!(fs::read_to_string(&path).unwrap(), "do not lose this");
}

/// An event with its lists.
#[derive(Debug, Clone)]
enum Any {
    Plain(RecordedEvent<'static>),
    Space(Pid, Vec<VirtRange>),
    Located(Vec<Spread>),
    Moved(Vec<Spread>, u64, u64),
    Samples(usize, Vec<(Pid, Block)>),
    LookUp(Pid, Vec<Block>),
    Move(Pid, Level, Direction, Vec<Relocation>),
    Collapse(Pid, Vec<Relocation>),
}

impl Any {
    fn event(&self) -> RecordedEvent<'_> {
        match self {
            Self::Plain(event) => *event,
            Self::Space(pid, vmas) => RecordedEvent::Input(Input::Space { pid: *pid, vmas }),
            Self::Located(all) => RecordedEvent::Input(Input::Located(all)),
            Self::Moved(placements, took_ns, cpu_ns) => RecordedEvent::Input(Input::Moved {
                placements,
                took_ns: *took_ns,
                cpu_ns: *cpu_ns,
            }),
            Self::Samples(most, wanted) => RecordedEvent::Request(Request::Samples {
                most: *most,
                wanted,
            }),
            Self::LookUp(pid, blocks) => {
                RecordedEvent::Request(Request::LookUp { pid: *pid, blocks })
            }
            Self::Move(pid, level, direction, blocks) => RecordedEvent::Request(Request::Move {
                pid: *pid,
                level: *level,
                direction: *direction,
                blocks,
            }),
            Self::Collapse(pid, blocks) => {
                RecordedEvent::Request(Request::Collapse { pid: *pid, blocks })
            }
        }
    }
}

fn pid() -> impl Strategy<Value = Pid> {
    (0u32..5).prop_map(Pid)
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![any::<u64>(), 0..1u64 << 33, Just(BLOCK_SIZE), Just(0)]
}

fn bytes() -> impl Strategy<Value = ByteCount> {
    number().prop_map(ByteCount)
}

/// Any input without lists.
fn any_input() -> impl Strategy<Value = Input<'static>> {
    let latency_ns = || proptest::option::of(1..u32::MAX);
    let facts = move || {
        (bytes(), bytes(), latency_ns()).prop_map(|(free, kept, latency_ns)| NodeFacts {
            free,
            kept,
            latency_ns,
        })
    };
    prop_oneof![
        Just(Input::Epoch),
        pid().prop_map(Input::Started),
        pid().prop_map(Input::Ended),
        bytes().prop_map(Input::BalloonWants),
        (pid(), socket()).prop_map(|(pid, socket)| Input::Near { pid, socket }),
        (0..LEVELS, socket(), bytes()).prop_map(|(level, socket, free)| Input::Room {
            place: (Level::ALL[level], socket),
            free,
        }),
        (pid(), any::<bool>(), any::<u32>(), bytes()).prop_map(|(pid, has, n, guarantee)| {
            let (group, weight) = (n, n / 2);
            let share = has.then_some(Share {
                group,
                guarantee,
                weight,
            });
            Input::Share { pid, share }
        }),
        any::<bool>().prop_map(Input::Paused),
        any::<u32>().prop_map(Input::Thinned),
        Just(Input::Refreshed),
        (pid(), number(), prop_oneof![Just(1u32), any::<u32>()]).prop_map(|(pid, a, weight)| {
            let addr = GuestVirtAddr(a);
            Input::Sample(Sample { pid, addr, weight })
        }),
        (pid(), number(), any::<u32>(), number(), any::<bool>()).prop_map(
            |(pid, block, events, exposure_ns, is_least)| {
                Input::Looked(Observation {
                    pid,
                    block: Block(block),
                    events,
                    exposure_ns,
                    is_least,
                })
            }
        ),
        (number(), number(), any::<bool>()).prop_map(|(lost, rejected, is_repeat)| {
            Input::SamplesEnd {
                lost,
                rejected,
                is_repeat,
            }
        }),
        Just(Input::LookUpFailed),
        prop::array::uniform4(facts()).prop_map(|by| Input::Nodes(ByLevel(by))),
        (prop::array::uniform4(bytes()), any::<u32>()).prop_map(|(sizes, cpus)| {
            let sizes = ByLevel(sizes);
            Input::Machine { sizes, cpus }
        }),
        Just(Input::MoveFailed),
        (number(), number()).prop_map(|(took_ns, cpu_ns)| Input::Collapsed { took_ns, cpu_ns }),
        Just(Input::Reclaimed),
    ]
}

fn socket() -> impl Strategy<Value = Socket> {
    (0..usize::from(Socket::MAX)).prop_map(Socket::new)
}

fn any_event() -> impl Strategy<Value = Any> {
    let place = || {
        let bytes = prop::array::uniform4(bytes()).prop_map(ByLevel);
        (bytes, socket()).prop_map(|(bytes, socket)| Spread { bytes, socket })
    };
    let places = || prop::collection::vec(place(), 0..20);
    let range = (number(), number()).prop_filter_map("empty", |(a, b)| {
        VirtRange::new(GuestVirtAddr(a.min(b)), GuestVirtAddr(a.max(b)))
    });
    let request = prop_oneof![
        Just(Request::Refresh),
        any::<u32>().prop_map(|most| Request::Samples {
            most: most as usize,
            wanted: &[],
        }),
        Just(Request::ReadNodes),
        Just(Request::Reclaim),
        any::<u32>().prop_map(|epochs| Request::Sleep { epochs }),
    ];
    let moved = (
        pid(),
        any::<bool>(),
        prop::collection::vec((number(), bytes()), 0..9),
    );
    prop_oneof![
        8 => any_input().prop_map(|i| Any::Plain(RecordedEvent::Input(i))),
        2 => request.prop_map(|r| Any::Plain(RecordedEvent::Request(r))),
        1 => (pid(), prop::collection::vec(range, 0..9)).prop_map(|(p, r)| Any::Space(p, r)),
        1 => places().prop_map(Any::Located),
        1 => (places(), number(), number()).prop_map(|(all, took, cpu)| Any::Moved(all, took, cpu)),
        1 => (any::<u32>(), prop::collection::vec((pid(), number()), 0..20)).prop_map(|(most, wanted)| {
            let wanted = wanted.into_iter().map(|(pid, b)| (pid, Block(b)));
            Any::Samples(most as usize, wanted.collect())
        }),
        1 => (pid(), prop::collection::vec(number(), 0..20))
            .prop_map(|(p, b)| Any::LookUp(p, b.into_iter().map(Block).collect())),
        1 => moved.prop_map(|(pid, up, blocks)| {
            let relocation = |(b, bytes)| Relocation { pid, block: Block(b), bytes };
            let direction = if up { Direction::Promotion } else { Direction::Demotion };
            let level = Level::ALL[blocks.len() % LEVELS];
            let relocations: Vec<_> = blocks.into_iter().map(relocation).collect();
            match pid.0 {
                0 => Any::Collapse(pid, relocations),
                _ => Any::Move(pid, level, direction, relocations),
            }
        }),
    ]
}

proptest! {
    #[test]
    fn what_is_read_is_what_was_written(events in prop::collection::vec(any_event(), 0..60)) {
        let (mut encoder, mut bytes) = (Encoder::default(), vec![]);
        for any in &events {
            match any.event() {
                RecordedEvent::Input(input) => encoder.input(input, &mut bytes),
                RecordedEvent::Request(request) => encoder.request(request, &mut bytes),
            }
        }
        let (mut decoder, mut from) = (Decoder::default(), Bytes(&bytes));
        for any in &events {
            prop_assert_eq!(decoder.event(&mut from), Ok(any.event()));
        }
        prop_assert!(from.0.is_empty());
    }

    #[test]
    fn any_bytes_are_events_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let (mut decoder, mut from) = (Decoder::default(), Bytes(&bytes));
        while !from.0.is_empty() && decoder.event(&mut from).is_ok() {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn a_file_that_was_altered_or_cut_is_refused(
        seed: u64,
        at in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 20),
    ) {
        let bytes = bytes_of(&Script::new(seed));
        prop_assert_eq!(replay_bytes(&bytes).unwrap().divergence, None);
        for (at, bit) in at {
            let at = at.index(bytes.len());
            let mut altered = bytes.clone();
            altered[at] ^= 1 << bit;
            prop_assert!(replay_bytes(&altered).is_err());
            let whole = replay_bytes(&bytes[..at]).is_ok_and(|r| r.is_ended);
            prop_assert!(!whole, "cut at {}", at);
        }
    }
}

/// The seed file of the fuzz target `recording`.
const FUZZ_SEED: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../fuzz/corpus/recording/hot_set"
);

#[test]
fn the_fuzz_seed_has_the_format_of_today() {
    let bytes = fs::read(FUZZ_SEED).unwrap();
    let replayed = replay_bytes(&bytes)
        .expect("write it anew: cargo test -p demeter-guest -- --ignored writes_the_fuzz_seed");
    assert!(replayed.is_ended && replayed.decisions > 0);
}

#[test]
#[ignore = "writes to the source tree"]
fn writes_the_fuzz_seed() {
    fs::write(FUZZ_SEED, bytes_of(&hot_set(4, 8, 8..10, 4))).unwrap();
}
