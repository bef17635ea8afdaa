//! Properties of the codec: an encoded message is decoded however the pipe cuts it, and any bytes
//! are harmless.

use demeter_policy::benefit::{Benefit, POINTS_MAX};
use demeter_policy::{ByteCount, GuestPhysAddr, NodeId};
use demeter_proto::{
    BootId, DecodeError, Decoder, Done, ENCODED_BYTES_MAX, EncodeError, GpaRange, Hello, Message,
    NODES_MAX, NodeStats, NodeTotal, Nonce, Outcome, Permille, RANGES_MAX, REASON_BYTES_MAX,
    Ranges, Relocation, RequestId, Resize, SessionId, Stats, VERSION, VERSION_MIN, encode,
    encode_as, shown,
};
use proptest::collection::vec;
use proptest::prelude::*;

fn node() -> impl Strategy<Value = NodeId> + Clone {
    any::<u32>().prop_map(NodeId)
}

fn bytes() -> impl Strategy<Value = ByteCount> + Clone {
    any::<u64>().prop_map(ByteCount)
}

fn request() -> impl Strategy<Value = RequestId> + Clone {
    any::<u64>().prop_map(RequestId)
}

fn permille() -> impl Strategy<Value = Permille> {
    (0u16..=1000).prop_map(Permille::new)
}

fn hello() -> impl Strategy<Value = Message> {
    let total = (node(), bytes()).prop_map(|(node, total)| NodeTotal { node, total });
    let session = any::<u64>().prop_map(SessionId);
    (
        any::<[u8; 16]>(),
        session,
        any::<bool>(),
        vec(total, 0..=NODES_MAX),
    )
        .prop_map(|(boot_id, session, driver, nodes)| {
            Message::Hello(Hello {
                boot_id: BootId(boot_id),
                session,
                driver,
                nodes,
            })
        })
}

fn benefit() -> impl Strategy<Value = Benefit> {
    let points = vec((1..1u64 << 58, 0u16..=1000), 1..=POINTS_MAX);
    (
        points,
        1u32..1000,
        0u32..1000,
        0u32..10_000,
        0u16..=1000,
        0u16..=1000,
    )
        .prop_map(|(steps, fast, more, running_ms, one, other)| {
            let steps = steps
                .iter()
                .map(|&(step, served)| (ByteCount(step), served));
            let waits = (one.min(other), one.max(other));
            Benefit::of_steps(steps.collect(), (fast, more), running_ms, waits)
        })
}

fn stats() -> impl Strategy<Value = Message> {
    let node = (node(), bytes(), bytes(), bytes(), bytes()).prop_map(
        |(node, total, free, held, working_set)| NodeStats {
            node,
            total,
            free,
            held,
            working_set,
        },
    );
    let hit = prop::option::of(permille());
    let relocation = (any::<u64>(), any::<i64>(), any::<bool>()).prop_map(
        |(cost_ms, benefit_ms, is_resting)| Relocation {
            cost_ms,
            benefit_ms,
            is_resting,
        },
    );
    let relocation = prop::option::of(relocation);
    (
        permille(),
        permille(),
        hit,
        relocation,
        prop::option::of(benefit()),
        bytes(),
        vec(node, 0..=NODES_MAX),
    )
        .prop_map(
            |(psi_some, psi_full, fast_hit, relocation, benefit, oom_returned, nodes)| {
                Message::Stats(Stats {
                    psi_some,
                    psi_full,
                    fast_hit,
                    relocation,
                    benefit,
                    oom_returned,
                    nodes,
                })
            },
        )
}

fn ranges() -> impl Strategy<Value = Ranges> {
    let range = (any::<u64>(), bytes()).prop_map(|(start, bytes)| GpaRange {
        start: GuestPhysAddr(start),
        bytes,
    });
    let count = prop_oneof![9 => 0..50usize, 1 => RANGES_MAX..=RANGES_MAX];
    let list = count.prop_flat_map(move |n| vec(range.clone(), n));
    (request(), node(), any::<bool>(), list).prop_map(|(request, node, more, ranges)| Ranges {
        request,
        node,
        more,
        ranges,
    })
}

fn done() -> impl Strategy<Value = Message> {
    let outcome = prop_oneof![
        Just(Outcome::Ok),
        Just(Outcome::Partial),
        Just(Outcome::NoDriver),
        Just(Outcome::Refused),
    ];
    (request(), node(), bytes(), bytes(), outcome, ".{0,50}").prop_map(
        |(request, node, moved, held, outcome, reason)| {
            Message::Done(Done {
                request,
                node,
                moved,
                held,
                outcome,
                // Encoding cleans the text.
                reason: shown(&reason),
            })
        },
    )
}

fn message() -> impl Strategy<Value = Message> {
    let resize = (request(), node(), bytes()).prop_map(|(request, node, bytes)| Resize {
        request,
        node,
        bytes,
    });
    prop_oneof![
        hello(),
        stats(),
        ranges().prop_map(Message::Inflated),
        ranges().prop_map(Message::Held),
        done(),
        any::<u64>().prop_map(|id| Message::Welcome {
            session: SessionId(id)
        }),
        resize.clone().prop_map(Message::Inflate),
        resize.prop_map(Message::Deflate),
        (request(), node(), any::<u64>()).prop_map(|(request, node, page)| Message::Proof {
            request,
            node,
            page: GuestPhysAddr(page),
        }),
        (request(), node(), any::<[u8; 16]>()).prop_map(|(request, node, nonce)| Message::Prove {
            request,
            node,
            nonce: Nonce(nonce),
        }),
        (request(), node(), any::<u64>()).prop_map(|(request, node, from)| Message::List {
            request,
            node,
            from: GuestPhysAddr(from)
        }),
        bytes().prop_map(|oom| Message::Allow { oom }),
        any::<u64>().prop_map(|nonce| Message::Ping { nonce }),
        any::<u64>().prop_map(|nonce| Message::Pong { nonce }),
    ]
}

fn encoded(messages: &[Message]) -> Vec<u8> {
    let mut pipe = vec![];
    for message in messages {
        encode(message, &mut pipe).unwrap();
    }
    pipe
}

/// All results of the decoder for `pipe`, received in pieces that end at `cuts`.
fn decoded(pipe: &[u8], cuts: &[prop::sample::Index]) -> Vec<Result<Message, DecodeError>> {
    let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(pipe.len() + 1)).collect();
    cuts.push(pipe.len());
    cuts.sort();
    let (mut decoder, mut found, mut at) = (Decoder::default(), vec![], 0);
    for cut in cuts {
        decoder.push(&pipe[at..cut]);
        found.extend(std::iter::from_fn(|| decoder.next().transpose()));
        at = cut;
    }
    found
}

/// Arbitrary input: noise, noise full of zeros, and more than a frame holds.
fn noise() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        vec(any::<u8>(), 0..2000),
        vec(prop_oneof![Just(0), Just(1), any::<u8>()], 0..2000),
        (any::<u8>(), 0..3 * ENCODED_BYTES_MAX).prop_map(|(byte, n)| vec![byte; n]),
    ]
}

proptest! {
    #[test]
    fn what_was_encoded_is_decoded_however_the_pipe_cuts_it(
        messages in vec(message(), 0..12),
        cuts in vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let expected: Vec<_> = messages.iter().cloned().map(Ok).collect();
        prop_assert_eq!(decoded(&encoded(&messages), &cuts), expected);
    }

    /// Fields that a version does not have are lost; all others survive.
    #[test]
    fn the_versions_before_are_spoken_and_told(message in message(), version in VERSION_MIN..=VERSION) {
        let mut pipe = vec![];
        encode_as(version, &message, &mut pipe).unwrap();
        let mut decoder = Decoder::default();
        decoder.push(&pipe);
        let expected = match message {
            Message::List { request, node, .. } if version < 3 => Message::List {
                request,
                node,
                from: GuestPhysAddr(0),
            },
            Message::Stats(stats) => Message::Stats(Stats {
                relocation: stats.relocation.filter(|_| version >= 3),
                benefit: stats.benefit.filter(|_| version >= 4),
                ..stats
            }),
            message => message,
        };
        prop_assert_eq!(decoder.next(), Ok(Some(expected)));
        prop_assert_eq!(decoder.version(), Some(version));
    }

    #[test]
    fn the_same_bytes_say_the_same_however_they_are_cut(
        noise in noise(),
        message in message(),
        more_noise in noise(),
        cuts in vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let pipe = [noise, encoded(&[message]), more_noise].concat();
        prop_assert_eq!(decoded(&pipe, &cuts), decoded(&pipe, &[]));
    }

    #[test]
    fn a_whole_frame_is_understood_at_once_whatever_came_before(
        noise in noise(),
        lost in message(),
        cut in any::<prop::sample::Index>(),
        message in message(),
    ) {
        let half = encoded(&[lost]);
        let half = &half[..cut.index(half.len())];
        let pipe = [&noise[..], half, &encoded(std::slice::from_ref(&message))].concat();
        prop_assert_eq!(decoded(&pipe, &[]).pop(), Some(Ok(message)));
    }

    #[test]
    fn a_changed_byte_is_an_error_and_not_another_message(
        message in message(),
        at in any::<prop::sample::Index>(),
        change in 1u8..,
    ) {
        let mut pipe = encoded(std::slice::from_ref(&message));
        let at = at.index(pipe.len());
        pipe[at] ^= change;
        for found in decoded(&pipe, &[]) {
            // The zeros around a frame carry no data; a frame without the first one is still whole.
            prop_assert!(found.is_err() || found == Ok(message.clone()), "{found:?}");
        }
    }

    #[test]
    fn a_lost_byte_is_an_error_and_not_another_message(
        message in message(),
        at in any::<prop::sample::Index>(),
    ) {
        let mut pipe = encoded(std::slice::from_ref(&message));
        pipe.remove(at.index(pipe.len()));
        for found in decoded(&pipe, &[]) {
            prop_assert!(found.is_err() || found == Ok(message.clone()), "{found:?}");
        }
    }
}

#[test]
fn a_frame_is_no_longer_than_the_bound() {
    let full = |range| {
        encoded(&[Message::Held(Ranges {
            request: RequestId(u64::MAX),
            node: NodeId(u32::MAX),
            more: true,
            ranges: vec![range; RANGES_MAX],
        })])
    };
    for value in [0, u64::MAX] {
        let pipe = full(GpaRange {
            start: GuestPhysAddr(value),
            bytes: ByteCount(value),
        });
        assert!(pipe.len() <= ENCODED_BYTES_MAX + 2, "{}", pipe.len());
        assert!(decoded(&pipe, &[])[0].is_ok());
    }
}

#[test]
fn a_frame_without_end_is_told_once_and_not_kept() {
    let mut decoder = Decoder::default();
    let chunk = vec![7; 4096];
    let mut errors = vec![];
    for _ in 0..1000 {
        decoder.push(&chunk);
        errors.extend(std::iter::from_fn(|| decoder.next().transpose()));
    }
    assert_eq!(errors, [Err(DecodeError::TooLong)]);
    let ping = Message::Ping { nonce: 3 };
    decoder.push(&encoded(std::slice::from_ref(&ping)));
    assert_eq!(decoder.next(), Ok(Some(ping)));
}

#[test]
fn too_much_for_one_message_is_refused_and_a_long_reason_is_cut() {
    let node = NodeTotal {
        node: NodeId(0),
        total: ByteCount(0),
    };
    let hello = Message::Hello(Hello {
        boot_id: BootId([0; 16]),
        session: SessionId(0),
        driver: true,
        nodes: vec![node; NODES_MAX + 1],
    });
    let range = GpaRange {
        start: GuestPhysAddr(0),
        bytes: ByteCount(1),
    };
    let held = Message::Held(Ranges {
        request: RequestId(0),
        node: NodeId(0),
        more: false,
        ranges: vec![range; RANGES_MAX + 1],
    });
    let mut pipe = vec![];
    let refused = [encode(&hello, &mut pipe), encode(&held, &mut pipe)];
    assert_eq!(
        refused,
        [
            Err(EncodeError::Nodes(NODES_MAX + 1)),
            Err(EncodeError::Ranges(RANGES_MAX + 1))
        ]
    );
    assert!(pipe.is_empty(), "half a message was written");

    let done = Message::Done(Done {
        request: RequestId(1),
        node: NodeId(0),
        moved: ByteCount(0),
        held: ByteCount(0),
        outcome: Outcome::Refused,
        reason: "ü".repeat(REASON_BYTES_MAX),
    });
    let found = decoded(&encoded(&[done]), &[]).remove(0);
    let Ok(Message::Done(done)) = found else {
        panic!("{found:?}");
    };
    assert_eq!(done.reason, "ü".repeat(REASON_BYTES_MAX / 2));
}
